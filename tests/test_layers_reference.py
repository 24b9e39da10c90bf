"""The layers against their formulas, written out token by token in float64."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from layer_tables import call, make, parameters, tokens

TIME = 12


def float64_parameters(layer):
    """Parameters by dotted path, made different from their trivial starting values."""
    rng = np.random.default_rng(0)
    for path, value in parameters(layer).items():
        if path[-1] in ("scale", "bias", "D"):
            owner = layer
            for name in path[:-1]:
                owner = getattr(owner, name)
            getattr(owner, path[-1])[...] = jnp.asarray(
                1 + 0.5 * rng.standard_normal(value.shape), value.dtype
            )
    return {".".join(path): np.asarray(value, np.float64) for path, value in parameters(layer).items()}


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softplus(x):
    return np.logaddexp(0, x)


def unit(x):
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def rms_norm(x, scale, epsilon):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * scale


def convolve(stream, kernel, bias: Any = 0.0):
    past = np.concatenate([np.zeros((3, stream.shape[1])), stream])
    return silu(np.stack([(past[t : t + 4] * kernel).sum(axis=0) for t in range(len(stream))]) + bias)


def delta_family(layer, name, x):
    p, heads, size = float64_parameters(layer), layer.num_heads, layer.key_dim
    stream = convolve(x @ p["projection.kernel"], p["convolution.kernel"])
    q, k, v = np.split(stream, (heads * size, 2 * heads * size), axis=-1)
    q, k, v = (z.reshape(TIME, heads, -1) for z in (q, k, v))
    beta = sigmoid(x @ p["beta.kernel"])
    decay = np.ones_like(beta)
    if "gated" in name:
        g = -np.exp(p["decay.A_log"]) * softplus(x @ p["decay.projection.kernel"] + p["decay.dt_bias"])
        decay = np.exp(g)
    k = k if "efla" in name else unit(k)
    energy = (k * k).sum(axis=-1)
    erase = write = beta
    if "efla" in name:
        rate = 1 - decay  # the decay inside the ordinary differential equation
        erase = -np.expm1(-decay * beta * energy) / energy
        write = beta * -np.expm1(-(rate + decay * beta * energy)) / (rate + decay * beta * energy)
        decay = np.exp(-rate)
    state, o = np.zeros((heads, size, v.shape[-1])), np.zeros_like(v)
    for t in range(TIME):
        for h in range(heads):
            past = decay[t, h] * state[h]
            erased = erase[t, h] * np.outer(k[t, h], k[t, h] @ past)
            state[h] = past - erased + write[t, h] * np.outer(k[t, h], v[t, h])
            o[t, h] = unit(q[t, h]) / np.sqrt(size) @ state[h]
    y = rms_norm(o, p["norm.scale"], 1e-8).reshape(TIME, -1)
    y = y * silu(x @ p["gate.kernel"]) if "gated" in name else y
    return y @ p["out.kernel"]


def linear_attention(layer, name, x):
    p = float64_parameters(layer)
    q, k, v = (z.reshape(TIME, 2, 8) for z in np.split(x @ p["projection.kernel"], 3, axis=-1))
    q, k = (np.where(z < 0, np.exp(z), z + 1) for z in (q, k))
    scores = np.tril(np.einsum("thk,shk->hts", q, k))
    o = np.einsum("hts,shv->thv", scores / scores.sum(axis=-1, keepdims=True), v)
    return rms_norm(o, p["norm.scale"], 1e-8).reshape(TIME, -1) @ p["out.kernel"]


def mamba2(layer, name, x):
    p = float64_parameters(layer)
    stream = convolve(x @ p["projection.kernel"], p["convolution.kernel"], p["convolution.bias"])
    c, b, u = (z.reshape(TIME, -1, 8) for z in np.split(stream, (16, 32), axis=-1))
    dt = softplus(x @ p["decay.projection.kernel"] + p["decay.dt_bias"])
    decay = np.exp(-np.exp(p["decay.A_log"]) * dt)
    state, o = np.zeros((4, 8, 8)), np.zeros_like(u)
    for t in range(TIME):
        for h in range(4):
            state[h] = decay[t, h] * state[h] + dt[t, h] * np.outer(b[t, h // 2], u[t, h])
            o[t, h] = c[t, h // 2] @ state[h] + p["D"][h] * u[t, h]
    y = o.reshape(TIME, -1) * silu(x @ p["gate.kernel"])
    return rms_norm(y, p["norm.scale"], 1e-5) @ p["out.kernel"]


def mamba(layer, name, x):
    p = float64_parameters(layer)
    u = convolve(x @ p["projection.kernel"], p["convolution.kernel"], p["convolution.bias"])
    r, b, c = np.split(u @ p["selection.kernel"], (1, 5), axis=-1)
    dt = softplus(r @ p["dt.kernel"] + p["dt_bias"])
    state, y = np.zeros((32, 4)), np.zeros_like(u)
    for t in range(TIME):
        decay = np.exp(-dt[t][:, None] * np.exp(p["A_log"]))
        state = decay * state + np.outer(dt[t] * u[t], b[t])
        y[t] = state @ c[t] + p["D"] * u[t]
    return (y * silu(x @ p["gate.kernel"])) @ p["out.kernel"]


REFERENCES = dict.fromkeys(("deltanet", "efla", "gated-deltanet", "gated-efla"), delta_family) | {
    "linear-attention": linear_attention,
    "mamba2": mamba2,
    "mamba": mamba,
}


@pytest.mark.parametrize("name", REFERENCES)
def test_layers_are_what_they_say(name):
    layer, x = make(name), tokens(TIME, batch=1)
    exact = REFERENCES[name](layer, name, np.asarray(x[0], np.float64))
    np.testing.assert_allclose(call(layer, x)[0][0], exact, rtol=1e-3, atol=1e-4)
