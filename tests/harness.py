"""Runs the cells under test on the inputs of the table, in one compiled function a case, form and chunk size."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import regimes

from eflax import cells

KERNEL_FORMS = ("pallas_gpu", "pallas_tpu")


def portable_forms(cell):
    """The forms of a cell that run anywhere, in any dtype: all but those of kernels, which have tests of their own."""
    return tuple(form for form in cell.forms if form not in KERNEL_FORMS)


def case_forms(names, only=None):
    """Test parameters: every portable form of every named case, or the ones in `only`."""
    return [
        pytest.param(name, form, id=f"{name}-{form}")
        for name in names
        for form in portable_forms(cells.CELLS[oracle.CASES[name].cell])
        if only is None or form in only
    ]


def quick_forms(names):
    """Test parameters: every named case in the form that is quickest to compile."""
    return [
        pytest.param(name, form, id=f"{name}-{form}")
        for name in names
        for form in ("parallel" if name != "selective_ssm" else "recurrent",)
    ]


# What a form does depends on the coefficients that are there, not on the cell: nothing, decay, erase and write, all,
# and the recurrence of another kind. Properties of forms are tested on these, whose coefficients are the quickest to
# compile.
DISTINCT = ("linear_attention", "ssd", "delta_rule", "gated_delta_rule", "selective_ssm")
DISTINCT_FORMS = case_forms(DISTINCT)
# Numbers, in every regime: all forms of the distinct cases, and of the one that writes other than it erases and stands
# keys of any size; the coefficients of the other cases, which are the same in all forms, in one.
WHOLE = (*DISTINCT, "gated_efla")
COVERING = [
    *case_forms(WHOLE),
    *case_forms(["efla"], ["chunkwise"]),
    *quick_forms(name for name in oracle.CASES if name not in WHOLE),
]
# What happens before and after the form: a state that is a pair, one with all coefficients, the other recurrence.
KINDS = ("linear_attention", "gated_delta_rule", "selective_ssm")


def fewer_forms(names, whole="gated_delta_rule"):
    """Test parameters: the form that people use of every named case, and every form of one of them."""
    return [p for p in case_forms(names) if p.values[1] == "chunkwise" or p.values[0] == whole]


FEWER_FORMS = fewer_forms(DISTINCT)  # for what hardly depends on the coefficients
KINDS_FORMS = fewer_forms(KINDS)  # for what JAX does to any program


def cell_of(case_name) -> Any:
    """The cell of a case. Cells differ in their arguments and states, so that no one signature holds for all."""
    return cells.CELLS[oracle.CASES[case_name].cell]


def call(case_name, inputs, segment_ids=None, **keywords) -> Any:
    """Call the cell of a case on a dict of inputs."""
    case = oracle.CASES[case_name]
    return cell_of(case_name)(
        *(inputs[name] for name in case.arguments),
        initial_state=inputs.get("initial_state"),
        segment_ids=segment_ids,
        **case.options,
        **keywords,
    )


def cast(inputs, dtype):
    """Round inputs to a dtype and put them on the device; the initial state stays float32 (float64 for float64)."""
    state_dtype = jnp.float64 if dtype == jnp.float64 else jnp.float32
    state = jax.tree.map(lambda x: jnp.asarray(x, state_dtype), inputs["initial_state"])
    return {name: jnp.asarray(x, dtype) for name, x in inputs.items() if name != "initial_state"} | {
        "initial_state": state
    }


def problem(
    case_name, regime_name="random", shape=regimes.BASE, dtype=jnp.float32
) -> tuple[dict[str, Any], Any, Any]:
    """Inputs of the table on the device, loss weights that every dtype represents exactly, and segment ids."""
    case = oracle.CASES[case_name]
    inputs = cast(regimes.draw(case, regime_name, shape), dtype)
    weights = regimes.draw_weights(case, regime_name, shape)
    weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(np.float32), weights)
    packed = regimes.REGIMES[regime_name].packed
    return inputs, weights, jnp.asarray(regimes.segment_ids(shape)) if packed else None


def has_scale(case_name):
    """Whether the cell multiplies queries by a scale: all but the selective SSM do."""
    return "q" in oracle.CASES[case_name].arguments


def weighted_sum(result, weights):
    """The scalar loss <weights, result> over the leaves of both."""
    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(weights), strict=True)
    return sum((jnp.sum(x.astype(w.dtype) * w) for x, w in pairs), start=jnp.float32(0.0))


@cache
def forward(case_name, form, chunk_size=16):
    """Jitted (inputs, segment_ids) -> outputs and final state."""

    def run(inputs, segment_ids=None):
        return call(case_name, inputs, segment_ids, form=form, chunk_size=chunk_size)

    return jax.jit(run)


@cache
def compiled(case_name, form, chunk_size=16, scale=1.0):
    """Jitted (inputs, weights, segment_ids) -> results and gradients; jit itself keeps one entry a shape."""

    def loss(inputs, weights, segment_ids):
        keywords = {"scale": scale} if has_scale(case_name) else {}
        result = call(case_name, inputs, segment_ids, form=form, chunk_size=chunk_size, **keywords)
        return weighted_sum(result, weights), result

    def run(inputs, weights, segment_ids=None):
        (_, (outputs, state)), gradients = jax.value_and_grad(loss, has_aux=True)(
            inputs, weights, segment_ids
        )
        return {"outputs": outputs, "state": state, "gradients": gradients}

    return jax.jit(run)


@cache
def referee(case_name, regime_name, shape, dtype_name="float32", scale=1.0):
    """A problem of the table and the oracle's answer to it, computed once a process."""
    inputs, weights, segment_ids = problem(case_name, regime_name, shape, jnp.dtype(dtype_name))
    return inputs, weights, segment_ids, oracle.evaluate(case_name, inputs, weights, segment_ids, scale)
