"""Accelerators: kernels of `pallas_kernels` as forms, forward and backward."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, PartitionSpec

from eflax.cells.checks import UnsupportedForm
from eflax.cells.forms.edits import Coefficients
from pallas_kernels.device import Unsupported, interpretation
from pallas_kernels.rank_one import decode, gpu, tpu
from pallas_kernels.selective_scan import inputs as scan_inputs

# Axes of a mesh, by what they cut, as in eflax.training.sharding.
type Cut = tuple[str | None, ...]
BATCH_AXES, HEAD_AXES = ("data", "fsdp"), ("tensor",)


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
DECODE_KERNELS = {  # a few tokens; their checks take the number of tokens first
    f"pallas_{platform}": Kernels(
        f"pallas_{platform}",
        partial(decode.check, platform=platform),
        partial(decode.decode_tokens, platform=platform),
    )
    for platform in ("gpu", "tpu")
}


# What kernels leave, and their results, by the names that policies of jax.checkpoint know.
RESIDUALS = tuple(dict.fromkeys((*gpu.RESIDUALS, *tpu.RESIDUALS, *scan_inputs.RESIDUALS)))


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
    initial_state: Array | None,
    scale: float | Array,
) -> tuple[Array | None, Array]:
    """Like the other forms, but of q, k and v as they are given: in their dtypes, key heads not repeated.

    Under `jax.set_mesh` each device works on its sequences and heads, see `on_mesh`.
    """
    if not isinstance(scale, float):
        q = None if q is None else (q.astype(jnp.float32) * jnp.asarray(scale, jnp.float32)).astype(q.dtype)
        scale = 1.0

    def run(q, k, v, coefficients, restart, state):
        return kernels.evaluate(q, k, v, *coefficients, restart, state, scale=scale)

    tokens, state = ("batch", None, "heads"), ("batch", "heads")
    cuts = (tokens, tokens, tokens, tokens, ("batch",), state)
    arguments = (q, k, v, coefficients, restart, initial_state)
    return on_mesh(run, k.shape[0], k.shape[2], cuts, (tokens, state))(*arguments)


def on_mesh(
    run: Callable[..., Any], batch: int, heads: int, cuts: tuple[Cut, ...], results: tuple[Cut, ...]
) -> Callable[..., Any]:
    """`run`, each device of the mesh of the context on its sequences (axes data, fsdp) and heads (tensor).

    XLA cannot cut kernels by itself: without a mesh in the context it gathers what is sharded.

    Args:
        run: a function of arrays, or trees of arrays that are cut alike.
        batch: sequences of all devices.
        heads: heads or channels of all devices.
        cuts: of each argument, its first axes: "batch", "heads" or None.
        results: the same of the results.
    """
    axes = {None: None, "batch": _dividing(BATCH_AXES, batch), "heads": _dividing(HEAD_AXES, heads)}
    if not axes["batch"] and not axes["heads"]:
        return run
    inside, outside = (
        tuple(PartitionSpec(*(axes[axis] for axis in cut)) for cut in given) for given in (cuts, results)
    )
    return jax.shard_map(run, in_specs=inside, out_specs=outside, check_vma=False)


def _dividing(axes: tuple[str, ...], size: int) -> tuple[str, ...]:
    """Those of the axes that the mesh of the context has, if together they divide `size`; else none."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    found = tuple(axis for axis in axes if kinds.get(axis) == AxisType.Auto and sizes[axis] > 1)
    return found if size % math.prod(sizes[axis] for axis in found) == 0 else ()
