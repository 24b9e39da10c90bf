"""All states at once, by a parallel scan over the tokens' affine maps: O(log T) deep, O(T K (K + V)) memory."""

import jax.numpy as jnp
from jax import Array, lax

from eflax.cells import affine
from eflax.cells.forms.edits import Edits, read_state


def associative(
    edits: Edits, initial_state: Array, *, chunk_size: int, precision: lax.Precision
) -> tuple[Array | None, Array]:
    """`lax.associative_scan` over scalar maps, or over dense K × K maps where the cell erases."""
    del chunk_size
    states = affine.prefix_states(token_maps(edits), initial_state, axis=1)
    o = None if edits.q is None else read_state(states, edits.q, precision)
    return o, states[:, -1]


def token_maps(edits: Edits) -> affine.AffineMap:
    """Each token's map S ↦ e^g (I − a k kᵀ) S + w k vᵀ, stacked as [B, T, H, …]. A restart is A = 0."""
    offset = edits.k[..., :, None] * edits.written[..., None, :]
    if edits.erase is None and edits.log_decay is None and edits.restart is None:
        return affine.Additive(offset)
    decay = jnp.ones(offset.shape[:-2], offset.dtype)
    if edits.log_decay is not None:
        decay = jnp.exp(edits.log_decay)
    if edits.restart is not None:
        decay = jnp.where(edits.restart[..., None], 0, decay)
    if edits.erase is None:
        return affine.Scalar(decay, offset)
    left = (decay * edits.erase)[..., None] * edits.k
    return affine.to_dense(affine.LowRank(decay, left[..., None], edits.k[..., None], offset))
