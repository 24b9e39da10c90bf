"""The recurrence on a Hopper GPU: arguments, padding, kernels in order, gradients.

S ← e^g (I − a k kᵀ) S + w k vᵀ,      o = scale · Sᵀ q
"""

import dataclasses
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float

from pallas_kernels.device import Unsupported, check_hopper, interpretation
from pallas_kernels.rank_one import backward_chunks_sm90, backward_sm90
from pallas_kernels.rank_one.backward_block_sm90 import SIZE
from pallas_kernels.rank_one.backward_chunks_sm90 import backward_chunks
from pallas_kernels.rank_one.backward_sm90 import backward
from pallas_kernels.rank_one.backward_states_sm90 import backward_states
from pallas_kernels.rank_one.forward_sm90 import forward
from pallas_kernels.rank_one.gates_sm90 import gate_gradients, put_gates
from pallas_kernels.rank_one.inputs import check_inputs
from pallas_kernels.rank_one.layout import CHUNK, COLUMNS, MULTIPROCESSORS, WIDE, Plan
from pallas_kernels.rank_one.segments import (
    choose_segments,
    entering_states,
    first_segment,
    last_segment,
    leaving_gradients,
)
from pallas_kernels.rank_one.solve_sm90 import solve

DTYPES = (jnp.bfloat16, jnp.float16)
LARGEST_KEY = 256
# Names for policies of jax.checkpoint: what the backward pass reads, and the outputs, which code after them reads.
RESIDUALS = tuple(f"rank_one_{name}" for name in ("gates", "inverse", "passage", "states", "rows", "outputs"))


def check(q: Array | None, k: Array, v: Array, *others: Array | None) -> None:
    """Raise `Unsupported` if the kernels cannot serve here; the message says why."""
    check_hopper()
    check_inputs(q, k, v, others, DTYPES)
    if not 0 < k.shape[3] <= LARGEST_KEY:
        raise Unsupported(f"keys have {k.shape[3]} entries; the kernels hold 1 to {LARGEST_KEY}")


def rank_one(
    q: Float[Array, "B T H K"] | None,
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    erase: Float[Array, "B T HV"] | None,
    write: Float[Array, "B T HV"] | None,
    log_decay: Float[Array, "B T HV"] | None,
    restart: Bool[Array, "B T"] | None,
    initial_state: Float[Array, "B HV K V"] | None,
    *,
    scale: float = 1.0,
    segments: int | None = None,
) -> tuple[Float[Array, "B T HV V"] | None, Float[Array, "B HV K V"]]:
    """Evaluate the recurrence; differentiable once in all its floating-point arguments.

    Args:
        q: queries, bfloat16 or float16; None reads nothing out.
        k: keys, in the dtype of q; key head h serves the value heads h·HV/H to (h + 1)·HV/H − 1.
        v: values, in the dtype of q.
        erase: a, float32; None is 0, and then nothing needs to be solved.
        write: w, float32; None is 1.
        log_decay: g ≤ 0, float32; None is 0.
        restart: True where the state is zeroed before the token.
        initial_state: float32; None is 0, and then nothing is read.
        scale: of the queries.
        segments: into how many to cut the sequence, to be worked on side by side; None chooses.

    Returns:
        o in v's dtype, and the final state in float32.

    Raises:
        Unsupported: not a Hopper GPU, or dtypes and sizes that the kernels do not have.
    """
    check(q, k, v, erase, write, log_decay, initial_state)
    batch, time = v.shape[:2]
    plan = make_plan(q, k, v, erase, log_decay, restart, scale, segments)
    if initial_state is None:
        plan = dataclasses.replace(plan, continues=False)
    length = plan.segments * plan.chunks * CHUNK

    def segmented(x: Array | None, width: int | None = None) -> Array | None:
        """Zeros after the end of time and of the head, which write, erase and read nothing; then cut in segments."""
        if x is None:
            return None
        after = [(0, 0)] * x.ndim
        after[1] = (0, length - time)
        if width is not None:
            after[3] = (0, width - x.shape[3])
        x = jnp.pad(x, after)
        return x.reshape(batch * plan.segments, plan.chunks * CHUNK, *x.shape[2:])

    if write is None:
        write = jnp.ones(v.shape[:3], jnp.float32)
    gates = (segmented(x) for x in (erase, write, log_decay, restart))
    state = _pad_state(initial_state, plan)
    qk = (segmented(x, plan.key_dim) for x in (q, k))
    results = _evaluate(plan, *qk, segmented(v, plan.value_dim), *gates, state)
    o, state = cast(tuple[Array | None, Array], results)
    width, depth = k.shape[3], v.shape[3]
    if o is not None:
        o = o.reshape(batch, length, *o.shape[2:])[:, :time, :, :depth]
    return o, state[:, :, :width, :depth]


