"""The classifier of the robustness experiment: its parameters, its definition, its economy."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import erf

from eflax import cells, layers
from eflax.models import SequenceClassifier

LENGTH, WIDTH = 20, 8
every_cell = pytest.mark.parametrize("cell", cells.CELLS)


def make(cell, **options) -> Any:
    options = {"length": LENGTH, "width": WIDTH, "form": "recurrent"} | options
    return SequenceClassifier(cell, **options, rngs=nnx.Rngs(0))


def pixels(batch=3, length=LENGTH):
    return jax.random.uniform(jax.random.key(1), (batch, length))


@nnx.jit
def call(model, x):
    return model(x)


def count(model):
    return sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param)))


def float64(parameter):
    return np.asarray(parameter[...], np.float64)


COUNTS = {  # 784 positions, and 64 wide: embedding, positions, LayerNorm and head are 51,018
    "efla": 63_371,
    "delta_rule": 63_371,
    "gated_efla": 63_371 + 66,
    "gated_delta_rule": 63_371 + 66,
    "linear_attention": 51_018 + 3 * 64**2,
    "ssd": 51_018 + 3 * 64**2 + 66,
    "selective_ssm": 51_018 + 2 * 64**2 + 64 + 3 * 64 * 16,
}


@every_cell
def test_parameter_counts(cell):
    assert count(SequenceClassifier(cell, rngs=nnx.Rngs(0))) == COUNTS[cell]


@every_cell
def test_logits(cell):
    model, x = make(cell, dtype=jnp.bfloat16), pixels()
    logits = call(model, x)
    assert logits.shape == (3, 10) and logits.dtype == jnp.float32
    np.testing.assert_array_equal(call(model, x[..., None]), logits)
    np.testing.assert_allclose(logits, call(make(cell), x), atol=0.05)


def reference(model, x, unit_keys, exact):
    """The released script's model on one image x [T], token by token in float64; EFLA where exact, or DeltaNet."""
    memory = model.memory
    h = x[:, None] * float64(model.embedding) + float64(model.positions)
    h = h * (1 + erf(h / np.sqrt(2))) / 2
    state = np.zeros((WIDTH, WIDTH))
    for row in h:
        k, v = row @ float64(memory.key.kernel), row @ float64(memory.value.kernel)
        beta = 1 / (1 + np.exp(-(row @ float64(memory.beta.kernel) + float64(memory.beta.bias))))
        k = k / np.sqrt(k @ k + 1e-6) if unit_keys else k
        strength = -np.expm1(-beta * (k @ k)) / (k @ k) if exact else beta
        state += strength * np.outer(k, v - state.T @ k)
    o = state.T @ (h[-1] @ float64(memory.query.kernel))
    o = (o - o.mean()) / np.sqrt(o.var() + 1e-5)
    return o @ float64(model.head.kernel) + float64(model.head.bias)


@pytest.mark.parametrize("cell", ["efla", "delta_rule"])
@pytest.mark.parametrize("normalize_keys", [None, True, False])
def test_it_is_the_model_of_the_released_script(cell, normalize_keys):
    model, x = make(cell, normalize_keys=normalize_keys), pixels()
    unit_keys = cell == "delta_rule" if normalize_keys is None else normalize_keys
    exact = [reference(model, np.asarray(row, np.float64), unit_keys, cell == "efla") for row in x]
    np.testing.assert_allclose(call(model, x), np.stack(exact), rtol=1e-3, atol=1e-4)


def test_initial_strength_of_black_and_white_pixels():
    """EFLA barely writes the background: λ ≈ 0.006 for a black pixel and about 8 for a white one; β ≈ 0.12."""
    model = make("efla", length=784, width=64)
    assert float(jnp.std(model.positions[...])) == pytest.approx(0.02, rel=0.02)

    def energy(pixel):
        h = jax.nn.gelu(pixel * model.embedding[...] + model.positions[...], approximate=False)
        return float(jnp.mean(jnp.sum(model.memory.key(h) ** 2, axis=-1))), model.memory.beta(h)

    black, logits = energy(0.0)
    assert 0.004 < black < 0.009
    assert 3 < energy(1.0)[0] < 15
    np.testing.assert_allclose(jax.nn.sigmoid(logits), 0.12, atol=0.01)


