"""The algebra of affine maps against plain matrices: S -> A S + c for every kind and every mixed pair."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eflax.cells import affine

K, V, BATCH = 4, 3, (2, 5)
KINDS = (affine.Additive, affine.Scalar, affine.Diagonal, affine.LowRank, affine.Dense)
pairs = pytest.mark.parametrize("second_kind", KINDS, ids=lambda kind: kind.__name__)
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def draw(kind, rng, batch=BATCH, dtype: type = np.float32, rank=2, sizes=(K, V)) -> Any:
    rows, columns = sizes

    def normal(*shape):
        return jnp.asarray(rng.normal(size=(*batch, *shape)), dtype)

    fields = {
        affine.Additive: dict,
        affine.Scalar: lambda: {"decay": normal()},
        affine.Diagonal: lambda: {"decay": normal(rows)},
        affine.LowRank: lambda: {"decay": normal(), "left": normal(rows, rank), "right": normal(rows, rank)},
        affine.Dense: lambda: {"matrix": normal(rows, rows)},
    }[kind]()
    return kind(offset=normal(rows, columns), **fields)


def plain(map_):
    """(A, c) of a map as NumPy arrays, read off its fields."""
    c = np.asarray(map_.offset, np.float64)
    eye = np.broadcast_to(np.eye(c.shape[-2]), (*c.shape[:-1], c.shape[-2]))
    match map_:
        case affine.Additive():
            A = eye
        case affine.Scalar():
            A = np.asarray(map_.decay, np.float64)[..., None, None] * eye
        case affine.Diagonal():
            A = np.asarray(map_.decay, np.float64)[..., None] * eye
        case affine.LowRank():
            left, right = np.asarray(map_.left, np.float64), np.asarray(map_.right, np.float64)
            A = np.asarray(map_.decay, np.float64)[..., None, None] * eye - left @ np.swapaxes(right, -1, -2)
        case _:
            A = np.asarray(map_.matrix, np.float64)
    return A, c


def assert_same(map_, A, c, rtol=1e-5):
    for x, reference in zip(plain(map_), (A, c), strict=True):
        assert x.shape == reference.shape
        np.testing.assert_allclose(x, reference, rtol=rtol, atol=rtol * 10)


@kinds
def test_apply_and_to_dense(kind):
    rng = np.random.default_rng(0)
    map_, state = draw(kind, rng), jnp.asarray(rng.normal(size=(*BATCH, K, V)), jnp.float32)
    A, c = plain(map_)
    np.testing.assert_allclose(affine.apply(map_, state), A @ np.asarray(state) + c, rtol=1e-5, atol=1e-5)
    dense = affine.to_dense(map_)
    assert isinstance(dense, affine.Dense)
    assert_same(dense, A, c)


@pairs
@kinds
def test_compose_is_the_matrix_product(kind, second_kind):
    rng = np.random.default_rng(1)
    first, second = draw(kind, rng), draw(second_kind, rng, rank=3)
    (A1, c1), (A2, c2) = plain(first), plain(second)
    composed = affine.compose(second, first)
    assert_same(composed, A2 @ A1, A2 @ c1 + c2)
    state = jnp.asarray(rng.normal(size=(*BATCH, K, V)), jnp.float32)
    one_by_one = affine.apply(second, affine.apply(first, state))
    np.testing.assert_allclose(affine.apply(composed, state), one_by_one, rtol=1e-4, atol=1e-4)
    assert composed.offset.dtype == jnp.float32


@kinds
def test_structure_survives(kind):
    """Composing two maps of one kind gives that kind, so that a scan can carry it; simpler ones are absorbed."""
    rng = np.random.default_rng(2)
    assert isinstance(affine.compose(draw(kind, rng), draw(kind, rng)), kind)
    if kind is not affine.Additive:
        assert isinstance(affine.compose(draw(kind, rng), draw(affine.Additive, rng)), kind)
        assert isinstance(affine.compose(draw(affine.Additive, rng), draw(kind, rng)), kind)


@kinds
def test_identity(kind):
    rng = np.random.default_rng(3)
    map_, state = draw(kind, rng), jnp.asarray(rng.normal(size=(*BATCH, K, V)), jnp.float32)
    identity = affine.identity(kind, state)
    assert isinstance(identity, kind)
    np.testing.assert_array_equal(affine.apply(identity, state), state)
    for composed in (affine.compose(identity, map_), affine.compose(map_, identity)):
        assert_same(composed, *plain(map_), rtol=1e-6)


def test_ranks_add():
    rng = np.random.default_rng(4)
    maps = [draw(affine.LowRank, rng, rank=rank) for rank in (1, 2, 3)]
    composed: Any = affine.compose(maps[2], affine.compose(maps[1], maps[0]))
    assert composed.left.shape == composed.right.shape == (*BATCH, K, 6)
    absorbed: Any = affine.compose(draw(affine.Scalar, rng), maps[1])
    assert absorbed.left.shape == (*BATCH, K, 2)


def test_rank_one_maps_are_the_cells_transition():
    """decay (I - a k k^T) S + w k v^T as a LowRank map, composed over tokens, equals the loop over tokens."""
    rng = np.random.default_rng(5)
    state, total = jnp.ones((K, V)), None
    for _ in range(6):
        k, v = (
            jnp.asarray(rng.normal(size=(K, 1)), jnp.float32),
            jnp.asarray(rng.normal(size=(1, V)), jnp.float32),
        )
        decay, a = jnp.float32(rng.uniform(0.5, 1)), jnp.float32(rng.uniform(0, 1))
        token = affine.LowRank(decay, decay * a * k, k, a * k @ v)
        state = decay * (state - a * k @ (k.T @ state)) + a * k @ v
        total = token if total is None else affine.compose(token, total)
    assert isinstance(total, affine.LowRank) and total.left.shape[-1] == 6
    np.testing.assert_allclose(affine.apply(total, jnp.ones((K, V))), state, rtol=1e-4, atol=1e-4)


@kinds
def test_maps_pass_through_jit_vmap_scan_and_grad(kind):
    rng = np.random.default_rng(6)
    first, second = draw(kind, rng), draw(kind, rng)
    composed = affine.compose(second, first)
    looped = [
        affine.compose(*(jax.tree.map(lambda x, i=i, j=j: x[i, j], map_) for map_ in (second, first)))
        for i in range(BATCH[0])
        for j in range(BATCH[1])
    ]
    looped = jax.tree.map(lambda *xs: jnp.stack(xs).reshape(*BATCH, *xs[0].shape), *looped)
    for other in (
        jax.jit(affine.compose)(second, first),
        jax.vmap(jax.vmap(affine.compose))(second, first),
        looped,
    ):
        for x, y in zip(jax.tree.leaves(composed), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    gradient = jax.grad(lambda m: affine.apply(affine.compose(second, m), m.offset).sum())(first)
    assert isinstance(gradient, kind)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind is not affine.LowRank], ids=lambda k: k.__name__
)
def test_associative_scan_equals_one_by_one(kind):
    rng = np.random.default_rng(7)
    maps = draw(kind, rng, batch=(9,))
    prefixes = jax.lax.associative_scan(lambda first, second: affine.compose(second, first), maps)
    state = expected = jnp.asarray(rng.normal(size=(K, V)), jnp.float32)
    for t in range(9):
        one, prefix = (jax.tree.map(lambda x, t=t: x[t], m) for m in (maps, prefixes))
        expected = affine.apply(one, expected)
        np.testing.assert_allclose(affine.apply(prefix, state), expected, rtol=1e-3, atol=1e-3)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    three=st.tuples(*[st.sampled_from(KINDS)] * 3),
    batch=st.sampled_from([(), (2, 3)]),
    sizes=st.sampled_from([(1, 1), (1, 4), (5, 1), (4, 3)]),
    rank=st.integers(0, 3),
)
def test_composition_is_associative(seed, three, batch, sizes, rank):
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        first, second, third = (draw(kind, rng, batch, np.float64, rank, sizes) for kind in three)
        left = plain(affine.compose(affine.compose(third, second), first))
        right = plain(affine.compose(third, affine.compose(second, first)))
    for x, y in zip(left, right, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)
