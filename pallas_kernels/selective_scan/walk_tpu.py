"""What the scan kernels for TPUs share: sizes of a call, arrays block by block, and rows and columns as whole states.

States are [N, D], entries on sublanes and channels on lanes, so that their arithmetic fills vector registers. A program
holds the states of some channels in fast memory and goes through time, chunk by chunk; in a chunk, through groups of
channels whose states fit in registers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.walk_tpu import Kind

LANES, SUBLANES = 128, 8  # of a vector register
LONGEST = 64  # tokens of a chunk: what is kept of them stays within the fast memory of every TPU
SPREAD, PARTS = 32, 4  # tokens, and numbers a token, that stand side by side
BLOCK = 32  # tokens of a loop's body
HALF = BLOCK // 2  # rows of 16 bits in a register
REGISTERS = 8  # for the states of a group, of 64
LARGEST = 2**15  # entries of the states of a program
UNASKED = 16 * 2**20  # bytes of fast memory
PITCH = (
    SUBLANES + 1
)  # rows from token to token in `Rows`: odd, so that rows read together are on different sublanes


@dataclass(frozen=True)
class Plan:
    """Sizes and features of one call; all static."""

    tokens: int  # of a chunk
    chunks: int
    entries: int  # N, in whole registers
    tiles: int  # of 128 channels, of a group
    groups: int  # of a program
    programs: int  # that share the channels of a sequence
    packed: bool  # several documents in a sequence
    reads: bool  # outputs are asked for
    interpret: Any = False

    @property
    def group(self) -> int:
        """Channels of a group."""
        return self.tiles * LANES

    @property
    def width(self) -> int:
        """Channels of a program."""
        return self.groups * self.group

    @property
    def grid(self) -> tuple[int, int]:
        """Programs and steps in time."""
        return self.programs, self.chunks

    @property
    def columns(self) -> int:
        """Rows of the array of what depends on tokens alone: B, C, and whether the state is zeroed."""
        rows = self.entries * (1 + self.reads) + SUBLANES * self.packed
        return -(-rows // HALF) * HALF

    @property
    def memory(self) -> int | None:
        """Bytes of fast memory to ask for, where kernels need more than compilers give unasked; else None."""
        streamed = 2 * 5 * 4 * self.tokens * self.width  # twice, as they stream by; in float32
        need = streamed + 4 * self.tokens * (self.group * (self.entries + 3) + self.columns * LANES)
        need += 10 * 4 * self.entries * self.width
        return 5 * need // 4 if 5 * need // 4 > UNASKED else None

    def channels(self, group: Any) -> Any:
        """Which channels of a program are in a group."""
        return pl.ds(pl.multiple_of(group * self.group, self.group), self.group)

    def whole(self, column: Array) -> Array:
        """[N, 128], the same on all lanes, for all channels of a group."""
        return jnp.concatenate([column] * self.tiles, axis=1)

    def row(self, ref: Any, t: Any) -> Array:
        """Row t of [·, W], for all entries."""
        return jnp.broadcast_to(ref[pl.ds(t, 1), :], (self.entries, self.group))

    def half(self, block: Any, second: bool) -> Any:
        """Which tokens of a chunk are in half a block."""
        return pl.ds(pl.multiple_of(block * BLOCK + second * HALF, HALF), HALF)


def choose_sizes(time: int, width: int, entries: int) -> dict[str, int]:
    """Sizes of a plan: as large as they may be, and equal among each other, so that little is padded."""
    tokens = min(LONGEST, -(-time // SPREAD) * SPREAD)
    registers, tiles = -(-entries // SUBLANES), -(-width // LANES)
    all_groups = -(-tiles // max(1, REGISTERS // registers))
    tiles = -(-tiles // all_groups)
    most = max(1, LARGEST // (tiles * LANES * registers * SUBLANES))

    def cost(groups: int) -> int:  # what a program does for all its groups takes as long as half a group
        return -(-all_groups // groups) * (2 * groups + 1)

    groups = min(range(1, most + 1), key=cost)
    return {
        "tokens": tokens,
        "chunks": -(-time // tokens),
        "entries": registers * SUBLANES,
        "tiles": tiles,
        "groups": groups,
        "programs": -(-all_groups // groups),
    }


def kinds(plan: Plan, backward: bool) -> dict[str, Kind]:
    """All kinds of arrays of a call."""
    width = plan.width * plan.programs

    def chunk(n):
        return plan.chunks - 1 - n if backward else n

    tokens = pl.BlockSpec((None, plan.tokens, plan.width), lambda b, d, n: (b, chunk(n), d))
    parts = plan.tokens // SPREAD
    columns = pl.BlockSpec((None, parts, plan.columns, LANES), lambda b, d, n: (b, chunk(n), 0, 0))
    state = pl.BlockSpec((None, plan.entries, plan.width), lambda b, d, n: (b, 0, d))
    states = pl.BlockSpec((None, None, plan.entries, plan.width), lambda b, d, n: (b, chunk(n), 0, d))
    sums = pl.BlockSpec((None, None, None, plan.entries, LANES), lambda b, d, n: (b, d, chunk(n), 0, 0))
    return {
        "channels": Kind((plan.chunks * plan.tokens, width), tokens),
        "columns": Kind((plan.chunks * parts, plan.columns, LANES), columns),
        "state": Kind((plan.entries, width), state),
        "states": Kind((plan.chunks, plan.entries, width), states),
        "sums": Kind((plan.programs, plan.chunks, plan.entries, LANES), sums),
    }


class Columns:
    """What depends on tokens alone, spread over lanes, once for all channels: memory [tokens, columns, 128].

    Spreading is a product with ones, as matrix units have nothing else to do: of the numbers of SPREAD tokens, which
    come as sums of PARTS of 16 bits that keep every bit, all lanes but those of one token are made zero.
    """

    def __init__(self, plan: Plan, ref: Any):
        self.plan, self.ref = plan, ref

    @staticmethod
    def scratch(plan: Plan) -> Any:
        """The memory."""
        return pltpu.VMEM((plan.tokens, plan.columns, LANES), jnp.float32)

    def spread(self, given: Any) -> None:
        """Fill the memory from [tokens / SPREAD, columns, PARTS · SPREAD on lanes] bfloat16."""
        ones = jnp.ones((LANES, LANES), jnp.bfloat16)

        def block(i, _):
            words = pltpu.bitcast(given[i], jnp.int32)  # two rows at once: vector units select 32 bits
            token = lax.broadcasted_iota(jnp.int32, words.shape, 1) & (SPREAD - 1)
            rows = [jnp.where(token == j, words, 0) for j in range(SPREAD)]
            rows = pltpu.bitcast(jnp.concatenate(rows, axis=0), jnp.bfloat16)
            found = lax.dot_general(rows, ones, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
            self.ref[pl.ds(i * SPREAD, SPREAD)] = found.reshape(SPREAD, *self.ref.shape[1:])
            return 0

        lax.fori_loop(0, self.plan.tokens // SPREAD, block, 0)

    def b(self, t: Any) -> Array:
        """B of a token, for all channels of a group: [N, W]."""
        return self.plan.whole(self.ref[t, : self.plan.entries, :])

    def c(self, t: Any) -> Array:
        """Like `b`, of C."""
        return self.plan.whole(self.ref[t, self.plan.entries : 2 * self.plan.entries, :])

    def first(self, t: Any) -> Array:
        """Where the state is zeroed before the token: everywhere or nowhere of [N, W]."""
        first = self.plan.entries * (1 + self.plan.reads)
        mask = self.ref[t, first : first + SUBLANES, :]
        return self.plan.whole(jnp.concatenate([mask] * (self.plan.entries // SUBLANES), axis=0)) > 0


class Rows:
    """Sums over the entries of a block of tokens: written token by token, read together.

    Row s of 8 tokens is read at once, with a stride, so that adding up what was on the sublanes of each takes no move
    across them.
    """

    def __init__(self, ref: Any):
        self.ref = ref  # [tiles, BLOCK · PITCH, 128]

    @staticmethod
    def scratch(plan: Plan) -> Any:
        """The memory."""
        return pltpu.VMEM((plan.tiles, BLOCK * PITCH, LANES), jnp.float32)

    def put(self, j: Any, x: Array) -> None:
        """Write [N, W] of token j of the block."""
        x = _sum([x[i : i + SUBLANES] for i in range(0, x.shape[0], SUBLANES)])
        for tile in range(self.ref.shape[0]):
            self.ref[tile, pl.ds(j * PITCH, SUBLANES), :] = x[:, tile * LANES : (tile + 1) * LANES]

    def sums(self, second: bool) -> Array:
        """The sums [HALF, W] of half a block."""
        first = second * HALF
        parts = [
            jnp.concatenate([self._rows(tile, j) for tile in range(self.ref.shape[0])], axis=1)
            for j in range(first, first + HALF, SUBLANES)
        ]
        return jnp.concatenate(parts, axis=0)

    def _rows(self, tile: int, first: int) -> Array:
        rows = (pl.ds(first * PITCH + s, SUBLANES, stride=PITCH) for s in range(SUBLANES))
        return _sum([self.ref[tile, row, :] for row in rows])


def each_token(plan: Plan, body: Callable[[Any, Any], Any], carried: Any, *, reverse: bool = False) -> Any:
    """Carry through body(j, carried) for the tokens of a block, unrolled; the interpreter would only compile longer."""
    if plan.interpret:
        return lax.fori_loop(0, BLOCK, lambda i, c: body(BLOCK - 1 - i if reverse else i, c), carried)
    for j in reversed(range(BLOCK)) if reverse else range(BLOCK):
        carried = body(j, carried)
    return carried


def put_sums(table: Array, block: Any, j: Any, x: Array) -> Array:
    """Put the sums over channels of [N, W] of token j of a block in its column of a table [N, tokens on lanes]."""
    tiles = _sum([x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)])
    lane = lax.broadcasted_iota(jnp.int32, table.shape, 1) - block * BLOCK
    return jnp.where(lane == j, jnp.sum(tiles, axis=1, keepdims=True), table)


def _sum(terms: Sequence[Array]) -> Array:
    """The sum, as a tree: no long chain."""
    while len(terms) > 1:
        terms = [sum(terms[i + 1 : i + 2], start=terms[i]) for i in range(0, len(terms), 2)]
    return terms[0]
