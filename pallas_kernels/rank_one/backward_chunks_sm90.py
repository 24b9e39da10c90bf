"""Mosaic GPU, Hopper: the gradients of the inputs, every chunk for itself.

A chunk is given the state S that entered it, the gradient dS of the state that left it, its rows D and dR (see
`forward_sm90`, `backward_states_sm90`). Two warpgroups share the work: one has what belongs to the queries and values,
one what belongs to the keys. A third loads. What sums over V is added up from slices of 64 columns as they arrive; q
and k are needed after that.

    P̄ = scale · Tril((dO Dᵀ) ⊙ Γ)         dq = scale · e^c ⊙ (dO Sᵀ) + P̄ k
    L̄ = −StrictTril((dR Dᵀ) ⊙ Γ)           dk = e^{c_C − c} ⊙ (D dSᵀ) − a e^c ⊙ (dR Sᵀ) + P̄ᵀ q + (a L̄ + (a L̄)ᵀ) k
    dv = w ⊙ dR,   dw = rowsum(dR ⊙ V),     da = rowsum(L̄ ⊙ k kᵀ) − e^c ⊙ rowsum(k ⊙ dR Sᵀ)

The gradients of the gates are left in parts (`Parts`), which `gates_sm90` puts together.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.rank_one.chunk_roles_sm90 import Chunks, Parts, scratch_buffers
from pallas_kernels.rank_one.gates_sm90 import Rows
from pallas_kernels.rank_one.layout import CHUNK, MULTIPROCESSORS, Plan
from pallas_kernels.rank_one.stream_sm90 import Refs, launch


class InputGradients(NamedTuple):
    """What `backward_chunks` returns."""

    q: Array | None  # [B, T, HV, K] 16-bit: for each value head
    k: Array  # [B, T, HV, K] 16-bit: for each value head
    v: Array  # [B, T, HV, V] 16-bit
    gates: Array  # [B, HV, N, rows, C] float32


def backward_chunks(
    q: Array | None,
    k: Array,
    v: Array,
    do: Array | None,
    forward_rows: Array,
    row_gradients: Array,
    states: Array,
    state_gradients: Array,
    gates: Array,
    plan: Plan,
) -> InputGradients:
    """Return the gradients of q, k, v and, of the gates.

    Args:
        q: [B, T, H, K] 16-bit; None, with do, if nothing was read out.
        k: like q.
        v: [B, T, HV, V] 16-bit.
        do: like v.
        forward_rows: D, like v.
        row_gradients: dR, like v.
        states: Sᵀ [B, HV, N, V, K] 16-bit.
        state_gradients: dSᵀ, like states.
        gates: [B, HV, N, rows, C] float32; see `layout.Gates`.
        plan: sizes and features of this call.
    """
    inputs = {"q": q, "k": k, "gates": gates, "do": do, "rows": forward_rows, "drows": row_gradients, "v": v}
    inputs |= {"states": states, "dstates": state_gradients}
    inputs = {name: x for name, x in inputs.items() if x is not None}
    outputs = gradient_shapes(q, k, v, plan)
    outputs["dgates"] = jax.ShapeDtypeStruct((*gates.shape[:3], len(Parts), CHUNK), jnp.float32)
    total = k.shape[0] * plan.value_heads * plan.chunks
    blocks = min(MULTIPROCESSORS, total)

    def run(given: Refs, made: Refs, s: Refs) -> None:
        Chunks(plan, given, made, total, blocks, plan.value_heads // k.shape[2]).run(s)

    scratch = scratch_buffers(inputs, plan)
    made = launch("rank_one_backward_chunks", run, inputs, outputs, scratch, plan, {"block": blocks}, 3)
    return InputGradients(made.get("dq"), made["dk"], made["dv"], made["dgates"])


def gradient_shapes(q: Array | None, k: Array, v: Array, plan: Plan) -> dict[str, Any]:
    """What kernels return for the inputs, by name."""
    batch, time, _, width = k.shape
    keys = jax.ShapeDtypeStruct((batch, time, plan.value_heads, width), plan.dtype)
    shapes = {"dk": keys, "dv": jax.ShapeDtypeStruct(v.shape, plan.dtype)}
    return shapes if q is None else shapes | {"dq": keys}


def gate_rows(plan: Plan) -> Rows:
    """What stands where in the gradient of the gates; parts that this plan does not have were not written."""
    ways = ["KEYS"] * plan.erases + ["QUERIES"] * plan.reads
    return Rows(
        (Parts.ERASE,),
        (Parts.WRITE,),
        tuple(Parts[f"SUM_{way}"] for way in ways),
        (Parts.EXIT, *(Parts[f"MINUS_{way}"] for way in ways)),
        (Parts.EXIT, Parts.TOTAL),
    )
