"""Mosaic GPU, Hopper: the gradients of the scan, from the last chunk to the first.

With dh the gradient of the state after a token, a = e^{dt A}, q = a ⊙ h₋ what is left of the state before it, and
u = dt x, so that h = q + u Bᵀ and y = h C:

    dh += dy Cᵀ,   dC = hᵀ dy,   dB = dhᵀ u,   du = dh B,   dA += dt (dh ⊙ q),   d(dt) = x du + rowsum(A ⊙ dh ⊙ q),
    dx = dt du,    dh₋ = a ⊙ dh.

A chunk is first run forward again from the state that entered it, and leaves its q in shared memory. There q of a
token makes room for what each thread has of its dB and dC, which are then summed over the channels of the block.
"""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.channels_sm90 import Refs, launch
from pallas_kernels.selective_scan.forward_sm90 import decays
from pallas_kernels.selective_scan.layout import CHUNK, WARPGROUP, Plan
from pallas_kernels.selective_scan.stream_sm90 import each_chunk, stage_scratch

LN2 = 0.6931471805599453
SUMMED = ("dc", "db")  # the groups of channels in whose place they stand


class Gradients(NamedTuple):
    """What `backward` returns."""

    x: Array  # [B, T, D] in x's dtype
    dt: Array  # [B, T, D] in dt's dtype
    a: Array  # [B, D, N] float32, of each sequence
    b: Array  # [blocks, B, T, N] float32: what the channels of each block have of it
    c: Array | None  # like b
    initial_state: Array  # [B, D, N] float32


def backward(
    x: Array,
    dt: Array,
    exponents: Array,
    b: Array,
    c: Array | None,
    cut: Array | None,
    dy: Array | None,
    states: Array,
    final_state: Array,
    plan: Plan,
) -> Gradients:
    """Return the gradients of all inputs.

    Args:
        x, dt, exponents, b, c, cut: as for `forward`.
        dy: gradient of the outputs [B, T, D], in x's dtype; None, with c, if nothing was read out.
        states: as they enter each chunk [B, chunks, D, N] float32.
        final_state: gradient of the final state [B, D, N] float32.
        plan: sizes and features of this call; two groups of channels at least.
    """
    batch, time, width = x.shape
    streamed = {"x": x, "dt": dt, "dy": dy, "b": b, "c": c, "cut": cut, "states": states}
    streamed = {name: value for name, value in streamed.items() if value is not None}
    inputs = streamed | {"exponents": exponents, "final_state": final_state}
    blocks = width // plan.channels
    sums = jax.ShapeDtypeStruct((blocks, batch, time * plan.state_dim), jnp.float32)
    state = jax.ShapeDtypeStruct(final_state.shape, jnp.float32)
    outputs = {"dx": jax.ShapeDtypeStruct(x.shape, x.dtype), "ddt": jax.ShapeDtypeStruct(x.shape, dt.dtype)}
    outputs |= {"da": state, "initial_state": state, "db": sums}
    if c is not None:
        outputs["dc"] = sums
    scratch = stage_scratch(streamed, plan)
    # A row is a token longer than it must be, for neighbouring rows to be in different banks.
    scratch["past"] = plgpu.SMEM((plan.channels, (CHUNK + 1) * plan.state_dim), jnp.float32)
    scratch |= {name: plgpu.SMEM((CHUNK, plan.channels), outputs[name].dtype) for name in ("dx", "ddt")}

    made = launch(_recur, "selective_scan_backward", inputs, outputs, scratch, plan)
    db, dc = (
        made[name].reshape(blocks, batch, time, plan.state_dim) if name in made else None
        for name in ("db", "dc")
    )
    return Gradients(made["dx"], made["ddt"], made["da"], cast(Array, db), dc, made["initial_state"])


