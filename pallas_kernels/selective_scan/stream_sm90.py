"""Mosaic GPU, Hopper: chunks of tokens flow through shared memory, in order or in reverse, past one warpgroup."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.selective_scan.layout import CHUNK, Plan

# Threads write and read for themselves from token to token; where they do not, the kernels say `commit_smem`.
PARAMETERS = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
)
Refs = dict[str, Any]
OF_CHANNELS = ("x", "dt", "dy")  # [B, T, D]
OF_ENTRIES = ("b", "c")  # [B, T, N]
OF_TOKENS = ("cut",)  # [B, T, 4]
PADDED = 4  # times a number stands side by side, as copies are of 128 bytes at least
STREAMED = (*OF_CHANNELS, *OF_ENTRIES, *OF_TOKENS, "states")  # the last are [B, chunks, D, N]


def launch(
    work: Callable[[Refs, Refs, Refs, Plan], None],
    name: str,
    inputs: dict[str, Array],
    outputs: dict[str, Any],
    scratch: dict[str, Any],
    plan: Plan,
) -> dict[str, Array]:
    """Run `work(inputs, outputs, scratch, plan)` for every block of channels of every sequence; outputs by name."""
    batch, _, width = inputs["x"].shape

    def body(*refs):
        given = dict(zip(inputs, refs, strict=False))
        made = dict(zip(outputs, refs[len(inputs) :], strict=True))
        pl.run_scoped(lambda s: work(given, made, s, plan), scratch)

    results = plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        grid=(width // plan.channels, batch),
        grid_names=("d", "b"),
        interpret=plan.interpret,
        compiler_params=PARAMETERS,
        kernel_name=name,
    )(*inputs.values())
    return dict(zip(outputs, results, strict=True))


def stage_scratch(inputs: dict[str, Any], plan: Plan) -> Refs:
    """Buffers for chunks of those inputs that are streamed, and the barriers that announce them."""
    shapes = dict.fromkeys(OF_CHANNELS, (CHUNK, plan.channels))
    shapes |= dict.fromkeys(OF_ENTRIES, (CHUNK, plan.state_dim)) | dict.fromkeys(OF_TOKENS, (CHUNK, PADDED))
    shapes |= {"states": (plan.channels, plan.state_dim)}
    streamed = [name for name in STREAMED if name in inputs]
    scratch = {name: plgpu.SMEM((plan.stages, *shapes[name]), inputs[name].dtype) for name in streamed}
    loaded = plgpu.Barrier(num_arrivals=len(streamed), num_barriers=plan.stages)
    return scratch | {"loaded": loaded}


def each_chunk(
    chunk: Callable[[Array, Refs, Any], Any],
    state: Any,
    given: Refs,
    s: Refs,
    plan: Plan,
    *,
    reverse: bool = False,
) -> Any:
    """Carry `state` through chunk(number, the chunk's buffers, state) for all chunks.

    `chunk` must end its reading by `commit_smem`, after which its buffers are loaded again.
    """
    b, mine = lax.axis_index("b"), pl.ds(lax.axis_index("d") * plan.channels, plan.channels)
    streamed = [name for name in STREAMED if name in s]

    def number(i: Any) -> Any:
        return plan.chunks - 1 - i if reverse else i

    def load(i: Any) -> None:
        slot, n = lax.rem(i, plan.stages), number(i)
        tokens = pl.ds(n * CHUNK, CHUNK)
        for name in streamed:
            if name == "states":
                part = given[name].at[b, n, mine]
            else:
                part = given[name].at[(b, tokens, mine) if name in OF_CHANNELS else (b, tokens)]
            plgpu.copy_gmem_to_smem(part, s[name].at[slot], s["loaded"].at[slot])

    def step(i: Array, state: Any) -> Any:
        slot = lax.rem(i, plan.stages)
        plgpu.barrier_wait(s["loaded"].at[slot])
        state = chunk(number(i), {name: s[name].at[slot] for name in streamed}, state)
        pl.when(i + plan.stages < plan.chunks)(lambda: load(i + plan.stages))
        return state

    for i in range(min(plan.stages, plan.chunks)):
        load(jnp.int32(i))
    return lax.fori_loop(0, plan.chunks, step, state)
