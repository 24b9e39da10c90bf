"""The TPU kernels without a TPU: in JAX's interpreter against the float64 oracle, with a race detector; and lowered."""

import itertools
from typing import NamedTuple
from unittest import mock

import harness
import jax
import jax.numpy as jnp
import kernels
import numpy as np
import pytest
from budgets import BUDGETS, assert_close, error
from jax.experimental.pallas import tpu as pltpu
from kernels_tpu import interpreted, tpu
from regimes import Shape

from eflax import cells
from pallas_kernels import device, walk_tpu
from pallas_kernels.rank_one import tpu as rank_one
from pallas_kernels.rank_one.tiles_tpu import choose_heads
from pallas_kernels.selective_scan import tpu as selective_scan

FORM = "pallas_tpu"


class Case(NamedTuple):
    """One line of the table; the shape is (T, B, H, HV, K, V)."""

    cell: str
    regime: str
    dtype: str
    shape: tuple[int, int, int, int, int, int]
    packed: bool = False
    scale: float = 1.0


# As for the GPU kernels: gradients lose digits where keys are alike or of many sizes, in 16 bits.
HARD = {"correlated_keys": 2, "repeated_key": 4, "mixed_magnitudes": 4}

# Every cell, dtype, feature, kind of size, in pairs rather than in all combinations.
TABLE = [
    Case("gated_efla", "random", "bfloat16", (130, 2, 2, 4, 64, 128), packed=True),
    Case("delta_rule", "random", "float32", (65, 1, 1, 3, 60, 100), packed=True, scale=0.5),
    Case("efla", "repeated_key", "float32", (130, 1, 1, 1, 128, 64)),
    Case("gated_delta_rule", "correlated_keys", "bfloat16", (130, 1, 2, 2, 64, 64), scale=0.125),
    Case("efla", "huge_keys", "bfloat16", (64, 1, 1, 1, 192, 256)),
    Case("gated_efla-log_rate", "mixed_magnitudes", "float32", (65, 1, 1, 1, 64, 64)),
    Case("gated_delta_rule", "reset_tokens", "float32", (70, 1, 1, 1, 80, 60)),
    Case("ssd", "strong_decay_everywhere", "bfloat16", (130, 1, 1, 4, 128, 128), packed=True),
    Case("linear_attention-unnormalized", "random", "float32", (9, 2, 1, 1, 64, 63)),
    Case(
        "gated_efla", "random", "bfloat16", (3, 2, 1, 2, 64, 32), packed=True, scale=0.5
    ),  # decode, from here on
    Case("efla", "random", "float32", (8, 1, 2, 2, 60, 128)),
]


def name_of(case):
    return "-".join([case.cell, case.regime, case.dtype, "x".join(map(str, case.shape))])


def evaluate(case, inputs, weights, ids=None):
    return jax.device_get(harness.compiled(case.cell, FORM, 64, case.scale)(inputs, weights, ids))


@pytest.mark.parametrize("case", TABLE, ids=name_of)
def test_kernels_agree_with_the_oracle(case):
    shape = Shape(**dict(zip(("T", "B", "H", "HV", "K", "V"), case.shape, strict=True)))
    inputs, weights = kernels.problem(case.cell, case.regime, shape, case.dtype)
    ids = kernels.segment_ids(shape) if case.packed else None
    expected = kernels.expected(case.cell, inputs, weights, ids, case.scale)
    with interpreted(seed=TABLE.index(case)):
        result = evaluate(case, inputs, weights, ids)
    budget = BUDGETS[case.dtype]
    hard = HARD.get(case.regime, 1) if case.dtype == "bfloat16" else 1
    for name in ("outputs", "state"):
        assert_close(result[name], expected[name], budget.forward, name)
    assert_close(result["gradients"], expected["gradients"], budget.backward * hard)
    assert result["outputs"].dtype == case.dtype
    assert {x.dtype.name for x in jax.tree.leaves(result["state"])} == {"float32"}


SMALL = Case("gated_delta_rule", "random", "float32", (130, 1, 1, 2, 64, 64))


def small():
    shape = Shape(**dict(zip(("T", "B", "H", "HV", "K", "V"), SMALL.shape, strict=True)))
    return kernels.problem(SMALL.cell, SMALL.regime, shape, SMALL.dtype)


