"""The attention-like dual: one masked T × T matrix for the whole sequence, O(T²) work and memory.

Unrolling the recurrence, token i writes the row d_i = w_i v_i − a_i (what the decayed state answers to k_i), so
that the rows of D solve a unit lower triangular system,

    (I + StrictTril(diag(a) (K Kᵀ ⊙ Γ))) D = diag(w) V − diag(a e^c) K S₀,
    O = diag(e^c) Q S₀ + (Q Kᵀ ⊙ Γ) D,      S_T = e^{c_T} S₀ + (diag(e^{c_T − c}) K)ᵀ D,

with c the cumulative log-decay and Γ_ij = e^{c_i − c_j} for i ≥ j. Without erase D = diag(w) V, and this is masked
linear attention, the quadratic mode of SSD.

A limit of this form: what long keys erase of S₀ is taken away in one difference, S₀ + Kᵀ D, and not token by token. The
absolute error of S_T is then a few roundings of S₀, which grow with T, however small S_T is. In float32 with |k| = 100,
T = 200 and an S₀ of order 1, a hundred times what such keys write, S_T of `efla` has a relative error of 4e-5 to 5e-5,
where `recurrent` has 1e-7; outputs (2e-6) and gradients (4e-6) stay below 1e-5. `chunkwise` does the same inside a
chunk (3e-5 at T = C = 64), but later chunks erase the error again (3e-7 at T = 200, C = 64).
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
