"""Layers as Flax Linen modules: every layer, equal in both worlds, with parameters that move both ways."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype.roar import BeartypeDecorHintPep585DeprecationWarning
from flax import linen as nn
from flax import nnx
from layer_tables import SMALL, WIDTH, make, tokens

from eflax import layers
from eflax.layers import LAYERS

# Flax's own module class, of which ours are made, has an annotation in an old spelling. It is not ours to change.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", BeartypeDecorHintPep585DeprecationWarning)
    from eflax import linen

EFLA = linen.EFLA(WIDTH, num_heads=2, form="recurrent")


def wrap(name, **options):
    form = {} if name == "transformer" else {"form": "recurrent"}
    return getattr(linen, LAYERS[name].__name__)(WIDTH, **SMALL[name] | form | options)


def assert_same(tree, other):
    # XLA fuses the two programs alike, but that is not promised.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6), tree, other)


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_states_and_parameters_are_the_layers(name):
    layer, wrapped, x = make(name), wrap(name), tokens(6)
    segment_ids = jnp.array([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 2]])
    # Not zeros, so that it shows whether the state goes in.
    state = jax.tree.map(
        lambda s: s + 0.1 if jnp.issubdtype(s.dtype, jnp.floating) else s, layer.init_state(2)
    )

    @jax.jit
    def both(params):
        ours = layer(x, state, segment_ids)
        return ours, wrapped.apply({"params": params}, x, state, segment_ids)

    params = linen.params_of(layer)
    assert_same(*both(params))
    drawn = jax.eval_shape(wrapped.init, jax.random.key(0), x)["params"]
    assert jax.tree.map(jnp.shape, drawn) == jax.tree.map(jnp.shape, params)
    trained = jax.tree.map(lambda x: x + 1, params)
    linen.load_params(layer, trained)
    jax.tree.map(np.testing.assert_array_equal, linen.params_of(layer), trained)


def test_blocks_and_swiglu_are_those_of_the_layers():
    block = layers.Block(make("efla"), mlp_width=24, norm_epsilon=0.1, rngs=nnx.Rngs(1))
    wrapped = linen.Block(wrap("efla"), mlp_width=24, norm_epsilon=0.1)
    mlp, x, state = linen.SwiGLU(WIDTH, 24), tokens(6), block.init_state(2)
    params, mlp_layer = linen.params_of(block), block.mlp
    assert mlp_layer is not None

    @jax.jit
    def both(params):
        ours = block(x, state), mlp_layer(x)
        return ours, (wrapped.apply({"params": params}, x, state), mlp.apply({"params": params["mlp"]}, x))

    assert_same(*both(params))
    assert params.keys() == {"mixer", "mixer_norm", "mlp", "mlp_norm"}
    for module, wanted in ((wrapped, params), (mlp, params["mlp"])):
        drawn = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
        assert jax.tree.map(jnp.shape, drawn) == jax.tree.map(jnp.shape, wanted)
    initial = wrapped.apply({"params": params}, 2, nnx_method="init_state")
    jax.tree.map(np.testing.assert_array_equal, initial, state)
    del params["mlp"]["up"]
    with pytest.raises(
        ValueError, match=r"do not fit Block: mlp/up/kernel is missing, it has shape \(16, 24\)"
    ):
        wrapped.apply({"params": params}, x)


def test_blocks_inside_a_linen_model(without_shape_checks):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x, _ = linen.Block(linen.EFLA(WIDTH, num_heads=2), mlp_width=0)(x)
            return x

    params = jax.eval_shape(Model().init, jax.random.key(0), tokens(3))["params"]
    assert [*params] == ["Mixer_1", "Mixer_3"]
    assert params["Mixer_1"].keys() == {"mixer", "mixer_norm"}
    with pytest.raises(
        TypeError, match=r"mixer is of type EFLA and must be a layer of eflax.linen, as linen.EFLA"
    ):
        linen.Block(make("efla"))


def test_every_layer_is_there():
    assert {layer.__name__ for layer in LAYERS.values()} <= vars(linen).keys()


def test_gradients_and_the_initial_state():
    layer, x = make("efla"), tokens(5)
    params = linen.params_of(layer)
    graph, state = nnx.split(layer)

    @jax.jit
    def both(params, state):
        theirs = jax.grad(lambda params: jnp.sum(EFLA.apply({"params": params}, x)[0]))
        ours = jax.grad(lambda state: jnp.sum(nnx.merge(graph, state)(x)[0]))
        return theirs(params), ours(state)

    theirs, ours = both(params, state)
    assert_same(theirs, nnx.to_pure_dict(ours))
    initial = EFLA.apply({"params": params}, 3, nnx_method="init_state")
    jax.tree.map(np.testing.assert_array_equal, initial, layer.init_state(3))


def test_layers_inside_a_linen_model_have_names_of_their_own():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x, _ = linen.EFLA(WIDTH, num_heads=2, name="first")(x)
            return linen.LinearAttention(WIDTH, num_heads=2)(x)[0]

    params = jax.eval_shape(Model().init, jax.random.key(0), tokens(3))["params"]
    assert params.keys() == {"first", "Mixer_0"}
    assert jax.tree.map(jnp.shape, params["first"]) == jax.tree.map(jnp.shape, linen.params_of(make("efla")))


@pytest.mark.parametrize("load", [False, True], ids=["apply", "load"])
def test_parameters_that_do_not_fit_are_named(load):
    layer = make("efla")
    params = linen.params_of(layer)
    before = jax.tree.map(jnp.copy, params)
    del params["beta"]
    params["norm"], params["extra"] = {"scale": jnp.ones(3)}, jnp.ones(1)
    with pytest.raises(ValueError) as error:
        if load:
            linen.load_params(layer, params)
        else:
            EFLA.apply({"params": params}, tokens(3))
    for fault in (
        "beta/kernel is missing, it has shape (16, 2)",
        "extra is unknown",
        "norm/scale has shape (3,) and needs (8,)",
    ):
        assert fault in str(error.value)
    jax.tree.map(np.testing.assert_array_equal, linen.params_of(layer), before)


def test_boxed_parameters_are_unboxed():
    layer = make("efla")
    params = linen.params_of(layer)
    boxed = jax.tree.map(lambda x: nn.Partitioned(x, names=(None,) * x.ndim), params)
    linen.load_params(layer, boxed)
    jax.tree.map(np.testing.assert_array_equal, linen.params_of(layer), params)
