"""Generation: the prompts in chunks, then token by token from a state of constant size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key, PyTree

from eflax.cells.checks import check_count
from eflax.models.language_model import LanguageModel

LEAST = 1e-6  # float32 still has its quotients


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: logits are divided by it, from 1e-6 on; 0 takes the most likely token.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: of these, keep the most likely ones that together have this probability, from 1e-6 to 1, which keeps
            all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if self.temperature != 0 and not LEAST <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be 0 or at least {LEAST}")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be 0, for all, or positive")
        if not LEAST <= self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in {LEAST}..1")


def choose(logits: Float[Array, "B V"], key: Key[Array, ""], sampling: Sampling) -> Int[Array, "B"]:
    """Return a token of each row of float32 logits."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_k:
        k = min(sampling.top_k, logits.shape[-1])
        logits = jnp.where(logits < jax.lax.top_k(logits, k)[0][:, -1:], -jnp.inf, logits)
    if sampling.top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        # A token stays if those before it have not reached top_p yet: the first always does.
        stays = jnp.cumsum(probabilities, axis=-1) - probabilities < sampling.top_p
        lowest = jnp.where(stays, ordered, jnp.inf).min(axis=-1, keepdims=True)
        logits = jnp.where(logits < lowest, -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


class Generator:
    """Continues prompts; compiled once for a batch size, a chunk size and a way of sampling.

    Prompts of unequal length are padded on their left, as a document of its own, of which the prompt sees nothing.

    Args:
        model: the model.
        sampling: how the next token is chosen.
        chunk_size: tokens of the prompts that are read at once.
    """

    def __init__(self, model: LanguageModel, sampling: Sampling | None = None, chunk_size: int = 256) -> None:
        check_count("chunk_size", chunk_size)
        graph, self.variables = nnx.split(model)
        self.model, self.sampling, self.chunk_size = model, sampling or Sampling(), chunk_size

        def read(
            variables: PyTree, tokens: Array, state: Any, segment_ids: Array | None
        ) -> tuple[Array, Any]:
            merged = nnx.merge(graph, variables)
            hidden, state = merged.hidden(tokens, state, segment_ids)
            return merged.logits(hidden[:, -1]), state

        def step(variables: PyTree, logits: Array, state: Any, key: Array) -> tuple[Array, Array, Any]:
            tokens = choose(logits, key, self.sampling)
            logits, state = read(variables, tokens[:, None], state, None)
            return tokens, logits, state

        self._read = jax.jit(read, donate_argnums=2)
        self._step = jax.jit(step, donate_argnums=(1, 2))

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        seed: int = 0,
        stop: Sequence[int] = (),
        on_tokens: Callable[[list[int | None]], object] | None = None,
    ) -> list[list[int]]:
        """Return what follows each prompt, at most `max_tokens` ids, without the stop token.

        Args:
            prompts: ids, at least one each.
            max_tokens: ids to generate at most.
            seed: of the sampling, in 0..2**32 − 1.
            stop: ids that end an answer.
            on_tokens: called with the new id of each prompt, None where its answer has ended.

        Raises:
            ValueError: the seed is out of range; or a prompt is empty, has ids outside the vocabulary, or leaves no
                room in a state of softmax attention.
        """
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed={seed} must lie in 0..{2**32 - 1}")
        logits, state = self._prefill(prompts, max_tokens)
        answers: list[list[int]] = [[] for _ in prompts]
        open_ = [True] * len(prompts)
        for key in jax.random.split(jax.random.key(seed), max_tokens):
            tokens, logits, state = self._step(self.variables, logits, state, key)
            new: list[int | None] = []
            for row, token in enumerate(np.asarray(tokens).tolist()):
                open_[row] = open_[row] and token not in stop
                new.append(token if open_[row] else None)
                if open_[row]:
                    answers[row].append(token)
            if on_tokens is not None:
                on_tokens(new)
            if not any(open_):
                break
        return answers

    def _prefill(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[Array, Any]:
        check_count("max_tokens", max_tokens)
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise ValueError("prompts: each needs at least one id; begin a text with the tokenizer's bos")
        longest = max(map(len, prompts))
        size = min(self.chunk_size, longest)
        length = -(-longest // size) * size
        self._check_room(length + max_tokens)
        tokens, ids = np.zeros((2, len(prompts), length), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, length - len(prompt) :] = prompt
            ids[row, length - len(prompt) :] = 1
        self.model.check_tokens(jnp.asarray(tokens))
        state, logits = self.model.init_state(len(prompts)), jnp.zeros(0)
        for first in range(0, length, size):
            piece = (jnp.asarray(x[:, first : first + size]) for x in (tokens, ids))
            logits, state = self._read(self.variables, next(piece), state, next(piece))
        return logits, state

    def _check_room(self, tokens: int) -> None:
        attends = any(block.layer == "transformer" for block in self.model.config.pattern)
        if attends and tokens > self.model.max_length:
            raise ValueError(
                f"max_tokens: prompts and answers need {tokens} tokens, and the states of softmax attention hold "
                f"max_length={self.model.max_length}; ask for fewer, or build the model with a larger max_length"
            )
