"""Endless training batches through grain: a new global shuffle each epoch, resumable at any batch."""

import grain
import numpy as np
from jaxtyping import Int, UInt8

type Batch = dict[str, np.ndarray]


def image_batches(
    images: UInt8[np.ndarray, "N 28 28"], labels: Int[np.ndarray, " N"], batch_size: int, seed: int
) -> grain.DatasetIterator[Batch]:
    """Return an endless iterator over shuffled batches.

    A batch is a dict of `pixels` [B, 784] uint8, `label` [B] int32 and `weight` [B] float32. The order
    depends on `seed` and the epoch alone. The last batch of an epoch keeps the images that are left over;
    it is padded to B rows with weight 0, so that every batch has one shape and the train step compiles
    once.

    Raises:
        ValueError: `batch_size` outside 1..N, or a negative `seed`.
    """
    if not 1 <= batch_size <= len(images):
        raise ValueError(f"batch_size must be in 1..{len(images)} (the number of images), got {batch_size}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    pixels = images.reshape(len(images), -1)

    def gather(index: Int[np.ndarray, " M"]) -> Batch:
        pad = (0, batch_size - len(index))
        return {
            "pixels": np.pad(pixels[index], (pad, (0, 0))),
            "label": np.pad(labels[index].astype(np.int32), pad),
            "weight": np.pad(np.ones(len(index), np.float32), pad),
        }

    # Rows are shuffled, not images: one fancy index a batch, not B Python calls, leaves nothing to prefetch.
    rows = grain.MapDataset.range(len(images)).shuffle(seed=seed).batch(batch_size, drop_remainder=False)
    return iter(
        rows.repeat().map(gather).to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    )
