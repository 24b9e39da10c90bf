"""Accelerators: kernels of `pallas_kernels` as forms, forward and backward."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from eflax.cells.checks import UnsupportedForm
from eflax.cells.forms.edits import Coefficients
from pallas_kernels.device import Unsupported, interpretation
from pallas_kernels.rank_one import decode, gpu, tpu


class Context(NamedTuple):
    """What a compiled call depends on beside its arrays."""

    interpretation: Any  # of kernels, on a machine that cannot run them
    scale: float | None  # a constant in the kernels; None if it is an array

    @classmethod
    def of(cls, scale: float | Array) -> "Context":
        """The context of a call made here with this scale."""
        constant = float(scale) if isinstance(scale, (int, float)) else None
        return cls((interpretation("gpu"), interpretation("tpu")), constant)


class Kernels(NamedTuple):
    """Kernels for one platform."""

    form: str
    check_inputs: Callable[..., None]  # raises `Unsupported`
    evaluate: Callable[..., Any]

    def refusal(self, *inputs: Any) -> str | None:
        """Why they cannot serve these inputs here; None if they can."""
        try:
            self.check_inputs(*inputs)
        except Unsupported as error:
            return str(error)
        return None

    def check(self, *inputs: Any) -> None:
        """Raise UnsupportedForm if they cannot serve these inputs here."""
        reason = self.refusal(*inputs)
        if reason is not None:
            raise UnsupportedForm(f"form={self.form!r} cannot serve: {reason} (form=None picks one that can)")


EDIT_KERNELS = {
    kernels.form: kernels
    for kernels in (
        Kernels("pallas_gpu", gpu.check, gpu.rank_one),
        Kernels("pallas_tpu", tpu.check, tpu.rank_one),
    )
}
DECODE = Kernels("pallas_gpu", decode.check, decode.decode_tokens)  # a few tokens


def serving(kernels: dict[str, Kernels], *inputs: Any) -> str | None:
    """The form of the kernels that serve these inputs here, if any do."""
    return next((form for form, found in kernels.items() if found.refusal(*inputs) is None), None)


def evaluate(
    kernels: Kernels,
    q: Array | None,
    k: Array,
    v: Array,
    coefficients: Coefficients,
    restart: Array | None,
    initial_state: Array,
    scale: float | Array,
) -> tuple[Array | None, Array]:
    """Like the other forms, but of q, k and v as they are given: in their dtypes, key heads not repeated."""
    if not isinstance(scale, float):
        q = None if q is None else (q.astype(initial_state.dtype) * scale).astype(q.dtype)
        scale = 1.0
    return kernels.evaluate(q, k, v, *coefficients, restart, initial_state, scale=scale)
