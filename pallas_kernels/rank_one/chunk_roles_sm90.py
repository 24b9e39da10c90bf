"""Mosaic GPU, Hopper: what the three warpgroups of the kernel in `backward_chunks_sm90` do."""

import enum
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import WGMMA, MatrixUnit, Zero, rows, tiled, zeros
from pallas_kernels.rank_one.layout import CHUNK, COLUMNS, Gates, Plan
from pallas_kernels.rank_one.stream_sm90 import Refs, matrix_unit

SQUARE = (CHUNK, CHUNK)
QUERIES, KEYS, LOADER = range(3)  # the warpgroups
TOKENS = ("do", "rows", "drows", "v")  # [B, T, HV, V]
STATES = ("states", "dstates")  # [B, HV, N, V, K]


class Parts(enum.IntEnum):
    """Rows of the gates' gradient [B, HV, N, rows, C], float32."""

    ERASE = 0  # da
    WRITE = 1  # dw
    SUM_KEYS = 2  # dc_i: what the keys' warpgroup has of it by row
    SUM_QUERIES = 3  # and the queries'
    MINUS_KEYS = 4  # −dc_j: by column
    MINUS_QUERIES = 5
    EXIT = 6  # −dc_j, and dc_C, of e^{c_C − c_j}
    TOTAL = 7  # dc_C of e^{c_C}, in parts that only their sum matters


