"""SSD, the core of Mamba-2 (Dao, Gu 2024, arXiv 2405.21060)."""

from jax import Array
from jaxtyping import Float

from eflax.cells import shapes
from eflax.cells.forms import Coefficients
from eflax.cells.rank_one import RankOneCell


class SSD(RankOneCell[shapes.States]):
    """S ← e^g S + k vᵀ: linear attention with a scalar decay per head.

    In the paper's letters q is C, k is B, v is x (times dt) and e^g is the scalar A. Nothing is erased, so no form
    needs a triangular solve, and `parallel` is the paper's quadratic mode.
    """

    name = "ssd"
    gates = ("g",)

    def coefficients(self, k: Float[Array, "*axes K"], g: Float[Array, "*axes"]) -> Coefficients:
        """a = 0, w = 1, log-decay g."""
        return Coefficients(log_decay=g)

    def __call__(
        self,
        q: shapes.Queries | None,
        k: shapes.Keys,
        v: shapes.Values,
        g: shapes.Gates,
        scale: shapes.Scale = 1.0,
        initial_state: shapes.States | None = None,
        segment_ids: shapes.SegmentIds | None = None,
        form: str | None = None,
        chunk_size: int = 64,
    ) -> tuple[shapes.Values | None, shapes.States]:
        """Outputs o [B, T, HV, V] in v's dtype, final state [B, HV, K, V]. Arguments: see `eflax.cells`."""
        return self._evaluate(q, k, v, (g,), scale, initial_state, segment_ids, form, chunk_size)

    def step(
        self,
        state: shapes.States,
        q_t: shapes.TokenQuery,
        k_t: shapes.TokenKey,
        v_t: shapes.TokenValue,
        g_t: shapes.TokenGate,
        scale: shapes.Scale = 1.0,
    ) -> tuple[shapes.States, shapes.TokenValue]:
        """One token: the new state and o_t [B, HV, V] in v's dtype."""
        return self._step(state, q_t, k_t, v_t, (g_t,), scale)


ssd = SSD()
