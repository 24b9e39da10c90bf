"""Which machine the kernels are for, and how to run them without it."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

# How a word of the device's name begins, as in "NVIDIA H20-3e".
HOPPER = ("H100", "H200", "H800", "H20", "GH200")

# The platform whose kernels are interpreted, and the interpreter's parameters.
_interpretation: ContextVar[tuple[str, Any] | None] = ContextVar("interpretation", default=None)


class Unsupported(ValueError):
    """The kernels cannot serve these inputs, or this machine."""


@contextlib.contextmanager
def interpreted(
    platform: str = "gpu", *, detect_races: bool = False, seed: int | None = None
) -> Iterator[None]:
    """Run kernels for a platform in JAX's interpreter, on any machine: slow, exact in what it checks, for tests.

    GPU, on a machine of few cores: set the environment variable NPROC to 16 before JAX is imported. A kernel's
    warpgroups wait for each other, each on a thread of XLA's pool, which has one a core.

    Args:
        platform: "gpu" or "tpu".
        detect_races: print races, and note them where the interpreter keeps its state.
        seed: TPU: shuffles the order of programs along axes that are said to be parallel.
    """
    params: Any = plgpu.InterpretGPUParams(detect_races=detect_races)
    if platform == "tpu":
        params = pltpu.InterpretParams(detect_races=detect_races, random_seed=seed)
    token = _interpretation.set((platform, params))
    try:
        yield
    finally:
        _interpretation.reset(token)


def interpretation(platform: str = "gpu") -> Any:
    """The interpreter's parameters inside `interpreted` for this platform, else None."""
    current = _interpretation.get()
    return current[1] if current is not None and current[0] == platform else None


def device_kind() -> str:
    """The kind of device that programs are for: of the abstract mesh, if it names one, else of the default device."""
    abstract, chosen = jax.sharding.get_abstract_mesh().abstract_device, jax.config.jax_default_device
    if abstract is not None:
        return abstract.device_kind
    return chosen.device_kind if isinstance(chosen, jax.Device) else jax.devices(chosen)[0].device_kind


def is_hopper() -> bool:
    """Whether programs are for a Hopper GPU (compute capability 9.0)."""
    return any(word.startswith(HOPPER) for word in device_kind().split())


def check_hopper() -> None:
    """Raise `Unsupported` unless the kernels can run: on a Hopper GPU, or interpreted."""
    if interpretation() is None and not is_hopper():
        raise Unsupported(
            f"the kernels need a Hopper GPU (compute capability 9.0), and this is {device_kind()!r}"
        )


def check_tpu() -> None:
    """Raise `Unsupported` unless the kernels can run: on a TPU from v4 on, or interpreted."""
    kind = device_kind()
    old = kind.startswith(("TPU v2", "TPU v3"))  # whose compilers refuse products of bfloat16
    if interpretation("tpu") is None and (old or not kind.startswith("TPU")):
        raise Unsupported(f"the kernels need a TPU, v4 or later, and this is {kind!r}")
