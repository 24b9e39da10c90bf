"""What the kernels that work in chunks need of their inputs on every platform."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.device import Unsupported


def check_inputs(q: Array | None, k: Array, v: Array, others: tuple[Array | None, ...], dtypes: Any) -> None:
    """Raise `Unsupported` unless q, k and v have one of `dtypes`, and the others at most 32 bits."""
    if jax.typeof(k).mat.varying:
        raise Unsupported("inside jax.shard_map the kernels need check_vma=False")
    for name, x in (("q", q), ("v", v)):
        if x is not None and x.dtype != k.dtype:
            raise Unsupported(
                f"{name} is {x.dtype} and k {k.dtype}; the kernels need one dtype for q, k and v"
            )
    if k.dtype not in dtypes:
        names = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
        raise Unsupported(f"q, k and v are {k.dtype}; the kernels multiply {names}: cast them to that")
    if any(x is not None and x.dtype == jnp.float64 for x in others):
        raise Unsupported("a gate or the state is float64; the kernels keep the state in float32")
    if 0 in (v.shape[0], *v.shape[2:]):
        raise Unsupported(
            f"v has shape {v.shape}; the kernels need one entry at least on every axis but time"
        )
