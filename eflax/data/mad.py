"""The MAD benchmark's synthetic tasks (Mechanistic Architecture Design, arXiv 2403.17844): splits, order, difficulty.

The six tasks are in `eflax.data.mad_tasks`. The laws are those of the released generators and of the benchmark's
settings; the random numbers are not, so that sets agree in distribution and not example by example.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import ClassVar

import grain
import numpy as np
from jaxtyping import Bool, Int

from eflax.data.algorithmic import TRAIN, Batch

type Changes = dict[str, tuple[int | float, ...]]

DATA_SEED = 12345
TEST_SIZE = 1280
LENGTHS = (256, 512, 1024)
TRAIN_SIZES = (6400, 3200, 1600, 800)


@dataclass(frozen=True)
class MadTask(ABC):
    """One task at one difficulty: how examples are drawn, and what the benchmark changes.

    A batch is a dict of arrays [N, T]: `tokens` int32; `targets` int32, what is to be predicted at each position; and
    `weight` float32, 1 where that is an answer, which the score counts, else 0.

    Attributes:
        vocab_size: V, of tokens and targets.
        length: L; T is L or, for two of the recall tasks, L - 1.
        train_size: training examples, which every epoch shows in a new order.
        name: in command lines and files.
        title: in figures.
        next_token: whether `targets` are the next tokens everywhere, so that a loss may cover all of them.
        changes: what the benchmark's sweep changes, one at a time.
    """

    vocab_size: int = 16
    length: int = 128
    train_size: int = 12_800

    name: ClassVar[str]
    title: ClassVar[str]
    next_token: ClassVar[bool] = False
    changes: ClassVar[Changes]

    def __post_init__(self):
        """Raise ValueError for a setting that the task cannot have."""
        self.require("train_size", self.train_size >= 1, "at least 1")

    @abstractmethod
    def draw(self, rng: np.random.Generator, size: int, split: int) -> Batch:
        """Return so many examples of a split."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """The macro accuracy of a uniform guess among all possible answers."""

    @property
    def label(self) -> str:
        """The name, and what differs from the benchmark's baseline: "compression,vocab_size=32"."""
        given = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return ",".join([self.name, *(f"{name}={value}" for name, value, base in given if value != base)])

    def sweep(self) -> list["MadTask"]:
        """Return this task and every one-at-a-time change of it, whose mean is the benchmark's score."""
        changed = ((name, value) for name, values in self.changes.items() for value in values)
        return [self, *(replace(self, **{name: value}) for name, value in changed)]

    def split(self, split: int, size: int | None = None, seed: int = DATA_SEED) -> Batch:
        """Return the examples of a split; they depend on the setting, the size and the seed alone.

        Args:
            split: TRAIN, VALIDATION or TEST of `eflax.data.algorithmic`; the last two follow one law.
            size: examples, by default `train_size` or the benchmark's 1,280.
            seed: of the data.
        """
        size = (self.train_size if split == TRAIN else TEST_SIZE) if size is None else size
        if size < 1:
            raise ValueError(f"size {size}: must be at least 1")
        return self.draw(np.random.default_rng([seed, split]), size, split)

    def batches(self, batch_size: int, seed: int, data_seed: int = DATA_SEED) -> grain.DatasetIterator[Batch]:
        """Return endless training batches, of one shape: an epoch's last one is filled up with rows of weight 0.

        Args:
            batch_size: examples in a batch.
            seed: of their order, which also changes from epoch to epoch.
            data_seed: of the examples.
        """
        examples = self.split(TRAIN, seed=data_seed)

        def gather(rows: Batch) -> Batch:
            batch = {key: x[rows["rows"][0]] for key, x in examples.items()}
            return batch | {"weight": batch["weight"] * rows["weight"][0][:, None]}

        return _iterate(_rows(self.train_size, batch_size, (seed,)).map(gather))

    def require(self, name: str, holds: bool, must: str) -> None:
        """Raise ValueError for a setting that does not hold."""
        if not holds:
            raise ValueError(f"{self.name}: {name}={getattr(self, name)} must be {must}")


def shuffled_rows(count: int, batch_size: int, seeds: Sequence[int]) -> grain.DatasetIterator[Batch]:
    """Return endless batches of row numbers of a set, in an order of their own for each seed.

    A batch is a dict of `rows` [S, B] int32 and `weight` [S, B] float32. Each epoch is a new permutation, which depends
    on the seed and the epoch alone; its last batch is filled up with row 0 at weight 0.

    Args:
        count: rows of the set.
        batch_size: B.
        seeds: S numbers of at least 0.
    """
    return _iterate(_rows(count, batch_size, tuple(seeds)))


def steps_per_epoch(count: int, batch_size: int) -> int:
    """Return the batches of an epoch, the last and smaller one included."""
    return -(-count // batch_size)


def to_batch(
    tokens: Int[np.ndarray, "N T"], targets: Int[np.ndarray, "N T"], answer: Bool[np.ndarray, "N T"]
) -> Batch:
    """Return the batch of tokens, targets, and which of these are answers."""
    weight = answer.astype(np.float32)
    return {"tokens": tokens.astype(np.int32), "targets": targets.astype(np.int32), "weight": weight}


def _rows(count: int, batch_size: int, seeds: tuple[int, ...]) -> grain.MapDataset[Batch]:
    if batch_size < 1:
        raise ValueError(f"batch_size {batch_size}: must be at least 1")
    steps = steps_per_epoch(count, batch_size)

    rest = (0, steps * batch_size - count)
    weight = np.pad(np.ones(count, np.float32), rest).reshape(steps, batch_size)

    @lru_cache(maxsize=2)
    def order(epoch: int) -> Int[np.ndarray, "S steps B"]:
        orders = [np.random.default_rng([seed, epoch]).permutation(count) for seed in seeds]
        return np.stack([np.pad(order, rest) for order in orders]).reshape(len(seeds), steps, batch_size)

    def make(index: int) -> Batch:
        epoch, step = divmod(index, steps)
        rows = order(epoch)[:, step].astype(np.int32)
        return {"rows": rows, "weight": np.broadcast_to(weight[step], rows.shape)}

    return grain.MapDataset.range(2**40).map(make)


def _iterate(dataset: grain.MapDataset[Batch]) -> grain.DatasetIterator[Batch]:
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
