"""Mosaic GPU, Hopper: the gradients of the convolution, from the last token to the first.

With p the sum before SiLU, recomputed from x, and s = sigmoid(p):

    dp_t = dy_t · (s + p s (1 - s)),   dx_t = Σ_s kernel[-1 - s] dp_{t+s},
    dkernel[-1 - s] = Σ_t dp_t x_{t-s},   dbias = Σ_t dp_t.

A token passes on what it adds to dx of the tokens before it, so that dx is complete when its token is reached.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

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


class Gradients(NamedTuple):
    """What `backward` returns."""

    x: Array  # [B, T, D] in x's dtype
    parameters: Array  # [B · segments, W + 2, D] float32, of each segment


def backward(
    x: Array, before: Array, parameters: Array, past: Array | None, dy: list[Array], after: Array, plan: Plan
) -> Gradients:
    """Return the gradients of x and the parameters.

    Args:
        x, before, parameters, past: as for `forward`.
        dy: gradient of y, in the parts that the plan says.
        after: what tokens after a segment add to the gradient of its last W of x [B · segments, W, D] float32.
        plan: sizes of this call.
    """
    inputs = {"x": x, "before": before, "parameters": parameters, "past": past, "after": after}
    inputs |= {f"dy{i}": part for i, part in enumerate(dy)}
    inputs = {name: value for name, value in inputs.items() if value is not None}
    outputs = {"dx": jax.ShapeDtypeStruct(x.shape, x.dtype)}
    outputs["sums"] = jax.ShapeDtypeStruct((before.shape[0], *parameters.shape), jnp.float32)
    scratch = stage_scratch(inputs, plan, gradient=True)
    made = launch(_convolve_back, "short_convolution_backward", inputs, outputs, scratch, plan, plan.segments)
    return Gradients(made["dx"], made["sums"])


def _convolve_back(given: Refs, made: Refs, s: Refs, plan: Plan) -> None:
    b, mine = lax.axis_index("b"), pl.ds(lax.axis_index("d") * plan.channels, plan.channels)
    weights = parameters(given, plan)

    def chunk(buffers: Refs, dx: Any, state: tuple[list[Array], list[Array]]) -> Any:
        x = buffers["x"]

        def tokens(turn: Array, carried: Any) -> Any:
            taps, passed, sums = carried
            first = CHUNK - (turn + 1) * plan.unroll
            taps = [*(plan.load(x.at[first + i]) for i in range(plan.unroll)), *taps]
            dys = [plan.load(buffers["dy"].at[first + i]) for i in range(plan.unroll)]
            for i in reversed(range(plan.unroll)):
                inputs = seen(taps[i : i + plan.taps], buffers, first + i)
                dp = dys[i] * _slope(preactivation(inputs, weights))
                parts = [*(dp * tap for tap in inputs), dp]
                sums = [total + part for total, part in zip(sums, parts, strict=True)]
                shares = seen([dp] * plan.taps, buffers, first + i)
                added = [weight * share for weight, share in zip(weights[:-1], shares, strict=True)]
                *passed, own = [old + new for old, new in zip([0, *passed], added, strict=True)]
                dx.at[first + i][...] = own.astype(dx.dtype)
            return taps[: plan.window], passed, sums

        carried = [plan.load(x.at[CHUNK + i]) for i in range(plan.window)], *state
        return lax.fori_loop(0, CHUNK // plan.unroll, tokens, carried)[1:]

    passed = [plan.load(given["after"].at[b, i, mine]) for i in range(plan.window)]
    sums = [plan.zeros() for _ in weights]
    _, sums = each_chunk(chunk, (passed, sums), given, [made["dx"]], s, plan, reverse=True)
    for i, total in enumerate(sums):
        made["sums"].at[b, i, mine][...] = total


def _slope(p: Array) -> Array:
    """The derivative of SiLU."""
    share = sigmoid(p)
    return share + p * share * (1 - share)
