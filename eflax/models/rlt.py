"""The Recurrent Looped Transformer (arXiv 2610.07591): an encoder, and a decoder that reads its own last output.

A causal encoder maps all known tokens to e_1 … e_T in parallel. Before position t the decoder merges its output s of an
earlier position into e_t, and reads the encoder's memory M up to t and its own last W - 1 keys and values:

    H_t = F(H_{t-1}; e_t, M, t),   H = (s, the decoder's window of keys and values),   logits_t = head(s_t)

feedback_interval says which s: 1 is RLT-1, that of the token before; B > 1 is RLT-2, where B tokens share the last one
of the B before them and are decoded together; None is RLT-0, without merge, all positions in parallel. The decoder's
sequential stages are T · L_D, ⌈T/B⌉ · L_D and L_D (`RLT.sequential_stages`).

F is not affine in s (norms, softmax and SwiGLU stand in its way), and so, unlike the cells of `eflax.cells`, it has no
small summary of a segment that could be composed in parallel: RLT-1 must be stepped. RLT-2 is another model, not a way
to evaluate RLT-1.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from eflax.cells.checks import check_count, known_values
from eflax.layers.parts import RMSNorm
from eflax.layers.state import check_counts, check_divides
from eflax.models.rlt_arrays import KeyValues, Rotary, Sizes, empty_slots, lookup
from eflax.models.rlt_decoder import Decoder, DecoderState
from eflax.models.rlt_parts import EPSILON, KEEP_PRODUCTS, EncoderBlock

BASE_WIDTH = 1024  # of the width-µP of the authors' base code: logits are multiplied by BASE_WIDTH / width


@dataclass(frozen=True)
class RLTConfig:
    """Sizes of an `RLT`; the defaults are the paper's RLT-1 4+4 with 28,726,912 parameters.

    Attributes:
        vocab_size: tokens, 256 bytes and 21 special ones in the paper.
        width: D, of the residual stream.
        num_heads: heads of every attention.
        encoder_layers: L_E, at least 1.
        decoder_layers: L_D; with 0 the merged input is the output: a gated recurrence on top of the encoder.
        window: W; a decoder position sees itself and the W - 1 before it.
        alpha: of the merge, fixed.
        feedback_interval: 1 for RLT-1, B > 1 for RLT-2, None for RLT-0, which has no parameters of the merge.
        mlp_width: inner width of SwiGLU, by default 8/3 · width rounded down.
    """

    vocab_size: int = 277
    width: int = 512
    num_heads: int = 4
    encoder_layers: int = 4
    decoder_layers: int = 4
    window: int = 8
    alpha: float = 0.1
    feedback_interval: int | None = 1
    mlp_width: int | None = None

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "width", "num_heads", "encoder_layers", "window")
        check_counts(**{name: getattr(self, name) for name in sizes})
        if self.decoder_layers != 0:
            check_count("decoder_layers", self.decoder_layers)
        if self.feedback_interval is not None:
            check_count("feedback_interval", self.feedback_interval)
        if self.mlp_width is not None:
            check_count("mlp_width", self.mlp_width)
        if check_divides("width", self.width, "num_heads", self.num_heads) % 2:
            raise ValueError(
                f"width={self.width} over num_heads={self.num_heads} is odd; rotary positions turn pairs"
            )

    @classmethod
    def gpt(cls, layers: int = 8, **sizes: int) -> "RLTConfig":
        """Return the GPT baseline of the same blocks: an encoder alone, under the norm and the head."""
        return replace(cls(**sizes), encoder_layers=layers, decoder_layers=0, feedback_interval=None)


class RLTCache(NamedTuple):
    """All that generation carries: S = max_length slots of encoder and memory, ``length`` of them in use."""

    encoder: tuple[KeyValues, ...]  # of each encoder layer
    memory: KeyValues | None  # None without decoder layers
    decoder: DecoderState
    length: Array  # int32 scalar


class RLT(nnx.Module):
    """Maps tokens to the logits of what follows each.

    Args:
        config: the sizes, and which of RLT-1, RLT-2, RLT-0 and GPT it is.
        rngs: the source of initial parameters.
    """

    def __init__(self, config: RLTConfig, *, rngs: nnx.Rngs):
        self.config = config
        mlp_width = config.mlp_width or 8 * config.width // 3
        layers = config.encoder_layers + config.decoder_layers
        self.sizes = Sizes(config.width, config.num_heads, mlp_width, layers)
        table = 0.02 * jax.random.normal(rngs.params(), (config.vocab_size, config.width), jnp.float32)
        self.embedding = nnx.Param(table)
        self.encoder = nnx.List([EncoderBlock(self.sizes, rngs=rngs) for _ in range(config.encoder_layers)])
        self.decoder = Decoder(
            self.sizes,
            config.decoder_layers,
            window=config.window,
            alpha=config.alpha,
            feedback_interval=config.feedback_interval,
            rngs=rngs,
        )
        self.norm = RMSNorm(config.width, EPSILON, rngs=rngs)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        truncate: int | None = None,
        remat: bool = False,
        unroll: int = 1,
    ) -> Float[Array, "B T V"]:
        """Return the logits after each token, float32.

        Args:
            tokens: known ones, T ≥ 1.
            truncate: cut the gradient through H before every position that this divides, a multiple of the feedback
                interval; None cuts nowhere. The gradient through encoder and memory is never cut.
            remat: compute the decoder's steps again in the backward pass, to store H alone of each.
            unroll: steps of the decoder in one iteration of the compiled loop.
        """
        self.check_tokens(tokens)
        start = jnp.zeros((), jnp.int32)
        e, memory, _ = self.encode(tokens, start)
        options = {"truncate": truncate, "remat": remat, "unroll": unroll}
        s, _ = self.decoder(self.decoder.init_state(len(tokens)), e, memory, start, **options)
        return self.read(s)

    def encode(
        self, tokens: Int[Array, "B T"], start: Int[Array, ""], cache: RLTCache | None = None
    ) -> tuple[Float[Array, "B T D"], KeyValues | None, tuple[KeyValues, ...]]:
        """Return e, the memory M, and the keys and values of each layer; these include those of the cache."""
        x = lookup(self.embedding[...], tokens)
        positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        rotary = Rotary.of(positions, self.sizes)
        layers = []
        for index, block in enumerate(self.encoder):
            past = None if cache is None else cache.encoder[index]
            x, past = jax.checkpoint(block.__call__, policy=KEEP_PRODUCTS)(x, rotary, positions, past)
            layers.append(past)
        memory = None if self.decoder.memory is None else self.decoder.memory(x, rotary)
        if memory is not None and cache is not None and cache.memory is not None:
            memory = cache.memory.write(memory, start)
        return x, memory, tuple(layers)

    def transition(
        self, state: DecoderState, e: Float[Array, "B D"], memory: KeyValues | None, t: Int[Array, ""]
    ) -> tuple[DecoderState, Float[Array, "B D"]]:
        """Return H_t = F(H_{t-1}; e_t, M, t) and s_t, for t from 0; H before that is `init_state`.

        M may hold positions after t; they are not seen. The register of RLT-2 changes where t + 1 is a multiple of
        its interval, so tokens may be stepped one by one in every variant.
        """
        s, state = self.decoder(state, e[:, None], memory, t, chunk=1)
        return state, s[:, 0]

    def init_state(self, batch_size: int) -> DecoderState:
        """Return H before the first token: s_star and an empty window."""
        return self.decoder.init_state(batch_size)

    def sequential_stages(self, tokens: int) -> int:
        """Return how many decoder layers wait for each other in a forward pass over so many tokens."""
        interval = self.config.feedback_interval
        steps = 1 if interval is None else -(-tokens // interval)
        return steps * self.config.decoder_layers

    def read(self, s: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Return the logits of outputs s, by the embedding."""
        return (BASE_WIDTH / self.config.width) * (self.norm(s) @ self.embedding[...].T)

    def init_cache(self, batch_size: int, max_length: int) -> RLTCache:
        """Return what generation starts from, with room for ``max_length`` tokens."""
        check_counts(batch_size=batch_size, max_length=max_length)
        slots = empty_slots(batch_size, max_length, self.sizes)
        memory = None if self.decoder.memory is None else slots
        decoder = self.decoder.init_state(batch_size)
        return RLTCache((slots,) * len(self.encoder), memory, decoder, jnp.zeros((), jnp.int32))

    def extend(self, tokens: Int[Array, "B T"], cache: RLTCache) -> tuple[Float[Array, "B T V"], RLTCache]:
        """Return the logits after further tokens, as in one call over all, and the cache after them.

        Raises:
            ValueError: the cache overflows. Where its length is not known, under jit, the logits are NaN instead.
        """
        self.check_tokens(tokens)
        room = cache.encoder[0].keys.shape[2]
        used = 0 if isinstance(cache.length, Tracer) else int(cache.length)
        if used + tokens.shape[1] > room:
            raise ValueError(
                f"tokens: {used} in the cache and {tokens.shape[1]} more exceed its max_length={room}; "
                "make a larger one with init_cache"
            )
        e, memory, encoder = self.encode(tokens, cache.length, cache)
        s, decoder = self.decoder(cache.decoder, e, memory, cache.length, chunk=1)
        length = cache.length + tokens.shape[1]
        logits = jnp.where(length <= room, self.read(s), jnp.nan)
        return logits, RLTCache(encoder, memory, decoder, length)

    def generate(self, tokens: Int[Array, "B T"], steps: int) -> Int[Array, "B steps"]:
        """Return the ``steps`` most likely next tokens, each after those before it."""
        check_count("steps", steps)
        logits, cache = self.extend(tokens, self.init_cache(len(tokens), tokens.shape[1] + steps))

        def step(carry: tuple[Array, RLTCache], _: None) -> tuple[tuple[Array, RLTCache], Array]:
            token, cache = carry
            logits, cache = self.extend(token[:, None], cache)
            return (most_likely(logits), cache), token

        _, generated = jax.lax.scan(step, (most_likely(logits), cache), length=steps)
        return generated.T

    def check_tokens(self, tokens: Int[Array, "B T"]) -> None:
        """Raise ValueError for no tokens, or known ones outside the vocabulary (unknown ones give NaN)."""
        if tokens.ndim != 2 or tokens.shape[1] == 0:
            raise ValueError(f"tokens has shape {tokens.shape}; it needs [B, T] with T ≥ 1")
        values = known_values(tokens)
        if values is not None and not 0 <= values.min() <= values.max() < self.config.vocab_size:
            raise ValueError(
                f"tokens has ids from {values.min()} to {values.max()}; vocab_size={self.config.vocab_size} "
                f"allows 0 to {self.config.vocab_size - 1}"
            )


def most_likely(logits: Float[Array, "B T V"]) -> Int[Array, "B"]:
    """Return the most likely token after the last one."""
    return jnp.argmax(logits[:, -1], axis=-1).astype(jnp.int32)
