"""The gated delta rule (Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464)."""

from jax import Array
from jaxtyping import Float

from eflax.cells import shapes
from eflax.cells.forms import Coefficients
from eflax.cells.rank_one import RankOneCell


class GatedDeltaRule(RankOneCell[shapes.States]):
    """S ← e^g (I − β k kᵀ) S + β k vᵀ.

    The order of one token: the state decays, the retrieval error is taken from the decayed state, the error is
    written, the state is read. With g = 0 this is `delta_rule`.
    """

    name = "gated_delta_rule"
    gates = ("beta", "g")

    def coefficients(
        self, k: Float[Array, "*axes K"], beta: Float[Array, "*axes"], g: Float[Array, "*axes"]
    ) -> Coefficients:
        """a = w = β, log-decay g."""
        return Coefficients(erase=beta, write=beta, log_decay=g)

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
    ) -> tuple[shapes.Values | None, shapes.States]:
        """Outputs o [B, T, HV, V] in v's dtype, final state [B, HV, K, V]. Arguments: see `eflax.cells`."""
        return self._evaluate(q, k, v, (beta, g), scale, initial_state, segment_ids, form, chunk_size)

    def step(
        self,
        state: shapes.States,
        q_t: shapes.TokenQuery,
        k_t: shapes.TokenKey,
        v_t: shapes.TokenValue,
        beta_t: shapes.TokenGate,
        g_t: shapes.TokenGate,
        scale: shapes.Scale = 1.0,
    ) -> tuple[shapes.States, shapes.TokenValue]:
        """One token: the new state and o_t [B, HV, V] in v's dtype."""
        return self._step(state, q_t, k_t, v_t, (beta_t, g_t), scale)


gated_delta_rule = GatedDeltaRule()
