"""Softmax attention against a plain loop over heads and tokens, and the bounds of its cache."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_tables import call, make, tokens


def reference(layer, x, window=None):
    """One sequence x [T, D], in float64."""
    kernel, out = (np.asarray(m.kernel[...], np.float64) for m in (layer.projection, layer.out))
    heads = (np.asarray(x, np.float64) @ kernel).reshape(len(x), -1, layer.head_dim)
    half, groups = layer.head_dim // 2, layer.num_heads // layer.num_kv_heads
    angles = np.outer(np.arange(len(x)), 10_000.0 ** (-np.arange(half) / half))
    turned = (heads[..., :half] + 1j * heads[..., half:]) * np.exp(1j * angles)[:, None]
    rows = []
    for t in range(len(x)):
        first = max(0, t + 1 - window) if window else 0
        outputs = []
        for h in range(layer.num_heads):
            key = layer.num_heads + h // groups
            scores = (turned[first : t + 1, key] * turned[t, h].conj()).real.sum(axis=-1) / np.sqrt(
                layer.head_dim
            )
            weights = np.exp(scores - scores.max())
            outputs.append(weights / weights.sum() @ heads[first : t + 1, key + layer.num_kv_heads])
        rows.append(np.concatenate(outputs))
    return np.stack(rows) @ out


@pytest.mark.parametrize("window", [None, 1, 4])
def test_attention_is_what_it_says(window):
    layer, x = make("transformer", window=window), tokens(11, batch=1)
    exact = reference(layer, x[0], window)
    np.testing.assert_allclose(call(layer, x)[0][0], exact, rtol=1e-4, atol=1e-5)
    first, state = call(layer, x[:, :6], layer.init_state(1))
    second, _ = call(layer, x[:, 6:], state)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1)[0], exact, rtol=1e-4, atol=1e-5)


def test_overflow_of_the_cache_is_never_silent():
    layer, x = make("transformer", max_length=8), tokens(8)
    with pytest.raises(ValueError, match=r"max_length=8"):
        layer(tokens(9))
    _, state = layer(x[:, :6])
    with pytest.raises(ValueError, match=r"state: 6 tokens and 3 of x exceed max_length=8"):
        layer(x[:, :3], state)
    y, state = call(layer, x[:, :2], state)
    assert bool(jnp.isfinite(y).all()) and int(state.length) == 8
    y, _ = call(layer, x[:, :1], state)  # under jit the length of the cache is not known
    assert bool(jnp.isnan(y).all())


def test_decoding_compiles_once():
    layer, x = make("transformer"), tokens(6)
    traces = []

    @nnx.jit
    def step(layer, x, state):
        traces.append(1)
        return layer(x, state)

    state = layer.init_state(2)
    for t in range(6):
        _, state = step(layer, x[:, t : t + 1], state)
    assert len(traces) == 1 and int(state.length) == 6
