"""Scores of sequence predictions, example by example, and their sums over sets of one length."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

type Scores = dict[str, Any]  # arrays [*seeds, B], or [*seeds] where summed over the examples

COUNTED = ("final", "sequence", "token", "supervised")


def example_scores(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], weight: Float[Array, "B T"]
) -> dict[str, Float[Array, "B"]]:
    """Return how well each example is predicted at its supervised positions, those of weight 1.

    `loss` is the mean cross-entropy in nats; `final`, `sequence` are 1 where the last of the positions, or all of them,
    are right; `token` is the number of right ones of `supervised`. Logits with a NaN or infinity are wrong.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    right = (jnp.argmax(logits, -1) == targets) & jnp.isfinite(logits).all(-1)
    hits = jnp.where(weight > 0, right.astype(jnp.float32), 0)
    supervised = weight.sum(-1)
    last = weight.shape[1] - 1 - jnp.argmax(weight[:, ::-1], axis=1)
    return {
        "loss": jnp.where(weight > 0, losses * weight, 0).sum(-1) / supervised,
        "final": jnp.take_along_axis(hits, last[:, None], axis=1)[:, 0],
        "sequence": (hits.sum(-1) == supervised).astype(jnp.float32),
        "token": hits.sum(-1),
        "supervised": supervised,
    }


def sum_scores(
    score: Callable[[Mapping[str, np.ndarray]], Scores], batch: Mapping[str, np.ndarray], batch_size: int
) -> Scores:
    """Return the sums over all examples of a batch, float64, scored so many at a time.

    Args:
        score: maps a part of the batch, always of one size, to scores [*seeds, B].
        batch: arrays with a leading axis of examples.
        batch_size: examples at a time.
    """
    count = len(batch["tokens"])
    batch_size = min(batch_size, count)
    totals: Scores = {}
    for start in range(0, count, batch_size):
        rows = np.minimum(
            np.arange(start, start + batch_size), count - 1
        )  # the last part repeats its last example
        scores = score({key: x[rows] for key, x in batch.items()})
        for key, x in scores.items():
            summed = np.asarray(x, np.float64)[..., : count - start].sum(-1)
            totals[key] = totals.get(key, 0.0) + summed
    return totals


def accuracy(totals: Mapping[str, Any], metric: str, count: int) -> float:
    """Return an accuracy in 0..1 from the sums over so many examples of one training.

    Args:
        totals: the sums, numbers.
        metric: "final" or "sequence", over examples, or "token", over supervised positions.
        count: examples.
    """
    return float(totals[metric]) / (float(totals["supervised"]) if metric == "token" else count)
