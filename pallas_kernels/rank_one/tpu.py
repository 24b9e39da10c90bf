"""The recurrence on a TPU: arguments, padding, kernels, gradients.

S ← e^g (I − a k kᵀ) S + w k vᵀ,      o = scale · Sᵀ q
"""

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float

from pallas_kernels.device import Unsupported, check_tpu, interpretation
from pallas_kernels.rank_one.backward_tpu import backward
from pallas_kernels.rank_one.forward_tpu import forward
from pallas_kernels.rank_one.gates import decay_sums, decay_sums_in_two, gate_rows, unchunked
from pallas_kernels.rank_one.inputs import check_inputs
from pallas_kernels.rank_one.layout import CHUNK
from pallas_kernels.rank_one.tiles_tpu import Plan, choose_heads
from pallas_kernels.rank_one.walk_tpu import GateGradients

DTYPES = (jnp.bfloat16, jnp.float32)
LARGEST = 256  # entries of a key or value
UNIT = 64  # entries that keys and values are padded to
# Names for policies of jax.checkpoint: what the backward pass reads, and the outputs, which code after them reads.
RESIDUALS = tuple(f"rank_one_{name}" for name in ("gates", "inverse", "states", "rows", "outputs"))


def check(q: Array | None, k: Array, v: Array, *others: Array | None) -> None:
    """Raise `Unsupported` if the kernels cannot serve here; the message says why."""
    check_tpu()
    check_inputs(q, k, v, others, DTYPES)
    for name, x in (("keys", k), ("values", v)):
        if not 0 < x.shape[3] <= LARGEST:
            raise Unsupported(f"{name} have {x.shape[3]} entries; the kernels hold 1 to {LARGEST}")


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
) -> tuple[Float[Array, "B T HV V"] | None, Float[Array, "B HV K V"]]:
    """Evaluate the recurrence; differentiable once in all its floating-point arguments.

    Args:
        q: queries, bfloat16 or float32; None reads nothing out.
        k: keys, in the dtype of q; key head h serves the value heads h·HV/H to (h + 1)·HV/H − 1.
        v: values, in the dtype of q.
        erase: a, float32; None is 0, and then nothing needs to be solved.
        write: w, float32; None is 1.
        log_decay: g ≤ 0, float32; None is 0.
        restart: True where the state is zeroed before the token.
        initial_state: float32; None is 0.
        scale: of the queries.

    Returns:
        o in v's dtype, and the final state in float32.

    Raises:
        Unsupported: not a TPU, or dtypes and sizes that the kernels do not have.
    """
    check(q, k, v, erase, write, log_decay, initial_state)
    batch, time, value_heads, depth = v.shape
    if initial_state is None:
        initial_state = jnp.zeros((batch, value_heads, k.shape[3], depth), jnp.float32)
    plan = make_plan(q, k, v, erase, log_decay, restart, scale)
    length = plan.chunks * CHUNK

    def padded(x: Array | None, width: int | None = None) -> Array | None:
        """Zeros after the end of time and of the head, which write, erase and read nothing; heads in one axis."""
        if x is None:
            return None
        after = [(0, 0)] * x.ndim
        after[1] = (0, length - time)
        if width is not None:
            after[3] = (0, width - x.shape[3])
        x = jnp.pad(x, after)
        return x if width is None else x.reshape(batch, length, -1)

    if write is None:
        write = jnp.ones(v.shape[:3], jnp.float32)
    gates = (padded(x) for x in (erase, write, log_decay, restart))
    keys = (padded(x, plan.key_dim) for x in (q, k))
    after = [(0, plan.key_dim - k.shape[3]), (0, plan.value_dim - depth)]
    state = jnp.pad(initial_state, [(0, 0), (0, 0), *after])
    results = _evaluate(plan, *keys, padded(v, plan.value_dim), *gates, state)
    o, state = cast(tuple[Array | None, Array], results)
    if o is not None:
        o = o.reshape(batch, length, value_heads, -1)[:, :time, :, :depth]
    return o, state[:, :, : k.shape[3], :depth]


def make_plan(
    q: Array | None,
    k: Array,
    v: Array,
    erase: Array | None,
    log_decay: Array | None,
    restart: Array | None,
    scale: float,
) -> Plan:
    """Choose sizes and features for a call."""
    key_dim, value_dim = (-(-x.shape[3] // UNIT) * UNIT for x in (k, v))
    return Plan(
        chunks=-(-v.shape[1] // CHUNK),
        key_heads=k.shape[2],
        value_heads=v.shape[2],
        key_dim=key_dim,
        value_dim=value_dim,
        heads=choose_heads(k.shape[2], v.shape[2], key_dim, value_dim),
        erases=erase is not None,
        decays=log_decay is not None or restart is not None,
        packed=restart is not None,
        reads=q is not None,
        dtype=k.dtype,
        scale=scale,
        interpret=interpretation("tpu") or False,
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _evaluate(plan, q, k, v, erase, write, log_decay, restart, state):
    gates = _gates(plan, erase, write, log_decay, restart)
    results = forward(q, k, v, gates, state, plan)
    return results.o, results.final_state


def _gates(plan, erase, write, log_decay, restart):
    if not plan.exact_sums:
        return gate_rows(erase, write, decay_sums(log_decay, write, restart), restart)
    sums, rest = decay_sums_in_two(log_decay, write, restart)
    return gate_rows(erase, write, sums, restart, rest)


def _evaluate_forward(plan, q, k, v, erase, write, log_decay, restart, state):
    gates = _gates(plan, erase, write, log_decay, restart)
    results = forward(q, k, v, gates, state, plan, residuals=True)
    kept = (gates, results.inverse, results.states, results.rows, (results.o, results.final_state))
    *kept, outputs = (checkpoint_name(x, name) for x, name in zip(kept, RESIDUALS, strict=True))
    return outputs, (q, k, v, write, log_decay, restart, *kept)


def _evaluate_backward(plan, residuals, cotangents):
    q, k, v, write, log_decay, restart, gates, inverse, states, rows = residuals
    do, dstate = cotangents
    grads = backward(q, k, v, do, rows, gates, inverse, states, dstate, plan)
    parts = {part: unchunked(grads.gates[..., part, :]) for part in GateGradients}
    dlog_decay = None
    if log_decay is not None:
        _, transpose = jax.vjp(lambda g: decay_sums(g, write, restart), log_decay)
        (dlog_decay,) = transpose(grads.gates[..., GateGradients.SUM, :])
    dq, dk = (_sum_programs(x, plan, k.dtype) for x in (grads.q, grads.k))
    derase = parts[GateGradients.ERASE] if plan.erases else None
    return dq, dk, grads.v, derase, parts[GateGradients.WRITE], dlog_decay, None, grads.initial_state


_evaluate.defvjp(_evaluate_forward, _evaluate_backward)


def _sum_programs(x: Array | None, plan: Plan, dtype) -> Array | None:
    """Add up what the programs that share a key head ask of it."""
    sharing = plan.programs * plan.keys // plan.key_heads
    if x is None or sharing == 1:
        return x
    batch, time, _ = x.shape
    x = x.reshape(batch, time, plan.key_heads, sharing, plan.key_dim).sum(3)
    return x.reshape(batch, time, -1).astype(dtype)
