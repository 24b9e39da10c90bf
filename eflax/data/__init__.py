"""Data: image sets from the package, the network or local files, and their batches through grain."""

from eflax.data.batches import Batch, image_batches
from eflax.data.idx import DataError
from eflax.data.images import ImageSet, load_images

__all__ = ["Batch", "DataError", "ImageSet", "image_batches", "load_images"]
