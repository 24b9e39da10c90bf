"""Runs GPU kernels in JAX's interpreter, on a GPU so small that few heads fill it, and looks for races in each.

Where tests run on a GPU (JAX_PLATFORMS=cuda), it runs the kernels there.
"""

import contextlib
from typing import Any
from unittest import mock

import harness
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import oracle
import regimes
from jax._src.pallas.mosaic_gpu.interpret import (  # the race detector has no public name
    gpu_callbacks,
    race_detection_state,
)
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels import device
from pallas_kernels.rank_one import backward_chunks_sm90, gpu, solve_sm90

AHEAD = ("rank_one_gates", "rank_one_solve", "rank_one_forward")
BACK = ("rank_one_backward_states", "rank_one_backward_chunks", "rank_one_gate_gradients")
KERNELS = AHEAD + BACK
EDGES = (
    (30, 80, 81),
    (64, 65, 100),
)  # of packed documents, by sequence: inside chunks of 64, and on their edges


@contextlib.contextmanager
def interpreted(segments=1):
    """Interpret kernels, and fail if any of them has a race; or, on a GPU, run them in memory that holds NaN.

    Blocks are few, so that each has several chunks to do and uses its buffers again, and two warpgroups share a block
    from 4 × 64 columns of state on. Sequences are cut into `segments`, which no shape of the tests asks for by itself:
    programs are cached by shape, so a shape must always be cut the same way.
    """
    found = []

    def record(**sizes):  # a new one for each kernel
        found.append(detector(**sizes))
        return found[-1]

    detector = race_detection_state.GPURaceDetectionState
    smaller: list[tuple[Any, str, Any]] = [
        (solve_sm90, "MULTIPROCESSORS", 1),
        (backward_chunks_sm90, "MULTIPROCESSORS", 2),
        (gpu, "MULTIPROCESSORS", 3),
        (gpu, "choose_segments", lambda *sizes: segments),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, value in smaller:
            stack.enter_context(mock.patch.object(module, name, value))
        if jax.default_backend() == "gpu":
            fill_memory()
            yield
            return
        stack.enter_context(mock.patch.object(gpu_callbacks, "GPURaceDetectionState", record))
        stack.callback(gpu_callbacks.reset_gpu_interpret_mode_state)
        stack.enter_context(device.interpreted(detect_races=True))
        yield
    assert not any(state.races_found for state in found), "a race: the captured output tells where"


@contextlib.contextmanager
def h200(**axes):
    """Trace and lower programs for H200s, which need not be there; yields the mesh of these axes."""
    kind = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    types = (AxisType.Auto,) * len(axes)
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types, abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh):
        yield mesh


def fill_memory(largest=2**28):
    """Leave NaN where programs will find their memory: in 7 GB of free blocks of all sizes."""
    sizes = [size for n in range(8, largest.bit_length()) for size in [2**n] * (4 if 2**n < largest else 3)]
    jax.block_until_ready([jnp.full(size, jnp.nan, jnp.float32) for size in sizes])


def segment_ids(shape):
    """Ids [B, T] of documents that begin at EDGES."""
    tokens = np.arange(shape.T)
    rows = [np.searchsorted(edges, tokens, side="right") for edges in EDGES]
    return jnp.asarray(np.stack(rows)[: shape.B], jnp.int32)


def evaluate(case_name, inputs, weights, ids=None, scale=1.0, form="pallas_gpu"):
    """Results and gradients by the kernels."""
    return harness.compiled(case_name, form, 64, scale)(inputs, weights, ids)


def loss(cell, inputs, weights, ids=None):
    """<weights, results> of the kernels, and the results."""
    result = harness.call(cell, inputs, ids, form="pallas_gpu")
    return harness.weighted_sum(result, weights), result


def problem(case_name, regime_name="random", shape=None, dtype="bfloat16"):
    """Inputs of the table, and weights of the loss."""
    shape = shape or regimes.Shape(T=65, B=1, H=1, HV=1, K=64, V=64)
    inputs, weights, _ = harness.problem(case_name, regime_name, shape, jnp.dtype(dtype))
    return inputs, weights


def kernels_in(function, *arguments):
    """How often the jaxpr of a function launches each kernel, by name."""
    counts = {}

    def count(jaxpr):
        for equation in jaxpr.eqns:
            name = str(equation.params.get("name", ""))
            if name.startswith(("rank_one_", "selective_scan_")) and equation.primitive.name != "name":
                counts[name] = counts.get(name, 0) + 1
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                count(inner)

    count(jax.make_jaxpr(function)(*arguments).jaxpr)
    return counts


def launches_under_checkpoint(cell_name, form, residuals=()):
    """How often a gradient under jax.checkpoint, which keeps `residuals`, launches each kernel.

    What comes after the cell is not linear, as in a layer, so that its backward pass reads the outputs.
    """
    inputs, _ = problem(cell_name)
    policy = jax.checkpoint_policies.save_only_these_names(*residuals)

    def loss(inputs):
        results = harness.call(cell_name, inputs, form=form)
        return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in results)

    return kernels_in(jax.grad(jax.checkpoint(loss, policy=policy)), inputs)


def expected(case_name, inputs, weights, ids=None, scale=1.0):
    """The same by the oracle in float64, from the same rounded inputs."""
    return oracle.evaluate(case_name, inputs, weights, ids, scale)
