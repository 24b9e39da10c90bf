"""EFLA: Exact Flow Linear Attention (arXiv 2512.12602, sections 3.1 to 3.3)."""

from jax import Array
from jaxtyping import Float

from eflax.cells import shapes
from eflax.cells.checks import check_count
from eflax.cells.forms import Coefficients
from eflax.cells.numerics import decay_integral, squared_norm, truncated_phi
from eflax.cells.rank_one import RankOneCell


class EFLA(RankOneCell[shapes.States]):
    """S ← e^{−β k kᵀ} S + ∫₀^β e^{−(β−τ) k kᵀ} k vᵀ dτ: the delta rule's flow, solved in closed form.

    The delta rule is one explicit Euler step of length β of dS/dτ = −k kᵀ S + k vᵀ. Since (k kᵀ)² = λ k kᵀ with
    λ = ‖k‖², the exact solution is again a rank-1 edit,

        S ← (I − α k kᵀ) S + α k vᵀ,      α = (1 − e^{−βλ}) / λ.

    The transition has the eigenvalues 1 and e^{−βλ} and is not expansive for any β ≥ 0 and any key. So keys are
    meant to stay unnormalised: their norm says how firmly to write. With unit keys and β = softplus(z) this is the
    delta rule with the gate sigmoid(z). `order=n` keeps n terms of the series of α in β: 1 is the Euler step
    (`delta_rule`), 2 and 4 are the Runge-Kutta methods of these orders.
    """

    name = "efla"
    gates = ("beta",)

    def coefficients(
        self, k: Float[Array, "*axes K"], beta: Float[Array, "*axes"], *, order: int | None = None
    ) -> Coefficients:
        """a = w = α = β φ(βλ), φ(x) = (1 − e^{−x}) / x, from the keys as they are; gradients reach k through λ, too."""
        norm = squared_norm(k)
        alpha = decay_integral(beta, norm) if order is None else beta * truncated_phi(beta * norm, order)
        return Coefficients(erase=alpha, write=alpha)

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
        *,
        order: int | None = None,
    ) -> tuple[shapes.Values | None, shapes.States]:
        """Outputs o [B, T, HV, V] in v's dtype, final state [B, HV, K, V]. Arguments: see `eflax.cells`."""
        return self._evaluate(
            q, k, v, (beta,), scale, initial_state, segment_ids, form, chunk_size, order=order
        )

    def step(
        self,
        state: shapes.States,
        q_t: shapes.TokenQuery,
        k_t: shapes.TokenKey,
        v_t: shapes.TokenValue,
        beta_t: shapes.TokenGate,
        scale: shapes.Scale = 1.0,
        *,
        order: int | None = None,
    ) -> tuple[shapes.States, shapes.TokenValue]:
        """One token: the new state and o_t [B, HV, V] in v's dtype."""
        return self._step(state, q_t, k_t, v_t, (beta_t,), scale, order=order)

    def _check_options(self, scale, *, order=None) -> None:
        super()._check_options(scale)
        if order is not None:
            check_count("order", order)


efla = EFLA()
