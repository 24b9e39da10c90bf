"""The one table of error budgets: how far a result may lie from the float64 reference, by dtype.

Errors are RMS(x - ref) / RMS(ref), the reference being evaluated on the same rounded inputs.
A reference smaller than FLOOR (a gradient that is exactly zero, say) is measured against FLOOR instead:
what is zero in exact arithmetic may be `FLOOR * budget` in rounded arithmetic, when its neighbours are of order one.
"""

from typing import NamedTuple

import jax
import numpy as np

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


def error(x, reference):
    """RMS(x - reference) over max(RMS(reference), FLOOR); infinite when x is not finite or ill-shaped."""
    x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
    if x.shape != reference.shape or not np.isfinite(x).all():
        return np.inf
    if x.size == 0:
        return 0.0
    return _rms(x - reference) / max(_rms(reference), FLOOR)


def _rms(x):
    return float(np.sqrt(np.mean(np.square(x))))


def excesses(result, reference, budget, label=""):
    """Compare two trees leaf by leaf: one line of text for every leaf whose error is above the budget."""
    lines = []
    for (path, ref), x in zip(jax.tree.leaves_with_path(reference), jax.tree.leaves(result), strict=True):
        measured = error(x, ref)
        if not measured <= budget:
            lines.append(f"{label}{jax.tree_util.keystr(path)}: error {measured:.2e} > {budget:.2e}")
    return lines


def assert_close(result, reference, budget, label=""):
    """Fail with one line for every leaf whose error is above the budget."""
    lines = excesses(result, reference, budget, label)
    assert not lines, "\n".join(lines)