def _recur(given: Refs, made: Refs, s: Refs, plan: Plan) -> None:
    d, b = lax.axis_index("d"), lax.axis_index("b")
    mine = pl.ds(d * plan.channels, plan.channels)
    exponents = plan.load_states(given["exponents"].at[mine])

    def chunk(i: Array, buffers: Refs, sums: tuple[list[Array], list[Array]]) -> Any:
        _forward_again(buffers, s["past"], exponents, plan)

        def tokens(turn: Array, sums: tuple[list[Array], list[Array]]) -> Any:
            for offset in range(plan.unroll):
                t = CHUNK - 1 - turn * plan.unroll - offset
                sums = _token(t, buffers, s, exponents, sums, plan)
            return sums

        sums = lax.fori_loop(0, CHUNK // plan.unroll, tokens, sums)
        plgpu.commit_smem()
        for name in ("dx", "ddt"):
            plgpu.copy_smem_to_gmem(s[name], made[name].at[b, pl.ds(i * CHUNK, CHUNK), mine])
        size = CHUNK * plan.state_dim
        for group, name in enumerate(SUMMED):
            if name in made:
                made[name].at[d, b, pl.ds(i * size, size)][...] = _over_channels(s["past"], group, plan)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of all threads, so that they can write there again
        return sums

    dstate = plan.load_states(given["final_state"].at[b, mine])
    dstate, da = each_chunk(chunk, (dstate, plan.zeros()), given, s, plan, reverse=True)
    plan.store_states(made["initial_state"].at[b, mine], dstate)
    plan.store_states(made["da"].at[b, mine], da)
    plgpu.wait_smem_to_gmem(0)


def _forward_again(buffers: Refs, past: Any, exponents: list[Array], plan: Plan) -> None:
    """Put q of all tokens of a chunk into `past`."""

    def tokens(turn: Array, state: list[Array]) -> list[Array]:
        for offset in range(plan.unroll):
            t = turn * plan.unroll + offset
            dt, x = (plan.load_channels(buffers[name].at[t]) for name in ("dt", "x"))
            b = plan.load_entries(buffers["b"].at[t])
            kept = decays(plan.spread(dt), exponents, buffers, t)
            state = [a * h for a, h in zip(kept, state, strict=True)]
            plan.store_states(past.at[:, pl.ds(t * plan.state_dim, plan.state_dim)], state)
            written = plan.spread([u * v for u, v in zip(dt, x, strict=True)])
            state = [q + u * b for q, u in zip(state, written, strict=True)]
        return state

    lax.fori_loop(0, CHUNK // plan.unroll, tokens, plan.load_states(buffers["states"]))


def _token(
    t: Array,
    buffers: Refs,
    s: Refs,
    exponents: list[Array],
    sums: tuple[list[Array], list[Array]],
    plan: Plan,
) -> tuple[list[Array], list[Array]]:
    """Take the gradients of the state and of A past one token."""
    dh, da = sums
    past = s["past"].at[:, pl.ds(t * plan.state_dim, plan.state_dim)]
    left = plan.load_states(past)
    dt, x = (plan.load_channels(buffers[name].at[t]) for name in ("dt", "x"))
    b = plan.load_entries(buffers["b"].at[t])
    written, steps = plan.spread([u * v for u, v in zip(dt, x, strict=True)]), plan.spread(dt)
    if "dy" in buffers:
        c, dy = plan.load_entries(buffers["c"].at[t]), plan.spread(plan.load_channels(buffers["dy"].at[t]))
        parts = [(q + u * b) * g for q, u, g in zip(left, written, dy, strict=True)]
        past.at[plan.group(SUMMED.index("dc"))][...] = sum(parts[1:], start=parts[0])
        dh = [x + g * c for x, g in zip(dh, dy, strict=True)]
    parts = [x * u for x, u in zip(dh, written, strict=True)]
    past.at[plan.group(SUMMED.index("db"))][...] = sum(parts[1:], start=parts[0])
    of_power = [x * q for x, q in zip(dh, left, strict=True)]
    da = [total + x * u for total, x, u in zip(da, of_power, steps, strict=True)]
    du = [plan.over_entries(x * b) for x in dh]
    ddt = [
        u * v + LN2 * plan.over_entries(p * e) for u, v, p, e in zip(du, x, of_power, exponents, strict=True)
    ]
    plan.store_channels(s["dx"].at[t], [u * v for u, v in zip(du, dt, strict=True)])
    plan.store_channels(s["ddt"].at[t], ddt)
    kept = decays(steps, exponents, buffers, t)
    return [x * a for x, a in zip(dh, kept, strict=True)], da


def _over_channels(past: Any, group: int, plan: Plan) -> Array:
    """The sums over a block's channels of what stands in the place of a group, for a chunk's tokens [C · N]."""
    size = CHUNK * plan.state_dim
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=min(size // WARPGROUP, 4))
    rows = [
        plgpu.load(past.at[group * plan.width + i, pl.ds(0, size)], layout=layout) for i in range(plan.width)
    ]
    total = rows[0]
    for row in rows[1:]:
        total += row
    return total
