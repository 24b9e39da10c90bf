"""Backward scan kernel for TPUs: gradients of all inputs, from the last chunk to the first.

With dh the gradient of the state h after a token, a = e^{dt A}, h₋ the state before it, and u = dt x, so that
h = a ⊙ h₋ + u Bᵀ and y = h C:

    dh += dy Cᵀ,   dC = hᵀ dy,   dB = dhᵀ u,   du = dh B,   dh₋ = a ⊙ dh,   dA += dt (dh₋ ⊙ h₋),
    d(dt) = x du + rowsum(A ⊙ dh₋ ⊙ h₋),   dx = dt du.

A chunk is first run forward again, for h, of which dC is made, and h₋, which stays in fast memory.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.selective_scan.walk_tpu import (
    BLOCK,
    HALF,
    LANES,
    Columns,
    Plan,
    Rows,
    each_token,
    kinds,
    put_sums,
)
from pallas_kernels.walk_tpu import Task, run


class Gradients(NamedTuple):
    """What `backward` returns."""

    x: Array  # [B, T, D] in x's dtype
    dt: Array  # [B, T, D] in dt's dtype
    a: Array  # [B, N, D] float32, of each sequence
    b: Array  # [B, programs, chunks, N, 128] float32: what the channels of each program have of it
    initial_state: Array  # [B, N, D] float32
    c: Array | None = None  # like b


def backward(
    x: Array,
    dt: Array,
    exponents: Array,
    columns: Array,
    dy: Array | None,
    states: Array,
    dstate: Array,
    plan: Plan,
) -> Gradients:
    """Return the gradients of all inputs.

    Args:
        x, dt, exponents, columns: as for `forward`.
        dy: gradient of the outputs [B, T, D] in x's dtype; None if there are none.
        states: as they enter each chunk [B, chunks, N, D] float32.
        dstate: gradient of the final state [B, N, D] float32.
        plan: sizes and features of this call.
    """
    given = {
        "x": ("channels", x),
        "dt": ("channels", dt),
        "exponents": ("state", exponents),
        "columns": ("columns", columns),
        "dy": ("channels", dy),
        "states": ("states", states),
        "leaving": ("state", dstate),
    }
    outputs = [("x", "channels", x.dtype), ("dt", "channels", dt.dtype), ("a", "state", jnp.float32)]
    outputs += [("b", "sums", jnp.float32), ("initial_state", "state", jnp.float32)]
    outputs += [("c", "sums", jnp.float32)] if plan.reads else []
    task = Task(
        kernel=partial(_kernel, plan),
        name="selective_scan_backward_tpu",
        grid=plan.grid,
        kinds=kinds(plan, backward=True),
        inputs=tuple((name, kind) for name, (kind, z) in given.items() if z is not None),
        outputs=tuple(("d" + name, kind, dtype) for name, kind, dtype in outputs),
        scratch=(
            *[pltpu.VMEM((plan.entries, plan.width), jnp.float32)] * 2,
            *[pltpu.VMEM((plan.tokens, plan.group), jnp.float32)] * 3,
            pltpu.VMEM((plan.tokens, plan.entries, plan.group), jnp.float32),
            Columns.scratch(plan),
            *[Rows.scratch(plan)] * 2,
        ),
        memory=plan.memory,
        interpret=plan.interpret,
    )
    found = run(task, {name: z for name, (_, z) in given.items()})
    return Gradients(**{name[1:]: z for name, z in found.items()})


class Scratch(NamedTuple):
    """Fast memory, of one chunk and group of channels but for the first two and `columns`."""

    dstate: Any  # [N, all channels of the program]: stays from chunk to chunk
    da: Any  # like it
    steps: Any  # dt [C, W]
    written: Any  # dt x [C, W]
    dy: Any  # [C, W]
    past: Any  # h₋ [C, N, W]
    columns: Any
    written_gradients: Any  # dh B of a block, for sums over entries
    powers: Any  # A ⊙ dh₋ ⊙ h₋, for the same


def _kernel(plan: Plan, refs: dict[str, Any], *scratch: Any) -> None:
    s, step = Scratch(*scratch), pl.program_id(2)
    columns = Columns(plan, s.columns)

    @pl.when(step == 0)
    def _():
        s.dstate[...] = refs["leaving"][...]
        s.da[...] = jnp.zeros(s.da.shape, jnp.float32)

    columns.spread(refs["columns"])
    for name in ("db", "dc"):
        if name in refs:
            refs[name][...] = jnp.zeros(refs[name].shape, jnp.float32)

    def group(i, _):
        lanes = plan.channels(i)
        _forward_again(plan, refs, s, columns, lanes)
        _gradients(plan, refs, s, columns, lanes)
        return 0

    lax.fori_loop(0, plan.groups, group, 0)

    @pl.when(step == plan.chunks - 1)
    def _():
        refs["dinitial_state"][...] = s.dstate[...]
        refs["da"][...] = s.da[...]


def _forward_again(plan: Plan, refs: dict[str, Any], s: Scratch, columns: Columns, lanes: Any) -> None:
    """Fill the scratch memory of a chunk and group, and find dC."""
    exponents = refs["exponents"][:, lanes]

    def stage(turn, second):
        tokens = plan.half(turn, second)
        dt = refs["dt"][tokens, lanes].astype(jnp.float32)
        s.steps[tokens, :] = dt
        s.written[tokens, :] = dt * refs["x"][tokens, lanes].astype(jnp.float32)
        if plan.reads:
            s.dy[tokens, :] = refs["dy"][tokens, lanes].astype(jnp.float32)

    def block(turn, carried):
        def token(j, carried):
            t, (h, dc) = turn * BLOCK + j, carried
            if plan.packed:
                h = jnp.where(columns.first(t), 0.0, h)
            s.past[t] = h
            h = jnp.exp2(plan.row(s.steps, t) * exponents) * h + plan.row(s.written, t) * columns.b(t)
            if plan.reads:
                dc = put_sums(dc, turn, j, h * plan.row(s.dy, t))
            pl.when(j == HALF // 2)(lambda: stage(turn, True))
            return h, dc

        stage(turn, False)
        return each_token(plan, token, carried)

    table = jnp.zeros((plan.entries, LANES), jnp.float32) if plan.reads else None
    _, table = lax.fori_loop(0, plan.tokens // BLOCK, block, (refs["states"][:, lanes], table))
    if table is not None:
        refs["dc"][...] += table


def _gradients(plan: Plan, refs: dict[str, Any], s: Scratch, columns: Columns, lanes: Any) -> None:
    """Take the gradients of the state and of A through a chunk, back in time, and find all others."""
    exponents = refs["exponents"][:, lanes]
    blocks = plan.tokens // BLOCK
    du, powers = Rows(s.written_gradients), Rows(s.powers)

    def put(turn, second):
        tokens = plan.half(turn, second)
        mine = du.sums(second)
        refs["dx"][tokens, lanes] = (mine * s.steps[tokens, :]).astype(refs["dx"].dtype)
        ddt = mine * refs["x"][tokens, lanes].astype(jnp.float32) + powers.sums(second) * math.log(2)
        refs["ddt"][tokens, lanes] = ddt.astype(refs["ddt"].dtype)

    def block(i, carried):
        turn = blocks - 1 - i

        def token(j, carried):
            t, (dh, da, db) = turn * BLOCK + j, carried
            dt = plan.row(s.steps, t)
            if plan.reads:
                dh = dh + plan.row(s.dy, t) * columns.c(t)
            db = put_sums(db, turn, j, dh * plan.row(s.written, t))
            du.put(j, dh * columns.b(t))
            dh = jnp.exp2(dt * exponents) * dh
            if plan.packed:
                dh = jnp.where(columns.first(t), 0.0, dh)
            power = dh * s.past[t]
            powers.put(j, power * exponents)
            pl.when(j == HALF - HALF // 4)(lambda: put(turn, True))
            return dh, da + dt * power, db

        carried = each_token(plan, token, carried, reverse=True)
        put(turn, False)
        return carried

    table = jnp.zeros((plan.entries, LANES), jnp.float32)
    carried = s.dstate[:, lanes], s.da[:, lanes], table
    s.dstate[:, lanes], s.da[:, lanes], table = lax.fori_loop(0, blocks, block, carried)
    refs["db"][...] += table
