"""What the TPU kernels of the family share: sizes of a call, and products over the chunks of several heads at once.

A matrix unit is 128 wide at least and a chunk has 64 tokens, so heads go through it in pairs, as *stacks*:

- rows of tokens [C, ·] of the heads of a stack stand below each other, [S·C, ·] for S heads;
- matrices [C, C] of the heads stand side by side, [C, S·C] (*packed*: full vectors for elementwise work),
  or on the diagonal of [S·C, S·C] (*spread*: a factor of products with stacked rows).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.rank_one.layout import CHUNK, Gates

LANES = 128  # of a vector register
STACK = 2  # heads of a stack: 128 rows
MOST_HEADS = 8  # of one program
UNASKED = 16 * 2**20  # bytes of fast memory
# Contract the columns of the first factor with the rows of the second; columns with columns; rows with rows.
NN, NT, TN = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ())), (((0,), (0,)), ((), ()))


@dataclass(frozen=True)
class Plan:
    """Sizes and features of one call; all static."""

    chunks: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    heads: int  # value heads of one program; divides value_heads
    erases: bool  # a is not identically 0
    decays: bool  # g is given, or documents are packed
    packed: bool  # several documents in a sequence
    reads: bool  # outputs are asked for
    dtype: Any  # of q, k and v: bfloat16 or float32
    scale: float = 1.0  # of the queries
    interpret: Any = False

    @property
    def programs(self) -> int:
        """Programs that share the heads of a sequence."""
        return self.value_heads // self.heads

    @property
    def keys(self) -> int:
        """Key heads of one program."""
        return max(1, self.heads * self.key_heads // self.value_heads)

    def key_of(self, head: int) -> int:
        """The key head, among those of its program, of a program's value head."""
        return head * self.keys // self.heads

    @property
    def stacks(self) -> list[range]:
        """The heads of a program, by stack."""
        return [range(h, min(h + STACK, self.heads)) for h in range(0, self.heads, STACK)]

    @property
    def memory(self) -> int | None:
        """Bytes of fast memory to ask for, where kernels need more than compilers give unasked; else None."""
        size, state = jnp.dtype(self.dtype).itemsize, self.key_dim * self.value_dim
        # The state that is passed on, in float32; twice, as they stream by: states of both ends, the chunk's, and rows.
        streamed = 4 * 2 * state + size * (state + 4 * CHUNK * (self.key_dim + self.value_dim))
        need = 2 * self.heads * (4 * state + 2 * streamed)  # as much again for what is computed
        return need if need > UNASKED else None

    @property
    def exact_sums(self) -> bool:
        """Whether sums of log-decays come in two parts: for inputs whose own rounding does not hide what one loses."""
        return self.decays and self.dtype == jnp.float32

    @property
    def gate_rows(self) -> int:
        """Rows of the gate array."""
        return 9 if self.packed else 7

    def key_rows(self, ref: Any, heads: range) -> Array:
        """The keys or queries [S·C, K] of a stack, from a block [C, keys·K]."""
        return stack([ref[:, pl.ds(self.key_of(head) * self.key_dim, self.key_dim)] for head in heads])

    def value_rows(self, ref: Any, heads: range) -> Array:
        """The values [S·C, V] of a stack, from a block [C, heads·V]."""
        return stack([ref[:, pl.ds(head * self.value_dim, self.value_dim)] for head in heads])

    def put(self, ref: Any, heads: range, rows: Array) -> None:
        """Write the rows [S·C, V] of a stack to a block [C, heads·V]."""
        for i, head in enumerate(heads):
            ref[:, pl.ds(head * self.value_dim, self.value_dim)] = part(rows, i).astype(ref.dtype)

    def product(self, a: Array, b: Array, dims: Any = NN) -> Array:
        """A product in float32 of factors that have, or are rounded to, the inputs' dtype."""
        exact = self.dtype == jnp.float32
        return lax.dot_general(
            a.astype(self.dtype),
            b.astype(self.dtype),
            dims,
            precision=lax.Precision.HIGHEST if exact else None,
            preferred_element_type=jnp.float32,
        )


