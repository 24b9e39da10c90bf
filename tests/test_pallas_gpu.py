"""The GPU kernels without a GPU: in JAX's interpreter against the float64 oracle, with a race detector."""

from typing import NamedTuple

import harness
import jax
import jax.numpy as jnp
import kernels
import numpy as np
import pytest
from budgets import BUDGETS, Budget, assert_close
from regimes import Shape

from pallas_kernels import device
from pallas_kernels.rank_one import gates, gates_sm90, passage_sm90, segments
from pallas_kernels.rank_one.layout import Plan


class Case(NamedTuple):
    """One line of the table; the shape is (T, B, H, HV, K, V)."""

    cell: str
    regime: str
    dtype: str
    shape: tuple[int, int, int, int, int, int]
    packed: bool = False
    scale: float = 1.0
    segments: int = 1


# Where keys are alike or of many sizes, the gradients of rows, dR = Tᵀ dD, are small differences of values that were
# rounded to 16 bits, and gradients lose digits: this many times the budget of the other regimes.
HARD = {"correlated_keys": 2, "repeated_key": 4, "mixed_magnitudes": 4}

# Every cell, dtype, feature and size, in pairs rather than in all combinations: a case takes some ten seconds.
TABLE = [
    Case("efla", "huge_keys", "float16", (130, 1, 1, 1, 80, 100)),
    Case("gated_efla-log_rate", "mixed_magnitudes", "bfloat16", (65, 1, 1, 1, 64, 64)),
    Case("gated_delta_rule", "correlated_keys", "bfloat16", (130, 2, 1, 1, 64, 64), packed=True, scale=0.125),
    # Without decay, so that what enters the first segment reaches the last one.
    Case("gated_efla", "no_decay", "bfloat16", (190, 1, 1, 2, 64, 128), segments=3),
    Case("ssd", "strong_decay_everywhere", "bfloat16", (254, 1, 1, 1, 64, 64), packed=True, segments=2),
    Case("gated_delta_rule", "strong_decay_everywhere", "bfloat16", (254, 1, 1, 1, 64, 64), segments=2),
    # Keys so wide that registers hold one state only.
    Case("gated_delta_rule", "correlated_keys", "bfloat16", (130, 1, 1, 1, 200, 128), packed=True, scale=0.1),
    # So many heads, of 128 × 128, that the backward pass is one kernel.
    Case("efla", "repeated_key", "bfloat16", (130, 1, 1, 2, 128, 128)),
    Case("gated_delta_rule", "reset_tokens", "float16", (130, 1, 2, 2, 100, 128), packed=True, scale=0.5),
    Case("gated_efla", "no_decay", "bfloat16", (65, 2, 1, 1, 128, 128), segments=2),
    Case("ssd", "random", "float16", (100, 1, 1, 2, 128, 128), packed=True),
    Case("ssd", "strong_decay_every_fifth", "bfloat16", (1, 1, 1, 1, 64, 60)),
    Case("linear_attention-unnormalized", "random", "float16", (65, 2, 1, 1, 64, 63), packed=True),
]


def name_of(case):
    sizes = "x".join(map(str, case.shape))
    return "-".join([case.cell, case.regime, case.dtype, sizes, *(["packed"] if case.packed else [])])


def check(case, budget):
    """Compare outputs, states and gradients of all inputs with the oracle's."""
    t, b, h, hv, k, v = case.shape
    shape = Shape(T=t, B=b, H=h, HV=hv, K=k, V=v)
    inputs, weights = kernels.problem(case.cell, case.regime, shape, case.dtype)
    ids = kernels.segment_ids(shape) if case.packed else None
    expected = kernels.expected(case.cell, inputs, weights, ids, case.scale)
    with kernels.interpreted(case.segments):
        result = kernels.evaluate(case.cell, inputs, weights, ids, case.scale)
        jax.block_until_ready(result)
    for name in ("outputs", "state"):
        assert_close(result[name], expected[name], budget.forward, name)
    assert_close(result["gradients"], expected["gradients"], budget.backward)
    assert result["outputs"].dtype == case.dtype
    assert {x.dtype.name for x in jax.tree.leaves(result["state"])} == {"float32"}


