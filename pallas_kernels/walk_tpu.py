"""How kernels for TPUs go through time: blocks of arrays by program and step, memory that stays from step to step."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.batching import over_batch


class Kind(NamedTuple):
    """A kind of array: what follows its batch axis, and what a program sees of it at a step."""

    shape: tuple[int, ...]
    block: pl.BlockSpec


class Task(NamedTuple):
    """A kernel and its arrays; all static."""

    kernel: Callable[..., None]  # called with blocks by name, and then `scratch`
    name: str
    grid: tuple[int, int]  # programs that share a sequence, and steps in time
    kinds: Mapping[str, Kind]
    inputs: tuple[tuple[str, str], ...]  # name and kind
    outputs: tuple[tuple[str, str, Any], ...]  # name, kind and dtype
    scratch: tuple[Any, ...]  # memory that stays from step to step
    memory: int | None = None  # bytes of fast memory to ask for; None: what compilers give unasked
    interpret: Any = False


def run(task: Task, arrays: Mapping[str, Array | None]) -> dict[str, Array]:
    """Run a kernel over the steps of all programs of all sequences."""
    found = over_batch(partial(_launch, task))(*(arrays[name] for name, _ in task.inputs))
    return dict(zip((name for name, _, _ in task.outputs), found, strict=True))


def _launch(task: Task, *arrays: Array) -> tuple[Array, ...]:
    batch, known = arrays[0].shape[0], task.kinds
    names = [name for name, *_ in (*task.inputs, *task.outputs)]

    def body(*refs):
        task.kernel(dict(zip(names, refs, strict=False)), *refs[len(names) :])

    call = pl.pallas_call(
        body,
        grid=(batch, *task.grid),
        in_specs=[known[kind].block for _, kind in task.inputs],
        out_specs=[known[kind].block for _, kind, _ in task.outputs],
        out_shape=[jax.ShapeDtypeStruct((batch, *known[kind].shape), d) for _, kind, d in task.outputs],
        scratch_shapes=task.scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=task.memory
        ),
        interpret=task.interpret,
        name=task.name,
    )
    with jax.enable_x64(False):  # indices and counts are int32, also where JAX has 64-bit types
        results = call(*arrays)
    return tuple(results)
