"""Log-likelihoods of texts under a language model, and their perplexity by token, word and byte."""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, PyTree

from eflax.cells.checks import check_count
from eflax.models.language_model import LanguageModel

SHORTEST = 64  # windows are this long, or longer by powers of two: few programs serve all lengths
LONGEST = 2048


class Score(NamedTuple):
    """Of the counted tokens of a sequence: −log p in nats, their number, and whether each was the most likely one."""

    nll: float
    tokens: int
    greedy: bool


class Perplexity(NamedTuple):
    """exp of the mean −log p of all texts, over tokens and over words; and bits a byte."""

    token: float
    word: float
    bits_per_byte: float


class Scorer:
    """Scores sequences of ids in batches, padded on the right, in windows that pass their state on.

    A recurrent model so sees the whole text before a token, however long. Softmax attention sees the window alone, and
    each window but the first then begins with the last token of the one before.

    Args:
        model: the model.
        batch_size: sequences that are scored at once.
        length: tokens of a window at most, below 64 or a multiple of it; for softmax attention not above the model's
            `max_length`. By default 2048, or as many as attention allows.
    """

    def __init__(self, model: LanguageModel, batch_size: int = 16, length: int | None = None) -> None:
        self.carries = all(block.layer != "transformer" for block in model.config.pattern)
        if length is None:
            most = LONGEST if self.carries else min(model.max_length, LONGEST)
            length = most if most < SHORTEST else most // SHORTEST * SHORTEST
        check_count("batch_size", batch_size)
        check_count("length", length)
        if length > SHORTEST and length % SHORTEST:
            raise ValueError(f"length={length} must be a multiple of {SHORTEST}, or below it")
        if not self.carries and length > model.max_length:
            raise ValueError(
                f"length={length}: the states of softmax attention hold max_length={model.max_length} tokens; give a "
                "shorter one, or build the model with a larger max_length"
            )
        self.model, self.batch_size, self.length = model, batch_size, length
        graph, self.variables = nnx.split(model)

        def score(variables: PyTree, tokens: Array, targets: Array, weight: Array, state: Any) -> Any:
            merged = nnx.merge(graph, variables)
            hidden, state = merged.hidden(tokens, state)
            chunks = (
                jnp.moveaxis(x.reshape(x.shape[0], -1, min(SHORTEST, length), *x.shape[2:]), 1, 0)
                for x in (hidden, targets)
            )

            def part(_: None, chunk: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
                logits = merged.logits(chunk[0])
                target = jnp.take_along_axis(logits, chunk[1][..., None], axis=2)[..., 0]
                return None, (jax.nn.logsumexp(logits, -1) - target, target >= logits.max(-1))

            _, found = jax.lax.scan(part, None, (next(chunks), next(chunks)))
            nll, best = (jnp.moveaxis(x, 0, 1).reshape(targets.shape) for x in found)
            counted = weight > 0
            return jnp.where(counted, nll, 0).sum(1), (best | ~counted).all(1), state

        self._score = jax.jit(score, donate_argnums=4)

    def __call__(
        self,
        sequences: Sequence[Sequence[int]],
        firsts: Sequence[int] | None = None,
        advance: Callable[[int], None] = lambda count: None,
    ) -> list[Score]:
        """Return the score of each sequence.

        Args:
            sequences: ids; the first of each is given, not scored.
            firsts: the index of the first id of each that counts, at least 1; by default 1.
            advance: is told, after each batch, of how many ids it was, given ones included.

        Raises:
            ValueError: ids outside the vocabulary, or an index that is not in its sequence.
        """
        firsts = [1] * len(sequences) if firsts is None else firsts
        for sequence, first in zip(sequences, firsts, strict=True):
            if not 1 <= first <= max(len(sequence), 1):
                raise ValueError(f"firsts: {first} is no index after the first of {len(sequence)} ids")
        scores: list[Score] = [Score(0.0, 0, True)] * len(sequences)
        order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
        size = min(self.batch_size, max(len(sequences), 1))
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            found = self._batch([sequences[row] for row in rows], [firsts[row] for row in rows], size)
            for row, score in zip(rows, found, strict=True):
                scores[row] = score
            advance(sum(len(sequences[row]) for row in rows))
        return scores

    def _batch(self, sequences: list[Sequence[int]], firsts: list[int], size: int) -> list[Score]:
        longest = max(max(map(len, sequences)) - 1, 1)
        length = min(
            SHORTEST << max(math.ceil(math.log2(longest / SHORTEST)), 0),
            self.length,
        )
        padded = -(-longest // length) * length
        tokens, targets = np.zeros((2, size, padded), np.int32)
        weight = np.zeros((size, padded), np.float32)
        for row, (sequence, first) in enumerate(zip(sequences, firsts, strict=True)):
            count = max(len(sequence) - 1, 0)
            tokens[row, :count], targets[row, :count] = sequence[:-1], sequence[1:]
            weight[row, first - 1 : count] = 1
        self.model.check_tokens(jnp.asarray(np.concatenate([tokens, targets], 1)))
        nll, greedy = np.zeros(size), np.ones(size, bool)
        state = None
        for at in range(0, padded, length):
            if state is None or not self.carries:
                state = self.model.init_state(size)
            window = (jnp.asarray(x[:, at : at + length]) for x in (tokens, targets, weight))
            part, best, state = self._score(self.variables, *window, state)
            nll, greedy = nll + np.asarray(part, np.float64), greedy & np.asarray(best)
        counts = weight.sum(1).astype(int)
        rows = zip(nll.tolist(), counts.tolist(), greedy.tolist(), strict=True)
        return [Score(*row) for row in rows][: len(sequences)]


def perplexity(scores: Sequence[Score], texts: Sequence[str]) -> Perplexity:
    """Return the perplexity of texts, from the score of each with its bos; words are what white space parts."""
    nll, tokens = sum(score.nll for score in scores), sum(score.tokens for score in scores)
    words = sum(len(text.split()) for text in texts)
    size = sum(len(text.encode()) for text in texts)
    means = nll / max(tokens, 1), nll / max(words, 1)
    # Of text without white space a word is a line, or all of it, whose perplexity no float may hold.
    token, word = (math.exp(mean) if mean < math.log(sys.float_info.max) else math.inf for mean in means)
    return Perplexity(token, word, nll / max(size, 1) / math.log(2))