def choose_heads(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> int:
    """Value heads of one program: as many as fill the matrix units, of those whose blocks are whole vectors."""
    group = value_heads // key_heads
    allowed = []
    for heads in range(1, value_heads + 1):
        keys = max(1, heads // group)
        whole = (
            (heads == value_heads or heads * value_dim % LANES == heads * CHUNK % LANES == 0)
            and (keys == key_heads or keys * key_dim % LANES == 0)
            and (heads % group == 0 or group % heads == 0)
        )
        if value_heads % heads == 0 and whole:
            allowed.append(heads)
    most = max(1, MOST_HEADS * LANES // max(key_dim, value_dim, LANES))
    return max([heads for heads in allowed if heads <= most], default=allowed[0])


def stack(parts: Sequence[Array]) -> Array:
    """Put the rows of heads below each other."""
    return jnp.concatenate(parts, axis=0) if len(parts) > 1 else parts[0]


def side_by_side(parts: Sequence[Array]) -> Array:
    """Put matrices or rows of heads beside each other."""
    return jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]


def part(x: Array, member: int) -> Array:
    """The rows of one head of a stack."""
    return x[member * CHUNK : (member + 1) * CHUNK]


def pack(x: Array) -> Array:
    """Of [S·C, S·C], the diagonal blocks: [C, S·C]."""
    members = x.shape[1] // CHUNK
    packed = part(x, 0)
    lane = lax.broadcasted_iota(jnp.int32, packed.shape, 1)
    for member in range(1, members):
        packed = jnp.where(lane < member * CHUNK, packed, part(x, member))
    return packed


def spread(x: Array) -> Array:
    """Packed [C, S·C] onto the diagonal of [S·C, S·C], zeros elsewhere."""
    members = x.shape[1] // CHUNK
    if members == 1:
        return x
    words = pltpu.bitcast(x, jnp.int32)  # two 16-bit rows at once: vector units select 32 bits
    lane = lax.broadcasted_iota(jnp.int32, words.shape, 1)
    first = [member * CHUNK for member in range(members + 1)]
    spread = [jnp.where((a <= lane) & (lane < b), words, 0) for a, b in pairwise(first)]
    return pltpu.bitcast(stack(spread), x.dtype)


def places(members: int) -> tuple[Array, Array]:
    """Row and column within its head of each element of a packed matrix."""
    shape = (CHUNK, members * CHUNK)
    row, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return row, lane & (CHUNK - 1)


class StackGates:
    """The gates of a stack of heads, as rows [1, S·C] and as columns [S·C, 1]."""

    def __init__(self, gates: Sequence[Array], plan: Plan):
        self.plan = plan
        self.members = len(gates)
        self.rows = side_by_side(gates)  # [rows, S·C]
        self.columns = jnp.transpose(self.rows)

    def row(self, gate: Gates) -> Array:
        """[1, S·C]."""
        return self.rows[gate : gate + 1]

    def column(self, gate: Gates) -> Array:
        """[S·C, 1]."""
        return self.columns[:, gate : gate + 1]

    def along_rows(self, gate: Gates) -> Array:
        """Packed: the value of each element's row."""
        shape = (CHUNK, self.members * CHUNK)
        lane = lax.broadcasted_iota(jnp.int32, shape, 1)
        column = self.column(gate)
        result = jnp.broadcast_to(part(column, 0), shape)
        for member in range(1, self.members):
            result = jnp.where(lane < member * CHUNK, result, part(column, member))
        return result

    def decays(self) -> tuple[Array, Array]:
        """Γ packed: what is left of column j's write at row i, for i > j, and for i ≥ j; 0 elsewhere."""
        row, column = places(self.members)
        kept = row >= column
        if self.plan.packed:
            kept &= self.along_rows(Gates.DOCUMENT) == self.row(Gates.DOCUMENT)
        if self.plan.decays:
            exponent = self.along_rows(Gates.SUM) - self.row(Gates.SUM)
            if self.plan.exact_sums:  # whose rest is there
                exponent += self.along_rows(Gates.SUM_AGAIN) - self.row(Gates.SUM_AGAIN)
            with_diagonal = jnp.exp(jnp.where(kept, exponent, -jnp.inf))
        else:
            with_diagonal = jnp.where(kept, 1.0, 0.0)
        return jnp.where(row > column, with_diagonal, 0.0), with_diagonal

    def left(self, member: int) -> Array:
        """e^{c_C} of one head, [1, 1]: what is left of the entering state at the chunk's end."""
        last = (member + 1) * CHUNK - 1
        return self.rows[Gates.ENTRY : Gates.ENTRY + 1, last : last + 1]


class Stack:
    """What a stack of heads reads of one chunk."""

    def __init__(self, plan: Plan, heads: range, refs: dict[str, Any]):
        self.plan, self.heads = plan, heads
        self.gates = StackGates([refs["gates"][head] for head in heads], plan)
        self.k = plan.key_rows(refs["k"], heads)
        self.q = plan.key_rows(refs["q"], heads) if plan.reads else None
        self.v = plan.value_rows(refs["v"], heads)

    def similarities(self) -> tuple[Array, Array | None]:
        """K Kᵀ and Q Kᵀ, packed."""
        size = self.k.shape[0]
        if self.q is None:
            return pack(self.plan.product(self.k, self.k, NT)), None
        both = self.plan.product(stack([self.k, self.q]), self.k, NT)
        return pack(both[:size]), pack(both[size:])
