"""Gated EFLA (arXiv 2512.12602, appendix D), and two labelled ablations of where its decay enters."""

from typing import Literal, get_args

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from eflax.cells import shapes
from eflax.cells.forms import Coefficients
from eflax.cells.numerics import decay_integral, exponential_moment, squared_norm
from eflax.cells.rank_one import RankOneCell

Variant = Literal["published", "log_rate", "decay_first"]


class GatedEFLA(RankOneCell[shapes.States]):
    """Decay and delta rule in one ordinary differential equation, solved in closed form over one token.

    - "published": dS/dτ = −[(1 − e^g) I + e^g β k kᵀ] S + β k vᵀ over unit time, the flow whose Euler step is the
      gated delta rule. S ← e^{−δ} (I − a k kᵀ) S + w k vᵀ with δ = 1 − e^g, ρ = e^g β, a = ρ φ(ρλ),
      w = β φ(δ + ρλ). One token never keeps less than 1/e of the state.
    - "log_rate" (ablation, not published): the rate −g in place of 1 − e^g, and β in place of e^g β in the erase,
      so that the decay is e^g itself: a = β φ(βλ), w = β φ(−g + βλ).
    - "decay_first" (ablation, not published): S decays by e^g, then takes an ungated EFLA step: a = w = β φ(βλ).

    With g = 0 all three are `efla`.
    """

    name = "gated_efla"
    gates = ("beta", "g")

    def coefficients(
        self,
        k: Float[Array, "*axes K"],
        beta: Float[Array, "*axes"],
        g: Float[Array, "*axes"],
        *,
        variant: Variant = "published",
    ) -> Coefficients:
        """Erase a, write w and log-decay of the variant (see the class), by φ(x) = (1 − e^{−x}) / x."""
        norm = squared_norm(k)
        match variant:
            case "published":
                rate, erasing, log_decay = -jnp.expm1(g), jnp.exp(g) * beta, jnp.expm1(g)
            case "log_rate":
                rate, erasing, log_decay = -g, beta, g
            case "decay_first":
                erase = decay_integral(beta, norm)
                return Coefficients(erase, write=erase, log_decay=g)
        erase, write = decay_integral(erasing, norm), beta * exponential_moment(rate + erasing * norm)
        return Coefficients(erase, write, log_decay)

    def __call__(
        self,
        q: shapes.Queries | None,
        k: shapes.Keys,
        v: shapes.Values,
        beta: shapes.Gates,
        g: shapes.Gates,
        scale: shapes.Scale = 1.0,
        initial_state: shapes.States | None = None,
        segment_ids: shapes.SegmentIds | None = None,
        form: str | None = None,
        chunk_size: int = 64,
        *,
        variant: Variant = "published",
    ) -> tuple[shapes.Values | None, shapes.States]:
        """Outputs o [B, T, HV, V] in v's dtype, final state [B, HV, K, V]. Arguments: see `eflax.cells`."""
        return self._evaluate(
            q, k, v, (beta, g), scale, initial_state, segment_ids, form, chunk_size, variant=variant
        )

    def step(
        self,
        state: shapes.States,
        q_t: shapes.TokenQuery,
        k_t: shapes.TokenKey,
        v_t: shapes.TokenValue,
        beta_t: shapes.TokenGate,
        g_t: shapes.TokenGate,
        scale: shapes.Scale = 1.0,
        *,
        variant: Variant = "published",
    ) -> tuple[shapes.States, shapes.TokenValue]:
        """One token: the new state and o_t [B, HV, V] in v's dtype."""
        return self._step(state, q_t, k_t, v_t, (beta_t, g_t), scale, variant=variant)

    def _check_options(self, scale, *, variant="published") -> None:
        super()._check_options(scale)
        if not isinstance(variant, str) or variant not in get_args(Variant):
            raise ValueError(f"variant={variant!r} is unknown; it is one of {', '.join(get_args(Variant))}")


gated_efla = GatedEFLA()
