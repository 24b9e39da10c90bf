"""Every form of every cell equals the float64 oracle: outputs, final state, every gradient, in every regime."""

import harness
import numpy as np
import oracle
import pytest
import regimes
from budgets import BUDGETS, assert_close, excesses

SCALE = 0.7
BUDGET = BUDGETS["float32"]
WHOLE = ("A", "initial_state")  # inputs without the time axis
LONG_REGIMES = (
    "random",
    "correlated_keys",
    "repeated_key",
    "huge_keys",
    "mixed_magnitudes",
    "strong_decay_everywhere",
    "reset_inside_chunk",
)


def deviations(case_name, form, shape, regime_names):
    """One line for every quantity of every regime that leaves its budget; all regimes share one compilation."""
    run = harness.compiled(case_name, form, shape.chunk_size, SCALE)
    lines = []
    for regime in regime_names:
        inputs, weights, segment_ids, expected = harness.referee(case_name, regime, shape, scale=SCALE)
        if shape == regimes.BASE and segment_ids is None:
            segment_ids = np.zeros((shape.B, shape.T), np.int32)  # traced as packed documents are
        result = run(inputs, weights, segment_ids)
        for name in ("outputs", "state"):
            lines += excesses(result[name], expected[name], BUDGET.forward, f"{regime} {name}")
        lines += excesses(result["gradients"], expected["gradients"], BUDGET.backward, f"{regime} gradient")
    return "\n".join(lines)


@pytest.mark.parametrize(("case_name", "form"), harness.COVERING)
def test_regimes(case_name, form):
    lines = deviations(case_name, form, regimes.BASE, regimes.regimes_of(oracle.CASES[case_name]))
    assert not lines, lines


@pytest.mark.newest_jax
@pytest.mark.parametrize("shape", regimes.TAILS, ids=lambda shape: f"T{shape.T}")
@pytest.mark.parametrize(("case_name", "form"), harness.FEWER_FORMS)
def test_tails(case_name, form, shape):
    lines = deviations(case_name, form, shape, ["random", "final_state_only"])
    assert not lines, lines


@pytest.mark.parametrize(("case_name", "form"), harness.FEWER_FORMS)
def test_lengths_around_one_chunk(case_name, form):
    """Where a chunk is one token short or just full, T = C - 1 and C; gradients in the form that has chunks, at T = C.

    The reference is compiled for T = C + 1 alone: tokens of zeros at its end leave the state as it is.
    """
    inputs, (output_weights, state_weights), _ = harness.problem(case_name, "random", regimes.TAILS[-1])
    for T in (15, 16):
        weights = np.where(np.arange(17).reshape(-1, *[1] * (output_weights.ndim - 2)) < T, output_weights, 0)
        padded = {n: x if n in WHOLE else x.at[:, T:].set(0) for n, x in inputs.items()}
        start, expected = _first(T, padded), oracle.evaluate(case_name, padded, (weights, state_weights))
        if form == "chunkwise" and T == 16:
            result = harness.compiled(case_name, form)(start, (weights[:, :T], state_weights))
            gradients = _first(T, expected["gradients"])
            assert_close(result["gradients"], gradients, BUDGET.backward, f"T = {T} gradient")
        else:
            result = dict(zip(("outputs", "state"), harness.forward(case_name, form)(start), strict=True))
        assert_close(result["outputs"], expected["outputs"][:, :T], BUDGET.forward, f"T = {T} outputs")
        assert_close(result["state"], expected["state"], BUDGET.forward, f"T = {T} state")


def _first(T, inputs):
    return {name: x if name in WHOLE else x[:, :T] for name, x in inputs.items()}


@pytest.mark.parametrize(("case_name", "form"), harness.FEWER_FORMS)
def test_several_chunks_of_64(case_name, form):
    names = set(LONG_REGIMES) & set(regimes.regimes_of(oracle.CASES[case_name]))
    lines = deviations(case_name, form, regimes.LONG, sorted(names))
    assert not lines, lines
