"""Which machine the kernels are for, and how to run them without it."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

HOPPER = ("H100", "H200", "H800", "H20", "GH200")

_interpretation: ContextVar[Any] = ContextVar("interpretation", default=None)


class Unsupported(ValueError):
    """The kernels cannot serve these inputs, or this machine."""


@contextlib.contextmanager
def interpreted(*, detect_races: bool = False) -> Iterator[None]:
    """Run GPU kernels in JAX's interpreter, on any machine: slow, exact in what it checks, for tests.

    On a machine of few cores set the environment variable NPROC to 16 before JAX is imported: a kernel's warpgroups
    wait for each other, each on a thread of XLA's pool, which has one a core.
    """
    token = _interpretation.set(plgpu.InterpretGPUParams(detect_races=detect_races))
    try:
        yield
    finally:
        _interpretation.reset(token)


def interpretation() -> Any:
    """The interpreter's parameters inside `interpreted`, else None."""
    return _interpretation.get()


def device_kind() -> str:
    """The kind of device that programs are for: of the abstract mesh, if it names one, else of the first device."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return abstract.device_kind if abstract is not None else jax.devices()[0].device_kind


def is_hopper() -> bool:
    """Whether programs are for a Hopper GPU (compute capability 9.0)."""
    kind = device_kind().split()
    return any(name in HOPPER for name in kind)


def check_hopper() -> None:
    """Raise `Unsupported` unless the kernels can run: on a Hopper GPU, or interpreted."""
    if interpretation() is None and not is_hopper():
        raise Unsupported(
            f"the kernels need a Hopper GPU (compute capability 9.0), and this is {device_kind()!r}"
        )
