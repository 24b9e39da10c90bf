"""Linear attention (Katharopoulos et al. 2020, arXiv 2006.16236)."""

import math
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from eflax.cells import checks, shapes
from eflax.cells.checks import Axes
from eflax.cells.forms import Coefficients
from eflax.cells.numerics import state_dtype
from eflax.cells.rank_one import RankOneCell

State = tuple[shapes.States, shapes.Normalisers]


class LinearAttention(RankOneCell[State]):
    """S ← S + k vᵀ, z ← z + k; o = Sᵀq / (zᵀq + eps), or Sᵀq with normalize=False.

    q and k are features, already mapped (positive ones, where the read-out is normalised). The state is the pair
    (S, z) in both cases: z is what S would hold of one more value that is always 1.
    """

    name = "linear_attention"

    def coefficients(self, k: Float[Array, "*axes K"], **read_options) -> Coefficients:
        """a = 0, w = 1, no decay."""
        return Coefficients()

    def __call__(
        self,
        q: shapes.Queries | None,
        k: shapes.Keys,
        v: shapes.Values,
        scale: shapes.Scale = 1.0,
        initial_state: State | None = None,
        segment_ids: shapes.SegmentIds | None = None,
        form: str | None = None,
        chunk_size: int = 64,
        *,
        normalize: bool = True,
        eps: float = 1e-6,
    ) -> tuple[shapes.Values | None, State]:
        """Outputs o [B, T, HV, V] in v's dtype and the final state (S, z). Arguments: see `eflax.cells`."""
        options = {"normalize": normalize, "eps": eps}
        return self._evaluate(q, k, v, (), scale, initial_state, segment_ids, form, chunk_size, **options)

    def step(
        self,
        state: State,
        q_t: shapes.TokenQuery,
        k_t: shapes.TokenKey,
        v_t: shapes.TokenValue,
        scale: shapes.Scale = 1.0,
        *,
        normalize: bool = True,
        eps: float = 1e-6,
    ) -> tuple[State, shapes.TokenValue]:
        """One token: the new state (S, z) and o_t [B, HV, V] in v's dtype."""
        return self._step(state, q_t, k_t, v_t, (), scale, normalize=normalize, eps=eps)

    def read(
        self,
        state: State,
        q_t: shapes.TokenQuery,
        scale: shapes.Scale = 1.0,
        *,
        normalize: bool = True,
        eps: float = 1e-6,
    ) -> shapes.TokenValue:
        """The read-out of one token, in the state's dtype."""
        return self._read(state, q_t, scale, normalize=normalize, eps=eps)

    def _check_state(self, axes: Axes, name: str, state) -> None:
        if not isinstance(state, tuple) or len(state) != 2:
            raise TypeError(f"{name} must be the pair (S, z); got {type(state).__name__}")
        axes.bind(f"{name}[0]", state[0], "B HV K V")
        axes.bind(f"{name}[1]", state[1], "B HV K")

    def _to_matrix(self, state: State) -> Array:
        matrix, normaliser = (x.astype(state_dtype(*state)) for x in state)
        return jnp.concatenate([matrix, normaliser[..., None]], axis=-1)

    def _from_matrix(self, matrix: Array) -> State:
        return matrix[..., :-1], matrix[..., -1]

    def _values(self, v: Array) -> Array:
        return jnp.concatenate([v, jnp.ones((*v.shape[:-1], 1), v.dtype)], axis=-1)

    def _stored(self, v: Array) -> Any:
        return jax.ShapeDtypeStruct((*v.shape[:-1], v.shape[-1] + 1), v.dtype)

    def _choose_form(self, form, q, k, v, *others, normalize: bool = True, **options):
        # The normalised gradient of q is a small difference, of which 16-bit cotangents in kernels leave 4 %.
        if form is None and normalize:
            return checks.choose_form(self.name, form, self.forms, k.shape[1])
        return super()._choose_form(form, q, k, v, *others, **options)

    def _answer(self, o: Array, normalize: bool = True, eps: float = 1e-6, **options) -> Array:
        return o[..., :-1] / (o[..., -1:] + float(eps)) if normalize else o[..., :-1]

    def _check_options(self, scale, *, normalize=True, eps=1e-6) -> None:
        super()._check_options(scale)
        if not isinstance(normalize, bool | np.bool_):
            raise ValueError(f"normalize is {normalize!r}; it needs True or False")
        if not isinstance(eps, Real) or not 0 <= eps < math.inf:
            raise ValueError(f"eps is {eps!r}; it needs a number of at least 0, and not an array")


linear_attention = LinearAttention()
