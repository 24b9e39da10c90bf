"""A long sequence as segments side by side, for cards with more multiprocessors than there are heads.

A segment maps the state that enters it to M S + E. M and E of all segments are found at once, the entering states one
after the other, in float32; then every segment is a sequence of its own. The gradient passes back the same way.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.rank_one.backward_states_sm90 import backward_states
from pallas_kernels.rank_one.forward_sm90 import forward
from pallas_kernels.rank_one.layout import CHUNK, MULTIPROCESSORS, Gates, Plan

SHORTEST = 16  # chunks, under which a segment is not worth its share of the passes


def choose_segments(sequences: int, time: int) -> int:
    """A power of two so that the segments of all `sequences` (batch × value heads) fill the card."""
    segments = 1
    while 2 * segments * sequences <= MULTIPROCESSORS and time >= 2 * segments * SHORTEST * CHUNK:
        segments *= 2
    return segments if segments > 2 else 1  # for 2, more blocks that share a sequence's columns do as well


def entering_states(
    k: Array, v: Array, inverse: Array | None, gates: Array, state: Array, plan: Plan
) -> tuple[Array, Array | None]:
    """Return Sᵀ as it enters each segment [B · segments, HV, V, K], and Mᵀ of each segment.

    Args:
        k, v, inverse, gates: of the segments, as for `forward`.
        state: Sᵀ as it enters the first [B, HV, V, K].
        plan: of the call.
    """
    if plan.segments == 1:
        return state, None
    moved = _transitions(k, inverse, gates, plan)
    added = forward(None, k, v, inverse, gates, None, plan).final_state
    states = [state]
    for m, e in list(zip(_split(moved, plan), _split(added, plan), strict=True))[:-1]:
        states.append(_matmul(states[-1], m) + e)
    return _join(states), moved


def leaving_gradients(
    q: Array | None,
    k: Array,
    do: Array | None,
    inverse: Array | None,
    gates: Array,
    dstate: Array,
    moved: Array | None,
    plan: Plan,
) -> Array:
    """Return dSᵀ of the state that leaves each segment [B · segments, HV, V, K]; see `entering_states`."""
    if moved is None:
        return dstate
    nothing = jnp.zeros((k.shape[0], *dstate.shape[1:]), jnp.float32)
    added = backward_states(q, k, do, inverse, gates, nothing, plan, residuals=False).initial_state
    gradients = [dstate]
    for m, e in list(zip(_split(moved, plan), _split(added, plan), strict=True))[:0:-1]:
        gradients.append(_matmul(gradients[-1], jnp.swapaxes(m, 2, 3)) + e)
    return _join(gradients[::-1])


def first_segment(x: Array, plan: Plan) -> Array:
    """Of [B · segments, ...] what belongs to the first segments."""
    return x[:: plan.segments]


def last_segment(x: Array, plan: Plan) -> Array:
    """Of [B · segments, ...] what belongs to the last segments."""
    return x[plan.segments - 1 :: plan.segments]


def _transitions(k: Array, inverse: Array | None, gates: Array, plan: Plan) -> Array:
    """Mᵀ [B · segments, HV, K, K], or 1 × 1 where M is a multiple of the identity."""
    if not plan.erases:
        return jnp.prod(gates[..., Gates.ENTRY, -1], -1)[..., None, None]
    plan = dataclasses.replace(plan, value_dim=plan.key_dim, warpgroups=plan.key_dim // CHUNK)
    shape = (k.shape[0], plan.value_heads, plan.key_dim, plan.key_dim)
    identity = jnp.broadcast_to(jnp.eye(plan.key_dim, dtype=jnp.float32)[None, None], shape)
    return forward(None, k, None, inverse, gates, identity, plan).final_state


def _matmul(state: Array, m: Array) -> Array:
    if m.shape[-1] == 1:
        return state * m
    return jnp.einsum("bhvi,bhij->bhvj", state, m, precision=lax.Precision.HIGHEST)


def _split(x: Array, plan: Plan) -> list[Array]:
    return [x[i :: plan.segments] for i in range(plan.segments)]


def _join(parts: list[Array]) -> Array:
    x = jnp.stack(parts, 1)
    return x.reshape(-1, *x.shape[2:])
