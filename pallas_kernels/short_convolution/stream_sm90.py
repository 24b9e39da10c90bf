"""Mosaic GPU, Hopper: what both kernels load, and how an output comes from its taps."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.channels_sm90 import Refs, in_turn
from pallas_kernels.short_convolution.layout import CHUNK, Plan

PADDED = 4  # times a number stands side by side, as copies are of 128 bytes at least


def stage_scratch(inputs: dict[str, Array], plan: Plan, *, gradient: bool = False) -> Refs:
    """Buffers for chunks of x, behind the tokens before them, of dy and of past, and for a chunk of results."""
    dtype, staged = inputs["x"].dtype, {}
    staged["x"] = (plan.window + CHUNK, plan.channels), dtype
    if gradient:
        staged["dy"] = (CHUNK, plan.channels), dtype
    if "past" in inputs:
        staged["past"] = (CHUNK, PADDED), jnp.int32
    scratch: Refs = {name: plgpu.SMEM((plan.stages, *shape), of) for name, (shape, of) in staged.items()}
    scratch["results"] = plgpu.SMEM((2, CHUNK, plan.channels), dtype)
    return scratch | {"loaded": plgpu.Barrier(num_arrivals=len(staged) + 1, num_barriers=plan.stages)}


def of_part(arrays: list[Any], use: Callable[[Any, Any], None], plan: Plan) -> None:
    """use(array, channels in it) for that of the arrays, which together have all channels, that has the block's."""
    d, start = lax.axis_index("d"), 0
    for array in arrays:
        end = start + array.shape[-1] // plan.channels
        mine = pl.ds((d - start) * plan.channels, plan.channels)
        pl.when((d >= start) & (d < end))(partial(use, array, mine))
        start = end


def each_chunk(
    chunk: Callable[[Refs, Any, Any], Any],
    state: Any,
    given: Refs,
    results: list[Any],
    s: Refs,
    plan: Plan,
    *,
    reverse: bool = False,
) -> Any:
    """Carry `state` through chunk(buffers, results of a chunk, state), and copy the results out."""
    segment, mine = lax.axis_index("b"), pl.ds(lax.axis_index("d") * plan.channels, plan.channels)
    b, start = lax.div(segment, plan.segments), lax.rem(segment, plan.segments) * plan.chunks * CHUNK
    dys = [given[f"dy{i}"] for i in range(len(plan.parts))] if "dy" in s else []

    def load(n: Array, slot: Array) -> None:
        def copy(part: Any, buffer: Any) -> None:
            plgpu.copy_gmem_to_smem(part, buffer, s["loaded"].at[slot])

        first, x = start + n * CHUNK, s["x"].at[slot]
        tokens, before = pl.ds(first, CHUNK), x.at[pl.ds(0, plan.window)]
        copy(given["x"].at[b, tokens, mine], x.at[pl.ds(plan.window, CHUNK)])
        pl.when(n == 0)(lambda: copy(given["before"].at[segment, :, mine], before))
        earlier = pl.ds(first - plan.window, plan.window)
        pl.when(n > 0)(lambda: copy(given["x"].at[b, earlier, mine], before))
        of_part(dys, lambda dy, mine: copy(dy.at[b, tokens, mine], s["dy"].at[slot]), plan)
        if "past" in s:
            copy(given["past"].at[b, tokens], s["past"].at[slot])

    def step(n: Array, slot: Array, state: Any) -> Any:
        made = s["results"].at[lax.rem(n, 2)]
        buffers = {name: s[name].at[slot] for name in ("x", "dy", "past") if name in s}
        state = chunk(buffers, made, state)
        plgpu.commit_smem()
        tokens = pl.ds(start + n * CHUNK, CHUNK)
        of_part(results, lambda y, mine: plgpu.copy_smem_to_gmem(made, y.at[b, tokens, mine]), plan)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        return state

    state = in_turn(step, load, state, s["loaded"], plan, reverse=reverse)
    plgpu.wait_smem_to_gmem(0)
    return state


def parameters(given: Refs, plan: Plan) -> list[Array]:
    """The weights of a block's channels, from the oldest tap to the token itself, and the bias."""
    mine = pl.ds(lax.axis_index("d") * plan.channels, plan.channels)
    return [plan.load(given["parameters"].at[i, mine]) for i in range(plan.taps + 1)]


def seen(taps: list[Array], buffers: Refs, t: Any) -> list[Array]:
    """The taps of token t, of which those that it does not see are 0."""
    if "past" not in buffers:
        return taps
    past, last = buffers["past"][t, 0], len(taps) - 1
    zero = jnp.zeros_like(taps[0])
    return [jnp.where(past >= last - i, tap, zero) for i, tap in enumerate(taps[:-1])] + taps[-1:]


def preactivation(taps: list[Array], parameters: list[Array]) -> Array:
    """The bias and the weighted sum of the taps."""
    *weights, total = parameters
    for weight, tap in zip(weights, taps, strict=True):
        total += weight * tap
    return total


def sigmoid(p: Array) -> Array:
    """1 / (1 + e^-p), by the machine's own reciprocal root: a division takes ten instructions."""
    root = lax.rsqrt(1 + jnp.exp2(p * -math.log2(math.e)))
    return root * root
