"""The convolution on a Hopper GPU: arguments, segments, gradients.

y_t = silu(Σ_s kernel[-1 - s] · x_{t-s} (+ bias))
"""

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.device import Unsupported, check_hopper, interpretation
from pallas_kernels.short_convolution.backward_sm90 import backward
from pallas_kernels.short_convolution.formula import convolve
from pallas_kernels.short_convolution.forward_sm90 import forward
from pallas_kernels.short_convolution.layout import CHUNK, MULTIPROCESSORS, WARPGROUP, Plan
from pallas_kernels.short_convolution.stream_sm90 import PADDED

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
TAPS = range(2, 9)
RESIDENT = 3  # blocks that each multiprocessor gets at least, where a sequence can be cut in so many
SHORTEST = 128  # tokens of a segment
FORWARD_STAGES, BACKWARD_STAGES = 3, 2  # chunks in flight: those of the backward kernel are twice as large


def check(x: Array, kernel: Array) -> None:
    """Raise `Unsupported` if the kernels cannot serve here; the message says why."""
    check_hopper()
    if jax.typeof(x).mat.varying:
        raise Unsupported("inside jax.shard_map the kernels need check_vma=False")
    if x.dtype not in DTYPES:
        raise Unsupported(f"x is {x.dtype}; the kernels read bfloat16, float16 and float32")
    if x.shape[0] == 0 or x.shape[1] == 0 or x.shape[1] % CHUNK or x.shape[2] == 0 or x.shape[2] % WARPGROUP:
        raise Unsupported(
            f"x has shape {x.shape}; the kernels need [B, T, D] with T a multiple of {CHUNK} and D of {WARPGROUP}"
        )
    if kernel.shape[0] not in TAPS:
        raise Unsupported(f"kernel has {kernel.shape[0]} taps; the kernels have {TAPS[0]} to {TAPS[-1]}")


def short_convolution(
    x: Float[Array, "B T D"],
    tail: Float[Array, "B W D"],
    kernel: Float[Array, "J D"],
    bias: Float[Array, "D"] | None,
    past: Int[Array, "B T"] | None,
    *,
    parts: tuple[int, ...] = (),
    segments: int | None = None,
) -> Float[Array, "B T D"]:
    """Convolve x, preceded by `tail`; differentiable once, in reverse, in all its floating-point arguments.

    Args:
        x: bfloat16, float16 or float32; T a multiple of 16, D of 128.
        tail: the W = J - 1 inputs before x.
        kernel: J = 2 … 8 taps a channel, the last for the token itself; float32.
        bias: float32.
        past: how many of the tokens before it each token sees, W at most; None: all see W.
        parts: widths into which y will be split. If they are multiples of 128, the kernels write and read such parts,
            which are joined and split for XLA only, that sees that they need not be.
        segments: into how many to cut the sequence, to be worked on side by side; None chooses.

    Returns:
        y in x's dtype; sums and SiLU are float32.

    Raises:
        Unsupported: not a Hopper GPU, or dtypes and sizes that the kernels do not have.
    """
    check(x, kernel)
    plan = make_plan(x, kernel, parts, segments)
    return jnp.concatenate(cast(Any, _evaluate(plan, x, tail.astype(x.dtype), kernel, bias, past)), axis=-1)


def make_plan(x: Array, kernel: Array, parts: tuple[int, ...] = (), segments: int | None = None) -> Plan:
    """Choose sizes for a call."""
    batch, time, width = x.shape
    if sum(parts) != width or any(part % WARPGROUP for part in parts):
        parts = (width,)
    wide = x.dtype.itemsize == 2 and not any(part % (2 * WARPGROUP) for part in parts)
    channels = 2 * WARPGROUP if wide else WARPGROUP
    if segments is None:
        segments = choose_segments(batch * width // channels, time)
    chunks = time // (segments * CHUNK)
    return Plan(kernel.shape[0], parts, channels, chunks, segments, interpret=interpretation())


def choose_segments(blocks: int, time: int) -> int:
    """A power of two so that the segments of all blocks of channels fill the card, if tokens allow it."""
    segments = 1
    while segments * blocks < RESIDENT * MULTIPROCESSORS and time % (2 * segments * SHORTEST) == 0:
        segments *= 2
    return segments


def _segmented(z: Array, plan: Plan) -> Array:
    """Segments beside each other on the batch axis."""
    return z.reshape(z.shape[0] * plan.segments, plan.chunks * CHUNK, *z.shape[2:])


def _before(x: Array, tail: Array, plan: Plan) -> Array:
    """The tokens before each segment."""
    ends = _segmented(x, plan)[:, -plan.window :].reshape(x.shape[0], plan.segments, *tail.shape[1:])
    return jnp.concatenate([tail[:, None], ends[:, :-1]], axis=1).reshape(-1, *tail.shape[1:])


def _padded(past: Array | None) -> Array | None:
    return None if past is None else jnp.repeat(past[..., None], PADDED, -1)


def _joined(kernel: Array, bias: Array | None) -> Array:
    return jnp.concatenate([kernel, jnp.zeros_like(kernel[:1]) if bias is None else bias[None]])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _evaluate(plan, x, tail, kernel, bias, past):
    plan = plan.staged(FORWARD_STAGES)
    return tuple(forward(x, _before(x, tail, plan), _joined(kernel, bias), _padded(past), plan))


def _evaluate_forward(plan, *inputs):
    return _evaluate(plan, *inputs), inputs


def _evaluate_backward(plan, inputs, dy):
    x, tail, kernel, bias, past = inputs
    before = _before(x, tail, plan)
    dbefore = _gradient_before(plan, x, before, kernel, bias, past, dy)
    dbefore = dbefore.reshape(x.shape[0], plan.segments, *tail.shape[1:])
    after = jnp.pad(dbefore[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0))).reshape(before.shape)
    plan = plan.staged(BACKWARD_STAGES)
    grads = backward(x, before, _joined(kernel, bias), _padded(past), dy, after, plan)
    sums = grads.parameters.sum(0)
    return grads.x, dbefore[:, 0].astype(tail.dtype), sums[:-1], None if bias is None else sums[-1], None


def _gradient_before(plan, x, before, kernel, bias, past, dy):
    """The gradient of the tokens before each segment: of its first tokens, which alone see them; float32."""

    def first(z: Array) -> Array:
        return _segmented(z, plan)[:, : plan.window]

    dy = jnp.concatenate([first(part) for part in dy], axis=-1).astype(jnp.float32)
    x, past = first(x).astype(jnp.float32), None if past is None else first(past)
    _, gradient = jax.vjp(lambda z: convolve(x, z, kernel, bias, past), before.astype(jnp.float32))
    return gradient(dy)[0]


_evaluate.defvjp(_evaluate_forward, _evaluate_backward)
