"""Trainings side by side in one program: one that diverges stands still, and the others go on."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from eflax.training.run_folder import Record
from eflax.training.step import Metrics, TrainState, TrainStep


def guarded_step(
    train_step: TrainStep, state: TrainState, batch: PyTree, running: Bool[Array, ""]
) -> tuple[TrainState, Metrics, Bool[Array, ""]]:
    """Return the state after one more step of one training, its metrics, and whether the step was taken.

    It is not where the training does not run, nor where its loss, its gradient or a parameter would not be finite: the
    state is then as it was. To be mapped over trainings by `jax.vmap`, which keeps them apart.
    """
    after, metrics = train_step(state, batch)
    watched = (metrics["loss"], metrics["grad_norm"], *jax.tree.leaves(after.params))
    taken = running & jnp.stack([jnp.isfinite(x).all() for x in watched]).all()
    return select(taken, after, state), metrics, taken


def select(chosen: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    """Return one of two trees of equal shapes."""
    return jax.tree.map(lambda x, y: jnp.where(chosen, x, y), new, old)


def summarize(metrics: Metrics, taken: Bool[Array, "S"]) -> Metrics:
    """Return one number for each metric [S] of trainings side by side, of those that took the step.

    "grad_norm" is their largest, all others are means, NaN where none took it; "running" is their number.
    """
    count = taken.sum(dtype=jnp.float32)
    counted = {key: jnp.where(taken, x, 0) for key, x in metrics.items()}
    means = {key: x.sum() / count for key, x in counted.items()}
    largest = jnp.where(count > 0, counted["grad_norm"].max(), jnp.nan)
    return means | {"grad_norm": largest, "running": count}


def divergences(steps: Int[Array, "S"], labels: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Return a record for each training that has diverged, with its step and its label, as `Trainer.train` tells them.

    Args:
        steps: at which each diverged, 0 where it did not.
        labels: what distinguishes each from the others; becomes part of its record.
    """
    why = "its loss, its gradient or a parameter was not finite; lower the learning rate (what was best before is kept)"
    found = []
    for label, step in zip(labels, np.asarray(steps).tolist(), strict=True):
        if step:
            name = ", ".join(f"{key} {value}" for key, value in label.items()).replace("_", " ")
            found.append({"step": step, **label, "diverged": f"{name} diverged at step {step}: {why}"})
    return found
