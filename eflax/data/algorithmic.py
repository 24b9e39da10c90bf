"""Algorithmic tasks of the Recurrent Looped Transformer (arXiv 2610.07591): splits, and batches through grain.

The tasks themselves are in `eflax.data.algorithmic_tasks`. The generators of the paper are not public; its lengths,
sizes and seeds are, and what had to be chosen stands beside the code.

Tokens, of the 277 that the paper's tokenizer has room for: bytes as they are, BOS = 256, EOS = 257, PAD = 258; in the
permutation tasks 0 to 119 are the elements of S5, as inputs and as answers. Answers share the tokens of inputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import grain
import numpy as np
from jaxtyping import Int

type Batch = dict[str, np.ndarray]

VOCABULARY = 277
BOS, EOS, PAD = 256, 257, 258
MAX_LENGTH = 4096
TRAIN, VALIDATION, TEST = range(3)
FORMAL_SEEDS = (20260914, 20260915, 20260916)


class Task(ABC):
    """One task: how examples of a length are drawn, and which lengths each split has.

    A batch is a dict of arrays [N, T]: `tokens` int32, which start with BOS and end in PAD; `targets` int32, what is
    to be predicted at each position; and `weight` float32, 1 where the paper supervises the prediction, else 0. The
    length of an example counts its symbols, without BOS and a final "=".

    Attributes:
        name: in command lines and files.
        train_lengths: each as likely as the others; that they are uniform is a choice.
        validation_lengths: as the paper's, `validation_size` examples each.
        test_lengths: as the paper's, `test_size` examples each.
        seeds: of the data of the splits.
        stepwise: whether `targets` hold the running answer at every position, supervised or not.
        metric: the accuracy that the paper reports: "final", of the last supervised position, or "token".
        chance: accuracy of a guess among the possible answers; None where that says nothing.
    """

    name: ClassVar[str]
    train_lengths: ClassVar[Sequence[int]]
    validation_lengths: ClassVar[Sequence[int]]
    test_lengths: ClassVar[Sequence[int]]
    validation_size: ClassVar[int] = 256
    test_size: ClassVar[int] = 1024
    seeds: ClassVar[tuple[int, int, int]] = FORMAL_SEEDS
    stepwise: ClassVar[bool] = False
    metric: ClassVar[str] = "final"
    chance: ClassVar[float | None] = None

    @abstractmethod
    def draw(self, rng: np.random.Generator, lengths: Int[np.ndarray, " N"], split: int) -> Batch:
        """Return an example of each length, padded to the longest."""

    @abstractmethod
    def num_tokens(self, length: int) -> int:
        """Return T, the tokens of an example of this length."""

    def draw_train(self, rng: np.random.Generator, size: int) -> Batch:
        """Return training examples."""
        return self.draw(rng, rng.choice(np.asarray(self.train_lengths), size), TRAIN)

    def check_length(self, length: int) -> None:
        """Raise ValueError for a length that the task has no examples of."""
        if not 1 <= length <= MAX_LENGTH:
            raise ValueError(f"length {length}: {self.name} has examples of length 1 to {MAX_LENGTH}")

    def symbol(self, token: int) -> str:
        """Return a token for readers."""
        special = {BOS: "<bos>", EOS: "<eos>", PAD: "<pad>"}
        return special.get(token) or (chr(token) if 32 <= token < 127 else f"<{token}>")

    def batches(self, batch_size: int, seed: int | None = None) -> grain.DatasetIterator[Batch]:
        """Return endless training batches, all of one shape; batch i depends on the seed and i alone.

        Args:
            batch_size: examples in a batch.
            seed: of the training data, by default the paper's.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size}: must be at least 1")
        seed = self.seeds[TRAIN] if seed is None else seed
        tokens = self.num_tokens(max(self.train_lengths))

        def make(index: int) -> Batch:
            return pad(self.draw_train(np.random.default_rng([seed, index]), batch_size), tokens)

        indices = grain.MapDataset.range(2**40).map(make)
        return iter(indices.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))

    def test(self, length: int, size: int | None = None) -> Batch:
        """Return the test examples of one length, ``test_size`` by default."""
        size = self.test_size if size is None else size
        return self._held_out(length, size, TEST)

    def validation(self, size: int | None = None) -> Batch:
        """Return the validation examples of all lengths, ``validation_size`` of each by default."""
        size = self.validation_size if size is None else size
        parts = [self._held_out(length, size, VALIDATION) for length in self.validation_lengths]
        longest = max(part["tokens"].shape[1] for part in parts)
        parts = [pad(part, longest) for part in parts]
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}

    def _held_out(self, length: int, size: int, split: int) -> Batch:
        self.check_length(length)
        if size < 1:
            raise ValueError(f"size {size}: must be at least 1")
        rng = np.random.default_rng([self.seeds[split], length])
        return self.draw(rng, np.full(size, length), split)


def pad(batch: Batch, tokens: int) -> Batch:
    """Return the batch with T = ``tokens``, at least what it has."""
    fill = {"tokens": PAD, "targets": PAD, "weight": 0}
    return {
        key: np.pad(x, ((0, 0), (0, tokens - x.shape[1])), constant_values=fill[key])
        for key, x in batch.items()
    }


def from_rows(rows: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Batch:
    """Return the batch of rows of tokens; the answers are the targets of the last positions of each row."""
    longest = max(map(len, rows))
    tokens, targets = (np.full((len(rows), longest), PAD, np.int32) for _ in range(2))
    weight = np.zeros((len(rows), longest), np.float32)
    for n, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        supervised = slice(len(row) - len(answer), len(row))
        tokens[n, : len(row)], targets[n, supervised], weight[n, supervised] = row, answer, 1
    return {"tokens": tokens, "targets": targets, "weight": weight}
