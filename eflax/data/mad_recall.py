"""MAD's recall tasks: in-context recall, noisy and fuzzy."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Int

from eflax.data.algorithmic import TRAIN, Batch
from eflax.data.mad import LENGTHS, TRAIN_SIZES, Changes, MadTask, to_batch

type Motifs = list[tuple[int, ...]]

BLOCK = 256  # sequences whose motifs are drawn at once


@dataclass(frozen=True)
class InContextRecall(MadTask):
    """Pairs of key and value; what value a key has stays the same within a sequence. T = L - 1.

    Keys are the ids 0 to n/2 - 1 and values n/2 to n - 1, n = V without noise ids, all uniform. The last pair has a key
    that was shown. An answer is the value of a key that was shown before.
    """

    name = "in-context-recall"
    title = "In-context recall"
    next_token = True
    changes: ClassVar[Changes] = {"vocab_size": (32, 64, 128), "length": LENGTHS, "train_size": TRAIN_SIZES}

    def __post_init__(self):
        super().__post_init__()
        self.require("vocab_size", self.num_symbols >= 4, "larger by 4 than the number of noise ids")
        self.require("length", self.length >= 4 and self.length % 2 == 0, "even, and at least 4")

    @property
    def num_symbols(self) -> int:
        """Ids of keys and values."""
        return self.vocab_size

    @property
    def chance(self) -> float:
        """One over the number of values."""
        return 1 / (self.num_symbols - self.num_symbols // 2)

    def draw_noise(
        self, rng: np.random.Generator, size: int, pairs: int
    ) -> tuple[Bool[np.ndarray, "N P"], Int[np.ndarray, "N P 2"] | int]:
        """Return which pairs are noise, and the tokens of noise."""
        return np.zeros((size, pairs), bool), 0

    def draw(self, rng: np.random.Generator, size: int, split: int) -> Batch:
        """Return examples; all splits have one law."""
        pairs, keys = self.length // 2, self.num_symbols // 2
        row = np.arange(size)[:, None]
        value_of = rng.integers(keys, self.num_symbols, (size, keys))
        key = rng.integers(0, keys, (size, pairs))
        is_noise, noise = self.draw_noise(rng, size, pairs - 1)
        first = np.full((size, keys + 1), pairs)  # where each key is shown first; the last entry is for noise
        np.minimum.at(first, (row, np.where(is_noise, keys, key[:, :-1])), np.arange(pairs - 1))
        key[:, -1] = np.where(first[:, :keys] < pairs, rng.random((size, keys)), -1).argmax(1)
        sequence = np.stack([key, value_of[row, key]], axis=-1)
        sequence[:, :-1] = np.where(is_noise[..., None], noise, sequence[:, :-1])
        again = np.arange(pairs) > first[row, key]
        again[:, :-1] &= ~is_noise
        answer = np.stack([np.zeros_like(again), again], axis=-1)
        return _next_tokens(sequence.reshape(size, -1), answer.reshape(size, -1))


@dataclass(frozen=True)
class NoisyRecall(InContextRecall):
    """In-context recall in which pairs are replaced by two ids of noise, with probability `noise`.

    One pair before the last is never noise, so that there is something to recall. (In the released generator the pair
    that is spared may be the last, which is no noise anyway.)
    """

    vocab_size: int = 32
    noise: float = 0.2
    noise_vocab: int = 16

    name = "noisy-in-context-recall"
    title = "Noisy recall"
    changes: ClassVar[Changes] = {
        "vocab_size": (48, 80, 144),
        "length": LENGTHS,
        "train_size": TRAIN_SIZES,
        "noise": (0.4, 0.6, 0.8),
    }

    def __post_init__(self):
        super().__post_init__()
        self.require("noise", 0 <= self.noise < 1, "at least 0 and below 1")
        self.require("noise_vocab", self.noise_vocab >= 1, "at least 1")

    @property
    def num_symbols(self) -> int:
        """Ids of keys and values."""
        return self.vocab_size - self.noise_vocab

    def draw_noise(
        self, rng: np.random.Generator, size: int, pairs: int
    ) -> tuple[Bool[np.ndarray, "N P"], Int[np.ndarray, "N P 2"]]:
        """Return which pairs are noise, and the tokens of noise."""
        is_noise = rng.random((size, pairs)) < self.noise
        is_noise[np.arange(size), rng.integers(0, pairs, size)] = False
        return is_noise, rng.integers(self.num_symbols, self.vocab_size, (size, pairs, 2))


@dataclass(frozen=True)
class FuzzyRecall(MadTask):
    """In-context recall of keys and values of one to three tokens, a motif of different ids in an order.

    Of n = V - 1 ids, keys use 0 to n/2 - 1, values the others; V - 1 is padding, in front. Motifs of a size are equally
    likely, and so are sizes in training; keys of the tests all have three tokens. One pair, the probe, is put in at a
    uniform place and comes once more at the end. (A late place with a short probe can lie behind the last pair: then
    the last answer cannot be known. That is rare, and so in the released generator.)
    """

    name = "fuzzy-in-context-recall"
    title = "Fuzzy recall"
    next_token = True
    changes: ClassVar[Changes] = InContextRecall.changes

    def __post_init__(self):
        super().__post_init__()
        self.require("vocab_size", self.vocab_size >= 7, "at least 7")
        self.require("length", self.length >= 14, "at least 14, for two pairs of six tokens")

    @property
    def chance(self) -> float:
        """One over the number of ids in values."""
        return 1 / (self.vocab_size - 1 - (self.vocab_size - 1) // 2)

    def draw(self, rng: np.random.Generator, size: int, split: int) -> Batch:
        """Return examples; keys have one to three tokens in training and three in the other splits."""
        sequence = np.full((size, self.length + 1), self.vocab_size - 1)
        answer = np.zeros(sequence.shape, bool)
        half, most = (self.vocab_size - 1) // 2, self.length // 2 + 1  # pairs have two tokens at least
        for start in range(0, size, BLOCK):
            block = min(BLOCK, size - start)
            keys = _motifs(rng, half, rng.integers(1 if split == TRAIN else 3, 4, (block, most)))
            values = _motifs(rng, self.vocab_size - 1 - half, rng.integers(1, 4, (block, most)), half)
            drawn = zip(keys, values, rng.random(block).tolist(), strict=True)
            for n, pairs in enumerate(drawn, start):
                tokens, answers = self._sequence(*pairs)
                sequence[n, -len(tokens) :], answer[n, -len(tokens) :] = tokens, answers
        return _next_tokens(sequence, answer)

    def _sequence(self, keys: Motifs, values: Motifs, place: float) -> tuple[list[int], list[bool]]:
        """Return the tokens of a sequence, and which are answers; the first pair is the probe, `place` is in [0, 1)."""
        probe, probe_size = keys[0], len(keys[0] + values[0])
        planned = int(place * (self.length - 2 * probe_size))
        value_of, shown = {probe: values[0]}, set()
        tokens, answers = [], []
        pairs = iter(zip(keys[1:], values[1:], strict=True))
        while len(tokens) < self.length - probe_size - 6:
            key, value = next(pairs)
            if len(tokens) >= planned and probe not in shown:
                key = probe
            value = value_of.setdefault(key, value)
            tokens += key + value
            answers += [False] * len(key) + [key in shown] * len(value)
            shown.add(key)
        return [*tokens, *probe, *values[0]], answers + [False] * len(probe) + [True] * len(values[0])


def _motifs(
    rng: np.random.Generator, count: int, sizes: Int[np.ndarray, "N P"], first: int = 0
) -> list[Motifs]:
    """Return tuples of these sizes, up to three, of different ids among `count`, each as likely as the others."""
    a, b, c = np.moveaxis(rng.integers(0, [count, count - 1, count - 2], (*sizes.shape, 3)), -1, 0)
    b += b >= a
    low, high = np.minimum(a, b), np.maximum(a, b)
    c += c >= low
    c += c >= high
    ids = (first + np.stack([a, b, c], axis=-1)).tolist()
    return [
        [tuple(motif[:size]) for motif, size in zip(*row, strict=True)]
        for row in zip(ids, sizes.tolist(), strict=True)
    ]


def _next_tokens(sequence: Int[np.ndarray, "N L"], answer: Bool[np.ndarray, "N L"]) -> Batch:
    """Return the batch in which each token but the last is to be followed by the next."""
    return to_batch(sequence[:, :-1], sequence[:, 1:], answer[:, 1:])
