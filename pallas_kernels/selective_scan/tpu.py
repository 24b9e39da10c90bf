"""The scan on a TPU: arguments, padding, kernels, gradients.

h ← e^{dt A} ⊙ h + (dt x) Bᵀ,      y = h C
"""

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float

from pallas_kernels.device import check_tpu, interpretation
from pallas_kernels.selective_scan.backward_tpu import backward
from pallas_kernels.selective_scan.forward_tpu import forward
from pallas_kernels.selective_scan.inputs import RESIDUALS, check_inputs, exponents
from pallas_kernels.selective_scan.walk_tpu import PARTS, SPREAD, SUBLANES, Plan, choose_sizes

DTYPES = (jnp.bfloat16, jnp.float32)
LARGEST = 256  # state entries of a channel


def check(x: Array, dt: Array, a: Array, *others: Array | None) -> None:
    """Raise `Unsupported` if the kernels cannot serve here; the message says why."""
    check_tpu()
    check_inputs(x, dt, a, others, DTYPES, LARGEST)


def selective_scan(
    x: Float[Array, "B T D"],
    dt: Float[Array, "B T D"],
    a: Float[Array, "D N"],
    b: Float[Array, "B T N"],
    c: Float[Array, "B T N"] | None,
    restart: Bool[Array, "B T"] | None,
    initial_state: Float[Array, "B D N"],
) -> tuple[Float[Array, "B T D"] | None, Float[Array, "B D N"]]:
    """Evaluate the recurrence; differentiable once in all its floating-point arguments.

    Args:
        x: bfloat16 or float32.
        dt: in any of these dtypes.
        a: A ≤ 0.
        b: B.
        c: C; None reads nothing out.
        restart: True where the state is zeroed before the token.
        initial_state: float32.

    Returns:
        y in x's dtype, and the final state in float32.

    Raises:
        Unsupported: not a TPU, or dtypes and sizes that the kernels do not have.
    """
    check(x, dt, a, b, c, initial_state)
    (_, time, width), entries = x.shape, a.shape[1]
    plan = make_plan(x, entries, packed=restart is not None, reads=c is not None)
    longer = plan.chunks * plan.tokens - time
    wider, deeper = plan.programs * plan.width - width, plan.entries - entries

    def padded(z: Array | None, more: int = 0) -> Array | None:
        """Zeros after the end, which neither decay nor write."""
        return None if z is None else jnp.pad(z, [(0, 0), (0, longer), (0, more)][: z.ndim])

    results = _evaluate(
        plan,
        padded(x, wider),
        padded(dt, wider),
        jnp.pad(a.astype(jnp.float32), [(0, wider), (0, deeper)]),
        cast(Array, padded(b, deeper)).astype(jnp.float32),
        None if c is None else cast(Array, padded(c, deeper)).astype(jnp.float32),
        padded(restart),
        jnp.pad(initial_state, [(0, 0), (0, wider), (0, deeper)]),
    )
    y, state = cast(tuple[Array | None, Array], results)
    return None if y is None else y[:, :time, :width], state[:, :width, :entries]


def make_plan(x: Array, entries: int, *, packed: bool, reads: bool) -> Plan:
    """Choose sizes and features for a call."""
    _, time, width = x.shape
    return Plan(
        **choose_sizes(time, width, entries),
        packed=packed,
        reads=reads,
        interpret=interpretation("tpu") or False,
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _evaluate(plan, x, dt, a, b, c, restart, state):
    results = forward(x, dt, *_shared(plan, a, b, c, restart), _turned(state), plan)
    return results.y, _turned(results.final_state)


def _evaluate_forward(plan, x, dt, a, b, c, restart, state):
    results = forward(x, dt, *_shared(plan, a, b, c, restart), _turned(state), plan, residuals=True)
    outputs = results.y, _turned(results.final_state)
    states, outputs = map(checkpoint_name, (results.states, outputs), RESIDUALS)
    return outputs, (x, dt, a, b, c, restart, states)


def _evaluate_backward(plan, residuals, cotangents):
    x, dt, a, b, c, restart, states = residuals
    dy, dstate = cotangents
    grads = backward(x, dt, *_shared(plan, a, b, c, restart), dy, states, _turned(dstate), plan)
    db, dc = (None if z is None else _by_token(plan, z) for z in (grads.b, grads.c))
    return grads.x, grads.dt, grads.a.sum(0).T, db, dc, None, _turned(grads.initial_state)


_evaluate.defvjp(_evaluate_forward, _evaluate_backward)


def _turned(state: Array) -> Array:
    """[B, D, N] ↔ [B, N, D]."""
    return jnp.swapaxes(state, 1, 2)


def _shared(plan: Plan, a: Array, b: Array, c: Array | None, restart: Array | None) -> tuple[Array, Array]:
    """The exponents and columns of `forward`: what is the same for all tokens, and what is for all channels."""
    batch, length, _ = b.shape
    columns = [b] if c is None else [b, c]
    if restart is not None:
        columns.append(jnp.broadcast_to(restart[..., None], (batch, length, SUBLANES)).astype(jnp.float32))
    x = jnp.concatenate(columns, axis=2)
    x = jnp.pad(x, [(0, 0), (0, 0), (0, plan.columns - x.shape[2])])
    parts = []
    for _ in range(PARTS):  # the last of them is zero
        parts.append(lax.reduce_precision(x, 8, 7))
        x = x - parts[-1]
    x = jnp.stack(parts, 2).astype(jnp.bfloat16).reshape(batch, -1, SPREAD, PARTS, plan.columns)
    x = x.transpose(0, 1, 4, 3, 2).reshape(batch, -1, plan.columns, PARTS * SPREAD)
    powers = exponents(a).T
    return jnp.broadcast_to(powers[None], (batch, *powers.shape)), x


def _by_token(plan: Plan, sums: Array) -> Array:
    """Sums over all channels, [B, T, N], of those of each program, [B, programs, chunks, N, 128]."""
    x = sums.sum(1)[..., : plan.tokens]
    return x.swapaxes(2, 3).reshape(x.shape[0], -1, plan.entries)
