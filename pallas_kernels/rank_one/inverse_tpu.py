"""Inverses of the chunks' triangular matrices on a TPU."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.rank_one.layout import CHUNK
from pallas_kernels.rank_one.tiles_tpu import NN, places, spread, stack

BLOCK = 16  # rows of the blocks that are inverted by substitution


def inverses(lowers: Sequence[Array], exact: bool) -> list[Array]:
    """(I + L)⁻¹ of strictly lower triangular matrices, packed; stable for any keys.

    Diagonal blocks of BLOCK rows by substitution in float32; then blocks double: X ← X − (X L X) ∘ M, M the blocks
    below the diagonal ones. Each product waits for the one before, so stacks take turns. `exact` is for float32 inputs;
    else products keep 16 bits of each factor (three bfloat16 products).
    """
    found = [_block_inverses(x) for x in lowers]
    lower = [Factor.of(x, exact).spread() for x in lowers]
    size = BLOCK
    while size < CHUNK:
        # Only rows of the second block of each two change.
        second = [slice(row, row + size) for row in range(size, CHUNK, 2 * size)]
        rows = [Factor.of(stack([x[block] for block in second]), exact) for x in found]
        products = [Factor.of(x @ y, exact) for x, y in zip(rows, lower, strict=True)]
        changes = [x @ Factor.of(y, exact).spread() for x, y in zip(products, found, strict=True)]
        found = [_subtract(x, y, size) for x, y in zip(found, changes, strict=True)]
        size *= 2
    return found


def _block_inverses(lower: Array) -> Array:
    """(I + L)⁻¹ of the diagonal blocks alone: all blocks of a stack at once, side by side in [BLOCK, S·C]."""
    row, lane = (lax.broadcasted_iota(jnp.int32, (BLOCK, lower.shape[1]), axis) for axis in (0, 1))
    place = lane & (CHUNK - 1)
    blocks = [(place >= first) & (place < first + BLOCK) for first in range(0, CHUNK, BLOCK)]
    diagonal = jnp.zeros(row.shape, jnp.float32)
    for i, block in enumerate(blocks):
        diagonal = jnp.where(block, lower[i * BLOCK : (i + 1) * BLOCK], diagonal)
    column = lane & (BLOCK - 1)
    found = jnp.where(row == column, 1.0, 0.0)
    for j in range(BLOCK - 1):  # row j is found: take it out of those below
        factor = jnp.take_along_axis(diagonal, lane - column + j, axis=1)
        found = found - factor * found[j : j + 1]
    return stack([jnp.where(block, found, 0.0) for block in blocks])


def _subtract(x: Array, change: Array, size: int) -> Array:
    """The change of second blocks' rows, of which the columns of the first blocks count."""
    row, column = places(x.shape[1] // CHUNK)
    parts = []
    for i, first in enumerate(range(0, CHUNK, 2 * size)):
        second = slice(first + size, first + 2 * size)
        here = (row[second] ^ column[second]) < 2 * size
        here &= column[second] & size == 0
        mine = x[second]
        parts += [x[first : first + size], jnp.where(here, mine - change[i * size : (i + 1) * size], mine)]
    return stack(parts)


class Factor(NamedTuple):
    """A factor of products, packed or spread: float32, or a sum of two bfloat16 values with 16 bits in all."""

    parts: tuple[Array, ...]

    @classmethod
    def of(cls, x: Array, exact: bool) -> "Factor":
        """Of a float32 array; `exact` leaves it whole."""
        if exact:
            return cls((x,))
        high = x.astype(jnp.bfloat16)
        return cls((high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)))

    def spread(self) -> "Factor":
        """Onto the diagonal."""
        return Factor(tuple(spread(x) for x in self.parts))

    def __matmul__(self, other: "Factor") -> Array:
        if len(self.parts) == 1:
            return _product(self.parts[0], other.parts[0], lax.Precision.HIGHEST)
        both = _product(stack(self.parts), other.parts[0])
        size = self.parts[0].shape[0]
        return both[:size] + both[size:] + _product(self.parts[0], other.parts[1])


def _product(a: Array, b: Array, precision: lax.Precision | None = None) -> Array:
    return lax.dot_general(a, b, NN, precision=precision, preferred_element_type=jnp.float32)
