"""The six MAD tasks by name; here memorization, compression and selective copying."""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from eflax.data.algorithmic import Batch
from eflax.data.mad import DATA_SEED, TRAIN_SIZES, Changes, MadTask, to_batch
from eflax.data.mad_recall import FuzzyRecall, InContextRecall, NoisyRecall


@dataclass(frozen=True)
class Memorization(MadTask):
    """One map from keys to values for all sequences: the value is asked for at the insert id behind a key.

    Keys are the ids 0 to n/2 - 1 of n = V - 1, values the others, the insert id is V - 1. The map is that of the
    released generator. 256 examples show 4,096 keys in all: of the larger vocabularies not all are ever shown.
    """

    vocab_size: int = 256
    length: int = 32
    train_size: int = 256

    name = "memorization"
    title = "Memorization"
    changes: ClassVar[Changes] = {"vocab_size": (512, 1024, 2048, 4096, 8192)}

    def __post_init__(self):
        super().__post_init__()
        self.require("vocab_size", self.vocab_size >= 5, "at least 5")
        self.require("length", self.length >= 2 and self.length % 2 == 0, "even, and at least 2")

    @property
    def chance(self) -> float:
        """One over the number of values."""
        return 1 / (self.vocab_size - 1 - (self.vocab_size - 1) // 2)

    def draw(self, rng: np.random.Generator, size: int, split: int) -> Batch:
        """Return examples; all splits have one law."""
        value_of = value_map(self.vocab_size)
        key = rng.integers(0, len(value_of), (size, self.length // 2))
        tokens = np.stack([key, np.full_like(key, self.vocab_size - 1)], axis=-1)
        targets = np.stack([np.zeros_like(key), value_of[key]], axis=-1)
        return to_batch(*(x.reshape(size, -1) for x in (tokens, targets, targets > 0)))


@cache
def value_map(vocab_size: int) -> Int[np.ndarray, " keys"]:
    """Return the value of each key of memorization."""
    rng = np.random.default_rng(DATA_SEED)
    half = (vocab_size - 1) // 2
    keys, values = list(range(half)), list(range(half, vocab_size - 1))
    rng.shuffle(keys)
    rng.shuffle(values)
    value_of = np.zeros(half, int)
    value_of[keys] = values[:half]
    return value_of


@dataclass(frozen=True)
class Compression(MadTask):
    """L - 1 uniform ids and the compression id V - 1; all L are to be told from the last position alone."""

    length: int = 32

    name = "compression"
    title = "Compression"
    changes: ClassVar[Changes] = {
        "vocab_size": (32, 64, 128),
        "length": (64, 128, 256),
        "train_size": TRAIN_SIZES,
    }

    def __post_init__(self):
        super().__post_init__()
        self.require("vocab_size", self.vocab_size >= 3, "at least 3")
        self.require("length", self.length >= 2, "at least 2")

    @property
    def chance(self) -> float:
        """The last token is known; of the others one over their number is right."""
        return 2 / self.vocab_size

    def draw(self, rng: np.random.Generator, size: int, split: int) -> Batch:
        """Return examples; all splits have one law."""
        tokens = rng.integers(0, self.vocab_size - 1, (size, self.length))
        tokens[:, -1] = self.vocab_size - 1
        return to_batch(tokens, tokens, np.ones(tokens.shape, bool))


@dataclass(frozen=True)
class SelectiveCopying(MadTask):
    """`copies` uniform ids among blanks, then the copy id V - 1 and as many blanks V - 2, at which they are to be told.

    Each blank falls into a uniform gap before one of the ids, so that the last id stands right before the copy id.
    """

    length: int = 256
    copies: int = 16

    name = "selective-copying"
    title = "Selective copying"
    changes: ClassVar[Changes] = {
        "vocab_size": (32, 64, 128),
        "length": (512, 1024),
        "train_size": TRAIN_SIZES,
        "copies": (32, 64, 96),
    }

    def __post_init__(self):
        super().__post_init__()
        self.require("vocab_size", self.vocab_size >= 4, "at least 4")
        self.require("copies", self.copies >= 1, "at least 1")
        self.require("length", self.length > 2 * self.copies + 1, "more than twice the copies and one")

    @property
    def chance(self) -> float:
        """One over the number of ids."""
        return 1 / (self.vocab_size - 2)

    def draw(self, rng: np.random.Generator, size: int, split: int) -> Batch:
        """Return examples; all splits have one law."""
        blank, copies = self.vocab_size - 2, self.copies
        data = rng.integers(0, blank, (size, copies))
        gap = rng.integers(0, copies, (size, self.length - 2 * copies - 1))
        row = np.arange(size)[:, None]
        in_gap = np.bincount((copies * row + gap).ravel(), minlength=size * copies).reshape(size, copies)
        tokens = np.full((size, self.length), blank)
        tokens[row, in_gap.cumsum(1) + np.arange(copies)] = data
        tokens[:, -copies - 1] = blank + 1
        targets, answer = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
        targets[:, -copies:], answer[:, -copies:] = data, True
        return to_batch(tokens, targets, answer)


TASKS: dict[str, type[MadTask]] = {
    task.name: task
    for task in (Compression, FuzzyRecall, InContextRecall, Memorization, NoisyRecall, SelectiveCopying)
}
