"""Hopper GPUs: the recurrence in kernels of `pallas_kernels.rank_one`, forward and backward."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from eflax.cells.checks import UnsupportedForm
from eflax.cells.forms.edits import Coefficients
from pallas_kernels.device import Unsupported, interpretation
from pallas_kernels.rank_one import gpu

NAME = "pallas_gpu"


class Context(NamedTuple):
    """What a compiled call depends on beside its arrays."""

    interpretation: Any  # of kernels, on a machine that cannot run them
    scale: float | None  # a constant in the kernels; None if it is an array

    @classmethod
    def of(cls, scale: float | Array) -> "Context":
        """The context of a call made here with this scale."""
        return cls(interpretation(), float(scale) if isinstance(scale, (int, float)) else None)


def refusal(*inputs: Any, of: Callable[..., None] = gpu.check) -> str | None:
    """Why the kernels whose check is `of` cannot serve these inputs here; None if they can."""
    try:
        of(*inputs)
    except Unsupported as error:
        return str(error)
    return None


def check(*inputs: Any, of: Callable[..., None] = gpu.check) -> None:
    """Raise UnsupportedForm if the kernels whose check is `of` cannot serve these inputs here."""
    reason = refusal(*inputs, of=of)
    if reason is not None:
        raise UnsupportedForm(f"form={NAME!r} cannot serve: {reason} (form=None picks one that can)")


def pallas_gpu(
    q: Array | None,
    k: Array,
    v: Array,
    coefficients: Coefficients,
    restart: Array | None,
    initial_state: Array,
    scale: float | Array,
) -> tuple[Array | None, Array]:
    """Like the other forms, but of q, k and v as they are given: 16-bit, key heads not repeated."""
    if not isinstance(scale, float):
        q = None if q is None else (q.astype(initial_state.dtype) * scale).astype(q.dtype)
        scale = 1.0
    return gpu.rank_one(q, k, v, *coefficients, restart, initial_state, scale=scale)
