"""Mosaic GPU, Hopper: the gate array that the other kernels read, and the gradients of the gates from its own.

A block has one chunk of a few heads. Sums from the start of the chunk, or to its end, are those of the rows of a matrix
in which the tokens that do not count are 0, which threads add up in registers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import WGMMA, columns, index
from pallas_kernels.rank_one.gates import FORGET
from pallas_kernels.rank_one.layout import CHUNK, Gates, Plan
from pallas_kernels.rank_one.stream_sm90 import Refs, launch

WHOLE = 4  # float32 numbers of the 16 bytes that TMA moves at least: heads come in multiples of it
HEADS = 2 * WHOLE  # of a block, at most
CHANGE, LAST = 0, 1  # where a block puts its sums over rows of dgates
# Every load says its layout, as of these buffers columns are read, which the search for layouts does not allow; and
# what one thread writes for another stands before a commit_smem.
PARAMETERS = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
)


class Rows(NamedTuple):
    """Where the gradients of the gates stand in an array [B, HV, N, rows, C]: sums of rows."""

    erase: tuple[int, ...]  # of a
    write: tuple[int, ...]  # of w
    sums: tuple[int, ...]  # of the decay sums c
    minus_sums: tuple[int, ...]  # to be taken away from it
    last: tuple[int, ...]  # of the last c of the chunk, in parts that only their sum matters


class _Chunk:
    """The chunk of a block in shared memory, and which of its tokens stand before which, in the same document."""

    def __init__(self, given: Refs, s: Refs, plan: Plan, heads: int) -> None:
        self.s = s
        self.b, self.n, self.first = lax.axis_index("b"), lax.axis_index("n"), lax.axis_index("h") * heads
        self.span = pl.ds(self.n * CHUNK, CHUNK)
        self.heads = pl.ds(self.first, heads)
        self.row, self.column = index(0), index(1)
        self.count = heads
        for name, ref in given.items():
            if name == "dgates":
                for i in range(heads):
                    head = jnp.minimum(self.first + i, plan.value_heads - 1)  # past the last any will do
                    plgpu.copy_gmem_to_smem(ref.at[self.b, head, self.n], s[name].at[i], s["loaded"])
            else:
                place = (self.b, self.span) if name == "restart" else (self.b, self.span, self.heads)
                plgpu.copy_gmem_to_smem(ref.at[place], s[name], s["loaded"])
        plgpu.barrier_wait(s["loaded"])
        if plan.packed:
            restarts, self.cut = columns(s["restart"]), _rows(s["restart"]) > 0.0
            self.document = jnp.sum(jnp.where(self.column <= self.row, restarts, 0.0), 1)  # restarts so far
            self.in_last = self.document == jnp.sum(restarts, 1)
            s["document"][...] = self.document
            plgpu.commit_smem()
            # Whether the column's token is in the row's document.
            self.same = lax.broadcast_in_dim(self.document, (CHUNK, CHUNK), [0]) == columns(s["document"])

    def of(self, name: str, head: Array | int) -> Array:
        """A vector of the tokens, one value a row."""
        return _rows(self.s[name].at[:, head])

    def decays(self, head: Array | int) -> Array:
        """The log-decays of the tokens that are summed, one a column; after `turn_decays`."""
        return columns(self.s["decays"].at[head])

    def turn_decays(self) -> None:
        """Put the log-decays of each head side by side."""

        @pl.loop(0, self.count)
        def _(head):
            x = self.of("log_decay", head)
            x = jnp.where(x < FORGET, FORGET, x)
            if "restart" in self.s:
                x = jnp.where(self.cut, 0.0, x)  # nothing is left that it could act on
            self.s["decays"].at[head][...] = x

        plgpu.commit_smem()

    def add_up(self, x: Array, kept: Array) -> Array:
        """For each row of `kept` the sum of x over the columns that are kept, of the row's document."""
        if "restart" in self.s:
            kept &= self.same
        return jnp.sum(jnp.where(kept, x, 0.0), 1)


