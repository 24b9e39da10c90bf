"""Mosaic GPU, Hopper: kernels whose blocks, of one warpgroup each, take some channels of a sequence past its tokens."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import run_kernel

# Threads write and read for themselves from token to token; where they do not, the kernels say `commit_smem`.
PARAMETERS = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
)
Refs = dict[str, Any]


def launch(
    work: Callable[[Refs, Refs, Refs, Any], None],
    name: str,
    inputs: dict[str, Array],
    outputs: dict[str, Any],
    scratch: dict[str, Any],
    plan: Any,
    segments: int = 1,
) -> dict[str, Array]:
    """Run `work(inputs, outputs, scratch, plan)` for every block of channels of every sequence; outputs by name.

    The input x [B, T, D] says how many there are, with `plan.channels` in a block. With `segments`, there are so many
    blocks for each sequence, side by side on the axis "b".
    """
    batch, _, width = inputs["x"].shape

    def body(*refs):
        given = dict(zip(inputs, refs, strict=False))
        made = dict(zip(outputs, refs[len(inputs) :], strict=True))
        pl.run_scoped(lambda s: work(given, made, s, plan), scratch)

    results = run_kernel(
        body,
        *inputs.values(),
        name=name,
        out_type=tuple(outputs.values()),
        grid=(width // plan.channels, batch * segments),
        grid_names=("d", "b"),
        interpret=plan.interpret,
        compiler_params=PARAMETERS,
    )
    return dict(zip(outputs, results, strict=True))


def in_turn(
    chunk: Callable[[Array, Array, Any], Any],
    load: Callable[[Array, Array], None],
    state: Any,
    loaded: Any,
    plan: Any,
    *,
    reverse: bool = False,
) -> Any:
    """Carry `state` through chunk(number, slot, state) for all chunks, each loaded in time into a slot of a ring.

    Args:
        chunk: must end its reading by `commit_smem`, after which its slot is loaded again.
        load: load(number, slot) starts copies, which arrive at `loaded.at[slot]`.
        state: before the first chunk.
        loaded: barriers, one a slot.
        plan: has `chunks`, and `stages` for the number of slots.
        reverse: from the last chunk to the first.
    """

    def number(i: Any) -> Any:
        return plan.chunks - 1 - i if reverse else i

    def step(i: Array, state: Any) -> Any:
        slot = lax.rem(i, plan.stages)
        plgpu.barrier_wait(loaded.at[slot])
        state = chunk(number(i), slot, state)
        pl.when(i + plan.stages < plan.chunks)(lambda: load(number(i + plan.stages), slot))
        return state

    for i in range(min(plan.stages, plan.chunks)):
        load(number(jnp.int32(i)), jnp.int32(i))
    return lax.fori_loop(0, plan.chunks, step, state)
