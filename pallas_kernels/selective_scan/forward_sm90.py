"""Mosaic GPU, Hopper: h ← e^{dt A} ⊙ h + (dt x) Bᵀ, y = h C, token after token, with the states in registers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.channels_sm90 import Refs, launch
from pallas_kernels.selective_scan.layout import CHUNK, Plan
from pallas_kernels.selective_scan.stream_sm90 import each_chunk, stage_scratch


class Results(NamedTuple):
    """What `forward` returns; None where it was not asked for."""

    y: Array | None  # [B, T, D] in x's dtype
    final_state: Array  # [B, D, N] float32
    states: Array | None  # as they enter each chunk [B, chunks, D, N] float32


def forward(
    x: Array,
    dt: Array,
    exponents: Array,
    b: Array,
    c: Array | None,
    cut: Array | None,
    initial_state: Array,
    plan: Plan,
    *,
    residuals: bool = False,
) -> Results:
    """Run the recurrence; `residuals` adds `states`, which the backward kernel needs.

    Args:
        x: [B, T, D], T a multiple of the chunk size, D of the channels of a block.
        dt: [B, T, D].
        exponents: A log₂e [D, N] float32.
        b: [B, T, N] float32.
        c: like b; None reads nothing out.
        cut: −inf where the state is zeroed before the token, else 0, four times [B, T, 4] float32; or None.
        initial_state: [B, D, N] float32.
        plan: sizes and features of this call.
        residuals: see above.
    """
    batch, _, width = x.shape
    outputs = {"final_state": jax.ShapeDtypeStruct(initial_state.shape, jnp.float32)}
    streamed = {"x": x, "dt": dt, "b": b, "c": c, "cut": cut}
    streamed = {name: value for name, value in streamed.items() if value is not None}
    scratch = stage_scratch(streamed, plan)
    if c is not None:
        outputs["y"] = jax.ShapeDtypeStruct(x.shape, x.dtype)
        scratch["y"] = plgpu.SMEM((2, CHUNK, plan.channels), x.dtype)
    if residuals:
        outputs["states"] = jax.ShapeDtypeStruct((batch, plan.chunks, width, plan.state_dim), jnp.float32)
    inputs = streamed | {"exponents": exponents, "initial_state": initial_state}

    made = launch(_recur, "selective_scan_forward", inputs, outputs, scratch, plan)
    return Results(made.get("y"), made["final_state"], made.get("states"))


def _recur(given: Refs, made: Refs, s: Refs, plan: Plan) -> None:
    b, mine = lax.axis_index("b"), pl.ds(lax.axis_index("d") * plan.channels, plan.channels)
    exponents = plan.load_states(given["exponents"].at[mine])

    def chunk(i: Array, buffers: Refs, state: list[Array]) -> list[Array]:
        if "states" in made:
            plan.store_states(made["states"].at[b, i, mine], state)
        y = s["y"].at[lax.rem(i, 2)] if "y" in made else None

        def tokens(turn: Array, state: list[Array]) -> list[Array]:
            for offset in range(plan.unroll):
                t = turn * plan.unroll + offset
                state = _token(t, buffers, state, exponents, plan)
                if y is not None:
                    c = plan.load_entries(buffers["c"].at[t])
                    plan.store_channels(y.at[t], [plan.over_entries(h * c) for h in state])
            return state

        state = lax.fori_loop(0, CHUNK // plan.unroll, tokens, state)
        plgpu.commit_smem()
        if y is not None:
            plgpu.copy_smem_to_gmem(y, made["y"].at[b, pl.ds(i * CHUNK, CHUNK), mine])
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        return state

    state = plan.load_states(given["initial_state"].at[b, mine])
    state = each_chunk(chunk, state, given, s, plan)
    plan.store_states(made["final_state"].at[b, mine], state)
    plgpu.wait_smem_to_gmem(0)


def _token(t: Array, buffers: Refs, state: list[Array], exponents: list[Array], plan: Plan) -> list[Array]:
    dt, x = (plan.load_channels(buffers[name].at[t]) for name in ("dt", "x"))
    written = [u * v for u, v in zip(dt, x, strict=True)] if plan.weighted else x
    b = plan.load_entries(buffers["b"].at[t])
    kept = decays(plan.spread(dt), exponents, buffers, t)
    return [a * h + u * b for a, h, u in zip(kept, state, plan.spread(written), strict=True)]


def decays(dt: list[Array], exponents: list[Array], buffers: Refs, t: Any) -> list[Array]:
    """e^{dt A} of a token, or 0 where a document begins."""
    powers = [u * v for u, v in zip(dt, exponents, strict=True)]
    if "cut" in buffers:
        cut = buffers["cut"][t, 0]
        powers = [x + cut for x in powers]
    return [jnp.exp2(x) for x in powers]
