"""The delta rule (Schlag et al. 2021, arXiv 2102.11174; in chunks: Yang et al. 2024, arXiv 2406.06484)."""

from jax import Array
from jaxtyping import Float

from eflax.cells import shapes
from eflax.cells.forms import Coefficients
from eflax.cells.rank_one import RankOneCell


class DeltaRule(RankOneCell[shapes.States]):
    """S ← (I − β k kᵀ) S + β k vᵀ.

    One gradient step of size β on ½‖Sᵀk − v‖²: the value stored under k moves a fraction β‖k‖² of the way to v.
    Not expansive for 0 ≤ β‖k‖² ≤ 2, which is why layers normalise the keys; the cell uses them as given.
    """

    name = "delta_rule"
    gates = ("beta",)

    def coefficients(self, k: Float[Array, "*axes K"], beta: Float[Array, "*axes"]) -> Coefficients:
        """a = w = β."""
        return Coefficients(erase=beta, write=beta)

    def __call__(
        self,
        q: shapes.Queries | None,
        k: shapes.Keys,
        v: shapes.Values,
        beta: shapes.Gates,
        scale: shapes.Scale = 1.0,
        initial_state: shapes.States | None = None,
        segment_ids: shapes.SegmentIds | None = None,
        form: str | None = None,
        chunk_size: int = 64,
    ) -> tuple[shapes.Values | None, shapes.States]:
        """Outputs o [B, T, HV, V] in v's dtype, final state [B, HV, K, V]. Arguments: see `eflax.cells`."""
        return self._evaluate(q, k, v, (beta,), scale, initial_state, segment_ids, form, chunk_size)

    def step(
        self,
        state: shapes.States,
        q_t: shapes.TokenQuery,
        k_t: shapes.TokenKey,
        v_t: shapes.TokenValue,
        beta_t: shapes.TokenGate,
        scale: shapes.Scale = 1.0,
    ) -> tuple[shapes.States, shapes.TokenValue]:
        """One token: the new state and o_t [B, HV, V] in v's dtype."""
        return self._step(state, q_t, k_t, v_t, (beta_t,), scale)


delta_rule = DeltaRule()
