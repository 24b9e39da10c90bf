"""The gate array that the TPU kernels read, in plain XLA."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.rank_one.layout import CHUNK, Gates

EARLIER = np.tri(CHUNK, dtype=bool)[None, None, None]  # [..., i, j]: token j is not after token i
FORGET = -200.0  # e^FORGET is 0 in float32, and sums with it are finite


def chunked(x: Array) -> Array:
    """[B, T, HV] → [B, HV, N, C]."""
    batch, _, heads = x.shape
    return jnp.moveaxis(x, 2, 1).reshape(batch, heads, -1, CHUNK)


def unchunked(x: Array) -> Array:
    """[B, HV, N, C] → [B, T, HV]."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], -1), 1, 2)


def decay_sums(log_decay: Array | None, write: Array, restart: Array | None) -> Array:
    """Return c [B, HV, N, C]: the log-decays summed from the start of the chunk or, inside it, of the document.

    Args:
        log_decay: [B, T, HV] float32, or None for zeros; −inf forgets all.
        write: [B, T, HV], for the shape.
        restart: [B, T], True where the state restarts, or None.
    """
    if log_decay is None:
        return jnp.zeros_like(chunked(write))
    decay, summed = _summands(log_decay, restart)
    return _sum_up(decay, summed)


def decay_sums_in_two(log_decay: Array | None, write: Array, restart: Array | None) -> tuple[Array, Array]:
    """Return c in two parts, of which the first is a whole number and exact, and the second small.

    A difference of sums has lost the digits that the sums have lost, some 1e-3 after strong decays; that of two parts
    each has not.
    """
    if log_decay is None:
        nothing = jnp.zeros_like(chunked(write))
        return nothing, nothing
    decay, summed = _summands(log_decay, restart)
    whole = lax.stop_gradient(jnp.round(decay))
    return _sum_up(whole, summed), _sum_up(decay - whole, summed)


def _summands(log_decay: Array, restart: Array | None) -> tuple[Array, Array | np.ndarray]:
    """Return the log-decays [B, HV, N, C], and which of them each sum takes [..., C, C]."""
    decay, summed = jnp.maximum(chunked(log_decay), FORGET), EARLIER
    if restart is not None:
        cut, document = documents(restart)
        decay = jnp.where(cut, 0.0, decay)  # nothing is left that it could act on
        summed = EARLIER & (document[..., None] == document[..., None, :])
    return decay, summed


def _sum_up(x: Array, summed: Array | np.ndarray) -> Array:
    return jnp.sum(jnp.where(summed, x[..., None, :], 0.0), -1)


def documents(restart: Array) -> tuple[Array, Array]:
    """Return, both [B, 1, N, C], where documents begin and how many began in the chunk so far (float32)."""
    cut = chunked(restart[..., None].astype(jnp.float32))
    return cut > 0.0, jnp.sum(jnp.where(EARLIER, cut[..., None, :], 0.0), -1)


def gate_rows(
    erase: Array | None, write: Array, sums: Array, restart: Array | None, rest: Array | None = None
) -> Array:
    """Return the gate array [B, HV, N, rows, C] in float32 (`layout.Gates`).

    Args:
        erase: [B, T, HV], or None for zeros.
        write: [B, T, HV].
        sums: c [B, HV, N, C], from `decay_sums`.
        restart: [B, T], True where the state restarts, or None.
        rest: the second part, where ``sums`` is the first of two; it takes the place of `Gates.SUM_AGAIN`.
    """
    write = chunked(write)
    erase = jnp.zeros_like(write) if erase is None else chunked(erase)
    until_end = sums[..., -1:] - sums
    if rest is not None:
        until_end += rest[..., -1:] - rest
    entry, leaving = jnp.exp(sums if rest is None else sums + rest), jnp.exp(until_end)
    rows = {Gates.SUM: sums, Gates.SUM_AGAIN: sums if rest is None else rest}
    if restart is not None:
        _, document = documents(restart)
        kept = document == document[..., -1:]
        entry = jnp.where(document == 0.0, entry, 0.0)
        leaving = jnp.where(kept, jnp.exp(jnp.where(kept, until_end, 0.0)), 0.0)
        rows |= {Gates.DOCUMENT: document, Gates.DOCUMENT_AGAIN: document}
    rows |= {Gates.ERASE: erase, Gates.READ: erase * entry, Gates.WRITE: write}
    rows |= {Gates.ENTRY: entry, Gates.EXIT: leaving}
    return jnp.stack([jnp.broadcast_to(rows[row], sums.shape) for row in sorted(rows)], -2)
