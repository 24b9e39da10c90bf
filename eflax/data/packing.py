"""Batches of tokens: windows over documents in sequence, shuffled globally, mixed by weight, defined by the step.

The batch of a step depends on the data, the sizes and the seed alone. So a training that is resumed, be it with other
processes or devices, sees the batches that would have come.
"""

from collections.abc import Sequence
from typing import Any, SupportsIndex

import grain
import numpy as np
from jaxtyping import Int

from eflax.data.batches import Batch
from eflax.data.idx import DataError
from eflax.data.text_cache import TokenStore

STEPS = 1 << 40  # more than any training has


class Windows:
    """The tokens of a store, cut into windows of `length` that predict their next tokens, in order.

    A window is a dict of `tokens` and `targets` [T] int32, `weight` [T] float32, and, where documents are kept apart,
    `segment_ids` [T] int32, up by one at each document. The first token of a document is then no target.

    Args:
        store: the tokens.
        length: T, tokens of a window.
        separate: keep documents apart; otherwise a window is read as one text.
        remainder: whether a last window that is not full counts, padded with tokens of weight 0.

    Raises:
        DataError: there are fewer tokens than one window needs, or nothing to predict: all are first ones.
    """

    def __init__(
        self, store: TokenStore, length: int, *, separate: bool = True, remainder: bool = False
    ) -> None:
        targets = len(store.tokens) - 1
        self.store, self.length, self.separate = store, length, separate
        self._count = -(-targets // length) if remainder else targets // length
        if self._count < 1:
            raise DataError(
                f"{store.name} has {len(store.tokens)} tokens, too few for a window of {length}; "
                "give more text or a shorter sequence length"
            )
        if separate and len(store.starts) == len(store.tokens):
            raise DataError(f"{store.name} has no document of two tokens, so none to predict; get it again")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: SupportsIndex) -> Batch:
        if not 0 <= int(index) < self._count:
            raise IndexError(index)
        start = int(index) * self.length
        ids = self.store.tokens[start : start + self.length + 1].astype(np.int32)
        missing = self.length + 1 - len(ids)
        weight = np.ones(self.length + 1, np.float32)
        weight[len(ids) :] = 0
        ids = np.pad(ids, (0, missing))
        window = {"tokens": ids[:-1], "targets": ids[1:], "weight": weight[1:]}
        if self.separate:
            low, high = np.searchsorted(self.store.starts, (start, start + self.length + 1))
            begins = np.zeros(self.length + 1, np.int32)
            begins[self.store.starts[low:high] - start] = 1
            window["weight"] = window["weight"] * (1 - begins[1:]).astype(np.float32)
            window["segment_ids"] = 1 + np.cumsum(begins[:-1], dtype=np.int32)
        return window


def text_batches(
    stores: Sequence[TokenStore],
    length: int,
    batch_size: int,
    seed: int,
    *,
    weights: Sequence[float] | None = None,
    separate: bool = True,
    rows: Sequence[int] | None = None,
) -> grain.DatasetIterator[Batch]:
    """Return an endless iterator over batches; each window of a store comes once an epoch of that store.

    A batch stacks the arrays of `Windows`: [B, T].

    Args:
        stores: the data.
        length: T, tokens of a sequence.
        batch_size: B of all processes together.
        seed: of the order.
        weights: how often each store is drawn from; by default in proportion to its size.
        separate: keep documents apart, see `Windows`.
        rows: which of the B sequences to return, such as a process's `own_rows`; by default all.

    Raises:
        DataError: a store is too short.
        ValueError: sizes or weights do not fit.
    """
    wanted = range(batch_size) if rows is None else rows
    if not wanted or not all(0 <= row < batch_size for row in wanted):
        raise ValueError(
            f"batch_size={batch_size} must be positive and rows={rows} some of 0..{batch_size - 1}"
        )
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    windows = [Windows(store, length, separate=separate) for store in stores]
    shares = [float(len(each)) for each in windows] if weights is None else list(weights)
    if not stores or len(shares) != len(stores) or not all(0 < share < float("inf") for share in shares):
        raise ValueError(
            f"weights={shares}: there must be a positive one for each of the {len(stores)} sources"
        )
    orders = [
        grain.MapDataset.source(each).shuffle(seed=(seed + number) % 2**32).repeat()
        for number, each in enumerate(windows)
    ]
    total = sum(shares)
    mixed: Any = grain.MapDataset.mix(orders, [share / total for share in shares])

    def gather(step: int) -> Batch:
        parts = [mixed[step * batch_size + row] for row in wanted]
        return {name: np.stack([part[name] for part in parts]) for name in parts[0]}

    steps = grain.MapDataset.range(STEPS).map(gather)
    return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))


def segment_ids_from_cu_seqlens(cu_seqlens: Int[np.ndarray, "..."], length: int) -> Int[np.ndarray, "1 T"]:
    """Return the `segment_ids` [1, T] int32 of sequences packed end to end, from their cumulative lengths.

    Args:
        cu_seqlens: offsets of N sequences in the packed one, [N + 1], from 0 to the end of the last, as kernels for
            variable lengths take them, flash-linear-attention's among them. A sequence may be empty.
        length: T, tokens of the packed sequence; those behind the last offset are padding and get an id of their own.

    Raises:
        ValueError: the offsets do not start with 0, decrease, or exceed the length.
        TypeError: they are not integers.
    """
    offsets = np.asarray(cu_seqlens)
    if offsets.dtype.kind not in "iu":
        raise TypeError(f"cu_seqlens has dtype {offsets.dtype}; it holds offsets, which are integers")
    if offsets.ndim != 1 or offsets.size < 2 or offsets[0] != 0:
        raise ValueError(
            f"cu_seqlens={offsets.tolist()}: it needs the shape [N + 1] and starts with 0, as [0, 5, 12] for sequences "
            "of 5 and 7 tokens"
        )
    lengths = np.diff(offsets.astype(np.int64))
    if lengths.min() < 0:
        raise ValueError(f"cu_seqlens={offsets.tolist()} decreases; it holds cumulative lengths, not lengths")
    if offsets[-1] > length:
        raise ValueError(
            f"cu_seqlens ends at {offsets[-1]}, behind length={length}, the tokens that there are"
        )
    lengths = np.append(lengths, length - int(offsets[-1]))
    return np.repeat(np.arange(lengths.size, dtype=np.int32), lengths)[None]