def scratch_buffers(inputs: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The shared memory and barriers of a block, by name; `inputs` are those of the kernel."""
    width, stages = plan.key_dim, _stages(plan)
    scratch: dict[str, Any] = {
        name: tiled(1, CHUNK, width, dtype=plan.dtype) for name in ("q", "k") if name in inputs
    }
    scratch |= {name: tiled(stages, CHUNK, COLUMNS, dtype=plan.dtype) for name in TOKENS if name in inputs}
    scratch |= {name: tiled(stages, COLUMNS, width, dtype=plan.dtype) for name in STATES}
    scratch |= {
        "zero": plgpu.SMEM((2, 128), jnp.int32),
        "gates": plgpu.SMEM((2, plan.gate_rows, CHUNK), jnp.float32),
        "gates_loaded": plgpu.Barrier(num_arrivals=1, num_barriers=2),
        "loaded": plgpu.Barrier(
            num_arrivals=sum(n in inputs for n in (*TOKENS, *STATES)), num_barriers=stages
        ),
        "consumed": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "keys_loaded": plgpu.Barrier(num_arrivals=1 + ("q" in inputs)),
        "keys_consumed": plgpu.Barrier(num_arrivals=2),
        "scores": tiled(1, *SQUARE, dtype=plan.dtype),  # P̄
        "scored": plgpu.Barrier(),
        "erasures": tiled(1, *SQUARE, dtype=plan.dtype),  # a L̄
        "dv": tiled(1, CHUNK, COLUMNS, dtype=plan.dtype),
        "dgates": plgpu.SMEM((1, len(Parts), CHUNK), jnp.float32),
    }
    if plan.wide:
        # There is no room: dq and dk take the places of the states when both warpgroups are through them.
        scratch["drained"] = plgpu.Barrier(num_arrivals=2)
    else:
        scratch["dk"] = tiled(1, CHUNK, width, dtype=plan.dtype)
        if "q" in inputs:
            scratch["dq"] = tiled(1, CHUNK, width, dtype=plan.dtype)
    if plan.interpret:
        scratch["staging"] = {CHUNK: tiled(2, *SQUARE, dtype=plan.dtype)}
    return scratch


def _stages(plan: Plan) -> int:
    """Slices of 64 columns in flight."""
    return 1 if plan.wide else 2


class Chunks:
    """The three warpgroups' code; chunk number i of this block is `place(i)`."""

    def __init__(self, plan: Plan, given: Refs, made: Refs, total: int, blocks: int, group: int) -> None:
        self.plan, self.given, self.made, self.group = plan, given, made, group
        self.blocks, self.slices, self.stages = blocks, plan.value_dim // COLUMNS, _stages(plan)
        self.first = lax.axis_index("block")
        self.count = pl.cdiv(total - self.first, blocks)

    def run(self, s: Refs) -> None:
        """Do the part of the warpgroup that calls this; `s` is from `scratch_buffers`."""
        self.s = s
        wg = lax.axis_index("wg")

        @pl.when(wg == LOADER)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            pl.loop(0, self.count)(self.load)

        for role, work in ((QUERIES, self.queries), (KEYS, self.keys)):

            @pl.when(wg == role)
            def _(role=role, work=work):
                plgpu.set_max_registers(232, action="increase")
                zero = Zero(s["zero"].at[role])
                pl.loop(0, self.count)(lambda i: work(i, zero.get(), matrix_unit(s, role)))
                plgpu.wait_smem_to_gmem(0)

    def buffers(self, zero: Array) -> Refs:
        """The shared memory, without the first axis where that has one copy only."""
        single = ("q", "k", "scores", "erasures", "dq", "dk", "dv", "dgates")
        buffers = {name: x.at[zero] if name in single else x for name, x in self.s.items()}
        if self.plan.wide:
            buffers |= {"dq": self.s["states"].at[zero], "dk": self.s["dstates"].at[zero]}
        return buffers

    def slot(self, i: Array, j: int, zero: Array) -> Array:
        """Where slice j of chunk i is."""
        return lax.rem(i * self.slices + j, self.stages) + zero

    def place(self, i: Array) -> tuple[Array, Array, Array]:
        """Batch, head and chunk."""
        item, heads, chunks = self.first + i * self.blocks, self.plan.value_heads, self.plan.chunks
        return item // (heads * chunks), item // chunks % heads, item % chunks

    def load(self, i: Array) -> None:
        """Start the copies of all that chunk i needs, each as soon as its place is free."""
        s, given = self.buffers(jnp.int32(0)), self.given
        b, h, n = self.place(i)
        tokens, parity = pl.ds(n * CHUNK, CHUNK), lax.rem(i, 2)
        plgpu.copy_gmem_to_smem(
            given["gates"].at[b, h, n], s["gates"].at[parity], s["gates_loaded"].at[parity]
        )

        def load_keys() -> None:
            @pl.when(i > 0)
            def _():
                plgpu.barrier_wait(s["keys_consumed"])

            for name in ("q", "k"):
                if name in given:
                    plgpu.copy_gmem_to_smem(
                        given[name].at[b, tokens, h // self.group], s[name], s["keys_loaded"]
                    )

        if self.plan.wide:  # whose warpgroup of keys needs them for every slice
            load_keys()
        for j in range(self.slices):
            turn, slot, columns = (
                i * self.slices + j,
                self.slot(i, j, jnp.int32(0)),
                pl.ds(j * COLUMNS, COLUMNS),
            )

            @pl.when(turn >= self.stages)
            def _(slot=slot):
                plgpu.barrier_wait(s["consumed"].at[slot])

            for name in (*TOKENS, *STATES):
                if name in given:
                    place = (b, tokens, h, columns) if name in TOKENS else (b, h, n, columns)
                    plgpu.copy_gmem_to_smem(given[name].at[place], s[name].at[slot], s["loaded"].at[slot])

        if not self.plan.wide:
            load_keys()

    def each_slice(self, i: Array, zero: Array, use: Any, *sums: Array) -> tuple[Array, ...]:
        """Carry sums through use(buffers, slice number, sums) for the slices of 64 columns."""
        s, total = self.s, self.count * self.slices

        def step(j: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            slot = self.slot(i, j, s["zero"][lax.axis_index("wg"), 0] if self.plan.wide else zero)
            plgpu.barrier_wait(s["loaded"].at[slot])
            names = (*TOKENS, *STATES, *(("k",) if self.plan.wide else ()))
            sums = use({name: s[name].at[slot] for name in names if name in s}, j, *sums)

            awaited = i * self.slices + j + self.stages < total
            if self.plan.wide:  # and `finish` tells of the last slice
                awaited &= j < self.slices - 1

            @pl.when(awaited)
            def _():
                plgpu.barrier_arrive(s["consumed"].at[slot])

            return sums

        if not self.plan.wide:
            for j in range(self.slices):
                sums = step(j, sums)
            return sums
        sums = lax.fori_loop(0, self.slices, step, sums)
        plgpu.barrier_arrive(s["drained"])
        plgpu.barrier_wait(s["drained"])
        return sums

    def start(self, i: Array) -> Any:
        """Wait for the gates of chunk i, and for this warpgroup's last results to be on their way."""
        parity = lax.rem(i, 2)
        plgpu.barrier_wait(self.s["gates_loaded"].at[parity])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        return self.s["gates"].at[parity]

    def finish(self, i: Array) -> None:
        """Tell the loader that this warpgroup is through with chunk i."""
        if self.plan.wide:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(i + 1 < self.count)  # otherwise no one waits
        def _():
            if self.plan.wide:
                plgpu.barrier_arrive(self.s["consumed"].at[0])
            plgpu.barrier_arrive(self.s["keys_consumed"])

    def put(self, i: Array, rows: Any, **parts: Array) -> None:
        """Write rows of the gates' gradient."""
        for name, x in parts.items():
            rows.at[Parts[name]][...] = x
        plgpu.commit_smem()
        for name in parts:
            target = self.made["dgates"].at[(*self.place(i), int(Parts[name]))]
            plgpu.copy_smem_to_gmem(rows.at[Parts[name]], target)

    def queries(self, i: Array, zero: Array, unit: MatrixUnit) -> None:
        """dq, dv, dw, and what P and the entering state have of dc."""
        s, plan, gates = self.buffers(zero), self.plan, self.start(i)
        b, h, n = self.place(i)
        tokens = pl.ds(n * CHUNK, CHUNK)

        def use(x: Refs, j: int, scores: Array, dq: Array, dw: Array, total: Array) -> tuple[Array, ...]:
            dr, v = (plgpu.load(x[name], layout=WGMMA).astype(jnp.float32) for name in ("drows", "v"))
            if plan.decays:
                for part in range(0, plan.key_dim, CHUNK):
                    size = pl.ds(part, CHUNK)
                    state, dstate = (
                        plgpu.load(x[name].at[:, size], layout=WGMMA).astype(jnp.float32) for name in STATES
                    )
                    total += jnp.sum(state * dstate, 1)
            if plan.wide or j:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            s["dv"][...] = (dr * rows(gates.at[Gates.WRITE])).astype(plan.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(s["dv"], self.made["dv"].at[b, tokens, h, pl.ds(j * COLUMNS, COLUMNS)])
            dw += jnp.sum(dr * v, 1)
            if "do" in x:
                scores = unit.add(scores, (x["do"], x["rows"].transpose((1, 0))))
                dq = unit.add(dq, (x["do"], x["states"]))
            return scores, dq, dw, total

        vector = jnp.sum(zeros(*SQUARE), 1)
        sums = (zeros(*SQUARE), zeros(CHUNK, plan.key_dim), vector, vector)
        scores, dq, dw, total = self.each_slice(i, zero, use, *sums)
        plgpu.barrier_wait(s["keys_loaded"])
        parts = {"WRITE": dw}
        if "do" in self.given:
            scores = plan.decayed(scores, gates, diagonal=True)
            if plan.scale != 1.0:
                scores *= plan.scale
            s["scores"][...] = scores.astype(plan.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(s["scored"])
            if plan.scale != 1.0:
                dq *= plan.scale
            if plan.decays:
                dq *= rows(gates.at[Gates.ENTRY], plan.key_dim)
                change = scores * unit.product(SQUARE, (s["q"], s["k"].transpose((1, 0))))
                parts["SUM_QUERIES"] = jnp.sum(change, 1) + _row_products(s["q"], dq)
                parts["MINUS_QUERIES"] = jnp.sum(change, 0)
            dq = unit.add(dq, (s["scores"], s["k"]))
            s["dq"][...] = dq.astype(plan.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(s["dq"], self.made["dq"].at[b, tokens, h])
        if plan.decays:
            parts["TOTAL"] = total * gates[Gates.ENTRY, CHUNK - 1]
        self.put(i, s["dgates"], **parts)
        self.finish(i)

    def keys(self, i: Array, zero: Array, unit: MatrixUnit) -> None:
        """dk, da, and what L and the leaving state have of dc."""
        s, plan, gates = self.buffers(zero), self.plan, self.start(i)
        b, h, n = self.place(i)
        sums = self.wide_key_sums if plan.wide else self.key_sums
        erasures, overlap, leaving, dk = sums(i, zero, unit, gates)
        parts = {"EXIT": leaving} if plan.decays else {}
        if plan.erases:
            erase, read, entry = (
                plgpu.load(gates.at[name], layout=WGMMA.reduce(1))
                for name in (Gates.ERASE, Gates.READ, Gates.ENTRY)
            )
            erasures = -plan.decayed(erasures, gates, diagonal=False)
            gram = unit.product(SQUARE, (s["k"], s["k"].transpose((1, 0))))
            parts["ERASE"] = jnp.sum(erasures * gram, 1) - entry * overlap
            half = (erasures * lax.broadcast_in_dim(erase, SQUARE, [0])).astype(plan.dtype)
            s["erasures"][...] = half
            plgpu.commit_smem()
            if plan.decays:
                # Sums along columns cross warps, through memory that all warpgroups share: only the queries' may do
                # it. The matrix of k kᵀ is its own transpose, so that the sums along rows of the transpose serve.
                transposed = plgpu.load(s["erasures"].transpose((1, 0)), layout=WGMMA)
                parts["SUM_KEYS"] = jnp.sum(half.astype(jnp.float32) * gram, 1) - read * overlap
                parts["MINUS_KEYS"] = jnp.sum(transposed.astype(jnp.float32) * gram, 1)
            dk = unit.add(dk, (s["erasures"], s["k"]))
            dk = unit.add(dk, (s["erasures"].transpose((1, 0)), s["k"]))
        if "do" in self.given:
            plgpu.barrier_wait(s["scored"])
            dk = unit.add(dk, (s["scores"].transpose((1, 0)), s["q"]))
        s["dk"][...] = dk.astype(plan.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s["dk"], self.made["dk"].at[b, pl.ds(n * CHUNK, CHUNK), h])
        if parts:
            self.put(i, s["dgates"], **parts)
        self.finish(i)

    def key_sums(self, i: Array, zero: Array, unit: MatrixUnit, gates: Any) -> tuple[Array, ...]:
        """Sums over V: dR Dᵀ, rowsum(k ⊙ dR Sᵀ), the part of dc of what leaves, the part of dk by way of the states."""
        s, plan = self.buffers(zero), self.plan

        def use(x: Refs, j: int, erasures: Array, entering: Array, dk: Array) -> tuple[Array, ...]:
            dk = unit.add(dk, (x["rows"], x["dstates"]))
            if plan.erases:
                erasures = unit.add(erasures, (x["drows"], x["rows"].transpose((1, 0))))
                entering = unit.add(entering, (x["drows"], x["states"]))
            return erasures, entering, dk

        wide = zeros(CHUNK, plan.key_dim)
        erasures, entering, dk = self.each_slice(i, zero, use, zeros(*SQUARE), wide, wide)
        plgpu.barrier_wait(s["keys_loaded"])
        overlap = leaving = jnp.sum(zeros(*SQUARE), 1)
        if plan.decays:
            dk *= rows(gates.at[Gates.EXIT], plan.key_dim)
            leaving = _row_products(s["k"], dk)
        if plan.erases:
            overlap = _row_products(s["k"], entering)
            dk -= entering * rows(gates.at[Gates.READ], plan.key_dim)
        return erasures, overlap, leaving, dk

    def wide_key_sums(self, i: Array, zero: Array, unit: MatrixUnit, gates: Any) -> tuple[Array, ...]:
        """The same where registers hold one matrix as wide as the keys: factors of rows go into the products."""
        s, plan = self.buffers(zero), self.plan

        def passed(k: Any, row: Any, state: Any, gate: Gates, sign: float = 1.0) -> tuple[Array, Array]:
            """rowsum(row ⊙ k Sᵀ), and the rows times their gate as a left factor."""
            row = plgpu.load(row, layout=WGMMA).astype(jnp.float32)
            along = jnp.sum(row * unit.product(SQUARE, (k, state.transpose((1, 0)))), 1)
            return along, (row * (sign * rows(gates.at[gate]))).astype(plan.dtype)

        def use(
            x: Refs, j: int, erasures: Array, overlap: Array, leaving: Array, dk: Array
        ) -> tuple[Array, ...]:
            left = x["rows"]
            if plan.decays:
                along, left = passed(x["k"], left, x["dstates"], Gates.EXIT)
                leaving += along
            dk = unit.add(dk, (left, x["dstates"]))
            if plan.erases:
                erasures = unit.add(erasures, (x["drows"], x["rows"].transpose((1, 0))))
                along, left = passed(x["k"], x["drows"], x["states"], Gates.READ, -1.0)
                overlap += along
                dk = unit.add(dk, (left, x["states"]))
            return erasures, overlap, leaving, dk

        plgpu.barrier_wait(s["keys_loaded"])
        vector = jnp.sum(zeros(*SQUARE), 1)
        sums = zeros(*SQUARE), vector, vector, zeros(CHUNK, plan.key_dim)
        erasures, overlap, leaving, dk = self.each_slice(i, zero, use, *sums)
        if plan.decays:
            leaving *= plgpu.load(gates.at[Gates.EXIT], layout=WGMMA.reduce(1))
        return erasures, overlap, leaving, dk


def _row_products(ref: Any, x: Array) -> Array:
    """The dot product of each row of `ref` with that of x."""
    total = jnp.sum(zeros(*SQUARE), 1)
    for start in range(0, x.shape[1], CHUNK):
        part = plgpu.load(ref.at[:, pl.ds(start, CHUNK)], layout=WGMMA).astype(jnp.float32)
        total += jnp.sum(part * x[:, start : start + CHUNK], 1)
    return total