def put_gates(
    erase: Array | None, write: Array, log_decay: Array | None, restart: Array | None, plan: Plan
) -> Array:
    """Return the gate array [B, HV, N, rows, C], float32; see `layout.Gates`.

    Args:
        erase: a [B, T, HV] float32, or None for zeros.
        write: w, like a.
        log_decay: g, like a, or None for zeros; −inf forgets all.
        restart: [B, T], True where the state restarts, or None.
        plan: sizes and features of this call.
    """
    inputs = _inputs(restart, erase=erase, write=write, log_decay=log_decay)
    batch, _, total = inputs["write"].shape
    heads = _heads_of_block(total)

    def run(given: Refs, made: Refs, s: Refs) -> None:
        chunk = _Chunk(given, s, plan, heads)
        nothing = plgpu.layout_cast(jnp.full((CHUNK,), 0.0, jnp.float32), WGMMA.reduce(1))
        if "log_decay" in given:
            chunk.turn_decays()

        @pl.loop(0, heads)
        def _(i):
            sums = nothing
            if "log_decay" in given:
                sums = chunk.add_up(chunk.decays(i), chunk.column <= chunk.row)
            for place in (Gates.SUM, Gates.SUM_AGAIN):
                s["gates"].at[i, place][...] = sums

        plgpu.commit_smem()

        @pl.loop(0, heads)
        def _(i):
            gates = s["gates"].at[i]
            sums = _rows(gates.at[Gates.SUM])
            entry, until_end = jnp.exp(sums), gates[Gates.SUM, CHUNK - 1] - sums
            if plan.packed:
                entry = jnp.where(chunk.document == 0.0, entry, 0.0)
                until_end = jnp.where(chunk.in_last, until_end, -jnp.inf)
                gates.at[Gates.DOCUMENT][...] = chunk.document
                gates.at[Gates.DOCUMENT_AGAIN][...] = chunk.document
            erase = chunk.of("erase", i) if "erase" in given else nothing
            gates.at[Gates.ERASE][...], gates.at[Gates.READ][...] = erase, erase * entry
            gates.at[Gates.WRITE][...] = chunk.of("write", i)
            gates.at[Gates.ENTRY][...], gates.at[Gates.EXIT][...] = entry, jnp.exp(until_end)

        plgpu.commit_smem()
        for i in range(heads):
            plgpu.copy_smem_to_gmem(s["gates"].at[i], made["gates"].at[chunk.b, chunk.first + i, chunk.n])
        plgpu.wait_smem_to_gmem(0)

    scratch = _scratch(inputs, heads) | {"gates": plgpu.SMEM((heads, plan.gate_rows, CHUNK), jnp.float32)}
    if log_decay is not None:
        scratch["decays"] = plgpu.SMEM((heads, CHUNK), jnp.float32)
    shape = (batch, total, plan.chunks, plan.gate_rows, CHUNK)
    outputs = {"gates": jax.ShapeDtypeStruct(shape, jnp.float32)}
    grid = {"n": plan.chunks, "h": total // heads, "b": batch}
    made = launch("rank_one_gates", run, inputs, outputs, scratch, plan, grid, 1, PARAMETERS)
    return made["gates"][:, : plan.value_heads]


def gate_gradients(
    dgates: Array, log_decay: Array | None, restart: Array | None, rows: Rows, plan: Plan
) -> tuple[Array | None, Array, Array | None]:
    """Return the gradients of a, w and g [B, T, HV] float32, those that there are.

    Args:
        dgates: [B, HV, N, rows, C] float32, from a kernel.
        log_decay: as for `put_gates`.
        restart: likewise.
        rows: what stands where in dgates.
        plan: sizes and features of this call.
    """
    inputs = _inputs(restart, log_decay=log_decay) | {"dgates": dgates}
    batch, total = dgates.shape[0], -(-plan.value_heads // WHOLE) * WHOLE
    heads = _heads_of_block(total)
    names = [name for name, there in (("erase", plan.erases), ("log_decay", log_decay is not None)) if there]

    def run(given: Refs, made: Refs, s: Refs) -> None:
        chunk = _Chunk(given, s, plan, heads)

        def add(i: Array, plus: tuple[int, ...], minus: tuple[int, ...] = ()) -> Array:
            part = s["dgates"].at[i]
            terms = [_rows(part.at[place]) for place in plus] + [-_rows(part.at[place]) for place in minus]
            return sum(terms[1:], terms[0])

        @pl.loop(0, heads)
        def _(i):
            s["d_write"].at[:, i][...] = add(i, rows.write)
            if "erase" in names:
                s["d_erase"].at[:, i][...] = add(i, rows.erase)
            if "log_decay" in names:
                change, last = add(i, rows.sums, rows.minus_sums), add(i, rows.last)
                plgpu.commit_smem()  # every thread has read the rows, whose place they take
                s["dgates"].at[i, CHANGE][...] = change if plan.packed else change + last
                s["dgates"].at[i, LAST][...] = last

        plgpu.commit_smem()
        if "log_decay" in names:

            @pl.loop(0, heads)
            def _(i):
                change, last = (columns(s["dgates"].at[i, place]) for place in (CHANGE, LAST))
                replaced, onward = chunk.of("log_decay", i) <= FORGET, chunk.column >= chunk.row
                if plan.packed:
                    decay = chunk.add_up(change, onward)
                    decay += jnp.where(chunk.in_last, jnp.sum(last, 1), 0.0)
                    replaced |= chunk.cut
                else:
                    decay = jnp.sum(jnp.where(onward, change, last), 1)
                s["d_log_decay"].at[:, i][...] = jnp.where(replaced, 0.0, decay)

        plgpu.commit_smem()
        for name in made:
            plgpu.copy_smem_to_gmem(s[f"d_{name}"], made[name].at[chunk.b, chunk.span, chunk.heads])
        plgpu.wait_smem_to_gmem(0)

    names.append("write")
    scratch = _scratch(inputs, heads) | {
        f"d_{name}": plgpu.SMEM((CHUNK, heads), jnp.float32) for name in names
    }
    shape = (batch, plan.chunks * CHUNK, total)
    outputs = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name in names}
    grid = {"n": plan.chunks, "h": total // heads, "b": batch}
    made = launch("rank_one_gate_gradients", run, inputs, outputs, scratch, plan, grid, 1, PARAMETERS)
    made = {name: x[..., : plan.value_heads] for name, x in made.items()}
    return made.get("erase"), made["write"], made.get("log_decay")


def _inputs(restart: Array | None, **gates: Array | None) -> dict[str, Array]:
    """The arrays that there are, the heads filled up to a multiple of `WHOLE`."""
    inputs = {
        name: jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % WHOLE)])
        for name, x in gates.items()
        if x is not None
    }
    return inputs if restart is None else inputs | {"restart": restart.astype(jnp.float32)}


def _heads_of_block(total: int) -> int:
    return HEADS if total % HEADS == 0 else WHOLE


def _scratch(inputs: dict[str, Array], heads: int) -> dict[str, Any]:
    """Where the inputs of a block go, and the barrier that tells of them."""
    scratch: dict[str, Any] = {}
    for name, x in inputs.items():
        shape = (
            (CHUNK,) if name == "restart" else (heads, *x.shape[3:]) if name == "dgates" else (CHUNK, heads)
        )
        scratch[name] = plgpu.SMEM(shape, jnp.float32)
    if "restart" in inputs:
        scratch["document"] = plgpu.SMEM((CHUNK,), jnp.float32)
    copies = len(inputs) + (heads - 1) * ("dgates" in inputs)
    return scratch | {"loaded": plgpu.Barrier(num_arrivals=copies)}


def _rows(ref: Any) -> Array:
    """The vector in `ref`, whatever its stride; one value a row of a matrix."""
    return plgpu.load(ref, layout=WGMMA.reduce(1), optimized=False)
