"""The shared parts, each against its definition."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eflax.cells import tiles
from eflax.cells.numerics import squared_norm
from eflax.layers import DecayGate, RMSNorm, ShortConvolution, elu_plus_one, fan_in_uniform, l2_normalize

NORMAL = np.random.default_rng(0).standard_normal


def test_unit_keys_in_bfloat16_are_unit():
    k = jnp.full(128, 0.5, jnp.bfloat16).at[3].set(200)
    norm = np.linalg.norm(np.asarray(l2_normalize(k), np.float64))
    assert abs(norm - 1) < 1e-3


def test_the_gradient_of_a_zero_key_is_finite():
    gradient = jax.grad(lambda k: jnp.sum(l2_normalize(k)))(jnp.zeros(8))
    np.testing.assert_allclose(gradient, 1e3, rtol=1e-5)


def test_norms_of_heads_are_the_same_on_the_tiles_of_a_tpu():
    x = jnp.asarray(NORMAL((2, 16, 3, 128)), jnp.float32)
    for norm in (l2_normalize, RMSNorm(128, rngs=nnx.Rngs(0)), squared_norm):
        with mock.patch.object(tiles, "device_kind", lambda: "TPU v5 lite"):
            traced = jax.make_jaxpr(norm)(x)
            found = norm(x)
        assert "2,2,3,8,128" in str(traced)
        np.testing.assert_allclose(found, norm(x), rtol=1e-6)


def test_elu_plus_one_keeps_small_positives():
    for dtype in (jnp.float32, jnp.bfloat16):
        np.testing.assert_allclose(float(elu_plus_one(jnp.asarray(-8, dtype))), np.exp(-8.0), rtol=1e-2)
    x = jnp.asarray([-200.0, -3.0, 0.0, 2.0, 200.0])
    np.testing.assert_allclose(elu_plus_one(x), [0, np.exp(-3), 1, 3, 201], rtol=1e-6)
    gradient = jax.vmap(jax.grad(elu_plus_one))(x)
    np.testing.assert_allclose(gradient, [0, np.exp(-3), 1, 1, 1], rtol=1e-6)


def test_rms_norm_is_float32():
    x = jnp.asarray(NORMAL((3, 512)) * 100 + 300, jnp.bfloat16)
    norm = RMSNorm(512, rngs=nnx.Rngs(0))
    exact = np.asarray(x, np.float64)
    exact /= np.sqrt((exact**2).mean(axis=-1, keepdims=True) + 1e-6)
    assert norm(x).dtype == jnp.bfloat16 and norm.scale[...].dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(norm(x), np.float64), exact, rtol=2**-8)


def reference_convolution(x, kernel, bias):
    """One document: x [T, D], kernel [W, D]."""
    past = np.concatenate([np.zeros((len(kernel) - 1, x.shape[1])), x])
    y = np.stack([(past[t : t + len(kernel)] * kernel).sum(axis=0) for t in range(len(x))]) + bias
    return y / (1 + np.exp(-y))


def test_short_convolution_stops_at_documents():
    convolution = ShortConvolution(5, use_bias=True, rngs=nnx.Rngs(0))
    convolution.bias[...] = jnp.asarray(NORMAL(5), jnp.float32)
    kernel, bias = (np.asarray(p[...], np.float64) for p in (convolution.kernel, convolution.bias))
    x = jnp.asarray(NORMAL((1, 14, 5)), jnp.float32)
    documents = jnp.asarray([[0] * 6 + [1] * 2 + [2] * 6])
    y, tail = convolution(x, convolution.init_tail(1, jnp.float32), documents)
    exact = [
        reference_convolution(np.asarray(x[0, a:b], np.float64), kernel, bias)
        for a, b in ((0, 6), (6, 8), (8, 14))
    ]
    np.testing.assert_allclose(y[0], np.concatenate(exact), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(tail, x[:, -3:])


def test_the_tail_of_a_convolution_holds_one_document():
    convolution = ShortConvolution(2, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 2, 2))
    tail = jnp.full((1, 3, 2), 7.0)
    with pytest.raises(ValueError, match=r"^tail has shape \(1, 2, 2\); it needs \[B, 3, D\]"):
        convolution(x, tail[:, :2])
    with pytest.raises(ValueError, match=r"^parts=\(1, 2\) are 3 channels together; they must be width=2"):
        ShortConvolution(2, parts=(1, 2), rngs=nnx.Rngs(0))
    _, continued = convolution(x, tail, jnp.asarray([[0, 0]]))
    _, restarted = convolution(x, tail, jnp.asarray([[0, 1]]))
    np.testing.assert_array_equal(continued[0, :, 0], [7, 1, 1])
    np.testing.assert_array_equal(restarted[0, :, 0], [0, 0, 1])


def test_no_gradient_passes_a_boundary_of_the_convolution():
    convolution = ShortConvolution(2, rngs=nnx.Rngs(0))
    documents = jnp.asarray([[0, 0, 0, 1, 1, 1]])

    def loss(x, tail):
        return jnp.sum(convolution(x, tail, documents)[0][:, 3:])

    dx, dtail = jax.grad(loss, argnums=(0, 1))(jnp.ones((1, 6, 2)), jnp.ones((1, 3, 2)))
    assert not dx[:, :3].any() and not dtail.any() and dx[:, 3:].all()


def test_initial_values_have_the_documented_ranges():
    draw = np.asarray(fan_in_uniform(jax.random.key(0), (4, 4096), jnp.float32))
    assert 0.49 < draw.max() <= 0.5 and -0.5 <= draw.min() < -0.49
    gate = DecayGate(4, 4096, rngs=nnx.Rngs(0))
    rate, step = np.exp(gate.A_log[...]), np.asarray(jax.nn.softplus(gate.dt_bias[...]))
    assert 0 < rate.min() < 0.1 and 15.9 < rate.max() <= 16 + 1e-4 and abs(rate.mean() - 8) < 0.3
    assert 1e-3 * 0.999 < step.min() < 1.05e-3 and 0.095 < step.max() < 0.1001
    assert abs(np.log(step).mean() - np.log(1e-2)) < 0.1  # log-uniform


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_decay_gate_is_float32(dtype):
    gate = DecayGate(16, 3, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
    x = jnp.asarray(NORMAL((2, 5, 16)), dtype)
    g, dt = gate(x)
    kernel = np.asarray(gate.projection.kernel[...], np.float64)
    exact = np.logaddexp(0, np.asarray(x, np.float64) @ kernel + np.asarray(gate.dt_bias[...], np.float64))
    assert g.dtype == dt.dtype == jnp.float32
    np.testing.assert_allclose(dt, exact, rtol=1e-5)
    np.testing.assert_allclose(g, -np.exp(np.asarray(gate.A_log[...], np.float64)) * exact, rtol=1e-5)
