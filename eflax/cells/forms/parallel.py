"""The attention-like dual: one masked T × T matrix for the whole sequence, O(T²) work and memory.

Unrolling the recurrence, token i writes the row d_i = w_i v_i − a_i (what the decayed state answers to k_i), so
that the rows of D solve a unit lower triangular system,

    (I + StrictTril(diag(a) (K Kᵀ ⊙ Γ))) D = diag(w) V − diag(a e^c) K S₀,
    O = diag(e^c) Q S₀ + (Q Kᵀ ⊙ Γ) D,      S_T = e^{c_T} S₀ + (diag(e^{c_T − c}) K)ᵀ D,

with c the cumulative log-decay and Γ_ij = e^{c_i − c_j} for i ≥ j. Without erase D = diag(w) V, and this is masked
linear attention, the quadratic mode of SSD.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from eflax.cells.forms.decay import block_decay
from eflax.cells.forms.edits import Edits

HIGHEST = lax.Precision.HIGHEST


def parallel(
    edits: Edits, initial_state: Array, *, chunk_size: int, precision: lax.Precision
) -> tuple[Array | None, Array]:
    """The whole sequence as one block, by a triangular solve. `chunk_size` plays no role."""
    del chunk_size
    restart = None if edits.restart is None else edits.restart[:, None]
    edits = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), edits._replace(restart=None))  # heads first
    q, k, rows = edits.q, edits.k, edits.written
    decay = block_decay(edits.log_decay, restart, k.shape[:-1], k.dtype)

    if edits.erase is not None:
        erase = edits.erase[..., None]
        gram = jnp.einsum("bhik,bhjk->bhij", k, k, precision=precision)
        answered = jnp.einsum("bhik,bhkv->bhiv", decay.entry[..., None] * k, initial_state, precision=HIGHEST)
        rows = lax.linalg.triangular_solve(
            erase * gram * decay.within,
            rows - erase * answered,
            left_side=True,
            lower=True,
            unit_diagonal=True,
        )
    kept = decay.total[..., None, None] * initial_state
    final_state = kept + jnp.einsum("bhik,bhiv->bhkv", decay.exit[..., None] * k, rows, precision=HIGHEST)
    if q is None:
        return None, final_state
    scores = decay.within * jnp.einsum("bhik,bhjk->bhij", q, k, precision=precision)
    o = jnp.einsum("bhij,bhjv->bhiv", scores, rows, precision=precision)
    o = o + jnp.einsum("bhik,bhkv->bhiv", decay.entry[..., None] * q, initial_state, precision=precision)
    return jnp.swapaxes(o, 1, 2), final_state
