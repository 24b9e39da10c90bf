"""The scan kernels of the selective SSM without a TPU: interpreted, against the float64 oracle, and lowered."""

from typing import NamedTuple
from unittest import mock

import harness
import jax
import jax.numpy as jnp
import kernels
import numpy as np
import pytest
from budgets import BUDGETS, assert_close
from kernels_tpu import interpreted, tpu
from regimes import Shape

from eflax import cells
from pallas_kernels.selective_scan import walk_tpu
from pallas_kernels.selective_scan.walk_tpu import LANES, choose_sizes

CELL, FORM = "selective_ssm", "pallas_tpu"


class Case(NamedTuple):
    """One line of the table; the shape is (T, B, N, D)."""

    regime: str
    dtype: str
    shape: tuple[int, int, int, int]
    packed: bool
    smaller: dict[str, int]  # sizes of kernels


# Two chunks of two programs; two groups of channels, and entries and channels that fill no register.
TABLE = [
    Case("random", "float32", (33, 1, 16, 130), True, {"LONGEST": 32, "REGISTERS": 2, "LARGEST": 2048}),
    Case("strong_decay_every_fifth", "bfloat16", (20, 1, 12, 150), False, {"REGISTERS": 2}),
]


def shape_of(case):
    time, batch, entries, channels = case.shape
    return Shape(T=time, B=batch, HV=1, K=entries, V=channels)


@pytest.mark.parametrize("case", TABLE, ids=lambda case: "-".join(map(str, case[:3])))
def test_scan_agrees_with_the_oracle(case):
    shape, budget = shape_of(case), BUDGETS[case.dtype]
    inputs, weights = kernels.problem(CELL, case.regime, shape, case.dtype)
    inputs = {name: x.astype(jnp.float32) if name == "A" else x for name, x in inputs.items()}
    ids = jnp.asarray(np.arange(shape.T)[None] // 7 * np.ones((shape.B, 1)), jnp.int32)
    ids = ids if case.packed else None
    expected = kernels.expected(CELL, inputs, weights, ids)
    with interpreted(seed=TABLE.index(case)), mock.patch.multiple(walk_tpu, **case.smaller):
        result = jax.device_get(kernels.evaluate(CELL, inputs, weights, ids, form=FORM))
    for name in ("outputs", "state"):
        assert_close(result[name], expected[name], budget.forward, name)
    assert_close(result["gradients"], expected["gradients"], budget.backward)
    assert (result["outputs"].dtype, result["state"].dtype) == (case.dtype, "float32")


def test_the_state_alone_and_nan():
    """Nothing is read out; NaN stays in its channel and document."""
    inputs, _ = kernels.problem(CELL, shape=Shape(T=20, B=2, K=8, V=3))
    inputs["C"] = None
    ids = (
        jnp.broadcast_to(jnp.arange(20)[None] // 12, (2, 20)) * jnp.arange(2)[:, None]
    )  # one document, and two
    expected = harness.call(CELL, inputs, ids, form="chunkwise")[1]
    inputs["x"] = inputs["x"].at[:, 4, 1].set(jnp.nan)
    with interpreted():
        y, state = jax.block_until_ready(harness.call(CELL, inputs, ids, form=FORM))
    assert y is None and np.isnan(state[0, 1]).all()
    assert_close(np.delete(state[0], 1, 0), np.delete(expected[0], 1, 0), BUDGETS["bfloat16"].forward)
    assert_close(state[1], expected[1], BUDGETS["bfloat16"].forward)


def test_refusal():
    inputs, _ = kernels.problem(CELL)
    with pytest.raises(cells.UnsupportedForm, match="need a TPU, v4 or later"):
        harness.call(CELL, inputs, form=FORM)
    wide, _ = kernels.problem(CELL, shape=Shape(K=257))
    for given, reason in (
        (wide, "N = 257"),
        (inputs | {"x": inputs["x"].astype(jnp.float16)}, "x is float16"),
    ):
        with tpu(), pytest.raises(cells.UnsupportedForm, match=reason):
            jax.eval_shape(lambda x: harness.call(CELL, x, form=FORM), given)


@pytest.mark.parametrize(
    ("kind", "form", "whole"),
    [("TPU v5 lite", FORM, True), ("TPU v6 lite", None, False), ("TPU7x", None, True)],
)
def test_scan_is_lowered_for_tpus(kind, form, whole):
    """Forward and backward, by name and by choice, with outputs and documents and without."""
    inputs, _ = kernels.problem(CELL, shape=Shape(T=300, B=1, K=16, V=700 if whole else 5))
    inputs, ids = (inputs, jnp.zeros((1, 300), jnp.int32)) if whole else (inputs | {"C": None}, None)

    def loss(inputs):
        y, state = harness.call(CELL, inputs, ids, form=form)
        return jnp.sum(state) + (0.0 if y is None else jnp.sum(y.astype(jnp.float32)))

    with tpu(kind):
        text = jax.jit(jax.grad(loss)).trace(inputs).lower(lowering_platforms=("tpu",)).as_text()
    assert "selective_scan_forward_tpu" in text and "selective_scan_backward_tpu" in text


@pytest.mark.parametrize("width", [1, 1536, 1664, 2048, 5120])
@pytest.mark.parametrize("entries", [1, 16, 64, 256])
def test_little_is_padded(width, entries):
    sizes = choose_sizes(8192, width, entries)
    padded = sizes["programs"] * sizes["groups"] * sizes["tiles"] * LANES
    assert width <= padded <= max(LANES, 1.25 * width)
    assert entries <= sizes["entries"] < entries + 8
