"""The language model: sizes, first loss, state, documents, ids."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eflax.models import CONFIG_NAMES, LanguageModel, named_config
from eflax.training.token_loss import chunked_cross_entropy, language_model_loss

PUBLISHED = {"deltanet-340m": 374.4, "efla-340m": 374.4, "deltanet-1.3b": 1365.7, "efla-1.3b": 1365.7}


def abstract(config, **options):
    return nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0), **options))


def million_parameters(name):
    leaves = jax.tree.leaves(nnx.state(abstract(named_config(name)), nnx.Param))
    return sum(leaf.size for leaf in leaves) / 1e6


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    assert round(million_parameters(name), 1) == PUBLISHED[name]


def test_layers_are_compared_at_equal_size():
    sizes = [million_parameters(name) for name in CONFIG_NAMES if name.endswith("-50m")]
    assert max(sizes) / min(sizes) < 1.02


# Both kinds of state in one program: a hybrid. Step by step, which compiles quickest.
HYBRID = named_config("efla-tiny", pattern=("efla", "transformer"), num_layers=4)


@cache
def hybrid():
    return LanguageModel(HYBRID, form="recurrent", max_length=64, rngs=nnx.Rngs(0))


@nnx.jit
def call(model, tokens, state=None, segment_ids=None):
    return model(tokens, state, segment_ids)


def some_tokens(time, seed=0):
    return jax.random.randint(jax.random.key(seed), (2, time), 0, 258)


def test_a_sequence_in_pieces_is_the_whole():
    tokens = some_tokens(18)
    whole, _ = call(hybrid(), tokens)
    first, state = call(hybrid(), tokens[:, :16])
    second, state = call(hybrid(), tokens[:, 16:17], state)
    third, _ = call(hybrid(), tokens[:, 17:], state)
    np.testing.assert_allclose(jnp.concatenate([first, second, third], 1), whole, atol=2e-5)
    assert whole.dtype == jnp.float32


def test_documents_do_not_see_each_other_and_padding_on_the_left_changes_nothing():
    tokens = some_tokens(18)
    ids = jnp.concatenate([jnp.zeros((2, 7), jnp.int32), jnp.ones((2, 11), jnp.int32)], 1)
    packed, _ = call(hybrid(), tokens, None, ids)
    changed, _ = call(hybrid(), tokens.at[:, :7].set(3), None, ids)
    np.testing.assert_array_equal(packed[:, 7:], changed[:, 7:])
    alone, _ = call(hybrid(), jnp.pad(tokens[:, 7:], ((0, 0), (0, 7))))
    np.testing.assert_allclose(packed[:, 7:], alone[:, :11], atol=2e-5)


def test_first_loss_is_that_of_a_uniform_guess():
    """With tied embeddings, at the width of the published 340m."""
    config = named_config("transformer-340m", num_layers=1, tied=True)
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (8, 33), 0, 32_000)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weight": jnp.ones((8, 32))}
    loss, metrics = nnx.jit(language_model_loss)(model, batch)
    assert abs(float(loss) - np.log(32_000)) < 0.1
    assert metrics["tokens"] == 8 * 32


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_chunked_loss_is_the_plain_loss(z_loss):
    draws = jax.random.split(jax.random.key(0), 3)
    hidden, readout = jax.random.normal(draws[0], (2, 13, 8)), jax.random.normal(draws[1], (8, 30))
    targets = jax.random.randint(draws[2], (2, 13), 0, 30)
    weight = jnp.ones((2, 13)).at[0, 4].set(0).at[1, 9:].set(0.5)
    poisoned = hidden.at[0, 4].set(jnp.nan)  # a token of weight 0 counts for nothing

    def plain(hidden, readout):
        logits = hidden @ readout
        lse = jax.nn.logsumexp(logits, -1)
        nll = lse - jnp.take_along_axis(logits, targets[..., None], 2)[..., 0]
        return (weight * (nll + z_loss * lse * lse)).sum() * 3.0, (weight * nll).sum()

    def chunked(hidden, readout):
        objective, nll = chunked_cross_entropy(hidden, readout, targets, weight, chunk_size=5, z_loss=z_loss)
        return objective * 3.0, nll  # the upstream gradient counts

    expected = jax.jit(jax.value_and_grad(plain, (0, 1), has_aux=True))(hidden, readout)
    results = jax.jit(jax.value_and_grad(chunked, (0, 1), has_aux=True))(hidden, readout)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5), results, expected)
    (sums, gradients) = jax.jit(jax.value_and_grad(chunked, (0, 1), has_aux=True))(poisoned, readout)
    np.testing.assert_allclose(sums[1], expected[0][1], rtol=2e-5)
    assert (gradients[0][0, 4] == 0).all()


def test_bad_ids_patterns_and_names_are_refused():
    with pytest.raises(ValueError, match="ids from 3 to 258 where vocab_size=258"):
        hybrid()(jnp.array([[3, 258]]))
    with pytest.raises(ValueError, match="no configuration 'efla-7b'"):
        named_config("efla-7b")
    with pytest.raises(ValueError, match="num_layers=24 is no multiple of the 5 blocks"):
        named_config("efla-340m", pattern=("efla",) * 4 + ("transformer",))
    with pytest.raises(ValueError, match="pattern='attention': there is no such layer"):
        named_config("efla-340m", pattern=("attention",))
    with pytest.raises(ValueError, match="depth=3 is no field"):
        named_config("efla-340m", depth=3)


@cache
def small(layers=4, dtype=jnp.float32):
    config = named_config(
        "efla-tiny", pattern=("efla", "transformer"), num_layers=layers, width=32, vocab_size=50
    )
    options = {"dtype": dtype, "param_dtype": dtype}
    return LanguageModel(config, form="recurrent", max_length=16, rngs=nnx.Rngs(0), **options)


def test_a_state_of_another_depth_or_pattern_is_refused():
    """A slice beyond a stack would be taken for its last one."""
    tokens, model = jnp.zeros((2, 1), jnp.int32), small()
    for layers in (2, 6):
        with pytest.raises(ValueError, match=f"stacked over {layers // 2} repeats .* the model has 2"):
            model(tokens, small(layers).init_state(2))
    with pytest.raises(ValueError, match="no 2 parts"):
        model(tokens, model.init_state(2)[:1])


def test_a_state_takes_the_dtype_that_the_layers_give_it(float64):
    model, tokens = small(dtype=jnp.float64), jnp.zeros((2, 3), jnp.int32)
    _, state = model(tokens)
    logits, _ = model(tokens[:, :1], state)
    assert np.isfinite(logits).all()


def test_a_model_without_a_state_is_mapped_over_a_mesh():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    graph, params = nnx.split(small())
    spec, tokens = jax.sharding.PartitionSpec("data"), jnp.zeros((2, 3), jnp.int32)

    def logits(params, tokens):
        return nnx.merge(graph, params)(tokens)[0]

    specs = {"in_specs": (jax.sharding.PartitionSpec(), spec), "out_specs": spec}
    mapped = jax.jit(jax.shard_map(logits, mesh=mesh, **specs))(params, tokens)
    np.testing.assert_allclose(mapped, small()(tokens)[0], atol=1e-5)
