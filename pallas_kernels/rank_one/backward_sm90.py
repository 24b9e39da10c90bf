"""Mosaic GPU, Hopper: the whole backward pass of a head in one kernel, from the last chunk to the first.

It computes what `backward_states_sm90` and `backward_chunks_sm90` do, where the formulas stand, for keys and values of
128 entries, without the arrays that go from one to the other: the gradients of the states and of the rows stay on the
multiprocessor. A multiprocessor has one head at a time, so heads must be many.

The gradient of the decay sums c follows from the others. In every product that has a decay, q stands with e^c, the key
that reads with a e^c, and the key that writes with e^{−c}; so that with dk = a u + w, the parts of the two,

    dc = rowsum(q ⊙ dq) + a rowsum(k ⊙ u) − rowsum(k ⊙ w),   da = rowsum(k ⊙ u),

and the last c of a chunk has, besides, the product of the state that leaves it with that state's gradient. These sums
nearly cancel where decay has left nothing to pass on, and leave there what 16 bits lose: some 0.3 % of other dc.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.rank_one.backward_block_sm90 import REGISTERS, WORKERS, Parts, scratch_buffers
from pallas_kernels.rank_one.backward_chunks_sm90 import InputGradients, gradient_shapes
from pallas_kernels.rank_one.backward_loader_sm90 import Loader
from pallas_kernels.rank_one.backward_worker_sm90 import Worker
from pallas_kernels.rank_one.gates_sm90 import Rows
from pallas_kernels.rank_one.layout import CHUNK, Plan
from pallas_kernels.rank_one.stream_sm90 import Refs, launch


def gate_rows() -> Rows:
    """What stands where in the gradient of the gates: every part once for each worker."""
    parts = {part: tuple(range(part, WORKERS * len(Parts), len(Parts))) for part in Parts}
    return Rows(parts[Parts.ERASE], parts[Parts.WRITE], parts[Parts.SUM], (), parts[Parts.LAST])


def backward(
    q: Array | None,
    k: Array,
    v: Array,
    do: Array | None,
    forward_rows: Array,
    states: Array,
    inverse: Array | None,
    gates: Array,
    final_state: Array,
    plan: Plan,
) -> tuple[InputGradients, Array]:
    """Return the gradients of the inputs, and that of the initial state, dS [B, HV, K, V] float32.

    Args:
        q: [B, T, H, K] 16-bit; None, with do, if nothing was read out.
        k: like q.
        v: [B, T, HV, V] 16-bit.
        do: like v.
        forward_rows: D, like v.
        states: Sᵀ as it entered each chunk [B, HV, N, V, K] 16-bit.
        inverse: T of every chunk [B, HV, N, C, C] 16-bit; None if nothing is erased.
        gates: [B, HV, N, rows, C] float32; see `layout.Gates`.
        final_state: gradient of the final state, dS [B, HV, K, V] float32.
        plan: sizes and features of this call.
    """
    inputs = {"q": q, "k": k, "inverse": inverse, "gates": gates, "do": do, "rows": forward_rows, "v": v}
    inputs |= {"states": states, "final_state": final_state}
    inputs = {name: x for name, x in inputs.items() if x is not None}
    outputs = gradient_shapes(q, k, v, plan)
    outputs["dgates"] = jax.ShapeDtypeStruct((*gates.shape[:3], WORKERS, len(Parts), CHUNK), jnp.float32)
    outputs["initial_state"] = jax.ShapeDtypeStruct(final_state.shape, jnp.float32)

    def run(given: Refs, made: Refs, s: Refs) -> None:
        wg = lax.axis_index("wg")

        @pl.when(wg == WORKERS)
        def _():
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            Loader(plan, given, made, s, WORKERS).run()

        @pl.when(wg < WORKERS)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            Worker(plan, given, made, s, wg).run()

    grid = {"h": plan.value_heads, "b": k.shape[0]}
    scratch = scratch_buffers(inputs, plan)
    made = launch("rank_one_backward", run, inputs, outputs, scratch, plan, grid, WORKERS + 1)
    dgates = made["dgates"].reshape(*gates.shape[:3], -1, CHUNK)
    return InputGradients(made.get("dq"), made["dk"], made["dv"], dgates), made["initial_state"]
