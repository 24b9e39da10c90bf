"""How the TPU kernels of the family go through their arrays: blocks by program and chunk, memory that stays."""

import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.rank_one.layout import CHUNK
from pallas_kernels.rank_one.tiles_tpu import Plan


class GateGradients(enum.IntEnum):
    """Rows of the gradients of gates, [B, HV, N, rows, C] float32."""

    ERASE = 0
    WRITE = 1
    SUM = 2  # of the log-decays summed from the chunk's start


class Blocks:
    """Which block of each kind of array a program sees at a step; `backward` walks the chunks from the last."""

    def __init__(self, plan: Plan, *, backward: bool = False):
        sharing = plan.programs * plan.keys // plan.key_heads  # programs that see the same key heads
        state = (plan.heads, plan.key_dim, plan.value_dim)

        def chunk(n):
            return plan.chunks - 1 - n if backward else n

        def tokens(width, of=lambda h: h):
            return pl.BlockSpec((None, CHUNK, width), lambda b, h, n: (b, chunk(n), of(h)))

        def gates(rows):
            return pl.BlockSpec((None, plan.heads, None, rows, CHUNK), lambda b, h, n: (b, h, chunk(n), 0, 0))

        self.keys = tokens(plan.keys * plan.key_dim, lambda h: lax.div(h, sharing))
        self.key_gradients = tokens(plan.keys * plan.key_dim)
        self.values = tokens(plan.heads * plan.value_dim)
        self.gates, self.gate_gradients = gates(plan.gate_rows), gates(len(GateGradients))
        self.state = pl.BlockSpec((None, *state), lambda b, h, n: (b, h, 0, 0))
        self.states = pl.BlockSpec((None, None, *state), lambda b, h, n: (b, chunk(n), h, 0, 0))
        self.inverse = pl.BlockSpec(
            (None, None, CHUNK, plan.heads * CHUNK), lambda b, h, n: (b, chunk(n), 0, h)
        )


def walk(
    kernel: Callable[..., None], plan: Plan, name: str, inputs: dict[str, Any], outputs: dict[str, Any]
) -> dict[str, Array]:
    """Run a kernel over the chunks of all heads of all sequences.

    Args:
        kernel: called with the plan, the blocks by name, and float32 memory [heads, K, V] that chunks pass on.
        plan: of the call.
        name: of the kernel.
        inputs: by name, the block specification and the array.
        outputs: by name, the block specification, the shape and the dtype.

    Returns:
        The outputs by name.
    """

    def body(*refs):
        kernel(plan, dict(zip([*inputs, *outputs], refs, strict=False)), refs[-1])

    @jax.custom_batching.custom_vmap
    def run(*arrays):
        batch = arrays[0].shape[0]
        results = pl.pallas_call(
            body,
            grid=(batch, plan.programs, plan.chunks),
            in_specs=[spec for spec, _ in inputs.values()],
            out_specs=[spec for spec, _, _ in outputs.values()],
            out_shape=[jax.ShapeDtypeStruct((batch, *shape[1:]), d) for _, shape, d in outputs.values()],
            scratch_shapes=[pltpu.VMEM((plan.heads, plan.key_dim, plan.value_dim), jnp.float32)],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=plan.memory
            ),
            interpret=plan.interpret,
            name=name,
        )(*arrays)
        return tuple(results)

    @run.def_vmap
    def _(size, batched, *arrays):
        """More sequences."""
        whole = [
            x if b else jnp.broadcast_to(x, (size, *x.shape)) for x, b in zip(arrays, batched, strict=True)
        ]
        found = run(*(x.reshape(-1, *x.shape[2:]) for x in whole))
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in found), (True,) * len(found)

    return dict(zip(outputs, run(*(array for _, array in inputs.values())), strict=True))
