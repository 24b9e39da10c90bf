"""The parts of the Recurrent Looped Transformer that have parameters: heads with QK-norm, blocks, memory, merge.

All is float32. Sizes and initial values follow the paper's exact parameter counts and the public base code of its
authors: no bias but the gate's; matrices N(0, (0.5/√D)²), those that write into the residual stream also over
√(number of layers).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from eflax.layers.parts import RMSNorm, linear
from eflax.models.rlt_arrays import KeyValues, Rotary, Sizes, attend

EPSILON = 1e-5  # of every RMSNorm
ALIGNMENT = 64

# What the backward pass keeps of a block: the products with parameters. All else is cheaper to compute again, fused
# with its use, than to store, which at every step of the decoder takes a kernel for each array.
KEEP_PRODUCTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


def matrix(inputs: int, outputs: int, sizes: Sizes, rngs: nnx.Rngs, **options: Any) -> nnx.Linear:
    """Make a linear layer that reads the residual stream, without bias by default."""
    options = {"kernel_init": jax.nn.initializers.normal(0.5 * sizes.width**-0.5)} | options
    return linear(inputs, outputs, dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs, **options)


def output_matrix(inputs: int, sizes: Sizes, rngs: nnx.Rngs) -> nnx.Linear:
    """Make a linear layer that writes into the residual stream."""
    init = jax.nn.initializers.normal(0.5 * (sizes.width * sizes.layers) ** -0.5)
    return matrix(inputs, sizes.width, sizes, rngs, kernel_init=init)


class Heads(nnx.Module):
    """Projections of an input to ``parts`` groups of heads by one matrix product: any of q, k, v.

    Queries and keys are rotated first and normalised then, with one gain of size K each for all heads. The gains of
    a part that has no name in ``normed`` do not exist.
    """

    def __init__(self, parts: str, sizes: Sizes, *, rngs: nnx.Rngs):
        self.parts, self.num_heads = parts, sizes.num_heads
        head_dim = sizes.width // sizes.num_heads
        self.projection = matrix(sizes.width, len(parts) * sizes.width, sizes, rngs)
        self.q_norm = RMSNorm(head_dim, EPSILON, rngs=rngs) if "q" in parts else None
        self.k_norm = RMSNorm(head_dim, EPSILON, rngs=rngs) if "k" in parts else None

    def __call__(self, x: Float[Array, "B T D"], positions: Rotary) -> list[Array]:
        """Return the parts in their order, [B, H, T, K] each."""
        x = self.projection(x).reshape(*x.shape[:2], len(self.parts), self.num_heads, -1)
        heads = []
        for index, part in enumerate(self.parts):
            y = x[:, :, index].swapaxes(1, 2)
            norm = {"q": self.q_norm, "k": self.k_norm, "v": None}[part]
            heads.append(y if norm is None else norm(positions.turn(y)))
        return heads


class FeedForward(nnx.Module):
    """x + down(silu(gate) · up) with [gate, up] of RMSNorm(x) in one matrix product: SwiGLU."""

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs):
        self.norm = RMSNorm(sizes.width, EPSILON, rngs=rngs)
        self.projection = matrix(sizes.width, 2 * sizes.mlp_width, sizes, rngs)
        self.out = output_matrix(sizes.mlp_width, sizes, rngs)

    def weights(self) -> tuple[Float[Array, "D Q"], Float[Array, "P D"]]:
        """Return both matrices with an inner width of a multiple of `ALIGNMENT`, filled with zeros.

        The result is the same. 1365 columns start at odd addresses, where no tensor core can read them; XLA would copy
        the matrices at every step of the decoder. This does it once, before the loop.
        """
        width, inner = self.out.kernel.shape[1], self.out.kernel.shape[0]
        fill = -inner % ALIGNMENT
        halves = self.projection.kernel[...].reshape(width, 2, inner)
        both = jnp.pad(halves, ((0, 0), (0, 0), (0, fill))).reshape(width, 2 * (inner + fill))
        return both, jnp.pad(self.out.kernel[...], ((0, fill), (0, 0)))

    def __call__(
        self, x: Float[Array, "B T D"], weights: tuple[Float[Array, "D Q"], Float[Array, "P D"]]
    ) -> Float[Array, "B T D"]:
        """Map each position on its own, with the matrices of `weights`."""
        gate, up = jnp.split(self.norm(x) @ weights[0], 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ weights[1]


class SelfAttention(nnx.Module):
    """x + attention of RMSNorm(x) to the past and itself."""

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs):
        self.norm = RMSNorm(sizes.width, EPSILON, rngs=rngs)
        self.heads = Heads("qkv", sizes, rngs=rngs)
        self.out = output_matrix(sizes.width, sizes, rngs)

    def project(self, x: Float[Array, "B T D"], positions: Rotary) -> tuple[Array, KeyValues]:
        """Return the queries, and the keys and values of these positions."""
        q, k, v = self.heads(self.norm(x), positions)
        return q, KeyValues(k, v)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        q: Float[Array, "B H T K"],
        past: KeyValues,
        visible: Bool[Array, "T S"],
    ) -> Float[Array, "B T D"]:
        """Add what the queries read from ``past``, which includes these positions."""
        return x + self.out(attend(q, past, visible))


class CrossAttention(nnx.Module):
    """x + attention of RMSNorm(x) to the encoder memory."""

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs):
        self.norm = RMSNorm(sizes.width, EPSILON, rngs=rngs)
        self.heads = Heads("q", sizes, rngs=rngs)
        self.out = output_matrix(sizes.width, sizes, rngs)

    def __call__(
        self, x: Float[Array, "B T D"], memory: KeyValues, positions: Rotary, visible: Bool[Array, "T S"]
    ) -> Float[Array, "B T D"]:
        """Add what x reads from the visible part of the memory."""
        (q,) = self.heads(self.norm(x), positions)
        return x + self.out(attend(q, memory, visible))


class EncoderBlock(nnx.Module):
    """Self-attention, then SwiGLU; eight of them under a norm and a head are the GPT baseline."""

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs):
        self.attention = SelfAttention(sizes, rngs=rngs)
        self.mlp = FeedForward(sizes, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], rotary: Rotary, positions: Int[Array, "T"], cache: KeyValues | None
    ) -> tuple[Float[Array, "B T D"], KeyValues]:
        """Return the output, and the keys and values so far, where a cache has room for those of these positions."""
        q, past = self.attention.project(x, rotary)
        if cache is not None:
            past = cache.write(past, positions[0])
        slots = jnp.arange(past.keys.shape[2], dtype=jnp.int32)
        x = self.attention(x, q, past, positions[:, None] >= slots[None])
        return self.mlp(x, self.mlp.weights()), past


class DecoderBlock(nnx.Module):
    """Sliding-window self-attention, cross-attention to the memory, SwiGLU."""

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs):
        self.attention = SelfAttention(sizes, rngs=rngs)
        self.cross = CrossAttention(sizes, rngs=rngs)
        self.mlp = FeedForward(sizes, rngs=rngs)


class Memory(nnx.Module):
    """The keys and values of RMSNorm(e) that all decoder blocks share (one group, G = 1 in the paper)."""

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs):
        self.norm = RMSNorm(sizes.width, EPSILON, rngs=rngs)
        self.heads = Heads("kv", sizes, rngs=rngs)

    def __call__(self, e: Float[Array, "B T D"], positions: Rotary) -> KeyValues:
        """Return keys and values of the encoder's outputs."""
        return KeyValues(*self.heads(self.norm(e), positions))


