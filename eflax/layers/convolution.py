"""The short causal convolution before a cell, with SiLU; its sum is float32 whatever the compute dtype."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eflax.cells.checks import check_count
from eflax.cells.forms import pallas
from eflax.layers.parts import fan_in_uniform
from pallas_kernels.short_convolution import formula, gpu

KERNELS = pallas.Kernels("pallas_gpu", gpu.check, gpu.short_convolution)


class ShortConvolution(nnx.Module):
    """Causal depthwise convolution over the last ``kernel_size`` tokens of the same document, then SiLU.

    y_t = silu(Σ_j kernel[j] · x_{t - (kernel_size-1) + j} (+ bias)), where a token of another document counts
    as zero. Each channel has its own kernel, initialised uniform ±1/sqrt(kernel_size).

    On a Hopper GPU it is one kernel forward and one backward where T is a multiple of 16, the channels of 128,
    ``kernel_size`` 2 to 8 and x bfloat16, float16 or float32; elsewhere it is plain XLA.

    Args:
        width: channels D.
        kernel_size: tokens under the kernel of a channel.
        use_bias: whether each channel has a bias, zero at first.
        parts: widths into which the outputs will be split: the kernels write such parts apart, so that to split
            takes no copy.
        param_dtype: of the kernel and the bias.
        rngs: the source of initial parameters.
    """

    def __init__(
        self,
        width: int,
        kernel_size: int = 4,
        *,
        use_bias: bool = False,
        parts: tuple[int, ...] = (),
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_count("kernel_size", kernel_size)
        if parts and sum(parts) != width:
            raise ValueError(f"parts={parts} are {sum(parts)} channels together; they must be width={width}")
        self.parts = parts
        self.kernel = nnx.Param(fan_in_uniform(rngs.params(), (kernel_size, width), param_dtype))
        self.bias = nnx.Param(jnp.zeros(width, param_dtype)) if use_bias else None

    def init_tail(self, batch_size: int, dtype: Any) -> Float[Array, "B W D"]:
        """Return the inputs before the first token: zeros, W = kernel_size - 1."""
        taps, width = self.kernel.shape
        return jnp.zeros((batch_size, taps - 1, width), dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        tail: Float[Array, "B W D"],
        documents: Int[Array, "B T"] | None = None,
        kernels: bool = True,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B W D"]]:
        """Convolve x, preceded by ``tail``.

        Args:
            x: the inputs, T ≥ 1.
            tail: the last W = kernel_size - 1 inputs before x, all of the document of number 0.
            documents: the number of each token's document, up by one at each change, or None where all tokens
                continue that of the tail.
            kernels: whether a kernel may do it, which is differentiable once, in reverse.

        Returns:
            The outputs, and the tail of the next call, in which inputs of earlier documents are zero.
        """
        length, window = x.shape[1], self.kernel.shape[0] - 1
        if tail.shape[1] != window:
            raise ValueError(f"tail has shape {tail.shape}; it needs [B, {window}, D], as from init_tail")
        tail, past = tail.astype(x.dtype), None
        latest = jnp.concatenate([tail, x[:, max(length - window, 0) :]], axis=1)
        next_tail = latest[:, latest.shape[1] - window :]
        if documents is not None and window:
            numbers = jnp.pad(documents, ((0, 0), (window, 0)))
            same = [numbers[:, j : j + length] == documents for j in range(window)]
            past = jnp.stack(same).sum(0, dtype=jnp.int32)
            next_tail = jnp.where((numbers[:, length:] == numbers[:, -1:])[..., None], next_tail, 0)
        kernel = self.kernel[...].astype(jnp.float32)
        bias = None if self.bias is None else self.bias[...].astype(jnp.float32)
        return convolve_silu(x, tail, kernel, bias, past, self.parts, kernels), next_tail


def convolve_silu(
    x: Float[Array, "B T D"],
    tail: Float[Array, "B W D"],
    kernel: Float[Array, "J D"],
    bias: Float[Array, "D"] | None,
    past: Int[Array, "B T"] | None,
    parts: tuple[int, ...],
    kernels: bool,
) -> Float[Array, "B T D"]:
    """What `ShortConvolution` computes, by kernels where they serve here and may be used, else by the formula.

    Under `jax.set_mesh` each device works with kernels on its sequences and channels, see `pallas.on_mesh`.
    ``past`` is how many of the tokens before it each token sees, W at most; None: all see W.
    """

    def served(x: Array, kernel: Array) -> bool:
        return KERNELS.refusal(x, kernel) is None

    def run(x, tail, kernel, bias, past):
        evaluate = partial(KERNELS.evaluate, parts=parts) if served(x, kernel) else formula.convolve
        return (evaluate(x, tail, kernel, bias, past),)

    if not kernels or not served(x, kernel):
        return formula.convolve(x, tail, kernel, bias, past)
    tokens, channels = ("batch", None, "heads"), ("heads",)
    cuts = (tokens, tokens, (None, *channels), channels, ("batch",))
    (y,) = pallas.on_mesh(run, x.shape[0], x.shape[2], cuts, (tokens,))(x, tail, kernel, bias, past)
    return y
