"""Mosaic GPU, Hopper: what the three warpgroups of the kernel in `backward_sm90` do.

Two compute. Each carries 64 of the 128 columns of dS, and has 64 of the 128 columns of dq and dk. All matrices are held
as 64 × 64 tiles, so that results can leave by way of the places of what is no longer needed. The third loads each tile
as soon as its place is free, stores the results, and computes the scores P of the next chunk.
"""

import enum
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import WGMMA, MatrixUnit, Zero, columns, rows, tiled, zeros
from pallas_kernels.rank_one.layout import CHUNK, COLUMNS, Gates, Plan
from pallas_kernels.rank_one.stream_sm90 import Refs, matrix_unit, put_scores

SQUARE = (CHUNK, CHUNK)
WORKERS = HALVES = 2
BOTH = range(HALVES)
Pair = tuple[Array, Array]
SIZE = HALVES * COLUMNS  # of keys and of values
REGISTERS = 216, 72  # of each thread that computes, and that loads; see `Plan.registers`
STAGES = 2  # of q, k, T, P and the gates; all else has one place
# What is loaded together: ahead, from ring; when the last chunk's products are done; and when its results have left.
EARLY, MIDDLE, LATE = ("q", "k", "inverse", "gates"), ("do", "rows", "states"), ("v",)
COLUMNS_OF = {"do": 0, "v": 1}  # places in "columns"


class Parts(enum.IntEnum):
    """Rows of the gates' gradient [B, HV, N, rows, C], float32; each once for each worker."""

    ERASE = 0  # da
    WRITE = 1  # dw
    SUM = 2  # dc
    LAST = 3  # of the last dc of the chunk, in parts that only their sum matters


