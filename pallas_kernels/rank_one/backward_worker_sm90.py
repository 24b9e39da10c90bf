"""Mosaic GPU, Hopper: a warpgroup of the kernel in `backward_sm90` that computes.

There are two. Each carries 64 of the 128 columns of dS, and has 64 of the 128 columns of dq and dk.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import WGMMA, columns, load_transposed, rows, store_transposed, zeros
from pallas_kernels.rank_one.backward_block_sm90 import BOTH, SQUARE, STAGES, Pair, Parts, Warpgroup
from pallas_kernels.rank_one.layout import CHUNK, COLUMNS, Gates, Plan
from pallas_kernels.rank_one.stream_sm90 import Refs, put_scores


class Worker(Warpgroup):
    """The warpgroup number `worker`, 0 or 1."""

    def __init__(self, plan: Plan, given: Refs, made: Refs, s: Refs, worker: Array) -> None:
        super().__init__(plan, given, made, s, worker)
        self.worker = worker

    def run(self) -> None:
        """Carry 64 columns of dS through the chunks."""
        mine = pl.ds(self.worker * COLUMNS, COLUMNS)

        def place(array: str, half: int) -> Any:
            refs = self.given | self.made
            return refs[array].at[self.b, self.h, pl.ds(half * COLUMNS, COLUMNS), mine]

        state = tuple(load_transposed(place("final_state", j)) for j in BOTH)
        state = lax.fori_loop(0, self.plan.chunks, self.chunk, state)
        for j in BOTH:
            store_transposed(place("initial_state", j), state[j])

    def meet(self, name: str) -> None:
        """Wait for the other worker."""
        plgpu.barrier_arrive(self.s[name])
        plgpu.barrier_wait(self.s[name])

    def chunk(self, i: Array, state: Pair) -> Pair:
        """All gradients of chunk i: dS as it leaves → dS as it enters."""
        state, row, erased = self.recur(i, state)
        value = self.put_row(i, row)
        self.meet("rows_met")
        state, dq, erased, dk = self.sum_values(i, state, erased, value)
        plgpu.commit_smem()

        @pl.when(i + 1 < self.plan.chunks)  # otherwise no one waits
        def _():
            plgpu.barrier_arrive(self.s["middle_consumed"])

        self.meet("scores_met")
        self.sum_tokens(i, dq, erased, dk)
        return state

    def recur(self, i: Array, state: Pair) -> tuple[Pair, Array, Array | None]:
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
                tile("dstates", self.worker, j)[...] = half[j]

        keys = ((half[j], tile("k", j).transpose((1, 0))) for j in BOTH)
        (row,), _ = unit.sums((zeros(*SQUARE), *keys), meanwhile=put_state)
        if plan.decays:
            row *= columns(gates.at[Gates.EXIT])
            left = gates[Gates.ENTRY, CHUNK - 1]
            state = state[0] * left, state[1] * left
        plgpu.barrier_wait(s["middle_loaded"])
        if self.reads:
            do = plgpu.load(tile("columns", 0, self.worker).transpose((1, 0)), layout=WGMMA)
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

    def put_row(self, i: Array, row: Array) -> Array:
        """dR takes the place of v, which is returned."""
        tile = self.tiles(i)
        plgpu.barrier_wait(self.s["late_loaded"])
        own = tile("columns", 1, self.worker)
        value = plgpu.load(own, layout=WGMMA)
        own.transpose((1, 0))[...] = row.astype(self.plan.dtype)
        plgpu.commit_smem()
        return value

    def sum_values(
        self, i: Array, state: Pair, erased: Array | None, value: Array
    ) -> tuple[Pair, Array | None, Array | None, Array]:
        """What sums over V.

        Returns dS as it enters; and, but for what comes by way of P̄ and L̄, which are put into memory: dq, and u and
        w of dk.
        """
        plan, unit, tile = self.plan, self.unit, self.tiles(i)
        gates = tile("gates")
        both = self.reads and plan.erases
        mine = self.worker if both else int(plan.erases)  # the first worker has P̄, the second L̄

        def over_values(place: Any, y: str) -> Any:
            return (zeros(*SQUARE), *((place(j), tile(y, j, self.worker)) for j in BOTH))

        def put_write() -> None:
            dr = _loaded(tile("columns", 1, self.worker))
            self.put(Parts.WRITE, jnp.sum(dr * value.astype(jnp.float32), 1))

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

                @pl.when(self.worker == 0)
                def _():
                    put_scores(tile("scores"), found[0], gates, plan)

            if found and plan.erases:

                @pl.when(self.worker == 1)
                def _():
                    erasures = -plan.decayed(found[0], gates, diagonal=False)
                    tile("erasures")[...] = erasures.astype(plan.dtype)
                    tile("inverse")[...] = (erasures * rows(gates.at[Gates.ERASE])).astype(plan.dtype)

            along = jnp.sum(zeros(*SQUARE), 1)
            if not plan.decays:
                return along
            for j in BOTH:
                along += jnp.sum(
                    _loaded(tile("states", self.worker, j)) * _loaded(tile("dstates", self.worker, j)), 1
                )
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
                self.put(Parts.LAST, last + jnp.sum(_loaded(tile("k", self.worker)) * w, 1))
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

    def put(self, part: Parts, x: Array) -> None:
        """Put a part of the gates' gradient into memory."""
        self.s["dgates"].at[self.worker, int(part)][...] = x

    def sum_tokens(self, i: Array, dq: Array | None, u: Array | None, w: Array) -> None:
        """Add what comes by way of P̄ and L̄; put all results into memory."""
        plan, unit, tile = self.plan, self.unit, self.tiles(i)
        gates, own, k = tile("gates"), tile("columns", 1, self.worker), tile("k", self.worker)
        to_w, terms = [], []
        if u is not None:
            to_w.append((tile("inverse").transpose((1, 0)), k))
            terms.append((u, (tile("erasures"), k)))
        if dq is not None:
            to_w.append((tile("scores").transpose((1, 0)), tile("q", self.worker)))
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
            self.put(Parts.ERASE, along)
            dk += u * rows(gates.at[Gates.ERASE])
            change += along * plgpu.load(gates.at[Gates.ERASE], layout=WGMMA.reduce(1))
        if dq is not None:
            change += jnp.sum(_loaded(tile("q", self.worker)) * dq, 1)
            tile("dstates", self.worker, 0)[...] = dq.astype(plan.dtype)
        tile("dstates", self.worker, 1)[...] = dk.astype(plan.dtype)
        if plan.decays:
            self.put(Parts.SUM, change)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.s["finished"])


def _loaded(ref: Any) -> Array:
    return plgpu.load(ref, layout=WGMMA).astype(jnp.float32)
