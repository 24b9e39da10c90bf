"""Low, high and mixed precision: budgets by dtype, float32 states, outputs in the dtype of the values."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import regimes
from budgets import BUDGETS, assert_close

from eflax import cells

REGIMES = ("random", "correlated_keys", "strong_decay_every_fifth", "huge_keys")
RANK_ONE = [name for name in oracle.DEFAULTS if harness.has_scale(name)]


def check(case_name, form, dtype_name):
    budget = BUDGETS[dtype_name]
    state_dtype = "float64" if dtype_name == "float64" else "float32"
    for regime in set(REGIMES) & set(regimes.regimes_of(oracle.CASES[case_name])):
        inputs, weights, _, expected = harness.referee(case_name, regime, regimes.BASE, dtype_name)
        result = harness.compiled(case_name, form)(inputs, weights)
        assert result["outputs"].dtype == dtype_name
        assert all(leaf.dtype == state_dtype for leaf in jax.tree.leaves(result["state"]))
        assert all(
            result["gradients"][name].dtype == dtype_name for name in oracle.CASES[case_name].arguments
        )
        assert_close(
            (result["outputs"], result["state"]),
            (expected["outputs"], expected["state"]),
            budget.forward,
            regime,
        )
        assert_close(result["gradients"], expected["gradients"], budget.backward, regime)


@pytest.mark.parametrize(("case_name", "form"), harness.fewer_forms(oracle.DEFAULTS))
def test_bfloat16(case_name, form):
    check(case_name, form, "bfloat16")


FLOWS = harness.quick_forms(["efla", "gated_efla"])  # whose coefficients have branches of their own


@pytest.mark.parametrize(("case_name", "form"), [*harness.case_forms(harness.KINDS, ["chunkwise"]), *FLOWS])
def test_float16(case_name, form):
    check(case_name, form, "float16")


@pytest.mark.parametrize(("case_name", "form"), [*harness.KINDS_FORMS, *FLOWS])
def test_float64(float64, case_name, form):
    check(case_name, form, "float64")


MIXED = {"q": "bfloat16", "k": "float32", "v": "float16", "beta": "bfloat16", "g": "float32"}


@pytest.mark.parametrize(
    ("case_name", "form"),
    [
        *harness.case_forms(["linear_attention"], ["chunkwise"]),
        *harness.case_forms(["gated_delta_rule"]),
        *harness.quick_forms(["gated_efla"]),
    ],
)
def test_mixed_dtypes(case_name, form):
    inputs, weights, _ = harness.problem(case_name)
    inputs |= {name: inputs[name].astype(dtype) for name, dtype in MIXED.items() if name in inputs}
    expected = oracle.evaluate(case_name, inputs, weights)
    result = harness.compiled(case_name, form)(inputs, weights)
    assert result["outputs"].dtype == inputs["v"].dtype
    budget = BUDGETS["bfloat16"]
    assert_close(
        (result["outputs"], result["state"]), (expected["outputs"], expected["state"]), budget.forward
    )
    assert_close(result["gradients"], expected["gradients"], budget.backward)
    for name in oracle.CASES[case_name].arguments:
        assert result["gradients"][name].dtype == inputs[name].dtype


@pytest.mark.parametrize(
    ("case_name", "dtype_name"), [*((name, "bfloat16") for name in RANK_ONE), ("gated_efla", "float16")]
)
def test_decode_equals_prefill_in_low_precision(case_name, dtype_name):
    """A gate rounded in one path and not in the other shows here; the states are float32 in both."""
    inputs, _, _ = harness.problem(case_name, dtype=jnp.dtype(dtype_name))
    case, cell = oracle.CASES[case_name], harness.cell_of(case_name)
    _, whole = harness.forward(case_name, harness.portable_forms(cell)[-1])(inputs)
    state, step = inputs["initial_state"], jax.jit(cell.step)
    for t in range(regimes.BASE.T):
        state, _ = step(state, *(inputs[name][:, t] for name in case.arguments))
    assert_close(whole, oracle.as_float64(state), 1e-3)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "float64"), ("float64", "float32")])
def test_the_pair_of_states_keeps_the_finer_dtype(float64, dtypes):
    inputs, _, _ = harness.problem("linear_attention")
    S, z = (jnp.ones_like(s, dtype) for s, dtype in zip(inputs["initial_state"], dtypes, strict=True))
    z += jnp.finfo(dtypes[1]).eps.astype(z.dtype)  # lost in any coarser dtype
    inputs |= {"k": 0 * inputs["k"], "initial_state": (S, z)}
    token = [inputs[name][:, 0] for name in "qkv"]
    _, after_call = harness.call("linear_attention", inputs, form="recurrent")
    after_step, _ = cells.linear_attention.step((S, z), *token)
    for state in (after_call, after_step):
        assert {str(x.dtype) for x in state} == {"float64" if "float64" in dtypes else "float32"}
        np.testing.assert_array_equal(state[1], z)
    assert cells.linear_attention.read((S, z), token[0]).dtype == after_step[0].dtype


@pytest.mark.parametrize("case_name", oracle.DEFAULTS)
def test_float64_of_numpy_is_float32_without_x64(without_shape_checks, case_name):
    inputs, _, _ = harness.problem(case_name)
    cell, query = harness.cell_of(case_name), "q" if harness.has_scale(case_name) else "C"

    def call_step_and_read(inputs):
        tokens = [inputs[name] if name == "A" else inputs[name][:, 0] for name in cell.arguments]
        state = inputs["initial_state"]
        return (
            harness.call(case_name, inputs, form="recurrent"),
            cell.step(state, *tokens),
            cell.read(state, inputs[query][:, 0]),
        )

    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), inputs)
    jax.tree.map(np.testing.assert_array_equal, call_step_and_read(wide), call_step_and_read(inputs))


@pytest.mark.parametrize("dtype_name", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", harness.portable_forms(cells.linear_attention))
def test_state_beyond_the_range_of_float16(form, dtype_name):
    """v = 3000 and one key, nothing erased: S passes 65,504, which neither state nor read-out may notice."""
    T, dtype = 64, jnp.dtype(dtype_name)
    k = jnp.full((1, T, 1, 4), 0.5, dtype)
    v = jnp.full((1, T, 1, 4), 3000.0, dtype)
    inputs = {"q": k, "k": k, "v": v}
    o, (S, _) = harness.call("linear_attention", inputs, form=form, chunk_size=16)
    np.testing.assert_allclose(S, 0.5 * float(v[0, 0, 0, 0]) * T, rtol=1e-3)
    np.testing.assert_allclose(o.astype(jnp.float32), float(v[0, 0, 0, 0]), rtol=5e-3)


@pytest.mark.parametrize(("case_name", "form"), harness.case_forms(["delta_rule", "gated_delta_rule"]))
def test_residual_is_formed_before_rounding(case_name, form):
    """v = 4096 and S^T k = 4098 differ by less than a bfloat16 step: the increment is -2, not 0."""
    ones = jnp.ones((1, 1, 1), jnp.bfloat16)
    inputs = {
        "q": ones[..., None],
        "k": ones[..., None],
        "v": ones[..., None] * 4096,
        "beta": ones,
        "g": 0 * ones,
    }
    inputs["initial_state"] = jnp.full((1, 1, 1, 1), 4098.0)
    _, state = harness.call(case_name, inputs, form=form)
    assert float(state[0, 0, 0, 0]) == 4096.0


@pytest.mark.parametrize(("case_name", "form"), harness.case_forms(["efla", "gated_efla"]))
def test_rounded_keys_do_not_overshoot(case_name, form):
    """The energy of a key comes from the key as rounded: no token expands the state, however large the key."""
    inputs, _, _ = harness.problem(case_name, "huge_keys", dtype=jnp.bfloat16)
    inputs |= {"v": 0 * inputs["v"]}
    _, state = harness.forward(case_name, form)(inputs)
    after, before = (
        np.linalg.norm(np.asarray(x), 2, axis=(-2, -1)) for x in (state, inputs["initial_state"])
    )
    assert np.all(after <= 1.001 * before)