@pytest.mark.parametrize("case", TABLE, ids=name_of)
def test_kernels_agree_with_the_oracle(case):
    forward, backward = BUDGETS[case.dtype]
    check(case, Budget(forward, backward * HARD.get(case.regime, 1)))


def test_normalized_linear_attention_has_a_budget_of_its_own():
    """The gradient of q is a small difference of two products of 16-bit cotangents: 4 %, where others keep 0.4 %."""
    case = Case("linear_attention", "random", "bfloat16", (65, 1, 1, 1, 64, 40))
    check(case, Budget(forward=BUDGETS["bfloat16"].forward, backward=6e-2))


@pytest.mark.parametrize(
    ("cell", "heads", "size"),
    [("gated_efla", 2, 128), ("delta_rule", 2, 128), ("gated_efla", 1, 64), ("ssd", 2, 128), ("ssd", 1, 64)],
)
def test_the_state_alone(cell, heads, size):
    """Without queries nothing is read out, and the gradients are those of the final state."""
    shape = Shape(T=65, B=1, H=1, HV=heads, K=size, V=size)
    inputs, (_, weight) = kernels.problem(cell, "final_state_only", shape)
    zeros = np.zeros(inputs["v"].shape, np.float32)
    expected = kernels.expected(cell, inputs, (zeros, weight))
    with kernels.interpreted():
        result = kernels.evaluate(cell, inputs | {"q": None}, (None, weight))
        jax.block_until_ready(result)
    assert result["outputs"] is None and result["gradients"].pop("q") is None
    del expected["gradients"]["q"]
    assert_close(result["state"], expected["state"], BUDGETS["bfloat16"].forward)
    assert_close(result["gradients"], expected["gradients"], BUDGETS["bfloat16"].backward)


@pytest.mark.parametrize(("tokens", "segments"), [(3, 1), (66, 1), (67, 2)])
def test_without_an_initial_state_it_is_zeros(tokens, segments):
    """By the kernel for a few tokens, by the others, and by those that cut a sequence."""
    shape = Shape(T=tokens, B=1, H=1, HV=2, K=128, V=128)
    inputs, weights = kernels.problem("gated_efla", "zero_initial_state", shape)
    expected = kernels.expected("gated_efla", inputs, weights)
    del inputs["initial_state"], expected["gradients"]["initial_state"]
    with kernels.interpreted(segments):
        result = jax.block_until_ready(kernels.evaluate("gated_efla", inputs, weights))
    for name in ("outputs", "state"):
        assert_close(result[name], expected[name], BUDGETS["bfloat16"].forward, name)
    assert_close(result["gradients"], expected["gradients"], BUDGETS["bfloat16"].backward)


@pytest.mark.parametrize(("square", "beta"), [(1.0, -1.0), (9.0, 1.0)])
def test_what_edits_lengthen_as_much_as_decay_shortens_passes_segments(square, beta):
    """The factor of the state along its one key is 1 or −1 a token, of which the decay is e^-0.7 or e^-2.1."""
    shape = Shape(T=129, B=1, H=1, HV=1, K=64, V=64)
    inputs, _ = kernels.problem("gated_delta_rule", "random", shape)
    k = jnp.zeros_like(inputs["k"]).at[..., 0].set(square**0.5)
    g = jnp.full_like(inputs["g"], -np.log(abs(1.0 - square * beta)))
    v, state = jnp.zeros_like(inputs["v"]), jnp.ones_like(inputs["initial_state"])
    inputs |= {"k": k, "v": v, "beta": jnp.full_like(inputs["beta"], beta), "g": g, "initial_state": state}
    expected = harness.call("gated_delta_rule", inputs, form="recurrent")[1]
    with kernels.interpreted(segments=2):
        found = harness.call("gated_delta_rule", inputs, form="pallas_gpu")[1]
    np.testing.assert_allclose(found[..., 0, :], expected[..., 0, :], rtol=0.3)
    assert abs(expected[0, 0, 0, 0]) > 0.5


