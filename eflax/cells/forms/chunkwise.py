"""Chunks of C tokens: the parallel form inside a chunk, one affine map from chunk to chunk. O(T C) work.

The rows D of a chunk (see `parallel`) depend on the state S that enters it through D = U − W S, with

    (I + StrictTril(diag(a) (K Kᵀ ⊙ Γ))) [W | U] = [diag(a e^c) K | diag(w) V],

so the chunk as a whole is the affine map S ↦ (e^{c_C} I − K̃ᵀ W) S + K̃ᵀ U with K̃ = diag(e^{c_C − c}) K: the WY form of
a product of rank-1 edits. All of this is computed for every chunk at once; only applying the maps is sequential.
The backward pass keeps the states between chunks and each chunk's triangular inverse, and recomputes the rest.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float

from eflax.cells import affine
from eflax.cells.forms.decay import Decay, block_decay
from eflax.cells.forms.edits import Edits
from eflax.cells.numerics import unit_lower_inverse

HIGHEST = lax.Precision.HIGHEST
INVERSE = "chunk_inverse"


class Chunks(NamedTuple):
    """`Edits` cut into N chunks of C tokens, heads first: q, k [B, H, N, C, K], erase [B, H, N, C], …"""

    q: Float[Array, "B H N C K"] | None
    k: Float[Array, "B H N C K"]
    v: Float[Array, "B H N C V"]
    erase: Float[Array, "B H N C"] | None
    log_decay: Float[Array, "B H N C"] | None
    restart: Bool[Array, "B 1 N C"] | None

    def decay(self) -> Decay:
        return block_decay(self.log_decay, self.restart, self.k.shape[:-1], self.k.dtype)


def chunkwise(
    edits: Edits, initial_state: Array, *, chunk_size: int, precision: lax.Precision
) -> tuple[Array | None, Array]:
    """The portable fast path, in plain matmuls. `chunk_size` changes the cost, not the result."""
    time = edits.k.shape[1]
    chunks = _cut(edits, min(chunk_size, time))
    # The backward pass recomputes what is local to a chunk, except the inverse, its costly part.
    local = partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(INVERSE))
    rows, maps = local(partial(_summarise, precision=precision))(chunks)
    states, final_state = affine.scan_states(maps, initial_state, axis=2)
    if edits.q is None:
        return None, final_state
    o = local(partial(_read, precision=precision))(chunks, rows, states)
    o = o.reshape(*o.shape[:2], -1, o.shape[-1])[:, :, :time]
    return jnp.swapaxes(o, 1, 2), final_state


def _cut(edits: Edits, size: int) -> Chunks:
    """Tail tokens are padded with zeros, which neither decay, erase nor write."""

    def cut(x: Array | None) -> Array | None:
        if x is None:
            return None
        x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 3, 1)

    restart = None if edits.restart is None else edits.restart[..., None]
    return Chunks(*map(cut, (edits.q, edits.k, edits.written, edits.erase, edits.log_decay, restart)))


class Rows(NamedTuple):
    """The rows a chunk writes, D = U − W S; no `from_state` where nothing is erased."""

    own: Float[Array, "B H N C V"]  # U
    from_state: Float[Array, "B H N C K"] | None  # W


def _summarise(chunks: Chunks, *, precision: lax.Precision) -> tuple[Rows, affine.AffineMap]:
    """Each chunk's rows, and the affine map that the chunk is."""
    k, v, decay = chunks.k, chunks.v, chunks.decay()
    total = jnp.broadcast_to(decay.total, k.shape[:-2])
    leaving = decay.exit[..., None] * k
    if chunks.erase is None:
        return Rows(v, None), affine.Scalar(total, _transposed_matmul(leaving, v, precision))

    erase = chunks.erase[..., None]
    gram = _outer_matmul(k, k, precision)
    inverse = checkpoint_name(unit_lower_inverse(erase * gram * decay.within), INVERSE)
    right_side = jnp.concatenate([erase * decay.entry[..., None] * k, v], axis=-1)
    solved = jnp.matmul(inverse, right_side, precision=precision)
    carried, size = _transposed_matmul(leaving, solved, precision), k.shape[-1]
    matrix = total[..., None, None] * jnp.eye(size, dtype=k.dtype).reshape(1, 1, 1, size, size)
    maps = affine.Dense(matrix - carried[..., :size], carried[..., size:])
    return Rows(own=solved[..., size:], from_state=solved[..., :size]), maps


def _read(chunks: Chunks, rows: Rows, states: Array, *, precision: lax.Precision) -> Array:
    """Every token's read-out, from the state that enters its chunk and from the chunk's earlier rows."""
    q, decay = chunks.q, chunks.decay()
    written = rows.own
    if rows.from_state is not None:
        written = written - jnp.matmul(rows.from_state, states, precision=precision)
    scores = decay.within * _outer_matmul(q, chunks.k, precision)
    from_state = jnp.matmul(decay.entry[..., None] * q, states, precision=precision)
    return from_state + jnp.matmul(scores, written, precision=precision)


def _outer_matmul(x: Array, y: Array, precision: lax.Precision) -> Array:
    """x yᵀ"""
    return jnp.einsum("...ik,...jk->...ij", x, y, precision=precision)


def _transposed_matmul(x: Array, y: Array, precision: lax.Precision) -> Array:
    """xᵀ y"""
    return jnp.einsum("...ck,...cv->...kv", x, y, precision=precision)
