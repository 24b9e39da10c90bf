"""Every layer: precision, life at the start, gradients, options and errors."""

import inspect
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_tables import EXEMPT, RECURRENT, SMALL, WIDTH, call, make, parameters, tokens

from eflax import cells, layers
from eflax.cells import UnsupportedForm
from eflax.layers import LAYERS

every_layer = pytest.mark.parametrize("name", LAYERS)


@nnx.jit
def loss_gradients(layer, x):
    """Gradients of a loss on outputs and states, with respect to the parameters and to x."""

    def loss(layer, x):
        y, state = layer(x)
        states = [s for s in jax.tree.leaves(state) if jnp.issubdtype(s.dtype, jnp.floating)]
        return sum((jnp.sum(s.astype(jnp.float32) ** 2) for s in states), jnp.sum(y.astype(jnp.float32) ** 2))

    return nnx.grad(loss, argnums=(0, 1))(layer, x)


# Precision


@every_layer
def test_sensitive_values_are_float32_under_a_bfloat16_policy(name):
    layer = make(name, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    for path, parameter in parameters(layer).items():
        exempt = path[-1] in EXEMPT[name] - {"bias"}
        assert parameter.dtype == (jnp.float32 if exempt else jnp.bfloat16), path
    y, state = call(layer, tokens(9))
    assert y.dtype == jnp.bfloat16 and y.shape == (2, 9, WIDTH)
    if name in RECURRENT:
        assert {s.dtype for s in jax.tree.leaves(state.recurrent)} == {jnp.dtype(jnp.float32)}


@every_layer
def test_bfloat16_is_near_float32(name):
    layer, half = make(name), make(name, dtype=jnp.bfloat16)
    y, y_half = call(layer, tokens(20))[0], call(half, tokens(20))[0].astype(jnp.float32)
    assert jnp.sqrt(jnp.mean((y - y_half) ** 2)) < 0.02 * jnp.sqrt(jnp.mean(y**2))


@pytest.mark.parametrize("name", ["gated-efla", "mamba"])  # those with the shared gate, and the other
def test_a_step_moves_the_decay_under_a_bfloat16_policy(name):
    """A step of 1e-4 on A_log ≈ 2 is below the resolution of bfloat16, so it shows what the parameter is kept in."""
    layer = make(name, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    gradients, _ = loss_gradients(layer, tokens(9))
    before = parameters(layer)
    nnx.update(
        layer,
        jax.tree.map(lambda p, g: p - (1e-4 * jnp.sign(g)).astype(p.dtype), nnx.state(layer), gradients),
    )
    for path, after in parameters(layer).items():
        if path[-1] in ("A_log", "dt_bias"):
            step = jnp.abs(after - before[path])
            assert 0.9e-4 < jnp.median(step) < 1.1e-4, path


@every_layer
def test_weight_decay_spares_norms_decays_skips_and_biases(name):
    layer = make(name)
    assert {path[-1] for path in parameters(layer) if layers.no_weight_decay(path)} == EXEMPT[name]
    mask = jax.tree_util.tree_map_with_path(lambda path, _: layers.no_weight_decay(path), nnx.state(layer))
    assert sum(jax.tree.leaves(mask)) == sum(layers.no_weight_decay(path) for path in parameters(layer))


# Life at the start


@nnx.jit
def head_outputs(layer, x):
    """The arguments of the cell and the normalised outputs of each head, before gate and output projection."""
    state = layer.init_state(x.shape[0])
    stream, _ = layer.convolution(layer.stream(x), state.tail)
    arguments = layer.arguments(x, stream)
    o, _ = layer.cell(**arguments, **layer.cell_options(), form="recurrent")
    return arguments, layer.norm(o)


@pytest.mark.parametrize(
    ("name", "width"),
    [("deltanet", 64), ("gated-deltanet", 64), *itertools.product(["efla", "gated-efla"], [64, 256])],
)
def test_heads_are_alive_at_the_start(name, width):
    """On unit-variance input the keys of EFLA edit the memory, and no head drowns in the epsilon of the norm."""
    layer = LAYERS[name](width, 2, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(2), (4, 64, width))
    arguments, o = head_outputs(layer, x)
    energy = jnp.sum(arguments["k"] ** 2, axis=-1)  # λ, of each token and head
    if "efla" in name:
        assert 0.5 < jnp.median(energy) * 32 / layer.key_dim < 4  # λ grows with K
    else:
        np.testing.assert_allclose(energy, 1.0, atol=1e-3)
    rms = jnp.sqrt(jnp.mean(o[:, 8:] ** 2, axis=(0, 1, 3)))
    assert jnp.all((rms > 0.9) & (rms <= 1.0)), rms


@every_layer
def test_the_output_is_alive_at_the_start(name):
    y, _ = call(make(name), tokens(20))
    assert 0.01 < jnp.sqrt(jnp.mean(y**2)) < 2


# Gradients


@every_layer
@pytest.mark.parametrize("kind", ["random", "zero", "padded"])
def test_gradients_are_finite(name, kind):
    x = tokens(20)
    x = {"random": x, "zero": 0 * x, "padded": x.at[:, 7:].set(0)}[kind]
    gradients, dx = loss_gradients(make(name), x)
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(gradients))
    assert bool(jnp.isfinite(dx).all())
    if kind == "random":  # and every parameter has a say
        assert all(bool(jnp.any(g != 0)) for g in jax.tree.leaves(gradients))


@pytest.mark.parametrize("name", ["efla", "transformer"])
def test_jit_equals_eager(name):
    layer, x = make(name), tokens(9)
    np.testing.assert_allclose(layer(x)[0], call(layer, x)[0], rtol=1e-5, atol=1e-6)


# Options and errors


def test_options_reach_the_cell():
    published, ablation = (make("gated-efla", variant=v) for v in (None, "decay_first"))
    x = tokens(9)
    assert published.variant == "published"
    assert not np.allclose(call(published, x)[0], call(ablation, x)[0], atol=1e-4)
    exact, euler = make("efla"), make("efla", order=1)
    arguments = euler.arguments(x, euler.stream(x))
    o, _ = euler.cell(**arguments, **euler.cell_options(), form="recurrent")
    delta_rule, _ = cells.delta_rule(**arguments, scale=8**-0.5, form="recurrent")
    assert delta_rule is not None
    np.testing.assert_allclose(o, delta_rule, rtol=1e-5, atol=1e-6)
    assert not np.allclose(call(exact, x)[0], call(euler, x)[0], atol=1e-4)
    assert make("efla", head_dim=4, expand_v=3.0).init_state(5).recurrent.shape == (5, 2, 4, 12)
    assert make("gated-deltanet").init_state(1).recurrent.shape == (1, 2, 8, 16)
    assert make("deltanet", num_value_heads=6).init_state(1).recurrent.shape == (1, 6, 8, 8)


def test_negative_eigenvalues_double_beta():
    x = tokens(9)
    plain, doubled = make("deltanet"), make("deltanet", allow_negative_eigenvalues=True)
    beta, twice = (layer.arguments(x, layer.stream(x))["beta"] for layer in (plain, doubled))
    np.testing.assert_allclose(twice, 2 * beta, rtol=1e-6)


@pytest.mark.parametrize("heads", [1, 2])
def test_grouped_value_heads_serve(heads):
    layer = LAYERS["gated-deltanet"](WIDTH, heads, num_value_heads=4, form="recurrent", rngs=nnx.Rngs(0))
    assert call(layer, tokens(9))[0].shape == (2, 9, WIDTH)


BAD_OPTIONS = {
    r"width=16 is not divisible by num_heads=3": ("efla", {"num_heads": 3}),
    r"expand \* width=32 is not divisible by num_heads=3": ("mamba2", {"num_heads": 3}),
    r"num_heads=4 is not divisible by num_groups=3": ("mamba2", {"num_groups": 3}),
    r"num_value_heads=3 is not divisible by num_heads=2": ("deltanet", {"num_value_heads": 3}),
    r"head_dim \* expand_v, is 0; it needs": ("efla", {"expand_v": 0.01}),
    r"num_heads=4 is not divisible by num_kv_heads=3": ("transformer", {"num_kv_heads": 3}),
    r"head_dim=3 is odd": ("transformer", {"head_dim": 3}),
    r"allow_negative_eigenvalues=True: EFLA": ("efla", {"allow_negative_eigenvalues": True}),
    r"variant='published': EFLA has no variants": ("efla", {"variant": "published"}),
    r"order=2: GatedEFLA has none": ("gated-efla", {"order": 2}),
    r"variant='other': GatedEFLA has \('published'": ("gated-efla", {"variant": "other"}),
}


@pytest.mark.parametrize("message", BAD_OPTIONS)
def test_options_that_do_not_fit_are_named(message):
    name, options = BAD_OPTIONS[message]
    with pytest.raises(ValueError, match=message):
        make(name, **SMALL[name] | options)


WRONG_VALUES: dict[Any, tuple] = dict.fromkeys(
    (int, int | None), (0, -1, 2.0, "2")
)  # by annotation, or by name
WRONG_VALUES |= dict.fromkeys(("dtype", "param_dtype"), ("float99", jnp.int32, None))
CHECKED_OPTIONS = [
    pytest.param(name, option.name, values, id=f"{name}-{option.name}")
    for name, layer in LAYERS.items()
    for option in inspect.signature(layer.__init__).parameters.values()
    if (values := WRONG_VALUES.get(option.name) or WRONG_VALUES.get(option.annotation))
]


@pytest.mark.parametrize(("name", "option", "values"), CHECKED_OPTIONS)
def test_sizes_and_types_are_checked_at_construction(name, option, values, without_shape_checks):
    for value in values:
        options = {"width": WIDTH} | SMALL[name] | {option: value}
        with pytest.raises(ValueError, match=rf"^{option}( is |=)"):
            LAYERS[name](**options, rngs=nnx.Rngs(0))


@every_layer
def test_calls_that_do_not_fit_are_named(name, without_shape_checks):
    layer, x = make(name), tokens(5)
    with pytest.raises(ValueError, match=r"^x has shape \(2, 5, 15\).* D = 16, as in the width of the layer"):
        layer(x[..., :15])
    for wrong in (x[0], x.astype(jnp.complex64), x.astype(jnp.int32), x.tolist()):
        with pytest.raises((TypeError, ValueError), match=r"^x "):
            layer(wrong)
    ids = np.zeros((2, 5), np.int32)
    for wrong in (ids[:, :4], ids.astype(np.float32), ids.tolist(), np.full((2, 5), 2**32)):
        with pytest.raises((TypeError, ValueError), match=r"^segment_ids "):
            layer(x, None, wrong)


@every_layer
def test_what_is_no_state_of_the_layer_is_refused(name, without_shape_checks):
    layer, x = make(name), tokens(5)
    for wrong in (x[:, 0], 3, jnp.zeros((2, 5), jnp.int32), tuple(layer.init_state(2))):
        with pytest.raises(TypeError, match=r"^state must be a \w+ from layer.init_state\(2\) or an earlier"):
            layer(x, wrong)


OTHER_STATES = {  # a layer, and whose state it is given
    "batch size": ("mamba", "mamba", {}, 3),
    "number of heads": ("efla", "efla", {"num_heads": 4}, 2),
    "kernel size": ("efla", "efla", {"kernel_size": 3}, 2),
    "no convolution": ("efla", "linear-attention", {}, 2),
    "a convolution": ("linear-attention", "efla", {}, 2),
    "kind of layer": ("mamba", "mamba2", {}, 2),
    "length of the cache": ("transformer", "transformer", {"max_length": 32}, 2),
}


@pytest.mark.parametrize("difference", OTHER_STATES)
def test_states_of_other_layers_are_refused(difference):
    name, other, options, batch_size = OTHER_STATES[difference]
    state = make(other, **SMALL[other] | options).init_state(batch_size)
    with pytest.raises(ValueError, match=r"^state has the shapes .* need .*, as from layer.init_state\(2\)"):
        make(name)(tokens(5), state)


@pytest.mark.parametrize("name", RECURRENT)
def test_the_form_is_checked_at_construction(name):
    with pytest.raises(UnsupportedForm, match=r"form='chunk-wise' does not exist for \w+; it has rec"):
        make(name, form="chunk-wise")


@pytest.mark.parametrize("name", ["efla", "mamba"])
def test_a_layer_for_another_device_can_be_built_and_says_so_when_called(name):
    kernels = jax.eval_shape(lambda: nnx.state(make(name, form="pallas_gpu"), nnx.Param))
    assert jax.tree.map(jnp.shape, kernels) == jax.tree.map(jnp.shape, nnx.state(make(name), nnx.Param))
    layer = make(name, form="pallas_gpu")
    reason = r"'s argument form='pallas_gpu' cannot serve: .* need a Hopper GPU.* 'cpu' \(form=None .*; build the layer"
    with pytest.raises(UnsupportedForm, match=f"^{type(layer).__name__}{reason}"):
        jax.eval_shape(lambda x: layer(x)[0], tokens(9))
    layer.set_form(None, layer.chunk_size)
    assert jax.eval_shape(lambda x: layer(x)[0], tokens(9)).shape == tokens(9).shape


def test_blocks_add_mixer_and_mlp():
    x = tokens(9)
    for options in ({"mlp_width": 24}, {"mlp_width": 0}):
        block = layers.Block(make("efla"), **options, rngs=nnx.Rngs(1))
        whole, _ = call(block, x)
        y, state = call(block, x[:, :4], block.init_state(2))
        rest, _ = call(block, x[:, 4:], state)
        np.testing.assert_allclose(jnp.concatenate([y, rest], axis=1), whole, rtol=1e-4, atol=1e-5)
    assert not hasattr(block, "mlp_norm")
    mixed, _ = call(block.mixer, block.mixer_norm(x))
    np.testing.assert_allclose(whole, x + mixed, rtol=1e-5, atol=1e-6)
    assert layers.swiglu_width(128) == 352 and layers.swiglu_width(1024, 256) == 2816
