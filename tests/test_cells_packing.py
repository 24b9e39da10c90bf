"""Packed documents: as separate calls, to the last bit independent of each other, one compilation for all."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import regimes
from budgets import BUDGETS, assert_close

SHAPE = regimes.Shape(T=37, B=1)
LENGTHS = (5, 11, 21)  # the second edge lies on the edge of a chunk of 16, the first inside it
EDGES = np.cumsum((0, *LENGTHS))
IDS = jnp.asarray(np.repeat([3, 9, 3], LENGTHS)[None], jnp.int32)
PER_DOCUMENT = ("A", "initial_state")  # inputs without a time axis


def part(tree, start, stop):
    return jax.tree.map(lambda x: x[:, start:stop], tree)


def document(inputs, index):
    """The inputs of one document alone; only the first one receives the initial state."""
    start, stop = EDGES[index : index + 2]
    alone = {name: x if name in PER_DOCUMENT else part(x, start, stop) for name, x in inputs.items()}
    if index:
        alone["initial_state"] = jax.tree.map(jnp.zeros_like, inputs["initial_state"])
    return alone


@pytest.mark.parametrize(("case_name", "form"), harness.FEWER_FORMS)
def test_packed_equals_separate_calls(case_name, form):
    inputs, _, _ = harness.problem(case_name, "random", SHAPE)
    packed, packed_state = harness.forward(case_name, form)(inputs, IDS)
    state = None
    for index in range(3):
        outputs, state = harness.forward(case_name, "recurrent")(document(inputs, index))
        budget = BUDGETS["float32"].forward
        assert_close(
            part(packed, *EDGES[index : index + 2]), np.asarray(outputs), budget, f"document {index}"
        )
    assert_close(packed_state, oracle.as_float64(state), BUDGETS["float32"].forward)


@pytest.mark.parametrize(
    ("case_name", "form"), [*harness.FEWER_FORMS, *harness.case_forms(["selective_ssm"], ["associative"])]
)
def test_documents_do_not_touch_each_other(case_name, form):
    """Bit-equal outputs when another document changes, and gradients across documents that are exactly zero."""
    inputs, weights, _ = harness.problem(case_name, "random", SHAPE)
    run = harness.compiled(case_name, form)
    before = run(inputs, weights, IDS)
    for changed in range(3):
        start, stop = EDGES[changed : changed + 2]
        other = {
            name: x if name in PER_DOCUMENT else x.at[:, start:stop].multiply(1.5)
            for name, x in inputs.items()
        }
        if changed == 0:
            other["initial_state"] = jax.tree.map(lambda x: x + 1.0, inputs["initial_state"])
        result = run(other, weights, IDS)
        for index in {0, 1, 2} - {changed}:
            here = EDGES[index : index + 2]
            assert np.array_equal(part(before["outputs"], *here), part(result["outputs"], *here)), (
                changed,
                index,
            )
        if changed != 2:
            for x, y in zip(jax.tree.leaves(before["state"]), jax.tree.leaves(result["state"]), strict=True):
                assert np.array_equal(x, y)

    for index in range(3):  # a loss on one document
        start, stop = EDGES[index : index + 2]
        mask = np.zeros((1, SHAPE.T) + (1,) * (weights[0].ndim - 2), np.float32)
        mask[:, start:stop] = 1
        only = (weights[0] * mask, jax.tree.map(lambda w, index=index: w * (index == 2), weights[1]))
        gradients = run(inputs, only, IDS)["gradients"]
        for name, gradient in gradients.items():
            if name == "initial_state":
                reached = any(np.any(leaf) for leaf in jax.tree.leaves(gradient))
                assert reached == (index == 0)
            elif name != "A":
                outside = np.asarray(gradient).copy()
                assert outside[:, start:stop].any()
                outside[:, start:stop] = 0
                assert not outside.any(), f"d{name} leaks out of document {index}"


@pytest.mark.parametrize(("case_name", "form"), harness.case_forms(harness.KINDS, ["chunkwise"]))
def test_one_compilation_serves_every_packing(case_name, form):
    inputs, weights, _ = harness.problem(case_name, "random", SHAPE)
    traces = []

    @jax.jit
    def run(inputs, ids):
        traces.append(1)
        return harness.call(case_name, inputs, ids, form=form, chunk_size=16)

    rng = np.random.default_rng(0)
    for _ in range(10):
        edges = rng.random(size=(1, SHAPE.T)) < 0.2
        ids = jnp.asarray(np.cumsum(edges, axis=1), jnp.int32)
        expected = oracle.evaluate(case_name, inputs, weights, ids)
        assert_close(run(inputs, ids), (expected["outputs"], expected["state"]), BUDGETS["float32"].forward)
    assert len(traces) == 1
