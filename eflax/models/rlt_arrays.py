"""What the parts of the Recurrent Looped Transformer do with arrays alone: look up, rotate, attend.

Arrays of heads are head-major, [B, H, T, K], so that the keys and values that every step of the decoder reads lie as
they are read.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eflax.layers.attention import rotary, turn

ROPE_BASE = 10_000.0
MOST_ONE_HOT = 1024  # rows of a table, for the gradient of `lookup`


class Sizes(NamedTuple):
    """What the parts need to know of the model; ``layers`` counts encoder and decoder."""

    width: int
    num_heads: int
    mlp_width: int
    layers: int


class KeyValues(NamedTuple):
    """Keys, rotated and normalised, and values of S positions."""

    keys: Array  # [B, H, S, K]
    values: Array  # [B, H, S, K]

    def write(self, new: "KeyValues", start: Int[Array, ""]) -> "KeyValues":
        """Return these slots with new ones written from ``start`` on."""
        return jax.tree.map(
            lambda old, x: jax.lax.dynamic_update_slice_in_dim(old, x, start, axis=2), self, new
        )


def empty_slots(batch_size: int, number: int, sizes: Sizes) -> KeyValues:
    """Return so many slots of zeros."""
    empty = jnp.zeros((batch_size, sizes.num_heads, number, sizes.width // sizes.num_heads), jnp.float32)
    return KeyValues(empty, empty)


class Rotary(NamedTuple):
    """The rotation of each position: cos and sin, [T, K/2]."""

    cos: Array
    sin: Array

    @classmethod
    def of(cls, positions: Int[Array, "T"], sizes: Sizes) -> "Rotary":
        """Return the rotations of these positions, which count from 0."""
        return cls(*rotary(positions, sizes.width // sizes.num_heads, ROPE_BASE))

    def turn(self, x: Float[Array, "B H T K"]) -> Float[Array, "B H T K"]:
        """Rotate x to its positions."""
        return turn(x, self.cos[None, None], self.sin[None, None])


@jax.custom_vjp
def lookup(table: Float[Array, "V D"], tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Return the rows of a table, NaN where it has none.

    The gradient is a matrix product with one-hot rows. Tasks have a handful of symbols, so the usual scatter would add
    ten thousand rows to each of a few addresses, one after the other, and on a GPU in an order that differs from run to
    run. A large table would need too much memory for that, but then the scatter serves.
    """
    return table.at[tokens].get(mode="fill", fill_value=jnp.nan)


def _lookup_forward(
    table: Float[Array, "V D"], tokens: Int[Array, "B T"]
) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "V D"], Int[Array, "B T"]]]:
    return lookup(table, tokens), (table, tokens)


def _lookup_backward(
    kept: tuple[Float[Array, "V D"], Int[Array, "B T"]], gradient: Float[Array, "B T D"]
) -> tuple[Float[Array, "V D"], None]:
    table, tokens = kept
    if len(table) > MOST_ONE_HOT:
        return jnp.zeros_like(table).at[tokens].add(gradient, mode="drop"), None
    rows = jax.nn.one_hot(tokens, len(table), dtype=gradient.dtype)
    return jnp.einsum("btv,btd->vd", rows, gradient, precision=jax.lax.Precision.HIGHEST), None


lookup.defvjp(_lookup_forward, _lookup_backward)


def attend(
    q: Float[Array, "B H T K"], past: KeyValues, visible: Bool[Array, "T S"]
) -> Float[Array, "B T H*K"]:
    """Return softmax attention over the visible positions, at scale K^-0.5, heads side by side."""
    batch, heads, time, width = q.shape
    q = q * width**-0.5

    def softmax(scores: Float[Array, "B H T S"]) -> Float[Array, "B H T S"]:
        return jax.nn.softmax(jnp.where(visible[None, None], scores, -jnp.inf), axis=-1)

    # One query, as at every step of the decoder, reads each key and value once: as sums of products XLA fuses that
    # with what stands around it, forward and backward, at the speed of the memory. A matrix product of one row cannot.
    if time == 1:
        weights = softmax((q * past.keys).sum(-1)[:, :, None])
        o = (weights[:, :, 0, :, None] * past.values).sum(-2)
    else:
        weights = softmax(jnp.einsum("bhtk,bhsk->bhts", q, past.keys))
        o = jnp.einsum("bhts,bhsk->bthk", weights, past.values)
    return o.reshape(batch, time, heads * width)
