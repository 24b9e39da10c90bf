"""Residual blocks: a token mixer and a SwiGLU, each behind a norm."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eflax.layers.parts import RMSNorm, linear
from eflax.layers.state import check_counts


def swiglu_width(width: int, multiple: int = 16) -> int:
    """Return 8/3 · width, rounded up to a multiple: SwiGLU then has the parameters of a 4 · width MLP."""
    return -(-8 * width // (3 * multiple)) * multiple


class SwiGLU(nnx.Module):
    """y = down(silu(gate(x)) · up(x)), without biases; ``inner`` is 8/3 · width by default."""

    def __init__(
        self,
        width: int,
        inner: int | None = None,
        *,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        inner = swiglu_width(width) if inner is None else inner
        check_counts(width=width, inner=inner)
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.gate = linear(width, inner, **options)
        self.up = linear(width, inner, **options)
        self.down = linear(inner, width, **options)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Map each token on its own."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """x + mixer(norm(x)), then x + SwiGLU(norm(x)).

    Args:
        mixer: any token mixer of ``eflax.layers``; its width and compute dtype are those of the block.
        mlp_width: inner width of the SwiGLU; None is 8/3 · width, 0 leaves it out (Mamba).
        norm_epsilon: of both RMSNorms.
        param_dtype: of the SwiGLU's projections.
        rngs: the source of initial parameters.
    """

    def __init__(
        self,
        mixer: Any,
        *,
        mlp_width: int | None = None,
        norm_epsilon: float = 1e-6,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.mixer, width = mixer, mixer.width
        self.mixer_norm = RMSNorm(width, norm_epsilon, rngs=rngs)
        if mlp_width == 0:
            self.mlp = None
            return
        self.mlp_norm = RMSNorm(width, norm_epsilon, rngs=rngs)
        self.mlp = SwiGLU(width, mlp_width, dtype=mixer.dtype, param_dtype=param_dtype, rngs=rngs)

    def init_state(self, batch_size: int) -> Any:
        """Return the mixer's state before the first token."""
        return self.mixer.init_state(batch_size)

    def __call__(
        self, x: Float[Array, "B T D"], state: Any = None, segment_ids: Int[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Return the output, in the dtype of x, and the mixer's state after the last token."""
        y, state = self.mixer(self.mixer_norm(x), state, segment_ids)
        x = x + y.astype(x.dtype)
        if self.mlp is not None:
            x = x + self.mlp(self.mlp_norm(x)).astype(x.dtype)
        return x, state
