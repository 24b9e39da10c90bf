"""The state as an object: carried from piece to piece, from chunk to single tokens, absent, or read alone."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import regimes
from budgets import BUDGETS, assert_close

from eflax import cells

SHAPE = regimes.Shape(T=50, B=1, HV=2)
FORWARD, BACKWARD = BUDGETS["float32"]
DECODERS = pytest.mark.parametrize("case_name", oracle.CASES)


def part(case_name, inputs, start, stop, state):
    pieces = {
        n: inputs[n] if n == "A" else inputs[n][:, start:stop] for n in oracle.CASES[case_name].arguments
    }
    return pieces | {"initial_state": state}


def token(case_name, inputs, t):
    return [inputs[n] if n == "A" else inputs[n][:, t] for n in oracle.CASES[case_name].arguments]


@pytest.mark.parametrize(("case_name", "form"), harness.FEWER_FORMS)
def test_pieces_with_carried_state_equal_the_whole(case_name, form):
    inputs, _, _ = harness.problem(case_name, "random", SHAPE)
    whole, final = harness.forward(case_name, "recurrent")(inputs)
    pieces, state, start = [], inputs["initial_state"], 0
    for length in (17, 16, 1, 16):
        piece = part(case_name, inputs, start, start + length, state)
        outputs, state = harness.forward(case_name, form)(piece)
        pieces.append(outputs)
        start += length
    assert_close(jnp.concatenate(pieces, axis=1), np.asarray(whole), FORWARD)
    assert_close(state, oracle.as_float64(final), FORWARD)


@DECODERS
def test_steps_equal_the_whole(case_name):
    inputs, _, _ = harness.problem(case_name, "random", SHAPE)
    case, cell = oracle.CASES[case_name], harness.cell_of(case_name)
    expected, final = harness.forward(case_name, harness.portable_forms(cell)[-1])(inputs)
    step = jax.jit(lambda state, *arguments: cell.step(state, *arguments, **case.options))
    state, outputs = inputs["initial_state"], []
    for t in range(SHAPE.T):
        state, output = step(state, *token(case_name, inputs, t))
        outputs.append(output)
    assert_close(jnp.stack(outputs, axis=1), np.asarray(expected), FORWARD)
    assert_close(state, oracle.as_float64(final), FORWARD)


@pytest.mark.parametrize(("case_name", "form"), harness.FEWER_FORMS)
def test_one_token_is_one_step(case_name, form):
    inputs, _, _ = harness.problem(case_name, "random", regimes.BASE)
    case, scale = oracle.CASES[case_name], {"scale": 0.7} if harness.has_scale(case_name) else {}
    state, output = harness.cell_of(case_name).step(
        inputs["initial_state"], *token(case_name, inputs, 3), **scale, **case.options
    )
    one = part(case_name, inputs, 3, 4, inputs["initial_state"])
    outputs, final = harness.call(case_name, one, form=form, **scale)
    assert_close(outputs[:, 0], np.asarray(output), 1e-6)
    assert_close(final, oracle.as_float64(state), 1e-6)


@pytest.mark.parametrize(("case_name", "form"), harness.case_forms(harness.KINDS, ["chunkwise"]))
def test_decode_continues_a_prefill(case_name, form):
    """K and V are not confused; that all forms leave the same state is a matter of the pieces above."""
    inputs, _, _ = harness.problem(case_name, "random", SHAPE)
    expected, final = harness.forward(case_name, "recurrent")(inputs)
    prefill = part(case_name, inputs, 0, SHAPE.T - 1, inputs["initial_state"])
    _, state = harness.forward(case_name, form)(prefill)
    state, output = harness.cell_of(case_name).step(state, *token(case_name, inputs, SHAPE.T - 1))
    assert_close(output, np.asarray(expected[:, -1]), FORWARD)
    assert_close(state, oracle.as_float64(final), FORWARD)


@pytest.mark.parametrize(("case_name", "form"), harness.quick_forms(harness.KINDS))
def test_no_initial_state_is_a_zero_one(case_name, form):
    inputs, weights, _, expected = harness.referee(case_name, "zero_initial_state", regimes.BASE)
    result = harness.compiled(case_name, form)(inputs | {"initial_state": None}, weights)
    for name in ("outputs", "state"):
        assert_close(result[name], expected[name], FORWARD, name)
    for name in oracle.CASES[case_name].arguments:
        assert_close(result["gradients"][name], expected["gradients"][name], BACKWARD, name)


@DECODERS
def test_init_state_is_zeros_of_the_right_shape(case_name):
    shape = regimes.BASE
    sizes = (
        (shape.B, shape.HV, shape.K, shape.V) if harness.has_scale(case_name) else (shape.B, shape.V, shape.K)
    )
    state = harness.cell_of(case_name).init_state(*sizes)
    like = harness.problem(case_name)[0]["initial_state"]
    assert jax.tree.structure(state) == jax.tree.structure(like)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
        assert (x.shape, x.dtype) == (y.shape, jnp.float32)
        assert not np.any(x)


@pytest.mark.parametrize(("case_name", "form"), harness.DISTINCT_FORMS)
def test_empty_sequence_returns_the_initial_state(case_name, form):
    inputs, _, _ = harness.problem(case_name, "random", regimes.BASE._replace(T=0))
    for ids in (None, jnp.zeros((regimes.BASE.B, 0), jnp.int32)):
        outputs, state = harness.call(case_name, inputs, ids, form=form)
        values = inputs["v" if harness.has_scale(case_name) else "x"]
        assert (outputs.shape, outputs.dtype) == (values.shape, values.dtype)
        for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(inputs["initial_state"]), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("case_name", ["ssd", "gated_delta_rule", "selective_ssm"])
def test_chunk_size_changes_nothing(case_name):
    """Enough rows, heads and chunks that an implementation may well work through them in groups."""
    shape = regimes.Shape(T=200, B=4, K=6, V=5)
    inputs, weights, _ = harness.problem(case_name, "random", shape)
    ids = np.stack(
        [np.repeat(np.arange(5), lengths) for lengths in ([1, 63, 30, 34, 72], [100, 12, 1, 1, 86])]
    )
    ids = jnp.asarray(np.tile(ids, (2, 1)), jnp.int32)
    first, *others = (
        harness.compiled(case_name, "chunkwise", size)(inputs, weights, ids) for size in (16, 64)
    )
    for result in others:
        assert_close(result, oracle.as_float64(first), 1e-5)


@pytest.mark.parametrize(
    ("case_name", "form"),
    [
        *harness.case_forms(["linear_attention", "ssd"], ["chunkwise"]),
        *harness.case_forms(["gated_delta_rule", "selective_ssm"]),
        *harness.quick_forms(["linear_attention-unnormalized", "gated_efla"]),
    ],
)
def test_state_alone_and_read_out_of_it(case_name, form):
    """Without queries only the final state is computed; `read` gives the last output from it."""
    inputs, _, _ = harness.problem(case_name)
    case, query = oracle.CASES[case_name], "q" if harness.has_scale(case_name) else "C"
    outputs, state = harness.forward(case_name, form)(inputs)
    nothing, alone = harness.forward(case_name, form)(inputs | {query: None})
    assert nothing is None
    assert_close(alone, oracle.as_float64(state), 1e-6)
    options = {name: value for name, value in case.options.items() if name == "normalize"}
    last = harness.cell_of(case_name).read(alone, inputs[query][:, -1], **options)
    assert_close(last, np.asarray(outputs[:, -1]), FORWARD)


@pytest.mark.parametrize("case_name", harness.KINDS)
def test_default_form_is_one_of_the_forms(case_name):
    inputs, _, _ = harness.problem(case_name)
    results = [harness.call(case_name, inputs, form=form) for form in (None, "recurrent")]
    assert_close(results[0], oracle.as_float64(results[1]), FORWARD)


@pytest.mark.parametrize("empty", ["B", "HV", "K", "V"])
@pytest.mark.parametrize(("case_name", "form"), harness.case_forms(("gated_efla",)))
def test_empty_axes_give_empty_or_zero_results(case_name, form, empty):
    sizes = {"B": 2, "T": 20, "H": 2, "HV": 2, "K": 3, "V": 4} | {empty: 0}
    b, t, h, hv, k, v = sizes.values()
    keys, gates = jnp.ones((b, t, h, k)), jnp.ones((b, t, hv))
    o, state = cells.gated_efla(keys, keys, jnp.ones((b, t, hv, v)), gates, -gates, form=form, chunk_size=8)
    assert o is not None and o.shape == (b, t, hv, v) and state.shape == (b, hv, k, v)
    assert not jnp.any(o)


@pytest.mark.parametrize("form", harness.portable_forms(cells.ssd))
def test_a_log_decay_of_minus_infinity_forgets_everything(form):
    k = jnp.ones((1, 20, 1, 2))
    g = jnp.zeros((1, 20, 1)).at[0, 9].set(-jnp.inf)
    o, _ = cells.ssd(k, k, k[..., :1], g, form=form, chunk_size=8)
    assert o is not None
    expected = 2.0 * np.array([*range(1, 10), *range(1, 12)])
    np.testing.assert_allclose(o[0, :, 0, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("form", harness.portable_forms(cells.selective_ssm))
def test_a_rate_of_minus_infinity_keeps_one_token(form):
    """Also where a chunk is padded, with dt = 0."""
    x = jnp.ones((1, 20, 2))
    A = jnp.asarray([[-jnp.inf], [0.0]])
    y, state = cells.selective_ssm(x, x, A, x[..., :1], x[..., :1], form=form, chunk_size=8)
    assert y is not None
    np.testing.assert_allclose(y[0, :, 0], np.ones(20), rtol=1e-6)
    np.testing.assert_allclose(state[0, :, 0], [1, 20], rtol=1e-6)
