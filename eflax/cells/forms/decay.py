"""Decays between the tokens of a block: which earlier writes a token still sees, and how much of them."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


class Decay(NamedTuple):
    """Products of e^g over stretches of a block of C tokens; 0 where a document begins in between.

    Axes broadcast against [..., C]; with neither decay nor documents they are constants.
    """

    within: Float[Array, "*batch C C"]  # [i, j]: from after token j to after token i, 0 for j > i
    entry: Float[Array, "*batch C"]  # from before the block to after token i
    exit: Float[Array, "*batch C"]  # from after token j to the end of the block
    total: Float[Array, "*batch"]  # the whole block


def block_decay(
    log_decay: Float[Array, "*batch C"] | None,
    restart: Array | None,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
) -> Decay:
    """The decays of blocks of the given shape (*batch, C).

    Every exponent is a direct sum of g ≤ 0 over its own stretch, never a difference of two cumulative sums:
    no cancellation, no overflow, and gradients that are sums of the right terms. Nothing is exponentiated
    above the diagonal.
    """
    size = shape[-1]
    ones = (1,) * (len(shape) - 1)
    lower = jnp.tri(size, dtype=bool).reshape(*ones, size, size)
    if log_decay is None:
        within, entry = lower.astype(dtype), jnp.ones((*ones, size), dtype)
    else:
        within = jnp.where(lower, jnp.exp(_stretch_sums(log_decay)), 0)
        entry = jnp.exp(jnp.cumsum(log_decay, axis=-1))
    if restart is not None:
        document = jnp.cumsum(restart.astype(jnp.int32), axis=-1)
        within = jnp.where(document[..., :, None] == document[..., None, :], within, 0)
        entry = jnp.where(document == 0, entry, 0)
    return Decay(within, entry, exit=within[..., -1, :], total=entry[..., -1])


def _stretch_sums(g: Array) -> Array:
    """[i, j] = Σ g over the tokens j < t ≤ i (0 on and above the diagonal); g = −∞ is a decay to exactly 0."""
    size = g.shape[-1]
    after = jnp.tri(size, k=-1, dtype=bool).reshape(*(1,) * (g.ndim - 1), size, size)
    return jnp.cumsum(jnp.where(after, g[..., :, None], 0), axis=-2)
