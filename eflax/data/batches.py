"""Endless training batches through grain: a new global shuffle each epoch, resumable at any batch."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import grain
import numpy as np
from jaxtyping import Int, UInt8

type Batch = dict[str, np.ndarray]


class Batches(Protocol):
    """An iterator over batches whose position can be saved and restored exactly, such as grain's."""

    def __next__(self) -> Batch: ...
    def __iter__(self) -> Iterator[Batch]: ...
    def get_state(self) -> Any: ...
    def set_state(self, state: Any) -> None: ...


def image_batches(
    images: UInt8[np.ndarray, "N 28 28"], labels: Int[np.ndarray, " N"], batch_size: int, seed: int
) -> Batches:
    """Return an endless iterator over shuffled batches.

    A batch is a dict of `pixels` [B, 784] uint8, `label` [B] int32 and `weight` [B] float32. The order depends on
    `seed` and the epoch alone. The last batch of an epoch keeps the images that are left over; it is padded to B rows
    with weight 0, so that every batch has one shape and the train step compiles once.

    Raises:
        ValueError: `batch_size` outside 1..N, or a negative `seed`.
    """
    if not 1 <= batch_size <= len(images):
        raise ValueError(f"batch_size must be in 1..{len(images)} (the number of images), got {batch_size}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    pixels = images.reshape(len(images), -1)

    def gather(rows: Sequence[int]) -> Batch:
        index = np.asarray(rows)
        pad = (0, batch_size - len(index))
        return {
            "pixels": np.pad(pixels[index], (pad, (0, 0))),
            "label": np.pad(labels[index].astype(np.int32), pad),
            "weight": np.pad(np.ones(len(index), np.float32), pad),
        }

    # Rows are shuffled, not images: one fancy index per batch instead of B Python calls. Nothing to prefetch then.
    rows = grain.MapDataset.range(len(images)).shuffle(seed=seed).batch(batch_size, drop_remainder=False)
    return iter(rows.repeat().map(gather).to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
