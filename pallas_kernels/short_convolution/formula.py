"""The convolution in plain XLA."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int


def convolve(
    x: Float[Array, "B T D"],
    tail: Float[Array, "B W D"],
    kernel: Float[Array, "J D"],
    bias: Float[Array, "D"] | None,
    past: Int[Array, "B T"] | None,
) -> Float[Array, "B T D"]:
    """Convolve x, preceded by `tail`, on any machine, and differentiable at will.

    Args:
        x: the inputs.
        tail: the W = J - 1 inputs before them.
        kernel: J taps a channel, the last for the token itself; float32.
        bias: float32.
        past: how many of the tokens before it each token sees, W at most; None: all see W.

    Returns:
        y in x's dtype; sums and SiLU are float32.
    """
    window, time = kernel.shape[0] - 1, x.shape[1]
    inputs = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
    taps = [inputs[:, i : i + time] for i in range(window + 1)]
    if past is not None:
        taps = [jnp.where(past[..., None] >= window - i, tap, 0) for i, tap in enumerate(taps)]
    total = taps[0].astype(jnp.float32) * kernel[0][None, None]
    for i, tap in enumerate(taps[1:], 1):
        total += tap.astype(jnp.float32) * kernel[i][None, None]
    if bias is not None:
        total += bias[None, None]
    return jax.nn.silu(total).astype(x.dtype)