def scratch_buffers(inputs: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The shared memory and barriers of a block, by name; `inputs` are those of the kernel."""
    shapes = {
        "q": (STAGES, HALVES),
        "k": (STAGES, HALVES),
        "inverse": (STAGES,),
        "rows": (HALVES,),
        "states": (HALVES, HALVES),  # of V, of K
    }
    shapes = {name: shape for name, shape in shapes.items() if name in inputs}
    shapes["dstates"] = (HALVES, HALVES)  # then dq and dk
    shapes["columns"] = (2, HALVES)  # dO; v, then dR, then dv
    if "q" in inputs:
        shapes["scores"] = (STAGES,)  # P, then P̄
    if plan.erases:
        shapes["erasures"] = ()  # L̄; a L̄ takes the place of T
    scratch: dict[str, Any] = {name: tiled(*lead, *SQUARE, dtype=plan.dtype) for name, lead in shapes.items()}
    copies = {
        name: 1 if name in ("inverse", "gates") else 4 if name == "states" else HALVES for name in inputs
    }

    def loads(names: tuple[str, ...]) -> int:
        return sum(copies[name] for name in names if name in inputs)

    scratch |= {
        "zero": plgpu.SMEM((WORKERS + 1, 128), jnp.int16),
        "gates": plgpu.SMEM((STAGES, plan.gate_rows, CHUNK), jnp.float32),
        "dgates": plgpu.SMEM((WORKERS, len(Parts), CHUNK), jnp.float32),
        "loaded": plgpu.Barrier(num_arrivals=loads(EARLY), num_barriers=STAGES),
        "scored": plgpu.Barrier(num_barriers=STAGES),
        "middle_loaded": plgpu.Barrier(num_arrivals=loads(MIDDLE)),
        "middle_consumed": plgpu.Barrier(num_arrivals=WORKERS),
        "late_loaded": plgpu.Barrier(num_arrivals=loads(LATE)),
        "finished": plgpu.Barrier(num_arrivals=WORKERS),
        "stored": plgpu.Barrier(),
        "rows_met": plgpu.Barrier(num_arrivals=WORKERS),
        "scores_met": plgpu.Barrier(num_arrivals=WORKERS),
    }
    if plan.interpret:
        scratch["staging"] = {CHUNK: tiled(WORKERS + 1, *SQUARE, dtype=plan.dtype)}
    return scratch


class Backward:
    """The three warpgroups' code."""

    def __init__(self, plan: Plan, given: Refs, made: Refs, group: int) -> None:
        self.plan, self.given, self.made, self.group = plan, given, made, group
        self.reads = "q" in given
        self.s: Refs
        self.zero: Zero
        self.unit: MatrixUnit
        self.b, self.h = lax.axis_index("b"), lax.axis_index("h")

    def run(self, s: Refs) -> None:
        """Do the part of the warpgroup that calls this; `s` is from `scratch_buffers`."""
        self.s = s
        wg = lax.axis_index("wg")

        @pl.when(wg == WORKERS)
        def _():
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            self.zero = Zero(s["zero"].at[WORKERS])
            self.load()

        @pl.when(wg < WORKERS)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            self.zero = Zero(s["zero"].at[wg])
            self.unit = matrix_unit(s, wg)
            self.work(wg)

    def tokens(self, i: Array) -> Any:
        """The tokens of the i-th chunk from the end."""
        return pl.ds((self.plan.chunks - 1 - i) * CHUNK, CHUNK)

    # The warpgroup that loads.

    def load(self) -> None:
        """Keep the places filled, and the scores one chunk ahead."""
        s, count = self.s, self.plan.chunks
        first = jnp.int32(0)
        self.copy(EARLY, first, s["loaded"].at[first])
        self.copy(MIDDLE, first, s["middle_loaded"])
        self.copy(LATE, first, s["late_loaded"])
        self.score(first)

        @pl.loop(1, count)
        def _(i):
            slot = lax.rem(i, STAGES)
            self.copy(EARLY, i, s["loaded"].at[slot])
            self.score(i)
            plgpu.barrier_wait(s["middle_consumed"])
            self.copy(MIDDLE, i, s["middle_loaded"])
            self.store(i - 1)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(s["stored"])
            self.copy(LATE, i, s["late_loaded"])

        self.store(count - 1)
        plgpu.wait_smem_to_gmem(0)

    def copy(self, names: tuple[str, ...], i: Array, ready: Any) -> None:
        """Start the copies of these arrays' tiles of chunk i."""
        b, h, n, tokens, tile = self.b, self.h, self.plan.chunks - 1 - i, self.tokens(i), self.tiles(i)
        part = [pl.ds(half * COLUMNS, COLUMNS) for half in BOTH]
        for name in names:
            if name not in self.given:
                continue
            source = self.given[name]
            if name in ("inverse", "gates"):
                plgpu.copy_gmem_to_smem(source.at[b, h, n], tile(name), ready)
            elif name == "states":
                for j, m in itertools.product(BOTH, BOTH):
                    plgpu.copy_gmem_to_smem(source.at[b, h, n, part[j], part[m]], tile(name, j, m), ready)
            else:
                head = h // self.group if name in ("q", "k") else h
                for j in BOTH:
                    target = tile("columns", COLUMNS_OF[name], j) if name in COLUMNS_OF else tile(name, j)
                    plgpu.copy_gmem_to_smem(source.at[b, tokens, head, part[j]], target, ready)

    def store(self, i: Any) -> None:
        """Start the copies of the results of chunk i when they are there."""
        plgpu.barrier_wait(self.s["finished"])
        b, h, n, tokens, tile = self.b, self.h, self.plan.chunks - 1 - i, self.tokens(i), self.tiles(i)
        for j in BOTH:
            places = {"dv": tile("columns", 1, j), "dk": tile("dstates", j, 1), "dq": tile("dstates", j, 0)}
            for name, place in places.items():
                if name in self.made:
                    target = self.made[name].at[b, tokens, h, pl.ds(j * COLUMNS, COLUMNS)]
                    plgpu.copy_smem_to_gmem(place, target)
        plgpu.copy_smem_to_gmem(self.s["dgates"], self.made["dgates"].at[b, h, n])

    def score(self, i: Array) -> None:
        """P of chunk i."""
        if not self.reads:
            return
        slot, tile = lax.rem(i, STAGES), self.tiles(i)
        plgpu.barrier_wait(self.s["loaded"].at[slot])
        factors = ((tile("q", j), tile("k", j).transpose((1, 0))) for j in BOTH)
        products = matrix_unit(self.s, WORKERS).product(SQUARE, *factors)
        put_scores(tile("scores"), products, tile("gates"), self.plan)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.s["scored"].at[slot])

    # The warpgroups that compute.

    def work(self, worker: Array) -> None:
        """Carry 64 columns of dS through the chunks."""
        mine = pl.ds(worker * COLUMNS, COLUMNS)

        def place(array: str, half: int) -> Any:
            refs = self.given | self.made
            return refs[array].at[self.b, self.h, mine, pl.ds(half * COLUMNS, COLUMNS)]

        state = tuple(plgpu.load(place("final_state", j), layout=WGMMA, optimized=False) for j in BOTH)
        state = lax.fori_loop(0, self.plan.chunks, partial(self.chunk, worker), state)
        for j in BOTH:
            place("initial_state", j)[...] = state[j]

    def meet(self, name: str) -> None:
        """Wait for the other worker."""
        plgpu.barrier_arrive(self.s[name])
        plgpu.barrier_wait(self.s[name])

    def tiles(self, i: Array) -> Callable[..., Any]:
        """Where the arrays of chunk i are, by name and indices; addresses are computed anew for each `tiles`."""
        zero = self.zero.get()
        slot = lax.rem(i, STAGES) + zero

        def tile(name: str, *index: Any) -> Any:
            ring = (slot,) if name in (*EARLY, "scores") else ()
            index = (*ring, *(x + zero for x in index))
            return self.s[name].at[index] if index else self.s[name]

        return tile

    def chunk(self, worker: Array, i: Array, state: Pair) -> Pair:
        """All gradients of chunk i: dS as it leaves → dS as it enters."""
        state, row, erased = self.recur(worker, i, state)
        value = self.put_row(worker, i, row)
        self.meet("rows_met")
        state, dq, erased, dk = self.sum_values(worker, i, state, erased, value)
        plgpu.commit_smem()

        @pl.when(i + 1 < self.plan.chunks)  # otherwise no one waits
        def _():
            plgpu.barrier_arrive(self.s["middle_consumed"])

        self.meet("scores_met")
        self.sum_tokens(worker, i, dq, erased, dk)
        return state

    def recur(self, worker: Array, i: Array, state: Pair) -> tuple[Pair, Array, Array | None]:
        """Return dS without what is erased, dRᵀ, and the left factor of what is erased."""
        s, plan, unit, tile = self.s, self.plan, self.unit, self.tiles(i)
        plgpu.barrier_wait(s["loaded"].at[lax.rem(i, STAGES)])
        gates = tile("gates")
        half = [x.astype(plan.dtype) for x in state]

        def put_state() -> None:
            @pl.when(i > 0)
            def _():
                plgpu.barrier_wait(s["stored"])

            for j in BOTH:
                tile("dstates", worker, j)[...] = half[j]

        keys = ((half[j], tile("k", j).transpose((1, 0))) for j in BOTH)
        (row,), _ = unit.sums((zeros(*SQUARE), *keys), meanwhile=put_state)
        if plan.decays:
            row *= columns(gates.at[Gates.EXIT])
            left = gates[Gates.ENTRY, CHUNK - 1]
            state = state[0] * left, state[1] * left
        plgpu.barrier_wait(s["middle_loaded"])
        if self.reads:
            do = plgpu.load(tile("columns", 0, worker).transpose((1, 0)), layout=WGMMA)
            plgpu.barrier_wait(s["scored"].at[lax.rem(i, STAGES)])
            left = do
            if plan.decays or plan.scale != 1.0:
                left = do.astype(jnp.float32) * columns(gates.at[Gates.ENTRY]) * plan.scale
                left = left.astype(plan.dtype)
            read = ((state[j], (left, tile("q", j))) for j in BOTH)
            (row, *more), _ = unit.sums((row, (do, tile("scores"))), *read)
            state = more[0], more[1]
        if not plan.erases:
            return state, row, None
        row = unit.product(SQUARE, (row.astype(plan.dtype), tile("inverse")))
        return state, row, (-columns(gates.at[Gates.READ]) * row).astype(plan.dtype)

    def put_row(self, worker: Array, i: Array, row: Array) -> Array:
        """dR takes the place of v, which is returned."""
        tile = self.tiles(i)
        plgpu.barrier_wait(self.s["late_loaded"])
        own = tile("columns", 1, worker)
        value = plgpu.load(own, layout=WGMMA)
        own.transpose((1, 0))[...] = row.astype(self.plan.dtype)
        plgpu.commit_smem()
        return value

    def sum_values(
        self, worker: Array, i: Array, state: Pair, erased: Array | None, value: Array
    ) -> tuple[Pair, Array | None, Array | None, Array]:
        """What sums over V.

        Returns dS as it enters; and, but for what comes by way of P̄ and L̄, which are put into memory: dq, and u and
        w of dk.
        """
        plan, unit, tile = self.plan, self.unit, self.tiles(i)
        gates = tile("gates")
        both = self.reads and plan.erases
        mine = worker if both else int(plan.erases)  # the first worker has P̄, the second L̄

        def over_values(place: Any, y: str) -> Any:
            return (zeros(*SQUARE), *((place(j), tile(y, j, worker)) for j in BOTH))

        def put_write() -> None:
            dr = _loaded(tile("columns", 1, worker))
            self.put(Parts.WRITE, worker, jnp.sum(dr * value.astype(jnp.float32), 1))

        terms = []
        if self.reads or plan.erases:
            square = ((tile("columns", mine, j), tile("rows", j).transpose((1, 0))) for j in BOTH)
            terms.append((zeros(*SQUARE), *square))
        if erased is not None:
            terms += [(state[j], (erased, tile("k", j))) for j in BOTH]
        found, _ = unit.sums(*terms, meanwhile=put_write) if terms else ([], put_write())
        if erased is not None:
            state = found[-2], found[-1]

        def put_squares() -> Array:
            """P̄ and L̄. Returns dc_C of e^{c_C} S."""
            if found and self.reads:

                @pl.when(worker == 0)
                def _():
                    put_scores(tile("scores"), found[0], gates, plan)

            if found and plan.erases:

                @pl.when(worker == 1)
                def _():
                    erasures = -plan.decayed(found[0], gates, diagonal=False)
                    tile("erasures")[...] = erasures.astype(plan.dtype)
                    tile("inverse")[...] = (erasures * rows(gates.at[Gates.ERASE])).astype(plan.dtype)

            along = jnp.sum(zeros(*SQUARE), 1)
            if not plan.decays:
                return along
            for j in BOTH:
                along += jnp.sum(_loaded(tile("states", worker, j)) * _loaded(tile("dstates", worker, j)), 1)
            return along * gates[Gates.ENTRY, CHUNK - 1]

        terms = [over_values(partial(tile, "rows"), "dstates")]
        if plan.erases:
            terms.append(over_values(partial(tile, "columns", 1), "states"))
        (dk, *more), last = unit.sums(*terms, meanwhile=put_squares)
        tile = self.tiles(i)

        def scale_keys() -> tuple[Array | None, Array]:
            w, u = dk, more[0] if more else None
            if plan.decays:
                w *= rows(gates.at[Gates.EXIT])
                self.put(Parts.LAST, worker, last + jnp.sum(_loaded(tile("k", worker)) * w, 1))
            if u is not None:
                u *= -rows(gates.at[Gates.ENTRY])
            return u, w

        if not self.reads:
            return state, None, *scale_keys()
        (dq,), keys = unit.sums(over_values(partial(tile, "columns", 0), "states"), meanwhile=scale_keys)
        if plan.decays:
            dq *= rows(gates.at[Gates.ENTRY])
        if plan.scale != 1.0:
            dq *= plan.scale
        return state, dq, *keys

    def put(self, part: Parts, worker: Array, x: Array) -> None:
        """Put a part of the gates' gradient into memory."""
        self.s["dgates"].at[worker, int(part)][...] = x

    def sum_tokens(self, worker: Array, i: Array, dq: Array | None, u: Array | None, w: Array) -> None:
        """Add what comes by way of P̄ and L̄; put all results into memory."""
        plan, unit, tile = self.plan, self.unit, self.tiles(i)
        gates, own, k = tile("gates"), tile("columns", 1, worker), tile("k", worker)
        to_w, terms = [], []
        if u is not None:
            to_w.append((tile("inverse").transpose((1, 0)), k))
            terms.append((u, (tile("erasures"), k)))
        if dq is not None:
            to_w.append((tile("scores").transpose((1, 0)), tile("q", worker)))
            terms.append((dq, (tile("scores"), k)))

        def put_values() -> None:
            own[...] = (_loaded(own) * rows(gates.at[Gates.WRITE])).astype(plan.dtype)

        if terms:
            (w, *more), _ = unit.sums((w, *to_w), *terms, meanwhile=put_values)
            u, dq = None if u is None else more[0], None if dq is None else more[-1]
        else:
            put_values()
        keys = _loaded(k)
        dk, change = w, -jnp.sum(keys * w, 1)
        if u is not None:
            along = jnp.sum(keys * u, 1)
            self.put(Parts.ERASE, worker, along)
            dk += u * rows(gates.at[Gates.ERASE])
            change += along * plgpu.load(gates.at[Gates.ERASE], layout=WGMMA.reduce(1))
        if dq is not None:
            change += jnp.sum(_loaded(tile("q", worker)) * dq, 1)
            tile("dstates", worker, 0)[...] = dq.astype(plan.dtype)
        tile("dstates", worker, 1)[...] = dk.astype(plan.dtype)
        if plan.decays:
            self.put(Parts.SUM, worker, change)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.s["finished"])


def _loaded(ref: Any) -> Array:
    return plgpu.load(ref, layout=WGMMA).astype(jnp.float32)
