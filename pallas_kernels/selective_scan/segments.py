"""A long sequence of few channels as segments side by side; see `pallas_kernels.rank_one.segments`.

A segment maps the state that enters it to e^{A Σdt} ⊙ h + E, and the gradient of the state that leaves it to
e^{A Σdt} ⊙ dh + G. G is what the same recurrence finds when it runs from the last token to the first, with dy for dt x
and C for B.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array

from pallas_kernels.selective_scan.forward_sm90 import forward
from pallas_kernels.selective_scan.layout import Plan


def entering_states(
    x: Array, dt: Array, exponents: Array, b: Array, cut: Array | None, state: Array, plan: Plan
) -> Array:
    """Return the state that enters each segment [B · segments, D, N].

    Args:
        x, dt, exponents, b, cut: of the segments, as for `forward`.
        state: that enters the first [B, D, N].
        plan: of the call.
    """
    if plan.segments == 1:
        return state
    decay = _decays(dt, exponents, cut)
    added = forward(x, dt, exponents, b, None, cut, jnp.zeros_like(decay), plan).final_state
    states = [state]
    for a, e in list(zip(_split(decay, plan), _split(added, plan), strict=True))[:-1]:
        states.append(a * states[-1] + e)
    return _join(states)


def leaving_gradients(
    dt: Array,
    exponents: Array,
    c: Array | None,
    cut: Array | None,
    dy: Array | None,
    dstate: Array,
    plan: Plan,
) -> Array:
    """Return the gradient of the state that leaves each segment [B · segments, D, N]; see `entering_states`."""
    if plan.segments == 1:
        return dstate
    decay = _decays(dt, exponents, cut)
    added = jnp.zeros_like(decay)
    if c is not None and dy is not None:

        def before(z: Array) -> Array:  # the decay of a token acts on what is after it in time
            return jnp.concatenate([jnp.zeros_like(z[:, :1]), z[:, :0:-1]], 1)

        backwards = dataclasses.replace(plan, weighted=False)
        tokens = (dy[:, ::-1], before(dt), exponents, c[:, ::-1], None, None if cut is None else before(cut))
        first = None if cut is None else cut[:, :1]
        added = forward(*tokens, added, backwards).final_state * _decays(dt[:, :1], exponents, first)
    gradients = [dstate]
    for a, g in list(zip(_split(decay, plan), _split(added, plan), strict=True))[:0:-1]:
        gradients.append(a * gradients[-1] + g)
    return _join(gradients[::-1])


def _decays(dt: Array, exponents: Array, cut: Array | None) -> Array:
    """What is left of a state after these tokens [B, D, N]."""
    total = jnp.sum(dt.astype(jnp.float32), 1)[..., None] * exponents[None]
    if cut is not None:
        total += jnp.sum(cut[..., 0], 1)[:, None, None]
    return jnp.exp2(total)


def _split(x: Array, plan: Plan) -> list[Array]:
    return [x[i :: plan.segments] for i in range(plan.segments)]


def _join(parts: list[Array]) -> Array:
    x = jnp.stack(parts, 1)
    return x.reshape(-1, *x.shape[2:])