def make_plan(
    q: Array | None,
    k: Array,
    v: Array,
    erase: Array | None,
    log_decay: Array | None,
    restart: Array | None,
    scale: float,
    segments: int | None = None,
) -> Plan:
    """Choose sizes and features for a call."""
    key_dim, value_dim = (-(-x.shape[3] // COLUMNS) * COLUMNS for x in (k, v))
    batch, time, heads, _ = v.shape
    segments = choose_segments(batch * heads, time) if segments is None else segments
    # Two warpgroups share the loaded keys, unless the columns of the state then go to too few multiprocessors.
    blocks = batch * segments * heads * value_dim // COLUMNS
    together = value_dim % (2 * COLUMNS) == 0 and blocks > MULTIPROCESSORS and key_dim <= WIDE
    return Plan(
        chunks=-(-time // (segments * CHUNK)),
        value_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        erases=erase is not None,
        decays=log_decay is not None or restart is not None,
        packed=restart is not None,
        reads=q is not None,
        dtype=k.dtype,
        scale=scale,
        segments=segments,
        joint=key_dim == value_dim == SIZE and 2 * batch * segments * heads > MULTIPROCESSORS,
        warpgroups=2 if together else 1,
        interpret=interpretation(),
    )


def _pad_state(state: Array | None, plan: Plan) -> Array | None:
    if state is None:
        return None
    width, depth = state.shape[2:]
    return jnp.pad(state, [(0, 0), (0, 0), (0, plan.key_dim - width), (0, plan.value_dim - depth)])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _evaluate(plan, q, k, v, erase, write, log_decay, restart, state):
    gates, inverse, growth = _prepare(plan, k, erase, write, log_decay, restart)
    state, _ = entering_states(k, v, inverse, growth, gates, state, plan.staged())
    results = forward(q, k, v, inverse, gates, state, plan.staged())
    return results.o, last_segment(results.final_state, plan)


def _prepare(plan, k, erase, write, log_decay, restart):
    gates = put_gates(erase, write, log_decay, restart, plan)
    return gates, *(solve(k, gates, plan) if plan.erases else (None, None))


def _evaluate_forward(plan, q, k, v, erase, write, log_decay, restart, state):
    gates, inverse, growth = _prepare(plan, k, erase, write, log_decay, restart)
    state, passage = entering_states(k, v, inverse, growth, gates, state, plan.staged())
    results = forward(q, k, v, inverse, gates, state, plan.staged(residuals=True), residuals=True)
    outputs = results.o, last_segment(results.final_state, plan)
    kept = (gates, inverse, passage, results.states, results.rows, outputs)
    *kept, outputs = (checkpoint_name(x, name) for x, name in zip(kept, RESIDUALS, strict=True))
    return outputs, (q, k, v, log_decay, restart, *kept)


def _evaluate_backward(plan, residuals, cotangents):
    q, k, v, log_decay, restart, gates, inverse, passage, states, row_values = residuals
    do, dstate = cotangents
    dstate = leaving_gradients(q, k, do, inverse, gates, dstate, passage, plan.staged())
    if plan.joint:
        grads, dstate = backward(q, k, v, do, row_values, states, inverse, gates, dstate, plan)
        rows = backward_sm90.gate_rows()
    else:
        found = backward_states(q, k, do, inverse, gates, dstate, plan.staged(residuals=True))
        drows, dstates, dstate = cast(Array, found.rows), cast(Array, found.states), found.initial_state
        grads = backward_chunks(q, k, v, do, row_values, drows, states, dstates, gates, plan)
        rows = backward_chunks_sm90.gate_rows(plan)
    dgates = gate_gradients(grads.gates, log_decay, restart, rows, plan)
    group = plan.value_heads // k.shape[2]
    dq, dk = (_sum_group(x, group) for x in (grads.q, grads.k))
    dinitial = first_segment(dstate, plan) if plan.continues else None
    return dq, dk, grads.v, *dgates, None, dinitial


_evaluate.defvjp(_evaluate_forward, _evaluate_backward)


def _sum_group(x: Array | None, group: int) -> Array | None:
    """Add up, in float32, what the value heads of a key head ask of it."""
    if x is None or group == 1:
        return x
    batch, time, heads, width = x.shape
    x = x.reshape(batch, time, heads // group, group, width)
    return x.astype(jnp.float32).sum(3).astype(x.dtype)
