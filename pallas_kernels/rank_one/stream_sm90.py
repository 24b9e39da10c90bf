"""Mosaic GPU, Hopper: chunks flow through shared memory, in order or in reverse, past warpgroups that carry a state.

Each of a block's first warpgroups ("workers") carries 64 columns of the state. The last one keeps `plan.stages` chunks
loaded, and computes their scores P = scale · Tril(Q Kᵀ ⊙ Γ) ahead of the workers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import APPROXIMATE, UNGUARDED, MatrixUnit, Zero, run_kernel, tiled
from pallas_kernels.rank_one.layout import CHUNK, COLUMNS, Plan

Refs = dict[str, Any]
OF_KEYS = ("q", "k")  # [B, T, H, K]
OF_CHUNKS = ("inverse", "gates")  # [B, HV, N, ...]
OF_COLUMNS = ("v", "do")  # [B, T, HV, V]; each worker takes its 64 columns


def run_stream(
    work: Callable[[Refs, Refs, Refs, Any, Plan], None],
    name: str,
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    scratch: dict[str, Any],
    plan: Plan,
    *,
    reverse: bool = False,
) -> dict[str, Array]:
    """Launch a kernel whose workers run `work(inputs, outputs, scratch, worker, plan)`; returns the outputs by name.

    Args:
        work: must pass through all chunks by `each_chunk`; see `UNGUARDED` for what it may read and write.
        name: of the kernel.
        inputs: arrays by name; None is left out. Besides those that the loader takes there may be
            `skip` [B, HV] int32, of how many chunks a sequence leaves out before its first.
        outputs: `jax.ShapeDtypeStruct` by name.
        scratch: the workers' own shared memory.
        plan: sizes and features of this call.
        reverse: from the last chunk to the first.
    """
    inputs = {key: x for key, x in inputs.items() if x is not None}
    scratch = _stage_scratch(inputs, plan) | scratch
    batch, _, heads, _ = inputs["k"].shape

    def run(given: Refs, made: Refs, s: Refs) -> None:
        wg = lax.axis_index("wg")

        @pl.when(wg == plan.warpgroups)
        def _():
            plgpu.set_max_registers(plan.registers[1], action="decrease")
            _load_and_score(given, s, plan, plan.value_heads // heads, reverse)

        @pl.when(wg < plan.warpgroups)
        def _():
            plgpu.set_max_registers(plan.registers[0], action="increase")
            if "zero" in s:
                Zero(s["zero"].at[wg])
            work(given, made, s, wg, plan)

    grid = {"j": plan.value_dim // (COLUMNS * plan.warpgroups), "h": plan.value_heads, "b": batch}
    return launch(name, run, inputs, outputs, scratch, plan, grid, plan.warpgroups + 1, UNGUARDED)


def launch(
    name: str,
    run: Callable[[Refs, Refs, Refs], None],
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    scratch: dict[str, Any],
    plan: Plan,
    grid: dict[str, int],
    warpgroups: int,
    parameters: plgpu.CompilerParams = APPROXIMATE,
) -> dict[str, Array]:
    """Launch a kernel whose warpgroups "wg" run `run(inputs, outputs, scratch)`; all by name, as are the outputs."""

    def body(*refs):
        given = dict(zip(inputs, refs, strict=False))
        made = dict(zip(outputs, refs[len(inputs) :], strict=True))
        pl.run_scoped(partial(run, given, made), scratch, collective_axes="wg")

    results = run_kernel(
        body,
        *inputs.values(),
        name=name,
        out_type=tuple(outputs.values()),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name="wg",
        interpret=plan.interpret,
        compiler_params=parameters,
    )
    return dict(zip(outputs, results, strict=True))


def residual_buffers(k: Any, plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """Outputs and scratch of what the backward pass needs of a chunk: the state that enters it, and its rows."""
    batch, time = k.shape[:2]
    states = (batch, plan.value_heads, plan.chunks, plan.value_dim, plan.key_dim)
    outputs = {
        "states": jax.ShapeDtypeStruct(states, plan.dtype),
        "rows": jax.ShapeDtypeStruct((batch, time, plan.value_heads, plan.value_dim), plan.dtype),
    }
    rows = tiled(plan.warpgroups, CHUNK, COLUMNS, dtype=plan.dtype)
    return outputs, state_buffer(plan) | {"rows": rows}


def state_buffer(plan: Plan) -> dict[str, Any]:
    """Scratch for the workers' columns of the state in 16 bits: what leaves, and the left factor of wide states."""
    buffers: dict[str, Any] = {"states": tiled(plan.warpgroups, COLUMNS, plan.key_dim, dtype=plan.dtype)}
    return buffers | ({"zero": plgpu.SMEM((plan.warpgroups, 128), jnp.int32)} if plan.wide else {})


def left_factor(state: Array, s: Refs, worker: Any, plan: Plan) -> Any:
    """The state as a left factor: in registers, or, where it is so wide that not both fit there, in shared memory."""
    half = state.astype(plan.dtype)
    if "states" not in s:
        return half
    if not plan.wide:
        s["states"].at[worker][...] = half
        return half
    buffer = s["states"].at[worker + s["zero"][worker, 0]]
    buffer[...] = half
    plgpu.commit_smem()
    return buffer


