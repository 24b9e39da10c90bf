"""Accuracy of a classifier of pixel sequences at one point of a perturbation family."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, UInt8

from eflax.evaluation.perturbations import FAMILIES

SEED = 42  # every family starts from it, as in the released script
BATCH_SIZE = 250


def count_correct(
    predict: Callable[[Float[Array, "B T"]], Float[Array, "B K"]],
    images: UInt8[np.ndarray, "N T"],
    labels: Int[np.ndarray, " N"],
    family: str,
    index: int,
    batch_size: int = BATCH_SIZE,
) -> int:
    """Return how many of the N images `predict` classifies rightly at one strength of a family.

    The perturbation of an image depends on its row, `index` and `SEED` alone: neither on the batch size nor on
    what was evaluated before. A row of logits with a NaN or infinity counts as wrong. All strengths share one
    compiled `predict`, as all batches have one shape.

    Args:
        predict: maps pixels in [0, 1], perturbed, to logits.
        images: pixels 0 to 255.
        labels: the right classes.
        family: a name of `FAMILIES`.
        index: of the strength in the family's grid.
        batch_size: images at a time.
    """
    batch_size = min(batch_size, len(images))
    strength = jnp.float32(FAMILIES[family].strengths[index])
    correct = 0
    for start in range(0, len(images), batch_size):
        rows = np.minimum(np.arange(start, start + batch_size, dtype=np.int32), len(images) - 1)
        pixels = _perturb(family, images[rows], strength, jnp.int32(index), rows)
        logits = np.asarray(predict(pixels))
        hits = np.isfinite(logits).all(-1) & (logits.argmax(-1) == labels[rows])
        correct += int(hits[: len(images) - start].sum())  # the last batch repeats its last image
    return correct


@partial(jax.jit, static_argnames="family")
def _perturb(
    family: str,
    images: UInt8[ArrayLike, "B T"],
    strength: Float[Array, ""],
    index: Int[Array, ""],
    rows: Int[ArrayLike, " B"],
) -> Float[Array, "B T"]:
    key = jax.random.fold_in(jax.random.key(SEED), index)
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
    pixels = jnp.asarray(images).astype(jnp.float32) / 255
    return jax.vmap(FAMILIES[family].apply, (0, None, 0))(pixels, strength, keys)