class Merge(nnx.Module):
    """u = e + alpha · sigmoid(W_g [e; r] + b_g) · (W_s r), r = RMSNorm(register); the register starts as s_star.

    W_g is kept as its two halves, and its half for r beside W_s, so that one product of r is all that waits for the
    register. alpha is no parameter. Not public, so chosen here: s_star starts N(0, 0.02²), as an embedding does; b_g
    at 0, so that gates start half open; W_g and W_s as the other matrices.
    """

    def __init__(self, sizes: Sizes, alpha: float, *, rngs: nnx.Rngs):
        self.alpha = alpha
        self.start = nnx.Param(0.02 * jax.random.normal(rngs.params(), (sizes.width,), jnp.float32))
        self.norm = RMSNorm(sizes.width, EPSILON, rngs=rngs)
        self.gate = matrix(sizes.width, sizes.width, sizes, rngs, use_bias=True)
        self.feedback = matrix(sizes.width, 2 * sizes.width, sizes, rngs)

    def init_register(self, batch_size: int) -> Float[Array, "B D"]:
        """Return s_star for each sequence."""
        return jnp.broadcast_to(self.start[...][None], (batch_size, self.start.shape[0]))

    def __call__(
        self, e: Float[Array, "B T D"], gate: Float[Array, "B T D"], register: Float[Array, "B D"]
    ) -> Float[Array, "B T D"]:
        """Merge the register into e, where ``gate`` is W_g's half of e, with b_g: ``self.gate(e)``."""
        gate_r, value = jnp.split(self.feedback(self.norm(register))[:, None], 2, axis=-1)
        return e + self.alpha * jax.nn.sigmoid(gate + gate_r) * value