def each_chunk(
    chunk: Callable[[Array, Refs, Array], Array],
    state: Array,
    given: Refs,
    s: Refs,
    plan: Plan,
    *,
    reverse: bool = False,
) -> Array:
    """Carry `state` through chunk(number, the chunk's buffers, state) for all chunks; for workers."""
    count, number = _passage(given, plan, reverse)

    def step(i: Array, state: Array) -> Array:
        slot = lax.rem(i, plan.stages)
        plgpu.barrier_wait(s["loaded"].at[slot])
        buffers = {
            key: s[key].at[slot]
            for key in (*OF_KEYS, *OF_CHUNKS, *OF_COLUMNS, "scores", "scored")
            if key in s
        }
        state = chunk(number(i), buffers, state)

        @pl.when(i + plan.stages < count)  # otherwise no one waits
        def _():
            plgpu.barrier_arrive(s["consumed"].at[slot])

        return state

    return lax.fori_loop(0, count, step, state)


def _passage(given: Refs, plan: Plan, reverse: bool) -> tuple[Any, Callable[[Array], Array]]:
    """How many chunks this block passes, and the number of the i-th."""
    skip = given["skip"][lax.axis_index("b"), lax.axis_index("h")] if "skip" in given else 0
    count = plan.chunks - skip
    return count, lambda i: count - 1 - i if reverse else skip + i


def worker_columns(worker: Array | int, plan: Plan) -> Any:
    """The slice of V that a worker has."""
    return pl.ds((lax.axis_index("j") * plan.warpgroups + worker) * COLUMNS, COLUMNS)


def put_scores(place: Any, products: Array, gates: Any, plan: Plan) -> None:
    """Put scale · Tril(products ⊙ Γ) into shared memory: P, from Q Kᵀ, or its gradient P̄."""
    scores = plan.decayed(products, gates, diagonal=True)
    if plan.scale != 1.0:
        scores *= plan.scale
    place[...] = scores.astype(plan.dtype)


def matrix_unit(s: Refs, wg: Any) -> MatrixUnit:
    """The products of one warpgroup."""
    staging = s.get("staging")
    return MatrixUnit(staging and {size: buffer.at[wg] for size, buffer in staging.items()})


def _stage_scratch(inputs: dict[str, Any], plan: Plan) -> dict[str, Any]:
    stages, workers, width = plan.stages, plan.warpgroups, plan.key_dim
    loads = sum(name in inputs for name in (*OF_KEYS, *OF_CHUNKS))
    loads += workers * sum(name in inputs for name in OF_COLUMNS)
    scratch: dict[str, Any] = {
        name: tiled(stages, CHUNK, width, dtype=plan.dtype) for name in OF_KEYS if name in inputs
    }
    scratch |= {
        name: tiled(stages, workers, CHUNK, COLUMNS, dtype=plan.dtype)
        for name in OF_COLUMNS
        if name in inputs
    }
    scratch["gates"] = plgpu.SMEM((stages, plan.gate_rows, CHUNK), jnp.float32)
    scratch["loaded"] = plgpu.Barrier(num_arrivals=loads, num_barriers=stages)
    scratch["consumed"] = plgpu.Barrier(num_arrivals=workers, num_barriers=stages)
    if "inverse" in inputs:
        scratch["inverse"] = tiled(stages, CHUNK, CHUNK, dtype=plan.dtype)
    if "q" in inputs:
        scratch["scores"] = tiled(stages, CHUNK, CHUNK, dtype=plan.dtype)
        scratch["scored"] = plgpu.Barrier(num_barriers=stages)
    if plan.interpret:
        scratch["staging"] = {
            size: tiled(workers + 1, COLUMNS, size, dtype=plan.dtype) for size in {CHUNK, width}
        }
    return scratch


def _load_and_score(given: Refs, s: Refs, plan: Plan, group: int, reverse: bool) -> None:
    b, h = lax.axis_index("b"), lax.axis_index("h")
    unit = matrix_unit(s, plan.warpgroups)
    count, number = _passage(given, plan, reverse)

    def load(i: Array) -> None:
        slot = lax.rem(i, plan.stages)
        chunk = number(i)
        ready, tokens = s["loaded"].at[slot], pl.ds(chunk * CHUNK, CHUNK)
        for name, source in given.items():
            if name in OF_KEYS:
                plgpu.copy_gmem_to_smem(source.at[b, tokens, h // group], s[name].at[slot], ready)
            elif name in OF_CHUNKS:
                plgpu.copy_gmem_to_smem(source.at[b, h, chunk], s[name].at[slot], ready)
            elif name in OF_COLUMNS:
                for worker in range(plan.warpgroups):
                    part = source.at[b, tokens, h, worker_columns(worker, plan)]
                    plgpu.copy_gmem_to_smem(part, s[name].at[slot, worker], ready)

    def score(i: Array) -> None:
        slot = lax.rem(i, plan.stages)
        plgpu.barrier_wait(s["loaded"].at[slot])
        factors = s["q"].at[slot], s["k"].at[slot].transpose((1, 0))
        put_scores(s["scores"].at[slot], unit.product((CHUNK, CHUNK), factors), s["gates"].at[slot], plan)
        plgpu.commit_smem()
        plgpu.barrier_arrive(s["scored"].at[slot])

    for i in range(min(plan.stages, plan.chunks)):
        pl.when(i < count)(lambda i=i: load(jnp.int32(i)))

    @pl.loop(0, count)
    def _(i):
        if "q" in given:
            score(i)

        @pl.when((i > 0) & (i - 1 + plan.stages < count))
        def _():
            plgpu.barrier_wait(s["consumed"].at[lax.rem(i - 1, plan.stages)])
            load(i - 1 + plan.stages)
