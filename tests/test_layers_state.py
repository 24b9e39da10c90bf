"""Splitting a sequence into calls changes nothing, and documents do not see each other."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_tables import RECURRENT, WIDTH, call, make, tokens

from eflax.layers import LAYERS

every_layer = pytest.mark.parametrize("name", LAYERS)


def assert_close(x, reference):
    np.testing.assert_allclose(x, reference, rtol=1e-4, atol=1e-5)


def in_pieces(layer, x, sizes, state=None, segment_ids=None):
    outputs, start = [], 0
    for size in sizes:
        ids = None if segment_ids is None else segment_ids[:, start : start + size]
        y, state = call(layer, x[:, start : start + size], state, ids)
        outputs.append(y)
        start += size
    return jnp.concatenate(outputs, axis=1), state


def assert_same_state(a, b):
    jax.tree.map(assert_close, a, b)


@every_layer
def test_pieces_equal_the_whole(name):
    """Where neither state nor tail of a convolution is the one at the start; single tokens are below."""
    layer, x = make(name), tokens(18)
    whole, state = call(layer, x)
    pieces, carried = in_pieces(layer, x, (9, 9), layer.init_state(2))
    assert_close(pieces, whole)
    assert_same_state(state, carried)


@pytest.mark.parametrize("name", ["efla", "mamba2", "mamba"])
def test_pieces_equal_the_whole_in_the_default_form(name):
    layer, x = make(name, form=None, chunk_size=16), tokens(50)
    assert_close(in_pieces(layer, x, (33, 16, 1))[0], call(layer, x)[0])


@pytest.mark.newest_jax
@every_layer
def test_single_tokens_equal_the_whole(name):
    layer, x = make(name), tokens(18)
    whole, _ = call(layer, x)
    assert_close(in_pieces(layer, x, (1,) * 18)[0], whole)


@every_layer
def test_no_tokens_leave_the_state(name):
    layer = make(name)
    _, state = call(layer, tokens(18))
    y, after = call(layer, tokens(0), state, jnp.zeros((2, 0), jnp.int32))
    assert y.shape == (2, 0, WIDTH)
    assert all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True)
    )


# An id comes back in the second row: it is a new document all the same.
LENGTHS, IDS = (6, 3, 9), ((3, 0, 7), (4, 9, 4))


def packed_ids():
    return jnp.asarray([[i for n, i in zip(LENGTHS, row, strict=True) for _ in range(n)] for row in IDS])


@every_layer
def test_packed_documents_equal_separate_calls(name):
    layer, x = make(name), tokens(18)
    packed, state = call(layer, x, None, packed_ids())
    for start, stop in pairwise(np.cumsum((0, *LENGTHS))):  # alone; what follows, it does not see
        alone, _ = call(layer, jnp.roll(x, -start, axis=1))
        assert_close(packed[:, start:stop], alone[:, : stop - start])
    if name in RECURRENT:
        _, last = call(layer, x[:, -LENGTHS[-1] :], layer.init_state(2))
        assert_same_state(state[:2], last[:2])
    assert state.segment.tolist() == [7, 4]


@every_layer
def test_no_gradient_passes_a_boundary(name):
    layer, x = make(name), tokens(18)

    @nnx.jit
    def gradient(layer, x):
        return jax.grad(lambda x: jnp.sum(layer(x, None, packed_ids())[0][:, 9:] ** 2))(x)

    dx = np.asarray(gradient(layer, x))
    assert not dx[:, :9].any()
    assert np.abs(dx[:, 9:]).min(axis=-1).max() > 0


@every_layer
def test_documents_across_calls(name):
    """Where a call ends inside a document it continues; where one ends with its document the next starts anew."""
    layer, x = make(name), tokens(18)
    whole, _ = call(layer, x, None, packed_ids())
    assert_close(in_pieces(layer, x, (3,) * 6, layer.init_state(2), packed_ids())[0], whole)


@every_layer
def test_rows_restart_on_their_own(name):
    """A reused slot of a batch: the row with a new id starts from zero, the other one continues."""
    layer, x = make(name), tokens(12)
    ids = jnp.asarray([[1] * 6, [2] * 6])
    _, state = call(layer, x[:, :6], None, ids)
    y, _ = call(layer, x[:, 6:], state, jnp.asarray([[1] * 6, [3] * 6]))
    continued, _ = call(layer, x[:, 6:], state)  # without ids, both continue
    fresh, _ = call(layer, x[:, 6:])
    assert_close(y, jnp.stack([continued[0], fresh[1]]))
    assert not np.allclose(continued[1], fresh[1], atol=1e-3)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_nan_of_an_old_request_does_not_reach_a_new_one(name):
    layer, x = make(name), tokens(12)
    ids = jnp.ones((2, 6), jnp.int32)
    _, state = call(layer, jnp.full_like(x[:, :6], jnp.nan), None, ids)
    y, _ = call(layer, x[:, 6:], state, ids + 1)
    assert_close(y, call(layer, x[:, 6:])[0])
