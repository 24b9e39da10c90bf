"""The scan kernels of the selective SSM without a GPU: interpreted, against the float64 oracle; and their choice."""

from typing import NamedTuple
from unittest import mock

import harness
import jax
import jax.numpy as jnp
import kernels
import numpy as np
import pytest
from budgets import BUDGETS, assert_close
from regimes import Shape

from eflax import cells
from pallas_kernels.device import is_hopper
from pallas_kernels.selective_scan import gpu
from pallas_kernels.selective_scan.inputs import RESIDUALS

CELL = "selective_ssm"


class Case(NamedTuple):
    """One line of the table; the shape is (T, B, N, D)."""

    regime: str
    dtype: str
    shape: tuple[int, int, int, int]
    packed: bool = False
    segments: int = 1


# Every size of state, padded and not, with every dtype and feature; channels of less, and of more, than a block.
TABLE = [
    Case("random", "float32", (20, 2, 16, 66), packed=True),
    Case("strong_decay_every_fifth", "bfloat16", (16, 1, 12, 5)),
    Case("reset_tokens", "float16", (1, 1, 64, 17)),
    Case("random", "bfloat16", (50, 1, 32, 8), packed=True, segments=3),
]


def shape_of(case):
    time, batch, entries, channels = case.shape
    return Shape(T=time, B=batch, HV=1, K=entries, V=channels)


@pytest.mark.parametrize("case", TABLE, ids=lambda case: "-".join(map(str, case)))
def test_scan_agrees_with_the_oracle(case):
    shape, budget = shape_of(case), BUDGETS[case.dtype]
    inputs, weights = kernels.problem(CELL, case.regime, shape, case.dtype)
    inputs = {name: x.astype(jnp.float32) if name == "A" else x for name, x in inputs.items()}
    ids = (
        jnp.asarray(np.arange(shape.T)[None] // 7 * np.ones((shape.B, 1)), jnp.int32) if case.packed else None
    )
    expected = kernels.expected(CELL, inputs, weights, ids)
    with kernels.interpreted(), mock.patch.object(gpu, "choose_segments", lambda *sizes: case.segments):
        result = jax.block_until_ready(kernels.evaluate(CELL, inputs, weights, ids))
    for name in ("outputs", "state"):
        assert_close(result[name], expected[name], budget.forward, name)
    assert_close(result["gradients"], expected["gradients"], budget.backward)
    assert (result["outputs"].dtype, result["state"].dtype) == (case.dtype, "float32")


def test_the_state_alone_and_nan():
    """Nothing is read out; NaN stays in its channel, and goes on to the end."""
    inputs, _ = kernels.problem(CELL, shape=shape_of(Case("random", "float32", (20, 1, 8, 3))))
    inputs["C"] = None
    expected = harness.call(CELL, inputs, form="chunkwise")[1]
    inputs["x"] = inputs["x"].at[0, 4, 1].set(jnp.nan)
    with kernels.interpreted():
        y, state = jax.block_until_ready(harness.call(CELL, inputs, form="pallas_gpu"))
    assert y is None and np.isnan(state[:, 1]).all()
    assert_close(np.delete(state, 1, 1), np.delete(expected, 1, 1), BUDGETS["bfloat16"].forward)


def test_choice_and_refusal():
    inputs, _ = kernels.problem(CELL)
    with kernels.h200():
        assert "selective_scan_forward" in str(jax.make_jaxpr(lambda x: harness.call(CELL, x))(inputs))
    if not is_hopper():
        with pytest.raises(cells.UnsupportedForm, match="need a Hopper GPU"):
            harness.call(CELL, inputs, form="pallas_gpu")
    wide, _ = kernels.problem(CELL, shape=Shape(K=65))
    with kernels.interpreted(), pytest.raises(cells.UnsupportedForm, match="N = 65"):
        harness.call(CELL, wide, form="pallas_gpu")


def test_residuals_that_a_policy_saves_are_not_computed_again():
    forward, backward = "selective_scan_forward", "selective_scan_backward"
    with kernels.h200():
        kept = kernels.launches_under_checkpoint(CELL, "pallas_gpu", RESIDUALS)
        assert kept == {forward: 1, backward: 1}
        assert kernels.launches_under_checkpoint(CELL, "pallas_gpu") == {forward: 2, backward: 1}


@pytest.mark.parametrize(("blocks", "time", "segments"), [(256, 1 << 16, 1), (100, 4096, 1), (16, 4096, 8)])
def test_segments_are_cut_where_channels_do_not_fill_the_card(blocks, time, segments):
    assert gpu.choose_segments(blocks, time) == segments


def test_scan_is_lowered_for_a_gpu():
    """Forward and backward, in segments: to the end of Mosaic GPU's own passes."""
    shape = shape_of(Case("random", "bfloat16", (2048, 1, 16, 100)))
    inputs, weights = kernels.problem(CELL, shape=shape)
    with kernels.h200():
        traced = jax.jit(jax.grad(lambda x: kernels.loss(CELL, x, weights)[0])).trace(inputs)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 4
