"""How the TPU kernels of the family go through their arrays: blocks by program and chunk, memory that stays."""

import enum
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.rank_one.layout import CHUNK
from pallas_kernels.rank_one.tiles_tpu import Plan
from pallas_kernels.walk_tpu import Kind, Task, run


class GateGradients(enum.IntEnum):
    """Rows of the gradients of gates, [B, HV, N, rows, C] float32."""

    ERASE = 0
    WRITE = 1
    SUM = 2  # of the log-decays summed from the chunk's start


def walk(
    kernel: Callable[..., None],
    plan: Plan,
    name: str,
    inputs: tuple[tuple[str, str], ...],
    outputs: tuple[tuple[str, str, Any], ...],
    arrays: dict[str, Array | None],
    *,
    backward: bool = False,
) -> dict[str, Array]:
    """Run a kernel over the chunks of all heads of all sequences.

    Args:
        kernel: called with the plan, blocks by name, and float32 memory [heads, K, V] that stays from chunk to chunk.
        plan: of the call.
        name: of the kernel.
        inputs: name and kind of each.
        outputs: name, kind and dtype.
        arrays: by name.
        backward: from the last chunk to the first.
    """
    task = Task(
        kernel=partial(kernel, plan),
        name=name,
        grid=(plan.programs, plan.chunks),
        kinds=kinds(plan, backward),
        inputs=inputs,
        outputs=outputs,
        scratch=(pltpu.VMEM((plan.heads, plan.key_dim, plan.value_dim), jnp.float32),),
        memory=plan.memory,
        interpret=plan.interpret,
    )
    return run(task, arrays)


def kinds(plan: Plan, backward: bool) -> dict[str, Kind]:
    """All kinds of arrays of a call."""
    sharing = plan.programs * plan.keys // plan.key_heads  # programs that see the same key heads
    state = (plan.key_dim, plan.value_dim)
    time = plan.chunks * CHUNK

    def chunk(n):
        return plan.chunks - 1 - n if backward else n

    def tokens(heads, mine, width, of=lambda h: h):
        block = pl.BlockSpec((None, CHUNK, mine * width), lambda b, h, n: (b, chunk(n), of(h)))
        return Kind((time, heads * width), block)

    def gates(rows):
        block = pl.BlockSpec((None, plan.heads, None, rows, CHUNK), lambda b, h, n: (b, h, chunk(n), 0, 0))
        return Kind((plan.value_heads, plan.chunks, rows, CHUNK), block)

    carried = pl.BlockSpec((None, plan.heads, *state), lambda b, h, n: (b, h, 0, 0))
    kept = pl.BlockSpec((None, None, plan.heads, *state), lambda b, h, n: (b, chunk(n), h, 0, 0))
    inverse = pl.BlockSpec((None, None, CHUNK, plan.heads * CHUNK), lambda b, h, n: (b, chunk(n), 0, h))
    return {
        "keys": tokens(plan.key_heads, plan.keys, plan.key_dim, lambda h: lax.div(h, sharing)),
        "key_gradients": tokens(plan.programs * plan.keys, plan.keys, plan.key_dim),
        "values": tokens(plan.value_heads, plan.heads, plan.value_dim),
        "gates": gates(plan.gate_rows),
        "gate_gradients": gates(len(GateGradients)),
        "state": Kind((plan.value_heads, *state), carried),
        "states": Kind((plan.chunks, plan.value_heads, *state), kept),
        "inverse": Kind((plan.chunks, CHUNK, plan.value_heads * CHUNK), inverse),
    }
