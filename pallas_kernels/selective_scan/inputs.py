"""What the scan kernels need of their inputs on every platform, and how they take A."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.device import Unsupported

# Names for policies of jax.checkpoint: what the backward pass reads, and the outputs, which code after them reads.
RESIDUALS = ("selective_scan_states", "selective_scan_outputs")


def check_inputs(
    x: Array, dt: Array, a: Array, others: tuple[Array | None, ...], dtypes: Any, largest: int
) -> None:
    """Raise `Unsupported` unless x and dt have one of `dtypes`, the others at most 32 bits, and N is in reach."""
    if jax.typeof(x).mat.varying:
        raise Unsupported("inside jax.shard_map the kernels need check_vma=False")
    for name, value in (("x", x), ("dt", dt)):
        if value.dtype not in dtypes:
            *most, last = (jnp.dtype(dtype).name for dtype in dtypes)
            raise Unsupported(f"{name} is {value.dtype}; the kernels read {', '.join(most)} and {last}")
    if any(value is not None and value.dtype == jnp.float64 for value in (a, *others)):
        raise Unsupported("A, B, C or the state is float64; the kernels keep the state in float32")
    if not 0 < a.shape[1] <= largest:
        raise Unsupported(f"states have N = {a.shape[1]} entries; the kernels hold 1 to {largest}")
    if 0 in (x.shape[0], x.shape[2]):
        raise Unsupported(f"x has shape {x.shape}; the kernels need one sequence and one channel at least")


def exponents(a: Array) -> Array:
    """A log₂e; −∞ becomes finite, so that with dt = 0, as in padding, it is no decay, and not NaN."""
    return jnp.maximum(a * math.log2(math.e), jnp.finfo(a.dtype).min)