def test_only_the_last_position_is_read_out():
    graph, state = nnx.split(make("efla", num_heads=2))
    program = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(state, pixels()).as_text()
    products = re.findall(r"dot_general.*-> tensor<(.*)xf32>", program)
    assert products.count(f"3x{LENGTH}x{WIDTH}") == 2  # keys and values
    assert products.count(f"3x{WIDTH}") == 1  # the query


@every_cell
def test_gradients_are_finite_and_reach_the_first_pixel(cell):
    model = make(cell)

    @nnx.jit
    def gradients(model, x):
        return nnx.grad(lambda model, x: jax.nn.logsumexp(model(x)[:, 1:]).sum(), argnums=(0, 1))(model, x)

    for brightness in (0.0, 1.0):
        dmodel, dx = gradients(model, pixels() * brightness)
        assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(dmodel))
        assert bool(jnp.isfinite(dx).all()) and bool(jnp.all(dx[:, 0] != 0))
    assert all(bool(jnp.any(g != 0)) for g in jax.tree.leaves(dmodel))


@pytest.mark.parametrize("cell", ["ssd", "gated_delta_rule", "gated_efla", "selective_ssm"])
def test_the_first_of_784_pixels_counts_at_the_start(cell):
    """A decay starts slow: no gate forgets the sequence before training has begun."""
    model, x = make(cell, length=784), pixels(2, 784)

    @nnx.jit
    def gradient(model, x):
        return jax.grad(lambda x: model(x)[:, 0].sum())(x)

    size = jnp.abs(gradient(model, x)).mean(axis=0)
    assert size[:16].mean() > 1e-3 * size[-17:-1].mean()


@pytest.mark.parametrize("cell", ["efla", "linear_attention", "gated_delta_rule", "selective_ssm"])
def test_forms_agree(cell):
    x = pixels()
    chunks = make(cell, form="chunkwise", chunk_size=8)
    np.testing.assert_allclose(call(chunks, x), call(make(cell), x), rtol=1e-3, atol=1e-4)


def test_heads_part_the_width():
    model = make("gated_efla", num_heads=4)
    assert call(model, pixels()).shape == (3, 10)
    assert model.memory.beta.kernel.shape == (WIDTH, 4)


def test_weight_decay_spares_biases_and_norm():
    spared = {
        path[-2:]
        for path, _ in nnx.to_flat_state(nnx.state(make("gated_efla")))
        if layers.no_weight_decay(path)
    }
    assert spared == {
        ("norm", "scale"),
        ("norm", "bias"),
        ("head", "bias"),
        ("beta", "bias"),
        ("decay", "A_log"),
        ("decay", "dt_bias"),
    }


def test_what_does_not_fit_is_named(without_shape_checks):
    with pytest.raises(ValueError, match=r"cell='elfa' is unknown; there are linear_attention"):
        make("elfa")
    with pytest.raises(ValueError, match=r"width=8 is not divisible by num_heads=3"):
        make("efla", num_heads=3)
    with pytest.raises(ValueError, match=r"normalize_keys=True: the keys of linear_attention"):
        make("linear_attention", normalize_keys=True)
    with pytest.raises(ValueError, match=r"num_heads=2, .*selective_ssm"):
        make("selective_ssm", num_heads=2)
    for shape in ((3, LENGTH + 1), (3, LENGTH, 2), (LENGTH,)):
        with pytest.raises(ValueError, match=r"pixels: expected shape \[B, 20\]"):
            make("efla")(jnp.zeros(shape))
    with pytest.raises(cells.UnsupportedForm, match="no-such-form"):
        make("efla", form="no-such-form")
    with pytest.raises(ValueError, match="chunk_size is 0"):
        make("selective_ssm", chunk_size=0)
