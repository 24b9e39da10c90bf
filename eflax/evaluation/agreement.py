"""How far two evaluations of the same thing may lie apart: the project's one table of error budgets."""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import ArrayLike, PyTree

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


def error(x: ArrayLike, reference: ArrayLike) -> float:
    """RMS(x − reference) / max(RMS(reference), FLOOR); infinite where x is not finite or has another shape.

    Below FLOOR an error counts absolutely: what is zero in exact arithmetic is rounding noise of its neighbours
    of order one. Budgets are meant for the same rounded inputs on both sides.
    """
    x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
    if x.shape != reference.shape or not np.isfinite(x).all():
        return float("inf")
    return _rms(x - reference) / max(_rms(reference), FLOOR) if x.size else 0.0


def worst_error(results: PyTree, references: PyTree) -> float:
    """The largest `error` among the leaves of two trees of the same structure."""
    return max(jax.tree.leaves(jax.tree.map(error, results, references)), default=0.0)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))
