"""The convolution on a Hopper GPU: arguments, segments, gradients."""

from functools import partial
from typing import cast

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
    segments: int | None = None,
) -> Float[Array, "B T D"]:
    """Convolve x, preceded by `tail`; differentiable once, in reverse, in all its floating-point arguments.

    Args:
        x: bfloat16, float16 or float32; T a multiple of 16, D of 128.
        tail: the W = J - 1 inputs before x.
        kernel: J = 2 … 8 taps a channel, the last for the token itself; float32.
        bias: float32.
        past: how many of the tokens before it each token sees, W at most; None: all see W.
        segments: into how many to cut the sequence, to be worked on side by side; None chooses.

    Returns:
        y in x's dtype; sums and SiLU are float32.

    Raises:
        Unsupported: not a Hopper GPU, or dtypes and sizes that the kernels do not have.
    """
    check(x, kernel)
    return cast(Array, _evaluate(make_plan(x, kernel, segments), x, tail.astype(x.dtype), kernel, bias, past))


def make_plan(x: Array, kernel: Array, segments: int | None = None) -> Plan:
    """Choose sizes for a call."""
    batch, time, width = x.shape
    channels = WARPGROUP if width % (2 * WARPGROUP) or x.dtype.itemsize > 2 else 2 * WARPGROUP
    if segments is None:
        segments = choose_segments(batch * width // channels, time)
    return Plan(kernel.shape[0], channels, time // (segments * CHUNK), segments, interpret=interpretation())


def choose_segments(blocks: int, time: int) -> int:
    """A power of two so that the segments of all blocks of channels fill the card, if tokens allow it."""
    segments = 1
    while segments * blocks < RESIDENT * MULTIPROCESSORS and time % (2 * segments * SHORTEST) == 0:
        segments *= 2
    return segments


def _segmented(z: Array, plan: Plan) -> Array:
    return z.reshape(z.shape[0] * plan.segments, plan.chunks * CHUNK, *z.shape[2:])


def _inputs(plan: Plan, x: Array, tail: Array, past: Array | None) -> tuple[Array, Array, Array | None]:
    """Segments of x, the tokens before each of them, and segments of past."""
    cut = _segmented(x, plan)
    ends = cut[:, -plan.window :].reshape(x.shape[0], plan.segments, plan.window, -1)
    before = jnp.concatenate([tail[:, None], ends[:, :-1]], axis=1)
    return cut, before.reshape(-1, *tail.shape[1:]), None if past is None else _segmented(past, plan)


def _padded(past: Array | None) -> Array | None:
    return None if past is None else jnp.repeat(past[..., None], PADDED, -1)


def _joined(kernel: Array, bias: Array | None) -> Array:
    return jnp.concatenate([kernel, jnp.zeros_like(kernel[:1]) if bias is None else bias[None]])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _evaluate(plan, x, tail, kernel, bias, past):
    x, before, seen = _inputs(plan, x, tail, past)
    y = forward(x, before, _joined(kernel, bias), _padded(seen), plan.staged(FORWARD_STAGES))
    return y.reshape(tail.shape[0], -1, tail.shape[2])


def _evaluate_forward(plan, *inputs):
    return _evaluate(plan, *inputs), inputs


def _evaluate_backward(plan, inputs, dy):
    x, tail, kernel, bias, past = inputs
    cut, before, seen = _inputs(plan, x, tail, past)
    dy = _segmented(dy, plan)
    dbefore = _before(plan, cut, before, kernel, bias, seen, dy)
    dbefore = dbefore.reshape(x.shape[0], plan.segments, *tail.shape[1:])
    after = jnp.pad(dbefore[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0))).reshape(before.shape)
    plan = plan.staged(BACKWARD_STAGES)
    grads = backward(cut, before, _joined(kernel, bias), _padded(seen), dy, after, plan)
    sums = grads.parameters.sum(0)
    dbias = None if bias is None else sums[-1]
    return grads.x.reshape(x.shape), dbefore[:, 0].astype(tail.dtype), sums[:-1], dbias, None


def _before(plan, x, before, kernel, bias, past, dy):
    """The gradient of the tokens before each segment: of its first tokens, which alone see them; float32."""
    first, dy = (z[:, : plan.window].astype(jnp.float32) for z in (x, dy))
    past = None if past is None else past[:, : plan.window]
    _, gradient = jax.vjp(lambda z: convolve(first, z, kernel, bias, past), before.astype(jnp.float32))
    return gradient(dy)[0]


_evaluate.defvjp(_evaluate_forward, _evaluate_backward)
