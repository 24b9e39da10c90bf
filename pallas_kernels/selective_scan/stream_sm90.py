"""Mosaic GPU, Hopper: chunks of tokens flow through shared memory, in order or in reverse, past one warpgroup."""

from collections.abc import Callable
from typing import Any

from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.channels_sm90 import Refs, in_turn
from pallas_kernels.selective_scan.layout import CHUNK, Plan

OF_CHANNELS = ("x", "dt", "dy")  # [B, T, D]
OF_ENTRIES = ("b", "c")  # [B, T, N]
OF_TOKENS = ("cut",)  # [B, T, 4]
PADDED = 4  # times a number stands side by side, as copies are of 128 bytes at least
STREAMED = (*OF_CHANNELS, *OF_ENTRIES, *OF_TOKENS, "states")  # the last are [B, chunks, D, N]


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

    def load(n: Array, slot: Array) -> None:
        tokens = pl.ds(n * CHUNK, CHUNK)
        for name in streamed:
            if name == "states":
                part = given[name].at[b, n, mine]
            else:
                part = given[name].at[(b, tokens, mine) if name in OF_CHANNELS else (b, tokens)]
            plgpu.copy_gmem_to_smem(part, s[name].at[slot], s["loaded"].at[slot])

    def step(n: Array, slot: Array, state: Any) -> Any:
        return chunk(n, {name: s[name].at[slot] for name in streamed}, state)

    return in_turn(step, load, state, s["loaded"], plan, reverse=reverse)
