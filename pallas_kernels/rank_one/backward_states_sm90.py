"""Mosaic GPU, Hopper: the gradient of the state, from the last chunk to the first.

With dS the gradient of the state that leaves a chunk, and dD of its rows,

    dD = Pᵀ dO + e^{c_C − c} ⊙ K dS,   dR = Tᵀ dD,
    dS ← e^{c_C} dS + (scale · e^c ⊙ Q)ᵀ dO − (a e^c ⊙ K)ᵀ dR,

where dR is the gradient of w ⊙ V − a e^c ⊙ K S, from which the rows were solved. Transposed like the forward kernel.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import WGMMA, columns, load_transposed, store_transposed, zeros
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


class StateGradients(NamedTuple):
    """What `backward_states` returns."""

    initial_state: Array  # dS [B, HV, K, V] float32
    states: Array | None  # dSᵀ as it enters each chunk from behind [B, HV, N, V, K] 16-bit
    rows: Array | None  # dR [B, T, HV, V] 16-bit


def backward_states(
    q: Array | None,
    k: Array,
    do: Array | None,
    inverse: Array | None,
    gates: Array,
    final_state: Array | None,
    plan: Plan,
    *,
    residuals: bool = True,
    skip: Array | None = None,
) -> StateGradients:
    """Run the recurrence of the state's gradient; `residuals` adds `states` and `rows`.

    Args:
        q: [B, T, H, K] 16-bit, T a multiple of the chunk size; None, with do, if nothing was read out.
        k: like q.
        do: gradient of the outputs [B, T, HV, V] 16-bit.
        inverse: T of every chunk [B, HV, N, C, C] 16-bit; None if nothing is erased.
        gates: [B, HV, N, rows, C] float32; see `layout.Gates`.
        final_state: gradient of the final state, dS [B, HV, K, V] float32; None is 0.
        plan: sizes and features of this call.
        residuals: see above.
        skip: [B, HV] int32, how many chunks to leave out after the last; not with residuals.
    """
    shape = (k.shape[0], plan.value_heads, plan.key_dim, plan.value_dim)
    outputs = {"initial_state": jax.ShapeDtypeStruct(shape, jnp.float32)}
    scratch: dict[str, Any] = {}
    if residuals:
        more, scratch = residual_buffers(k, plan)
        outputs |= more
    elif plan.wide:
        scratch = state_buffer(plan)
    inputs = {"q": q, "k": k, "do": do, "inverse": inverse, "gates": gates, "final_state": final_state}
    inputs["skip"] = skip

    made = run_stream(_recur, "rank_one_backward_states", inputs, outputs, scratch, plan, reverse=True)
    return StateGradients(made["initial_state"], made.get("states"), made.get("rows"))


def _recur(given: Refs, made: Refs, s: Refs, worker: Array, plan: Plan) -> None:
    b, h, mine = lax.axis_index("b"), lax.axis_index("h"), worker_columns(worker, plan)
    unit = matrix_unit(s, worker)

    def chunk(i: Array, c: Refs, state: Array) -> Array:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        half = left_factor(state, s, worker, plan)
        row = unit.product(SQUARE, (half, c["k"].transpose((1, 0))))
        if plan.decays:
            row *= columns(c["gates"].at[Gates.EXIT])
            state *= c["gates"][Gates.ENTRY, CHUNK - 1]
        if "do" in given:
            do = plgpu.load(c["do"].at[worker].transpose((1, 0)), layout=WGMMA)
            plgpu.barrier_wait(c["scored"])
            row = unit.add(row, (do, c["scores"]))
            if plan.decays or plan.scale != 1.0:
                do = (do.astype(jnp.float32) * columns(c["gates"].at[Gates.ENTRY]) * plan.scale).astype(
                    plan.dtype
                )
            state = unit.add(state, (do, c["q"]))
        if plan.erases:
            row = unit.product(SQUARE, (row.astype(plan.dtype), c["inverse"]))
            erased = (-columns(c["gates"].at[Gates.READ]) * row).astype(plan.dtype)
            state = unit.add(state, (erased, c["k"]))
        if "rows" in made:
            s["rows"].at[worker].transpose((1, 0))[...] = row.astype(plan.dtype)
            plgpu.commit_smem()
            tokens = pl.ds(i * CHUNK, CHUNK)
            plgpu.copy_smem_to_gmem(s["states"].at[worker], made["states"].at[b, h, i, mine])
            plgpu.copy_smem_to_gmem(s["rows"].at[worker], made["rows"].at[b, tokens, h, mine])
        return state

    state = zeros(COLUMNS, plan.key_dim)
    if "final_state" in given:
        state = load_transposed(given["final_state"].at[b, h, :, mine])
    state = each_chunk(chunk, state, given, s, plan, reverse=True)
    store_transposed(made["initial_state"].at[b, h, :, mine], state)
    plgpu.wait_smem_to_gmem(0)
