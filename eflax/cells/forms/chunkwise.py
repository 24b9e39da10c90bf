"""Chunks of C tokens: the parallel form inside a chunk, one affine map from chunk to chunk. O(T C) work.

The rows D of a chunk (see `parallel`) depend on the state S that enters it through D = U − W S, with

    (I + StrictTril(diag(a) (K Kᵀ ⊙ Γ))) [W | U] = [diag(a e^c) K | diag(w) V],

so the chunk as a whole is the affine map S ↦ (e^{c_C} I − K̃ᵀ W) S + K̃ᵀ U with K̃ = diag(e^{c_C − c}) K: the WY form of
a product of rank-1 edits. All of this is computed for many chunks at once; only applying the maps is sequential.

Long or wide inputs are cut into groups of chunks, one group after the other. The backward pass keeps the state that
enters each group and recomputes the rest, so that its memory is the inputs' and T / C states at most.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

from eflax.cells import affine
from eflax.cells.forms.decay import Decay, block_decay
from eflax.cells.forms.edits import Edits
from eflax.cells.numerics import unit_lower_inverse

BLOCKS = 128  # C × C blocks worked on at once: about one a core of a large GPU, and few enough for the cache of a CPU


class Chunks(NamedTuple):
    """`Edits` cut into N chunks of C tokens, heads first: q, k [B, H, N, C, K], erase [B, H, N, C], …"""

    q: Float[Array, "B H N C K"] | None
    k: Float[Array, "B H N C K"]
    v: Float[Array, "B H N C V"]
    erase: Float[Array, "B H N C"] | None
    log_decay: Float[Array, "B H N C"] | None
    restart: Bool[Array, "B 1 N C"] | None

    def decay(self) -> Decay:
        """The decays within each chunk."""
        return block_decay(self.log_decay, self.restart, self.k.shape[:-1], self.k.dtype)


def chunkwise(
    edits: Edits, initial_state: Array, *, chunk_size: int, precision: lax.Precision
) -> tuple[Array | None, Array]:
    """The portable fast path, in plain matmuls. `chunk_size` changes the cost, not the result."""
    batch, time, heads, _ = edits.k.shape
    size = min(chunk_size, time)
    count = -(-time // size)
    groups = max(1, -(-count * batch * heads // BLOCKS))
    group = -(-count // groups)

    @jax.checkpoint
    def evaluate(state: Array, chunks: Chunks):
        if count == 1:
            return _apply(chunks, state, precision)
        rows, maps = _summarise(chunks, precision)
        states, state = affine.scan_states(maps, state, axis=2)
        return state, None if chunks.q is None else _read(chunks.q, chunks, rows, states, precision)

    final_state, o = lax.scan(evaluate, initial_state, _cut(edits, size, group))
    if o is None:
        return None, final_state
    o = jnp.moveaxis(o, (0, 2), (1, 4))  # [groups, B, H, N, C, V] → [B, groups, N, C, H, V]
    return o.reshape(batch, o.shape[1] * group * size, *o.shape[-2:])[:, :time], final_state


def _cut(edits: Edits, size: int, group: int) -> Chunks:
    """Groups of chunks on the leading axis. Tail tokens are zeros, which neither decay, erase nor write."""

    def cut(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % (size * group))] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(
            x.shape[0], x.shape[1] // (size * group), group, size, *x.shape[2:]
        )  # [B, groups, N, C, H, …]
        return jnp.moveaxis(x, (1, 4), (0, 2))

    restart = None if edits.restart is None else edits.restart[..., None]
    chunks = Chunks(edits.q, edits.k, edits.written, edits.erase, edits.log_decay, restart)
    return jax.tree.map(cut, chunks)


class Rows(NamedTuple):
    """The rows a chunk writes, D = U − W S; no `from_state` where nothing is erased."""

    own: Float[Array, "B H N C V"]  # U
    from_state: Float[Array, "B H N C K"] | None  # W


def _summarise(chunks: Chunks, precision: lax.Precision) -> tuple[Rows, affine.AffineMap]:
    """Each chunk's rows, and the affine map that the chunk is."""
    k, v, decay = chunks.k, chunks.v, chunks.decay()
    total = jnp.broadcast_to(decay.total, k.shape[:-2])
    leaving = decay.exit[..., None] * k
    if chunks.erase is None:
        return Rows(v, None), affine.Scalar(total, _transposed_matmul(leaving, v, precision))

    erase = chunks.erase[..., None]
    gram = _outer_matmul(k, k, precision)
    inverse = unit_lower_inverse(erase * gram * decay.within)
    right_side = jnp.concatenate([erase * decay.entry[..., None] * k, v], axis=-1)
    solved = jnp.matmul(inverse, right_side, precision=precision)
    carried, size = _transposed_matmul(leaving, solved, precision), k.shape[-1]
    matrix = total[..., None, None] * jnp.eye(size, dtype=k.dtype).reshape(1, 1, 1, size, size)
    maps = affine.Dense(matrix - carried[..., :size], carried[..., size:])
    return Rows(own=solved[..., size:], from_state=solved[..., :size]), maps


def _apply(chunks: Chunks, state: Array, precision: lax.Precision) -> tuple[Array, Array | None]:
    """The state after a single chunk, and its read-outs. Its map, of K rows a head, need not be known."""
    decay, state = chunks.decay(), state[:, :, None]
    entering, rows = decay.entry[..., None], chunks.v
    if chunks.erase is not None:
        erase = chunks.erase[..., None]
        inverse = unit_lower_inverse(erase * _outer_matmul(chunks.k, chunks.k, precision) * decay.within)
        answered = jnp.matmul(entering * chunks.k, state, precision=precision)
        rows = jnp.matmul(inverse, rows - erase * answered, precision=precision)
    leaving = _transposed_matmul(decay.exit[..., None] * chunks.k, rows, precision)
    final_state = (decay.total[..., None, None] * state + leaving)[:, :, 0]
    if chunks.q is None:
        return final_state, None
    return final_state, _read(chunks.q, chunks, Rows(rows, None), state, precision)


def _read(q: Array, chunks: Chunks, rows: Rows, states: Array, precision: lax.Precision) -> Array:
    """Every token's read-out, from the state that enters its chunk and from the chunk's earlier rows."""
    decay, written = chunks.decay(), rows.own
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
