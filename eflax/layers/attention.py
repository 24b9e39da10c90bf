"""Softmax attention with rotary positions, grouped heads, a sliding window and a key-value cache."""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from eflax.cells.checks import check_count
from eflax.layers.parts import linear
from eflax.layers.state import check_call, check_counts, check_divides, number_documents


class KVCache(NamedTuple):
    """The tokens seen so far, of all documents; S = max_length slots, ``length`` of them in use."""

    keys: Array  # [B, S, KH, K], rotated
    values: Array  # [B, S, KH, K]
    documents: Array  # [B, S] int32: the number of each token's document; that of the last token is 0
    segment: Array  # [B] int32: the segment id of the last token
    length: Array  # int32 scalar


def rotary(
    positions: Int[Array, "T"], width: int, base: float
) -> tuple[Float[Array, "T P"], Float[Array, "T P"]]:
    """Return cos and sin of positions · base^(-2i/width) for i < P = width/2, in float32."""
    half = width // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None]
    return jnp.cos(angles), jnp.sin(angles)


def turn(
    x: Float[Array, "*B K"], cos: Float[Array, "*#B P"], sin: Float[Array, "*#B P"]
) -> Float[Array, "*B K"]:
    """Turn the pairs (x_i, x_{i + K/2}) by the angles of `rotary`, in float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def rotate(x: Float[Array, "B T H K"], positions: Int[Array, "T"], base: float) -> Float[Array, "B T H K"]:
    """Rotate the pairs (x_i, x_{i + K/2}) by positions · base^(-2i/K), in float32 (RoPE).

    Scores then depend on the distance of query and key alone, so the positions may count from any token.
    """
    cos, sin = rotary(positions, x.shape[-1], base)
    return turn(x, cos[None, :, None], sin[None, :, None])


class SoftmaxAttention(nnx.Module):
    """Causal softmax attention, called like the other mixers.

    Args:
        width: D, the width of x and y.
        num_heads: query heads.
        num_kv_heads: heads of keys and values, a divisor of num_heads; num_heads by default.
        head_dim: size of a head, even; width / num_heads by default.
        max_length: tokens that a state can hold, over all its calls and documents.
        window: a token sees itself and the window - 1 tokens before it; None: all before it.
        rope_base: base of the rotary frequencies.
        implementation: of ``jax.nn.dot_product_attention``.
        dtype: of matrix products and activations; the softmax is float32.
        param_dtype: of the projections.
        rngs: the source of initial parameters.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        max_length: int = 2048,
        window: int | None = None,
        rope_base: float = 10_000.0,
        implementation: Literal["xla", "cudnn"] | None = None,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.width, self.num_heads = width, num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_divides("num_heads", num_heads, "num_kv_heads", self.num_kv_heads)
        self.head_dim = (
            check_divides("width", width, "num_heads", num_heads) if head_dim is None else head_dim
        )
        check_counts(width=width, head_dim=self.head_dim, max_length=max_length)
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary positions turn pairs")
        if window is not None:
            check_count("window", window)
        self.max_length, self.window, self.rope_base = max_length, window, rope_base
        self.implementation: Literal["xla", "cudnn"] | None = implementation
        self.dtype = dtype
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.projection = linear(width, (num_heads + 2 * self.num_kv_heads) * self.head_dim, **options)
        self.out = linear(num_heads * self.head_dim, width, **options)

    def init_state(self, batch_size: int) -> KVCache:
        """Return the empty cache."""
        slots = (batch_size, self.max_length)
        heads = jnp.zeros((*slots, self.num_kv_heads, self.head_dim), self.dtype)
        documents, segment = jnp.zeros(slots, jnp.int32), jnp.zeros(batch_size, jnp.int32)
        return KVCache(heads, heads, documents, segment, jnp.zeros((), jnp.int32))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        state: KVCache | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Mix the tokens of x.

        Args:
            x: the input, any T ≥ 0; it is rounded to the compute dtype of the layer.
            state: what an earlier call returned, to continue from there.
            segment_ids: the document of each token; tokens see their own document only. None: one document,
                that of ``state``.

        Returns:
            The output, in the compute dtype, and the cache after the last token.

        Raises:
            ValueError: the cache overflows. Where the length of the cache is not known, under jit, the output
                is NaN instead.
        """
        check_call(self, x, state, segment_ids)
        cache = self.init_state(x.shape[0]) if state is None else state
        self.check_room(x.shape[1], cache)
        x = x.astype(self.dtype)
        if x.shape[1] == 0:
            return x, cache
        documents, segment = number_documents(cache.segment, segment_ids)
        q, k, v = self.heads(x, cache.length)
        filled = self.append(cache, k, v, documents, segment)
        # Without a past, the tokens attend to each other, and XLA drops the cache where nobody uses it.
        o = self.attend(q, k, v, documents) if state is None else self.attend_cache(q, filled)
        y = self.out(o.reshape(*x.shape[:2], -1))
        return jnp.where(filled.length <= self.max_length, y, jnp.nan), filled

    def check_room(self, tokens: int, cache: KVCache) -> None:
        """Raise ValueError if the cache is known to have no room for so many tokens."""
        used = 0 if isinstance(cache.length, Tracer) else int(cache.length)
        if used + tokens > self.max_length:
            raise ValueError(
                f"state: {used} tokens and {tokens} of x exceed max_length={self.max_length}; "
                "build the layer with a larger max_length, or start from layer.init_state"
            )

    def heads(self, x: Float[Array, "B T D"], start: Int[Array, ""]) -> tuple[Array, Array, Array]:
        """Return q, k, v by heads, q and k rotated to their positions from ``start`` on."""
        x = self.projection(x).reshape(*x.shape[:2], -1, self.head_dim)
        q, k, v = jnp.split(x, (self.num_heads, self.num_heads + self.num_kv_heads), axis=2)
        positions = start + jnp.arange(x.shape[1], dtype=jnp.int32)
        return rotate(q, positions, self.rope_base), rotate(k, positions, self.rope_base), v

    def append(
        self,
        cache: KVCache,
        k: Float[Array, "B T KH K"],
        v: Float[Array, "B T KH K"],
        documents: Int[Array, "B T"] | None,
        segment: Int[Array, "B"],
    ) -> KVCache:
        """Return the cache with the new tokens, documents numbered so that the last token's is 0 again."""
        documents = jnp.zeros(k.shape[:2], jnp.int32) if documents is None else documents

        def write(slots, new):
            return jax.lax.dynamic_update_slice_in_dim(slots, new, cache.length, axis=1)

        numbers = write(cache.documents, documents) - documents[:, -1:]
        length = cache.length + k.shape[1]
        return KVCache(write(cache.keys, k), write(cache.values, v), numbers, segment, length)

    def attend(
        self,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T G K"],
        v: Float[Array, "B T G K"],
        documents: Int[Array, "B T"] | None,
    ) -> Float[Array, "B T H K"]:
        """Attend among the tokens of one call."""
        mask = None if documents is None else documents[:, :, None] == documents[:, None]
        window = None if self.window is None else (self.window - 1, 0)
        return self.softmax(q, k, v, mask, is_causal=True, local_window_size=window)

    def attend_cache(self, q: Float[Array, "B T H K"], cache: KVCache) -> Float[Array, "B T H K"]:
        """Attend from the last T tokens of the cache to all of it."""
        return self.softmax(q, cache.keys, cache.values, self.cache_mask(q.shape[1], cache))

    def softmax(
        self,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B S G K"],
        v: Float[Array, "B S G K"],
        mask: Bool[Array, "B T S"] | None,
        **options: Any,
    ) -> Float[Array, "B T H K"]:
        """Softmax attention where the mask is True."""
        mask = None if mask is None else mask[:, None]
        attend = partial(jax.nn.dot_product_attention, implementation=self.implementation, **options)
        if self.implementation != "cudnn":
            # The backward pass finds the T × S weights again, of one layer at a time; cuDNN does so by itself.
            attend = jax.checkpoint(attend)
        with jax.numpy_dtype_promotion("standard"):  # which the library call needs for 16-bit inputs
            return attend(q, k, v, mask=mask)

    def cache_mask(self, tokens: int, cache: KVCache) -> Bool[Array, "B T S"]:
        """Return which slots each of the last tokens may see."""
        slots = jnp.arange(self.max_length, dtype=jnp.int32)
        positions = cache.length - tokens + jnp.arange(tokens, dtype=jnp.int32)
        distance = positions[:, None] - slots[None]
        near = (distance >= 0) & (distance < (self.window or self.max_length))
        own = jax.lax.dynamic_slice_in_dim(cache.documents, cache.length - tokens, tokens, axis=1)
        return near[None] & (own[:, :, None] == cache.documents[:, None])
