"""How far two evaluations of the same thing may lie apart: the project's one table of error budgets."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

FLOOR = 1e-2


class Budget(NamedTuple):
    """Largest allowed error of outputs and final states (forward) and of gradients (backward)."""

    forward: float
    backward: float


# bfloat16 keeps 8 significant bits, float16 keeps 11: the same algorithm is 2**3 times more accurate in float16.
BUDGETS = {
    "float64": Budget(1e-12, 1e-11),
    "float32": Budget(1e-5, 1e-4),
    "float16": Budget(5e-3 / 8, 8e-3 / 8),
    "bfloat16": Budget(5e-3, 8e-3),
}


def error(x: Array | np.ndarray, reference: Array | np.ndarray) -> float:
    """RMS(x − reference) / max(RMS(reference), FLOOR); infinite where x is not finite or has another shape.

    Below FLOOR an error counts absolutely: what is zero in exact arithmetic is rounding noise of its neighbours
    of order one. Budgets are meant for the same rounded inputs on both sides. Computed in float64 by NumPy, or
    on the reference's device, in its dtype, where the reference is a JAX array.
    """
    if x.shape != reference.shape:
        return float("inf")
    if isinstance(reference, jax.Array):
        return float(_device_error(jnp.asarray(x), reference))
    return float(_error(np, np.asarray(x, np.float64), np.asarray(reference, np.float64)))


def worst_error(results: PyTree, references: PyTree) -> float:
    """The largest `error` among the leaves of two trees of the same structure."""
    return max(jax.tree.leaves(jax.tree.map(error, results, references)), default=0.0)


def _error(xp: Any, x: Any, reference: Any) -> Any:
    if x.size == 0:
        return 0.0
    rms, scale = (xp.sqrt(xp.mean(xp.square(z))) for z in (x - reference, reference))
    return xp.where(xp.isfinite(x).all(), rms / xp.maximum(scale, FLOOR), xp.inf)


@jax.jit
def _device_error(x: Array, reference: Array) -> Array:
    return jnp.asarray(_error(jnp, x.astype(reference.dtype), reference))
