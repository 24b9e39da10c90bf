"""Float64 token-by-token recurrences, written from the equations alone: the judge of every cell and form.

Nothing of eflax is imported. One loop serves the whole rank-one family,

    S <- e^g (I - a k k^T) S + w k v^T,      o = S^T (scale q),

and each cell is the map from its inputs to (a, w, g). Axes: B batch, T time, H key heads, HV value heads, K, V.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Case:
    """A cell with fixed options: its name in the package, its arguments, its reference, the inputs it can stand."""

    cell: str
    arguments: tuple[str, ...]
    forward: Callable  # (inputs: dict, segment_ids, scale) -> (outputs, final state)
    options: dict = field(default_factory=dict)
    bounded_keys: bool = (
        False  # the transition expands once beta |k|^2 > 2, so such keys are no use as a test
    )
    features: bool = False  # queries and keys are non-negative features


# ------------------------------------------------------------------------------------------ coefficients
def phi(x):
    """(1 - e^-x) / x for x >= 0: a Taylor series below 1, where it loses no digit, the definition above."""
    small = x < 1.0
    near, far = jnp.where(small, x, 0.0), jnp.where(small, 1.0, x)
    series = jnp.zeros_like(x)
    for n in range(24, -1, -1):  # Horner: sum of (-x)^n / (n+1)!
        series = 1.0 - near / (n + 2) * series
    return jnp.where(small, series, -jnp.expm1(-far) / far)


def truncated_flow(beta, energy, order):
    """The series of (1 - e^(-beta energy)) / energy cut after `order` terms."""
    total, term = 0.0, beta
    for n in range(1, order + 1):
        total, term = total + term, -term * beta * energy / (n + 1)
    return total


def _efla(k, beta, g, order=None):
    energy = jnp.sum(k * k, axis=-1)
    a = beta * phi(beta * energy) if order is None else truncated_flow(beta, energy, order)
    return a, a, jnp.zeros_like(beta)


def _gated_efla(k, beta, g, variant="published"):
    energy = jnp.sum(k * k, axis=-1)
    if variant == "published":  # dS/dt = -[(1 - e^g) I + e^g beta k k^T] S + beta k v^T over unit time
        gate = jnp.exp(g)
        decay, erase = 1.0 - gate, gate * beta
        return erase * phi(erase * energy), beta * phi(decay + erase * energy), -decay
    a = beta * phi(beta * energy)
    write = beta * phi(beta * energy - g) if variant == "log_rate" else a
    return a, write, g


def _delta_rule(k, beta, g):
    return beta, beta, g


def _additive(k, beta, g):
    return jnp.zeros_like(beta), jnp.ones_like(beta), g


# ------------------------------------------------------------------------------------------ recurrences
def _restarts(segment_ids):
    return jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))[:, : segment_ids.shape[1]]


def rank_one(q, k, v, a, w, g, state, restart):
    """Outputs and final state of the rank-one family; heads of q and k are already those of v."""

    def step(state, token):
        q, k, v, a, w, g, restart = token
        state = jnp.where(restart[:, None, None, None], 0.0, state)
        held = jnp.einsum("bhkv,bhk->bhv", state, k)
        edit = w[..., None] * v - (jnp.exp(g) * a)[..., None] * held
        state = jnp.exp(g)[..., None, None] * state + jnp.einsum("bhk,bhv->bhkv", k, edit)
        return state, jnp.einsum("bhkv,bhk->bhv", state, q)

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, a, w, g, restart))
    state, outputs = jax.lax.scan(step, state, tokens)
    return jnp.moveaxis(outputs, 0, 1), state


def rank_one_cell(coefficients, **options):
    """The reference of a cell of the rank-one family, from its coefficients."""

    def forward(inputs, segment_ids, scale):
        q, k, v = _per_value_head(inputs)
        beta = inputs.get("beta", jnp.ones(v.shape[:3]))
        g = inputs.get("g", jnp.zeros(v.shape[:3]))
        a, w, g = coefficients(k, beta, g, **options)
        restart = _restarts(segment_ids)
        return rank_one(scale * q, k, v, a, w, g, inputs["initial_state"], restart)

    return forward


def _per_value_head(inputs):
    group = inputs["v"].shape[2] // inputs["k"].shape[2]
    return *(jnp.repeat(inputs[name], group, axis=2) for name in "qk"), inputs["v"]


def linear_attention(normalize, eps=1e-6):
    """S and z = sum of k; the read-out is S^T q, over z^T q + eps when normalised."""

    def forward(inputs, segment_ids, scale):
        q, k, v = _per_value_head(inputs)
        zeros, ones = jnp.zeros(v.shape[:3]), jnp.ones(v.shape[:3])
        restart = _restarts(segment_ids)
        S, z = inputs["initial_state"]
        numerator, S = rank_one(scale * q, k, v, zeros, ones, zeros, S, restart)
        total, z = rank_one(scale * q, k, ones[..., None], zeros, ones, zeros, z[..., None], restart)
        return (numerator / (total + eps) if normalize else numerator), (S, z[..., 0])

    return forward


def selective_ssm(inputs, segment_ids, scale):
    """h <- exp(dt A) h + dt B x, y = C^T h for each of D channels with N states."""

    def step(h, token):
        x, dt, B, C, restart = token
        h = jnp.where(restart[:, None, None], 0.0, h)
        h = jnp.exp(dt[..., None] * inputs["A"][None]) * h + (dt * x)[..., None] * B[:, None]
        return h, jnp.einsum("bdn,bn->bd", h, C)

    restart = _restarts(segment_ids)
    tokens = jax.tree.map(
        lambda x: jnp.moveaxis(x, 1, 0), (*(inputs[n] for n in ("x", "dt", "B", "C")), restart)
    )
    state, outputs = jax.lax.scan(step, inputs["initial_state"], tokens)
    return jnp.moveaxis(outputs, 0, 1), state


# ------------------------------------------------------------------------------------------ the table of cases
QKV, QKVB, QKVG, QKVBG = (
    ("q", "k", "v"),
    ("q", "k", "v", "beta"),
    ("q", "k", "v", "g"),
    ("q", "k", "v", "beta", "g"),
)


def _variants():
    yield "linear_attention", Case("linear_attention", QKV, linear_attention(True), features=True)
    yield (
        "linear_attention-unnormalized",
        Case("linear_attention", QKV, linear_attention(False), {"normalize": False}),
    )
    yield "ssd", Case("ssd", QKVG, rank_one_cell(_additive))
    yield "selective_ssm", Case("selective_ssm", ("x", "dt", "A", "B", "C"), selective_ssm)
    yield "delta_rule", Case("delta_rule", QKVB, rank_one_cell(_delta_rule), bounded_keys=True)
    yield "gated_delta_rule", Case("gated_delta_rule", QKVBG, rank_one_cell(_delta_rule), bounded_keys=True)
    yield "efla", Case("efla", QKVB, rank_one_cell(_efla))
    for order in (1, 2, 4):
        forward = rank_one_cell(_efla, order=order)
        yield f"efla-order{order}", Case("efla", QKVB, forward, {"order": order}, bounded_keys=True)
    yield "gated_efla", Case("gated_efla", QKVBG, rank_one_cell(_gated_efla))
    for variant in ("log_rate", "decay_first"):
        forward = rank_one_cell(_gated_efla, variant=variant)
        yield f"gated_efla-{variant}", Case("gated_efla", QKVBG, forward, {"variant": variant})


CASES: dict[str, Case] = dict(_variants())
DEFAULTS = tuple(name for name, case in CASES.items() if not case.options)  # one case a cell: its defaults


# ------------------------------------------------------------------------------------------ evaluation
def as_float64(tree):
    """Upcast every floating leaf to a float64 NumPy array."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


@cache
def _reference(case_name):
    forward = CASES[case_name].forward

    def loss(inputs, segment_ids, weights, scale):
        result = forward(inputs, segment_ids, scale)
        return sum(
            jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(weights), strict=True)
        ), result

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def evaluate(case_name, inputs, weights, segment_ids=None, scale=1.0):
    """Outputs, final state and the gradients of <weights, (outputs, state)> with respect to all inputs, in float64."""
    if segment_ids is None:  # one document
        segment_ids = np.zeros(jax.tree.leaves(weights)[0].shape[:2], np.int32)
    with jax.enable_x64(True):
        args = jax.tree.map(jnp.asarray, (as_float64(inputs), segment_ids, as_float64(weights)))
        (_, (outputs, state)), gradients = _reference(case_name)(*args, jnp.float64(scale))
        return jax.tree.map(np.asarray, {"outputs": outputs, "state": state, "gradients": gradients})