def test_an_axis_wrongly_called_parallel_is_noticed():
    """The interpreter shuffles programs along parallel axes: chunks out of order give another result."""
    inputs, weights = small()
    expected = kernels.expected(SMALL.cell, inputs, weights)
    params = pltpu.CompilerParams(dimension_semantics=("parallel",) * 3)
    wrong = mock.Mock(return_value=params)
    errors = []
    for seed in range(20, 23):
        with mock.patch.object(walk_tpu.pltpu, "CompilerParams", wrong), device.interpreted("tpu", seed=seed):
            outputs, _ = jax.device_get(harness.call(SMALL.cell, inputs, form=FORM))
        errors.append(error(outputs, expected["outputs"]))
    assert wrong.call_count == 3 and max(errors) > 1e-2


@pytest.mark.parametrize("tokens", [2, 70])
def test_without_an_initial_state_it_is_zeros(tokens):
    shape = Shape(T=tokens, B=1, H=1, HV=1, K=64, V=64)
    inputs, weights = kernels.problem("efla", "zero_initial_state", shape, "float32")
    expected = kernels.expected("efla", inputs, weights)
    del inputs["initial_state"], expected["gradients"]["initial_state"]
    with interpreted():
        result = jax.block_until_ready(kernels.evaluate("efla", inputs, weights, form=FORM))
    for name in ("outputs", "state"):
        assert_close(result[name], expected[name], BUDGETS["float32"].forward, name)
    assert_close(result["gradients"], expected["gradients"], BUDGETS["float32"].backward)


def test_what_is_kept_after_strong_decays_keeps_its_digits():
    """A chunk's sum of log-decays is then a large number, whose own rounding is 1e-3 of a factor."""
    inputs, weights = kernels.problem("gated_delta_rule", "random", Shape(64, 1, 1, 1, 64, 64), "float32")
    inputs |= {"g": jnp.where(jnp.arange(64)[None, :, None] < 40, -jnp.inf, jnp.float32(-0.01))}
    expected = kernels.expected("gated_delta_rule", inputs, weights)
    with interpreted():
        result = kernels.evaluate("gated_delta_rule", inputs, weights, form=FORM)
        jax.block_until_ready(result)
    for name in ("outputs", "state"):
        assert_close(result[name], expected[name], BUDGETS["float32"].forward, name)
    assert_close(result["gradients"], expected["gradients"], BUDGETS["float32"].backward)


@pytest.mark.parametrize("cell", ["gated_efla", "ssd"])
def test_the_state_alone(cell):
    """Without queries nothing is read out, and the gradients are those of the final state."""
    inputs, (_, weight) = kernels.problem(cell, "final_state_only", dtype="float32")
    zeros = np.zeros(inputs["v"].shape, np.float32)
    expected = kernels.expected(cell, inputs, (zeros, weight))
    with interpreted():
        result = kernels.evaluate(cell, inputs | {"q": None}, (None, weight), form=FORM)
        jax.block_until_ready(result)
    assert result["outputs"] is None and result["gradients"].pop("q") is None
    del expected["gradients"]["q"]
    assert_close(result["state"], expected["state"], BUDGETS["float32"].forward)
    assert_close(result["gradients"], expected["gradients"], BUDGETS["float32"].backward)


