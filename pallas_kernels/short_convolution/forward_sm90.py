"""Mosaic GPU, Hopper: y_t = silu(Σ_s kernel[-1 - s] x_{t-s} + bias), token after token, with the taps in registers."""

from typing import Any

import jax
from jax import Array, lax

from pallas_kernels.channels_sm90 import Refs, launch
from pallas_kernels.short_convolution.layout import CHUNK, Plan
from pallas_kernels.short_convolution.stream_sm90 import (
    each_chunk,
    parameters,
    preactivation,
    seen,
    sigmoid,
    stage_scratch,
)


def forward(x: Array, before: Array, parameters: Array, past: Array | None, plan: Plan) -> list[Array]:
    """Convolve: y [B, T, D] in x's dtype, in the parts that the plan says.

    Args:
        x: [B, T, D], cut as the plan says.
        before: the inputs before each segment [B · segments, W, D], in x's dtype.
        parameters: the W + 1 taps, the last for the token itself, and the bias [W + 2, D] float32.
        past: how many tokens before it each token sees, four times [B, T, 4] int32; None: W.
        plan: sizes of this call.
    """
    inputs = {"x": x, "before": before, "parameters": parameters, "past": past}
    inputs = {name: value for name, value in inputs.items() if value is not None}
    outputs = {
        f"y{i}": jax.ShapeDtypeStruct((*x.shape[:2], part), x.dtype) for i, part in enumerate(plan.parts)
    }
    scratch = stage_scratch(inputs, plan)
    made = launch(_convolve, "short_convolution_forward", inputs, outputs, scratch, plan, plan.segments)
    return [*made.values()]


def _convolve(given: Refs, made: Refs, s: Refs, plan: Plan) -> None:
    weights = parameters(given, plan)

    def chunk(buffers: Refs, y: Any, state: tuple[()]) -> tuple[()]:
        x = buffers["x"]

        def tokens(turn: Array, taps: list[Array]) -> list[Array]:
            first = turn * plan.unroll
            taps = [*taps, *(plan.load(x.at[first + plan.window + i]) for i in range(plan.unroll))]
            for i in range(plan.unroll):
                inputs = seen(taps[i : i + plan.taps], buffers, first + i)
                p = preactivation(inputs, weights)
                y.at[first + i][...] = (p * sigmoid(p)).astype(y.dtype)
            return taps[plan.unroll :]

        lax.fori_loop(0, CHUNK // plan.unroll, tokens, [plan.load(x.at[i]) for i in range(plan.window)])
        return state

    each_chunk(chunk, (), given, [*made.values()], s, plan)
