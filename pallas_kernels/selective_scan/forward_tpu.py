"""Forward scan kernel for TPUs: h ← e^{dt A} ⊙ h + (dt x) Bᵀ, y = h C, token after token on the vector units."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.selective_scan.walk_tpu import BLOCK, HALF, Columns, Plan, Rows, each_token, kinds
from pallas_kernels.walk_tpu import Task, run


class Results(NamedTuple):
    """What `forward` returns; None where it was not asked for."""

    final_state: Array  # [B, N, D] float32
    y: Array | None = None  # [B, T, D] in x's dtype
    states: Array | None = None  # as they enter each chunk [B, chunks, N, D] float32


def forward(
    x: Array,
    dt: Array,
    exponents: Array,
    columns: Array,
    state: Array,
    plan: Plan,
    *,
    residuals: bool = False,
) -> Results:
    """Run the recurrence; `residuals` adds `states`, which the backward kernel needs.

    Args:
        x: [B, T, D].
        dt: [B, T, D].
        exponents: A log₂e, for each sequence [B, N, D] float32.
        columns: rows of B, of C if outputs are asked for, and 8 of 1 where the state is zeroed before the token and
            else 0 if documents are packed, with the tokens of a chunk on lanes: [B, chunks, columns, 128] float32.
        state: entering, [B, N, D] float32.
        plan: sizes and features of this call.
        residuals: see above.
    """
    outputs = [("final_state", "state", jnp.float32)]
    outputs += [("y", "channels", x.dtype)] if plan.reads else []
    outputs += [("states", "states", jnp.float32)] if residuals else []
    task = Task(
        kernel=partial(_kernel, plan),
        name="selective_scan_forward_tpu",
        grid=plan.grid,
        kinds=kinds(plan, backward=False),
        inputs=(
            ("x", "channels"),
            ("dt", "channels"),
            ("exponents", "state"),
            ("columns", "columns"),
            ("entering", "state"),
        ),
        outputs=tuple(outputs),
        scratch=(
            pltpu.VMEM((plan.entries, plan.width), jnp.float32),
            *[pltpu.VMEM((BLOCK, plan.group), jnp.float32)] * 2,
            Columns.scratch(plan),
            Rows.scratch(plan),
        ),
        memory=plan.memory,
        interpret=plan.interpret,
    )
    arrays = {"x": x, "dt": dt, "exponents": exponents, "columns": columns, "entering": state}
    return Results(**run(task, arrays))


def _kernel(plan: Plan, refs: dict[str, Any], state: Any, steps: Any, written: Any, *scratch: Any) -> None:
    step = pl.program_id(2)
    columns, rows = Columns(plan, scratch[0]), Rows(scratch[1])

    @pl.when(step == 0)
    def _():
        state[...] = refs["entering"][...]

    columns.spread(refs["columns"])
    if "states" in refs:
        refs["states"][...] = state[...]

    def group(i, _):
        lanes = plan.channels(i)
        exponents = refs["exponents"][:, lanes]

        def stage(turn, second):
            here, mine = (plan.half(turn, second), lanes), pl.ds(second * HALF, HALF)
            dt = refs["dt"][here].astype(jnp.float32)
            steps[mine, :] = dt
            written[mine, :] = dt * refs["x"][here].astype(jnp.float32)

        def put(turn, second):
            if plan.reads:
                refs["y"][plan.half(turn, second), lanes] = rows.sums(second).astype(refs["y"].dtype)

        def block(turn, h):
            def token(j, h):
                t = turn * BLOCK + j
                if plan.packed:
                    h = jnp.where(columns.first(t), 0.0, h)
                h = jnp.exp2(plan.row(steps, j) * exponents) * h + plan.row(written, j) * columns.b(t)
                if plan.reads:
                    rows.put(j, h * columns.c(t))
                # Of the halves, one is staged or finished while the other is worked on.
                pl.when(j == HALF // 2)(lambda: stage(turn, True))
                pl.when(j == HALF + HALF // 4)(lambda: put(turn, False))
                return h

            stage(turn, False)
            h = each_token(plan, token, h)
            put(turn, True)
            return h

        state[:, lanes] = lax.fori_loop(0, plan.tokens // BLOCK, block, state[:, lanes])
        return 0

    lax.fori_loop(0, plan.groups, group, 0)

    @pl.when(step == plan.chunks - 1)
    def _():
        refs["final_state"][...] = state[...]
