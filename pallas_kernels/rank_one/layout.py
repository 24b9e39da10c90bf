"""What the kernels of the family share: chunk size, the rows of the gate array, and the plan of a call."""

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.mosaic import columns, index, rows

CHUNK = 64  # tokens of a chunk
MULTIPROCESSORS = 132  # of an H100 SXM or H200
SHARED_MEMORY = 226 * 1024  # bytes of it that a block can use for buffers
WIDE = 128  # the largest key of which registers hold a second matrix
COLUMNS = 64  # columns of the state that one warpgroup holds: the rows of one wgmma


class Gates(enum.IntEnum):
    """Rows of the gate array [B, HV, N, rows, C]: one float32 value a token and value head.

    A vector in shared memory can be read along one axis of a matrix only, so those needed along both stand twice.
    """

    ERASE = 0  # a
    READ = 1  # a e^c, the erasing factor on what the entering state holds
    WRITE = 2  # w
    ENTRY = 3  # e^c: what is left of the entering state at this token
    EXIT = 4  # e^{c_C - c}: what is left of this token's row at the chunk's end
    SUM = 5  # c, the log-decays summed from the chunk's start
    SUM_AGAIN = 6
    DOCUMENT = 7  # packed only: restarts so far in the chunk
    DOCUMENT_AGAIN = 8


@dataclass(frozen=True)
class Plan:
    """Sizes and features of one call; all static."""

    chunks: int
    value_heads: int
    key_dim: int
    value_dim: int
    erases: bool  # a is not identically 0
    decays: bool  # g is given, or documents are packed
    packed: bool
    reads: bool = True  # outputs are asked for
    continues: bool = True  # from an initial state that is not identically 0
    dtype: Any = jnp.bfloat16  # of the factors of all products: bfloat16 or float16
    segments: int = 1  # of a sequence, which stand beside each other on the batch axis
    interpret: Any = None
    joint: bool = False  # the backward pass is one kernel: a head keeps a multiprocessor busy
    warpgroups: int = 1  # that share a block, each with 64 columns of the state
    stages: int = 2  # chunks in flight; see `staged`
    scale: float = 1.0  # of the queries

    @property
    def wide(self) -> bool:
        """Whether a state's 64 columns take more than half of a warpgroup's registers."""
        return self.key_dim > WIDE

    def staged(self, *, residuals: bool = False) -> "Plan":
        """With as many stages as fit beside the results, and beside what the backward pass needs; at most 3."""
        chunk = (
            CHUNK * (2 * self.key_dim + self.warpgroups * COLUMNS + 2 * CHUNK) * 2
            + self.gate_rows * CHUNK * 4
        )
        results = (0 if self.wide else CHUNK) + (CHUNK if residuals else 0)
        results += self.key_dim if residuals or self.wide else 0
        results *= self.warpgroups * COLUMNS * 2
        return dataclasses.replace(self, stages=min(3, (SHARED_MEMORY - results) // chunk))

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of each thread that computes, and that loads.

        Together no more than the block starts with (168 a thread for three warpgroups), or it waits for ever.
        """
        return (208, 88) if self.warpgroups == 2 else (248, 224) if self.wide else (240, 232)

    @property
    def gate_rows(self) -> int:
        """Rows of the gate array."""
        return 9 if self.packed else 7

    def decayed(self, x: Array, gates: Any, *, diagonal: bool) -> Array:
        """x ⊙ Γ: x_ij times what is left of row j's write at row i > j, or i ≥ j with the diagonal; 0 elsewhere."""
        row, column = index(0), index(1)
        kept = row >= column if diagonal else row > column
        if not self.decays:
            return jnp.where(kept, x, 0.0)
        if self.packed:
            kept &= rows(gates.at[Gates.DOCUMENT]) == columns(gates.at[Gates.DOCUMENT_AGAIN])
        exponent = rows(gates.at[Gates.SUM]) - columns(gates.at[Gates.SUM_AGAIN])
        return x * jnp.exp(jnp.where(kept, exponent, -jnp.inf))
