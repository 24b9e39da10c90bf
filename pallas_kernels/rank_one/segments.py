"""A long sequence as segments side by side, for cards with more multiprocessors than there are heads.

A segment maps the state that enters it to M S + E. M and E of all segments are found at once, the entering states one
after the other, in float32; then every segment is a sequence of its own. The gradient passes back the same way.

Where decay leaves less than e^-FAINT of what stood before a chunk, the chunks before it are left out of E, and where
it leaves less than that of the whole entering state, M is 0: strongly gated heads pay next to nothing for segments.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.rank_one.backward_states_sm90 import backward_states
from pallas_kernels.rank_one.forward_sm90 import forward
from pallas_kernels.rank_one.layout import CHUNK, COLUMNS, MULTIPROCESSORS, Gates, Plan
from pallas_kernels.rank_one.passage_sm90 import pass_segments

FAINT = 24.0  # e^-24 is 4e-11, a thousandth of float32's own rounding, 6e-8
SHORTEST = 16  # chunks, under which a segment is not worth its share of the passes


def choose_segments(sequences: int, time: int) -> int:
    """A power of two so that the segments of all `sequences` (batch × value heads) fill the card."""
    segments = 1
    while 2 * segments * sequences <= MULTIPROCESSORS and time >= 2 * segments * SHORTEST * CHUNK:
        segments *= 2
    return segments if segments > 2 else 1  # for 2, more blocks that share a sequence's columns do as well


class Passage(NamedTuple):
    """How the gradient of the state passes back through segments."""

    transitions: Array  # M, or 1 × 1 where M is a multiple of the identity
    hidden: Array  # [B · segments, HV] int32: chunks that do not count for M, which is 0 if none does
    skip: Array  # [B · segments, HV] int32: chunks at a segment's end whose part of the gradient is faint at its start


def entering_states(
    k: Array,
    v: Array,
    inverse: Array | None,
    growth: Array | None,
    gates: Array,
    state: Array | None,
    plan: Plan,
) -> tuple[Array | None, Passage | None]:
    """Return S as it enters each segment [B · segments, HV, K, V], and what `leaving_gradients` needs.

    Args:
        k, v, inverse, gates: of the segments, as for `forward`.
        growth: from `solve`; None where nothing is erased.
        state: S as it enters the first [B, HV, K, V]; None is 0.
        plan: of the call.
    """
    if plan.segments == 1:
        return state, None
    left = gates[..., Gates.SUM, -1]  # of what enters a chunk, logarithms [B · segments, HV, N]
    if plan.packed:
        left = jnp.where(gates[..., Gates.DOCUMENT, -1] > 0.0, -jnp.inf, left)
    if growth is not None:
        left += growth.sum(-1)
    whole, first, last = _hidden(left)
    moved = _transitions(k, inverse, gates, whole, plan)
    added = forward(None, k, v, inverse, gates, None, plan, skip=first).final_state
    if state is None:
        state = jnp.zeros((added.shape[0] // plan.segments, *added.shape[1:]), jnp.float32)
    return _pass(moved, whole, added, state, plan), Passage(moved, whole, last)


def _hidden(left: Array) -> tuple[Array, Array, Array]:
    """How many chunks [B, HV] need not be passed.

    By the entering state: all or none; by what is written, on the way to the end: of the first ones; by gradients, on
    the way back: of the last ones.

    One that leaves less than e^-FAINT of what is beyond it hides all that, and only the nearest such is passed. Edits
    may lengthen, so that more arrives from further away: a chunk is left out only with all that are beyond it.

    Args:
        left: of what is on one side of a chunk, how much arrives at its other side; logarithms [B, HV, N].
    """
    count = left.shape[2]
    number = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), left.shape)
    backward = jnp.tri(count, dtype=bool)[None, None]

    # Masked sums, which XLA makes one kernel of. A comparison with NaN is false, so that it hides nothing.
    def faint(passed: Array) -> Array:
        return jnp.sum(jnp.where(passed, left[..., None, :], 0.0), -1) < -FAINT

    def hidden(faint: Array, beyond: Array) -> Array:
        return jnp.where(faint, count - 1, jnp.maximum(beyond - 1, 0)).min(2)

    onward = faint(backward.mT)
    whole = jnp.where(onward & (number == 0), jnp.int32(count), 0).max(2)
    return whole, hidden(onward, number), hidden(faint(backward), count - 1 - number)


def leaving_gradients(
    q: Array | None,
    k: Array,
    do: Array | None,
    inverse: Array | None,
    gates: Array,
    dstate: Array,
    passage: Passage | None,
    plan: Plan,
) -> Array:
    """Return dS of the state that leaves each segment [B · segments, HV, K, V]; see `entering_states`."""
    if passage is None:
        return dstate
    skip = passage.skip
    added = backward_states(q, k, do, inverse, gates, None, plan, residuals=False, skip=skip).initial_state
    return _pass(passage.transitions, passage.hidden, added, dstate, plan, reverse=True)


def first_segment(x: Array, plan: Plan) -> Array:
    """Of [B · segments, ...] what belongs to the first segments."""
    return x[:: plan.segments]


def last_segment(x: Array, plan: Plan) -> Array:
    """Of [B · segments, ...] what belongs to the last segments."""
    return x[plan.segments - 1 :: plan.segments]


def square_plan(plan: Plan) -> Plan:
    """The plan for a state K × K."""
    together = 1 if plan.wide else plan.key_dim // COLUMNS
    return dataclasses.replace(plan, value_dim=plan.key_dim, warpgroups=together)


def _transitions(k: Array, inverse: Array | None, gates: Array, skip: Array, plan: Plan) -> Array:
    """M [B · segments, HV, K, K], or 1 × 1 where M is a multiple of the identity; 0 where all chunks are skipped."""
    if not plan.erases:
        return jnp.prod(gates[..., Gates.ENTRY, -1], -1)[..., None, None]
    return forward(None, k, None, inverse, gates, None, square_plan(plan), skip=skip).final_state


def _pass(
    moved: Array, hidden: Array, added: Array, state: Array, plan: Plan, *, reverse: bool = False
) -> Array:
    """The state at every segment, from that at the first, or in reverse from that at the last; see `pass_segments`."""
    if plan.erases and not plan.wide:
        return pass_segments(moved, hidden, added, state, plan, reverse=reverse)
    moved, added = (x.reshape(-1, plan.segments, *x.shape[1:]) for x in (moved, added))
    states = [state]
    for i in range(plan.segments - 1):
        place = plan.segments - 1 - i if reverse else i
        m, e = moved[:, place], added[:, place]
        states.append(_matmul(jnp.swapaxes(m, 2, 3) if reverse else m, states[-1]) + e)
    x = jnp.stack(states[::-1] if reverse else states, 1)
    return x.reshape(-1, *x.shape[2:])


def _matmul(m: Array, state: Array) -> Array:
    if m.shape[-1] == 1:
        return m * state
    return jnp.einsum("bhij,bhjv->bhiv", m, state, precision=lax.Precision.HIGHEST)
