"""The kernel for a few tokens without a GPU: interpreted, against the float64 oracle; its choice and lowering."""

import harness
import jax
import jax.numpy as jnp
import kernels
import numpy as np
import pytest
from budgets import BUDGETS, assert_close
from regimes import Shape

from eflax import cells

NAME = "rank_one_decode"


def step_arguments(cell, shape, dtype="bfloat16"):
    """The state and one token, for `cell.step`."""
    inputs, _ = kernels.problem(cell, shape=shape, dtype=dtype)
    names = harness.cell_of(cell).arguments
    return inputs["initial_state"], *(inputs[name][:, 0] for name in names)


@pytest.mark.parametrize(
    ("cell", "dtype", "shape", "packed"),
    [
        ("gated_efla", "bfloat16", Shape(T=3, B=2, H=1, HV=2, K=64, V=32), True),
        ("efla", "float32", Shape(T=8, B=1, H=2, HV=2, K=60, V=128), False),
        ("ssd", "float16", Shape(T=1, B=1, H=1, HV=1, K=32, V=16), False),
    ],
)
def test_decode_agrees_with_the_oracle(cell, dtype, shape, packed):
    inputs, weights = kernels.problem(cell, shape=shape, dtype=dtype)
    ids = jnp.asarray([[0, 0, 1], [2, 3, 3]], jnp.int32) if packed else None
    expected = kernels.expected(cell, inputs, weights, ids, 0.5)
    with kernels.interpreted():
        result = jax.block_until_ready(kernels.evaluate(cell, inputs, weights, ids, 0.5))
    for name in ("outputs", "state"):
        assert_close(result[name], expected[name], BUDGETS[dtype].forward, name)
    assert_close(result["gradients"], expected["gradients"], BUDGETS[dtype].backward)


def test_step_and_its_vmap():
    cell, arguments = (
        harness.cell_of("gated_delta_rule"),
        step_arguments("gated_delta_rule", Shape(B=1, H=1, HV=2, K=32, V=16)),
    )
    state, *token = arguments
    expected = cell.step(*arguments)

    def steps(states):
        return jax.vmap(cell.step, (0, *[None] * len(token)))(states, *token)

    with kernels.interpreted():
        result = jax.block_until_ready(jax.jit(steps)(jnp.stack([state, state])))
    for x, y in zip(result, expected, strict=True):
        for part in x:
            assert_close(part, y, BUDGETS["bfloat16"].forward)


@pytest.mark.parametrize(
    ("cell", "shape", "picked"),
    [
        ("efla", Shape(T=8, K=256, V=128), True),
        ("efla", Shape(T=9, K=256, V=128), False),
        ("efla", Shape(T=1, K=256, V=60), False),
        ("linear_attention", Shape(T=1, K=64, V=64), False),  # its normaliser is a 65th column
    ],
)
def test_form_none_picks_it_for_few_tokens_and_whole_tiles(cell, shape, picked):
    inputs, _ = kernels.problem(cell, shape=shape)
    with kernels.h200():
        assert (NAME in str(jax.make_jaxpr(lambda x: harness.call(cell, x))(inputs))) == picked


def test_step_updates_a_donated_state_in_place():
    """In the lowered program the state is both operand and result of the kernel, and an input that is given away."""
    arguments = step_arguments("gated_efla", Shape(B=2, H=1, HV=2, K=128, V=128))
    with kernels.h200():
        traced = jax.jit(harness.cell_of("gated_efla").step, donate_argnums=0).trace(*arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1
    assert "output_operand_alias<output_tuple_indices = [0], operand_index = 0" in text
    assert "tf.aliasing_output" in text or "jax.buffer_donor" in text


def test_states_of_a_scan_over_layers():
    """XLA may let the kernel read a layer's state from one stack and write it to another: nothing may get lost."""
    state, q, k, v, *gates = step_arguments("gated_delta_rule", Shape(B=2, H=1, HV=2, K=32, V=16))
    states = jnp.stack([state, 2.0 * state, -state])

    def layer(v, state):
        return harness.cell_of("gated_delta_rule").step(state, q, k, v, *gates)[::-1]

    def one_by_one(v, states):
        after = []
        for state in states:
            v, state = layer(v, state)
            after.append(state)
        return v, jnp.stack(after)

    layers = jax.jit(lambda v, states: jax.lax.scan(layer, v, states))
    expected = one_by_one(v, states)
    with kernels.interpreted():
        result = jax.block_until_ready(layers(v, states))
    for x, y in zip(result, expected, strict=True):
        assert_close(x, y, BUDGETS["bfloat16"].forward)


@pytest.mark.parametrize("normalize", [True, False])
def test_no_tile_has_the_normalisers_column(normalize):
    """Linear attention has one column more than v: XLA steps, and the kernels for chunks serve a few tokens."""
    cell, token = cells.linear_attention, jnp.ones((1, 2, 64), jnp.bfloat16)
    state, few = cell.init_state(1, 2, 64, 64), jnp.ones((1, 3, 2, 64), jnp.bfloat16)
    with kernels.h200():
        assert not kernels.kernels_in(cell.step, state, token, token, token)
        found = kernels.kernels_in(lambda x: cell(x, x, x, form="pallas_gpu", normalize=normalize), few)
        assert found and NAME not in found
        jax.eval_shape(lambda x: cell(x, x, x, normalize=normalize), few)


def test_a_machine_without_a_hopper_gpu_steps_without_it():
    arguments = step_arguments("gated_efla", Shape(B=1, H=1, HV=1, K=16, V=16))
    step = harness.cell_of("gated_efla").step
    assert NAME not in str(jax.make_jaxpr(step)(*arguments))
    assert np.isfinite(step(*arguments)[0]).all()
