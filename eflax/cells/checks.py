"""Argument checks: every message names the argument, what it has, and what it needs."""

from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import AxisType

INT32_MAX = 2**31 - 1
FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)


class UnsupportedForm(ValueError):
    """The form asked for by name does not exist for this cell or cannot serve these inputs."""


class Axes:
    """Binds axis letters to sizes as arrays are checked, so that a mismatch can name both sides."""

    def __init__(self) -> None:
        self.size: dict[str, int] = {}
        self._from: dict[str, str] = {}

    def bind(self, name: str, x: Array, axes: str) -> None:
        """Check that x is a float array with the given axes, e.g. "B T H K"; raises TypeError or ValueError."""
        if not hasattr(x, "dtype"):
            raise TypeError(f"{name} must be an array [{axes.replace(' ', ', ')}], not {type(x).__name__}")
        if x.dtype not in FLOATS:
            raise TypeError(f"{name} has dtype {x.dtype}; cast it to bfloat16, float16, float32 or float64")
        if cut := explicit_axes(x):
            raise ValueError(
                f"{name} is cut over {', '.join(map(repr, cut))} of a mesh with explicit axes, as jax.make_mesh makes "
                "them; make it with axis_types=(jax.sharding.AxisType.Auto, …), one for each axis"
            )
        self.bind_shape(name, x.shape, axes)

    def bind_shape(self, name: str, shape: tuple[int, ...], axes: str) -> None:
        """The same for the shape alone."""
        letters, wanted = axes.split(), f"[{axes.replace(' ', ', ')}]"
        if len(shape) != len(letters):
            raise ValueError(f"{name} has shape {shape}; it needs the {len(letters)} axes {wanted}")
        for letter, size in zip(letters, shape, strict=True):
            known = self.size.setdefault(letter, size)
            source = self._from.setdefault(letter, name)
            if size != known:
                raise ValueError(
                    f"{name} has shape {shape}; it needs {wanted} with {letter} = {known}, as in {source}"
                )

    def group_heads(self) -> None:
        """Value heads must be a multiple of key heads, so that each key head serves a whole group."""
        heads, value_heads = self.size["H"], self.size["HV"]
        if heads == 0 or value_heads % heads:
            raise ValueError(f"v has HV = {value_heads} heads, which is not a multiple of k's H = {heads}")

    def bind_segment_ids(self, segment_ids: Array | None) -> None:
        """Check that segment_ids, if given, are integers [B, T]."""
        if segment_ids is None:
            return
        if not hasattr(segment_ids, "dtype"):
            raise TypeError(f"segment_ids must be an array [B, T], not {type(segment_ids).__name__}")
        if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
            raise TypeError(
                f"segment_ids has dtype {segment_ids.dtype}; it needs integers, one document id a token"
            )
        self.bind_shape("segment_ids", segment_ids.shape, "B T")
        if jnp.iinfo(segment_ids.dtype).max > INT32_MAX and (ids := known_values(segment_ids)) is not None:
            low, high = int(ids.min()), int(ids.max())
            if low < -INT32_MAX - 1 or high > INT32_MAX:
                raise ValueError(
                    f"segment_ids has ids from {low} to {high}; number the documents within int32"
                )


def explicit_axes(x: Array) -> tuple[str, ...]:
    """The axes of a mesh over which x is cut, and which are explicit: JAX then asks each operation for its sharding."""
    sharding: Any = jax.typeof(x).sharding
    types = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    used = (name for part in sharding.spec for name in (part if isinstance(part, tuple) else (part,)))
    return tuple(name for name in used if types.get(name) == AxisType.Explicit)


def known_values(x: Array) -> np.ndarray | None:
    """The values of x as NumPy's; None where there are none, or where they are traced or on other hosts.

    NumPy's, because what JAX computes inside of a trace is traced, even from an array whose values are known.
    """
    if isinstance(x, Tracer) or x.size == 0 or not getattr(x, "is_fully_addressable", True):
        return None
    return np.asarray(x)


def check_not_positive(name: str, x: Array, meaning: str) -> None:
    """Raise if a known array has an entry above 0. Under jit values are unknown and nothing is checked."""
    values = known_values(x)
    if values is not None and (top := float(np.max(values))) > 0:  # NaN compares false: NaN in, NaN out
        raise ValueError(f"{name} has the value {top:g} > 0; {meaning}")


def check_scale(scale: Any) -> None:
    """Raise unless scale is a real number or an array without axes."""
    dtype = getattr(scale, "dtype", None)
    if dtype is None:
        fits = isinstance(scale, float) or (isinstance(scale, int) and abs(scale) < 2**1023)
    else:
        real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
        fits = real and jnp.shape(scale) == ()
    if not fits:
        raise ValueError(f"scale is {scale!r}; it needs one real number for all heads (1.0 by default)")


def check_count(name: str, value: int) -> None:
    """Raise unless value is an integer ≥ 1, of Python or NumPy."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; it needs an integer of at least 1")


def check_float_type(name: str, dtype: Any) -> None:
    """Raise unless dtype is one that cells serve."""
    try:
        fits = dtype is not None and jnp.dtype(dtype) in FLOATS
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"{name} is {dtype!r}; it needs bfloat16, float16, float32 or float64")


def check_form(cell: str, form: str | None, forms: tuple[str, ...]) -> None:
    """Raise unless form is None or one that the cell has."""
    if form is not None and form not in forms:
        raise UnsupportedForm(
            f"form={form!r} does not exist for {cell}; it has {', '.join(forms)} (None picks)"
        )


def choose_form(cell: str, form: str | None, forms: tuple[str, ...], time: int) -> str:
    """The form that was asked for, or the fastest one: short sequences step by step, others in chunks."""
    check_form(cell, form, forms)
    if form is None:
        return "recurrent" if time < SHORT else "chunkwise"
    return form


SHORT = 8  # tokens, under which a chunk's triangular inverse costs more than stepping