def test_vmap_is_a_loop():
    inputs, _ = small()
    both = {name: jnp.stack([x, x * 0.5]) for name, x in inputs.items()}
    with interpreted():
        outputs, state = jax.vmap(lambda x: harness.call(SMALL.cell, x, form=FORM))(both)
        for i in range(2):
            single = harness.call(SMALL.cell, {name: x[i] for name, x in both.items()}, form=FORM)
            np.testing.assert_allclose(outputs[i], single[0], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(state[i], single[1], rtol=1e-5, atol=1e-6)


def test_a_step_is_one_kernel_that_takes_the_memory_of_a_donated_state():
    inputs, _ = kernels.problem("gated_efla", shape=Shape(T=1, B=2, H=2, HV=4, K=128, V=128))
    token = [inputs[name][:, 0] for name in ("q", "k", "v", "beta", "g")]
    step = jax.jit(harness.cell_of("gated_efla").step, donate_argnums=0)
    with tpu():
        text = step.trace(inputs["initial_state"], *token).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("rank_one_decode_tpu") == 1 and "tf.aliasing_output" in text
    assert "output_operand_alias" in text


@pytest.mark.parametrize(
    ("cell", "residuals"), [("efla", rank_one.RESIDUALS), ("selective_ssm", selective_scan.RESIDUALS)]
)
def test_residuals_that_a_policy_saves_are_not_computed_again(cell, residuals):
    with tpu():
        assert set(kernels.launches_under_checkpoint(cell, FORM, residuals).values()) == {1}
        assert sorted(kernels.launches_under_checkpoint(cell, FORM).values()) == [1, 2]


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v6 lite", "TPU7x"])
@pytest.mark.parametrize(
    ("cell", "dtype", "shape", "packed"),
    [
        ("gated_efla", "bfloat16", (8192, 4, 16, 16, 128, 128), True),
        ("efla", "float32", (100, 1, 2, 6, 64, 256), False),
        ("ssd", "bfloat16", (100, 1, 1, 4, 64, 64), False),
    ],
)
def test_kernels_are_lowered_for_tpus(kind, cell, dtype, shape, packed):
    """Forward and backward, by name and by choice."""
    T, B, H, HV, K, V = shape
    sizes = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, V)}
    sizes |= {name: (B, T, HV) for name in ("beta", "g")}
    arguments = (
        harness.cell_of(cell).func if hasattr(harness.cell_of(cell), "func") else harness.cell_of(cell)
    )
    inputs = {
        name: jax.ShapeDtypeStruct(sizes[name], dtype if name in ("q", "k", "v") else jnp.float32)
        for name in arguments.arguments
    }
    ids = jnp.zeros((B, T), jnp.int32) if packed else None

    def loss(inputs, form):
        outputs, state = harness.call(cell, inputs, ids, form=form)
        return jnp.sum(outputs.astype(jnp.float32)) + jnp.sum(state)

    with tpu(kind):
        for form in (FORM, None):
            traced = jax.jit(jax.grad(loss), static_argnums=1).trace(inputs, form)
            text = traced.lower(lowering_platforms=("tpu",)).as_text()
            assert "rank_one_forward_tpu" in text and "rank_one_backward_tpu" in text


@pytest.mark.parametrize("cell", ["gated_delta_rule", "selective_ssm"])
def test_kernels_count_in_32_bits_where_jax_has_64(float64, cell):
    inputs, weights = kernels.problem(cell, shape=Shape(T=40, B=1, H=1, HV=1, K=16, V=64))
    ids = jnp.zeros((1, 40), jnp.int32)

    def loss(inputs):
        return harness.weighted_sum(harness.call(cell, inputs, ids, form=FORM), weights)

    with tpu():
        text = jax.jit(jax.grad(loss)).trace(inputs).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q": jnp.float16, "k": jnp.float16, "v": jnp.float16}, "q, k and v are float16"),
        ({"v": jnp.float32}, "v is float32 and k bfloat16"),
        ({}, "keys have 257 entries"),
    ],
)
def test_what_the_kernels_cannot_serve_is_refused(change, reason):
    inputs, _ = kernels.problem("efla", shape=Shape(T=9, B=1, H=1, HV=1, K=64 if change else 257, V=64))
    inputs |= {name: inputs[name].astype(dtype) for name, dtype in change.items()}
    with tpu(), pytest.raises(cells.UnsupportedForm, match=f"form='pallas_tpu' cannot serve: {reason}"):
        jax.eval_shape(lambda x: harness.call("efla", x, form=FORM), inputs)


def test_the_normalisers_column_counts():
    x = jnp.ones((1, 9, 1, 256), jnp.bfloat16)
    with tpu():
        jax.eval_shape(lambda x: cells.linear_attention(x, x, x, normalize=False), x)  # another form
        with pytest.raises(cells.UnsupportedForm, match="values have 257 entries"):
            jax.eval_shape(lambda x: cells.linear_attention(x, x, x, form=FORM), x)


@pytest.mark.parametrize("kind", ["cpu", "TPU v3"])
def test_other_machines_are_refused(kind):
    inputs, _ = kernels.problem("efla")
    with (
        tpu(kind),
        pytest.raises(cells.UnsupportedForm, match=f"need a TPU, v4 or later, and this is '{kind}'"),
    ):
        jax.eval_shape(lambda x: harness.call("efla", x, form=FORM), inputs)


def test_blocks_of_heads_are_whole_vectors():
    for group, heads, key_dim, value_dim in itertools.product(
        (1, 2, 3, 8), (1, 2, 5, 16), (64, 128), (64, 256)
    ):
        found = choose_heads(heads, heads * group, key_dim, value_dim)
        keys = max(1, found // group)
        assert heads * group % found == 0 and (found % group == 0 or group % found == 0)
        assert found == heads * group or found * value_dim % 128 == found * 64 % 128 == 0
        assert keys == heads or keys * key_dim % 128 == 0
