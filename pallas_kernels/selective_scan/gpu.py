"""The scan on a Hopper GPU: arguments, padding, segments, gradients.

h ← e^{dt A} ⊙ h + (dt x) Bᵀ,      y = h C
"""

import dataclasses
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float

from pallas_kernels.device import check_hopper, interpretation
from pallas_kernels.selective_scan.backward_sm90 import backward
from pallas_kernels.selective_scan.forward_sm90 import forward
from pallas_kernels.selective_scan.inputs import RESIDUALS, check_inputs, exponents
from pallas_kernels.selective_scan.layout import CHUNK, MULTIPROCESSORS, Plan
from pallas_kernels.selective_scan.segments import entering_states, leaving_gradients
from pallas_kernels.selective_scan.stream_sm90 import PADDED

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
STATE_DIMS = (8, 16, 32, 64)  # what the kernels have; others are padded to the next
SHORTEST = 512  # tokens, under which a segment is not worth its share of the passes


def check(x: Array, dt: Array, a: Array, *others: Array | None) -> None:
    """Raise `Unsupported` if the kernels cannot serve here; the message says why."""
    check_hopper()
    check_inputs(x, dt, a, others, DTYPES, STATE_DIMS[-1])


def selective_scan(
    x: Float[Array, "B T D"],
    dt: Float[Array, "B T D"],
    a: Float[Array, "D N"],
    b: Float[Array, "B T N"],
    c: Float[Array, "B T N"] | None,
    restart: Bool[Array, "B T"] | None,
    initial_state: Float[Array, "B D N"],
    *,
    segments: int | None = None,
) -> tuple[Float[Array, "B T D"] | None, Float[Array, "B D N"]]:
    """Evaluate the recurrence; differentiable once in all its floating-point arguments.

    Args:
        x: bfloat16, float16 or float32.
        dt: in any of these dtypes.
        a: A ≤ 0.
        b: B.
        c: C; None reads nothing out.
        restart: True where the state is zeroed before the token.
        initial_state: float32.
        segments: into how many to cut the sequence, to be worked on side by side; None chooses.

    Returns:
        y in x's dtype, and the final state in float32.

    Raises:
        Unsupported: not a Hopper GPU, or dtypes and sizes that the kernels do not have.
    """
    check(x, dt, a, b, c, initial_state)
    batch, time, width = x.shape
    entries = a.shape[1]
    plan = make_plan(x, entries, segments, packed=restart is not None, reads=c is not None)
    length = plan.segments * plan.chunks * CHUNK
    wider, deeper = -width % plan.channels, plan.state_dim - entries

    def segmented(z: Array | None, more: int = 0) -> Array | None:
        """Zeros after the end, which neither decay nor write; then cut in segments."""
        if z is None:
            return None
        z = jnp.pad(z, [(0, 0), (0, length - time), (0, more)][: z.ndim])
        return z.reshape(batch * plan.segments, plan.chunks * CHUNK, *z.shape[2:])

    cut = None
    if restart is not None:
        cut = jnp.where(restart[..., None], jnp.full(PADDED, -jnp.inf, jnp.float32)[None, None], 0.0)
    results = _evaluate(
        plan,
        segmented(x, wider),
        segmented(dt, wider),
        jnp.pad(a.astype(jnp.float32), [(0, wider), (0, deeper)]),
        segmented(b.astype(jnp.float32), deeper),
        segmented(None if c is None else c.astype(jnp.float32), deeper),
        segmented(cut),
        jnp.pad(initial_state, [(0, 0), (0, wider), (0, deeper)]),
    )
    y, state = cast(tuple[Array | None, Array], results)
    y = None if y is None else y.reshape(batch, length, -1)[:, :time, :width]
    return y, state[:, :width, :entries]


def make_plan(x: Array, entries: int, segments: int | None = None, *, packed: bool, reads: bool) -> Plan:
    """Choose sizes for a call."""
    batch, time, width = x.shape
    plan = Plan(
        chunks=0,
        state_dim=next(size for size in STATE_DIMS if size >= entries),
        packed=packed,
        reads=reads,
        interpret=interpretation(),
    )
    if segments is None:
        segments = choose_segments(batch * -(-width // plan.channels), time)
    return dataclasses.replace(plan, chunks=-(-time // (segments * CHUNK)), segments=segments)


def choose_segments(blocks: int, time: int) -> int:
    """A power of two so that the segments of all blocks of channels give each multiprocessor two blocks."""
    segments = 1
    while segments * blocks <= MULTIPROCESSORS and time >= 2 * segments * SHORTEST:
        segments *= 2
    return segments if segments > 2 else 1  # with two, the pass that finds the states eats up what they gain


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _evaluate(plan, x, dt, a, b, c, cut, state):
    tokens = (x, dt, exponents(a), b)
    entering = entering_states(*tokens, cut, state, plan)
    results = forward(*tokens, c, cut, entering, plan)
    return results.y, results.final_state[plan.segments - 1 :: plan.segments]


def _evaluate_forward(plan, x, dt, a, b, c, cut, state):
    tokens = (x, dt, exponents(a), b)
    entering = entering_states(*tokens, cut, state, plan)
    results = forward(*tokens, c, cut, entering, plan, residuals=True)
    outputs = results.y, results.final_state[plan.segments - 1 :: plan.segments]
    states, outputs = map(checkpoint_name, (results.states, outputs), RESIDUALS)
    return outputs, (x, dt, a, b, c, cut, states)


def _evaluate_backward(plan, residuals, cotangents):
    x, dt, a, b, c, cut, states = residuals
    dy, dstate = cotangents
    powers = exponents(a)
    dstate = leaving_gradients(dt, powers, c, cut, dy, dstate, plan)
    grads = backward(x, dt, powers, b, c, cut, dy, states, dstate, plan.for_gradients())
    dc = None if grads.c is None else grads.c.sum(0)
    dinitial = grads.initial_state[:: plan.segments]
    return grads.x, grads.dt, grads.a.sum(0), grads.b.sum(0), dc, None, dinitial


_evaluate.defvjp(_evaluate_forward, _evaluate_backward)
