"""Assertions on the project's table of error budgets, `eflax.evaluation.agreement`."""

import jax
import numpy as np

from eflax.evaluation.agreement import BUDGETS, FLOOR, Budget, error

__all__ = ["BUDGETS", "FLOOR", "Budget", "assert_close", "error", "excesses"]


def excesses(result, reference, budget, label=""):
    """Compare two trees leaf by leaf: one line of text for every leaf whose error is above the budget."""
    lines = []
    for (path, ref), x in zip(jax.tree.leaves_with_path(reference), jax.tree.leaves(result), strict=True):
        measured = error(np.asarray(x), np.asarray(ref))
        if not measured <= budget:
            lines.append(f"{label}{jax.tree_util.keystr(path)}: error {measured:.2e} > {budget:.2e}")
    return lines


def assert_close(result, reference, budget, label=""):
    """Fail with one line for every leaf whose error is above the budget."""
    lines = excesses(result, reference, budget, label)
    assert not lines, "\n".join(lines)
