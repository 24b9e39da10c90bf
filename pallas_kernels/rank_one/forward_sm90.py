"""Mosaic GPU, Hopper: the recurrence over chunks, outputs and states.

With S the state that enters a chunk, T the chunk's inverse and P = scale · Tril(Q Kᵀ ⊙ Γ),

    D = T (w ⊙ V − a e^c ⊙ K S),   O = scale · e^c ⊙ Q S + P D,   S ← e^{c_C} S + (e^{c_C − c} ⊙ K)ᵀ D.

All of it is done transposed: a warpgroup holds 64 columns of S as the 64 rows of Sᵀ in registers. Then every product
has its left factor in registers, where the last product left it, and its right factor in shared memory as it was
loaded.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import WGMMA, columns, index, load_transposed, store_transposed, tiled, zeros
from pallas_kernels.rank_one.layout import CHUNK, COLUMNS, Gates, Plan
from pallas_kernels.rank_one.stream_sm90 import (
    Refs,
    each_chunk,
    left_factor,
    matrix_unit,
    residual_buffers,
    run_stream,
    state_buffer,
    worker_columns,
)

SQUARE = (COLUMNS, CHUNK)


class Results(NamedTuple):
    """What `forward` returns; None where it was not asked for."""

    o: Array | None  # [B, T, HV, V] 16-bit
    final_state: Array  # [B, HV, K, V] float32
    states: Array | None  # Sᵀ as it enters each chunk [B, HV, N, V, K] 16-bit
    rows: Array | None  # D [B, T, HV, V] 16-bit


def forward(
    q: Array | None,
    k: Array,
    v: Array | None,
    inverse: Array | None,
    gates: Array,
    initial_state: Array | None,
    plan: Plan,
    *,
    residuals: bool = False,
    skip: Array | None = None,
) -> Results:
    """Run the recurrence; `residuals` adds `states` and `rows`, which the backward kernels need.

    Args:
        q: [B, T, H, K] 16-bit, T a multiple of the chunk size; None reads nothing out.
        k: like q.
        v: [B, T, HV, V] 16-bit; None writes nothing, so that the initial state only passes through the edits.
        inverse: T of every chunk [B, HV, N, C, C] 16-bit (see `solve_sm90`); None if nothing is erased.
        gates: [B, HV, N, rows, C] float32; see `layout.Gates`.
        initial_state: [B, HV, K, V] float32; None is zeros, or, if nothing is written, the identity.
        plan: sizes and features of this call.
        residuals: see above.
        skip: [B, HV] int32, how many chunks to leave out before the first; not where outputs are asked for. The
            identity through no chunk at all is returned as 0: so faint is what it stands for.
    """
    shape_v = (*k.shape[:2], plan.value_heads, plan.value_dim)
    shape_s = (k.shape[0], plan.value_heads, plan.key_dim, plan.value_dim)
    outputs = {"final_state": jax.ShapeDtypeStruct(shape_s, jnp.float32)}
    scratch: dict[str, Any] = {}
    if q is not None:
        outputs["o"] = jax.ShapeDtypeStruct(shape_v, plan.dtype)
        if not plan.wide:  # otherwise it takes the place of v
            scratch["o"] = tiled(plan.warpgroups, CHUNK, COLUMNS, dtype=plan.dtype)
    if residuals:
        more, buffers = residual_buffers(k, plan)
        outputs, scratch = outputs | more, scratch | buffers
    elif plan.wide:
        scratch |= state_buffer(plan)
    inputs = {"q": q, "k": k, "v": v, "inverse": inverse, "gates": gates, "initial_state": initial_state}
    inputs["skip"] = skip

    made = run_stream(_recur, "rank_one_forward", inputs, outputs, scratch, plan)
    return Results(made.get("o"), made["final_state"], made.get("states"), made.get("rows"))


def _recur(given: Refs, made: Refs, s: Refs, worker: Array, plan: Plan) -> None:
    b, h, mine = lax.axis_index("b"), lax.axis_index("h"), worker_columns(worker, plan)
    unit = matrix_unit(s, worker)

    def chunk(i: Array, c: Refs, state: Array) -> Array:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        half = left_factor(state, s, worker, plan)
        row = zeros(*SQUARE)
        if "v" in given:
            v = plgpu.load(c["v"].at[worker].transpose((1, 0)), layout=WGMMA)
            row = v.astype(jnp.float32) * columns(c["gates"].at[Gates.WRITE])
        if plan.erases:
            row -= columns(c["gates"].at[Gates.READ]) * unit.product(SQUARE, (half, c["k"].transpose((1, 0))))
            row = unit.product(SQUARE, (row.astype(plan.dtype), c["inverse"].transpose((1, 0))))
        row16, leaving = row.astype(plan.dtype), {}
        if "o" in made:
            o = unit.product(SQUARE, (half, c["q"].transpose((1, 0))))
            if plan.decays:
                o *= columns(c["gates"].at[Gates.ENTRY])
            if plan.scale != 1.0:
                o *= plan.scale
            plgpu.barrier_wait(c["scored"])
            o = unit.add(o, (row16, c["scores"].transpose((1, 0))))
            leaving["o"] = s["o"].at[worker] if "o" in s else c["v"].at[worker]
            if "o" not in s:
                plgpu.commit_smem()  # every thread has read v
            leaving["o"].transpose((1, 0))[...] = o.astype(plan.dtype)
        if "rows" in made:
            leaving["rows"] = s["rows"].at[worker]
            leaving["rows"].transpose((1, 0))[...] = row16
        plgpu.commit_smem()
        for name, buffer in leaving.items():
            plgpu.copy_smem_to_gmem(buffer, made[name].at[b, pl.ds(i * CHUNK, CHUNK), h, mine])
        if "states" in made:
            plgpu.copy_smem_to_gmem(s["states"].at[worker], made["states"].at[b, h, i, mine])
        if plan.decays:
            state *= c["gates"][Gates.ENTRY, CHUNK - 1]
            row16 = (row * columns(c["gates"].at[Gates.EXIT])).astype(plan.dtype)
        state = unit.add(state, (row16, c["k"]))
        if plan.wide:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # before v's place is loaded anew
        return state

    state = zeros(COLUMNS, plan.key_dim)
    if "initial_state" in given:
        state = load_transposed(given["initial_state"].at[b, h, :, mine])
    elif "v" not in given:
        shape = COLUMNS, plan.key_dim
        passed = given["skip"][b, h] < plan.chunks
        state += jnp.where(index(1, shape) == index(0, shape) + mine.start, passed.astype(jnp.float32), 0.0)
    store_transposed(made["final_state"].at[b, h, :, mine], each_chunk(chunk, state, given, s, plan))
    plgpu.wait_smem_to_gmem(0)