def test_chunks_that_decay_hides_are_skipped():
    """Of those of which less than e^-FAINT arrives the nearest is passed; where it is not known what does, all are.

    In the last row an edit that lengthens stands between two decays.
    """
    left = jnp.array([[[-24, -9, -2, -23], [-21, -1, -1, 0], [-np.inf] * 4, [np.nan] * 4, [-30, 28, -28, 0]]])
    whole, first, last = segments._hidden(left)
    np.testing.assert_array_equal(whole, [[4, 0, 4, 0, 4]])
    np.testing.assert_array_equal(first, [[2, 0, 3, 0, 0]])
    np.testing.assert_array_equal(last, [[2, 0, 3, 0, 1]])


@pytest.mark.parametrize(("heads", "packed"), [(8, True), (3, False)])
def test_gates_and_their_gradients_are_those_of_plain_xla(heads, packed):
    """Also where a log-decay is −inf or beyond what is kept of it, and where heads do not fill a block."""
    rng = np.random.default_rng(0)
    erase, write, decay = (jnp.asarray(rng.random((2, 128, heads)), jnp.float32) for _ in range(3))
    decay = (-decay).at[0, 5, 0].set(-jnp.inf).at[1, 70, heads - 1].set(-1000.0)
    restart = jnp.asarray(rng.random((2, 128)) < 0.05) if packed else None
    dgates = jnp.asarray(rng.standard_normal((2, heads, 2, 5, 64)), jnp.float32)
    rows = gates_sm90.Rows(erase=(0,), write=(1,), sums=(2,), minus_sums=(3,), last=(4,))
    with kernels.interpreted():
        plan = Plan(2, heads, 64, 64, True, True, packed, interpret=device.interpretation())
        found = jax.block_until_ready(gates_sm90.put_gates(erase, write, decay, restart, plan))
        gradients = jax.block_until_ready(gates_sm90.gate_gradients(dgates, decay, restart, rows, plan))
    expected = gates.gate_rows(erase, write, gates.decay_sums(decay, write, restart), restart)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    da, dw, dsums, minus, last = (dgates[..., i, :] for i in range(5))
    dsums = (dsums - minus).at[..., -1].add(last.sum(-1))
    _, transpose = jax.vjp(lambda g: gates.decay_sums(g, write, restart), decay)
    for x, y in zip(gradients, (gates.unchunked(da), gates.unchunked(dw), *transpose(dsums)), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.parametrize("reverse", [False, True])
def test_states_pass_through_segments_in_float32(reverse):
    """Two sequences and heads, four segments, and more values than one warpgroup holds."""
    rng = np.random.default_rng(0)
    moved = rng.standard_normal((8, 2, 128, 128)) / 12
    added, first = rng.standard_normal((8, 2, 128, 192)), rng.standard_normal((2, 2, 128, 192))
    expected = np.zeros((2, 4, *first.shape[1:]))
    order = range(3, -1, -1) if reverse else range(4)
    state = first
    hidden = jnp.zeros((8, 2), jnp.int32).at[5, 1].set(1)
    moved[5, 1] = 0.0
    unread = moved.copy()
    unread[5, 1] = np.nan
    for i in order:
        expected[:, i] = state
        m = moved.reshape(2, 4, 2, 128, 128)[:, i]
        state = (np.swapaxes(m, 2, 3) if reverse else m) @ state + added.reshape(2, 4, *state.shape[1:])[:, i]
    with kernels.interpreted():
        plan = Plan(1, 2, 128, 192, True, True, False, segments=4, interpret=device.interpretation())
        m, e, state = (jnp.asarray(x, jnp.float32) for x in (unread, added, first))
        found = jax.block_until_ready(passage_sm90.pass_segments(m, hidden, e, state, plan, reverse=reverse))
    # Tensor cores truncate their sums. Two bfloat16 parts a number in place of three would add 5e-5.
    allowed = 4e-5 if jax.default_backend() == "gpu" else 5e-6
    np.testing.assert_allclose(found, expected.reshape(found.shape), rtol=0, atol=allowed)
