"""Dtypes, matmul precision, and the scalar functions that need care near zero."""

import math
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from eflax.cells.tiles import per_head

LOW_PRECISION = (jnp.bfloat16, jnp.float16)


def state_dtype(*arrays: Array | None) -> jnp.dtype:
    """The dtype of states, coefficients and sums: float64 if any input has it, else float32."""
    wide = any(x is not None and x.dtype == jnp.float64 for x in arrays)
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def on_device(*arrays):
    """The arrays, or trees of arrays, as JAX's: NumPy's float64 becomes float32 where JAX has no 64-bit types."""
    return jax.tree.map(jnp.asarray, arrays)


def vary_like(state: Array, *arrays: Array | None) -> Array:
    """The state, marked as varying over every mesh axis that an input varies over.

    Inside `jax.shard_map` a constant such as a zero state is the same on all devices, and what a scan makes of it
    is not; a scan wants the types of both to agree. Elsewhere nothing happens.
    """
    for x in arrays:
        if x is not None:
            state = state + lax.full_like(
                x, 0, dtype=state.dtype, shape=state.shape
            )  # zeros that vary as x does
    return state


def matmul_precision(*arrays: Array | None) -> lax.Precision:
    """HIGHEST for float32 and float64 inputs; the platform's fast default when any input is 16-bit.

    The default multiplies float32 operands as TF32 on NVIDIA GPUs and as bfloat16 on TPUs (always with
    float32 accumulation), which is no coarser than the rounding that 16-bit inputs already went through.
    The triangular inverse, the decay sums and the state never use it.
    """
    low = any(x is not None and x.dtype in LOW_PRECISION for x in arrays)
    return lax.Precision.DEFAULT if low else lax.Precision.HIGHEST


def exponential_moment(x: Float[Array, "..."], m: int = 0) -> Float[Array, "..."]:
    """∫₀¹ sᵐ e^{−x s} ds, to full precision for every x; its derivative is minus the next moment.

    m = 0 is φ(x) = (1 − e^{−x}) / x, with φ(0) = 1. Differentiating the closed form would subtract two
    terms of size 1/x; the moments have a series where that cancels, so that derivatives of every order
    keep their digits.
    """
    return cast(Array, _exponential_moment(x, m))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _exponential_moment(x: Array, m: int) -> Array:
    small = jnp.abs(x) < 0.5 * (m + 1)
    # Σ (−x)ⁿ / (n! (n + m + 1)): the last term is below 1e-17 where the series is used.
    y = jnp.where(small, x, 0)
    series = jnp.zeros_like(x)
    for n in reversed(range(16 + 4 * m)):
        series = series * -y + 1 / (math.factorial(n) * (n + m + 1))
    return jnp.where(small, series, _moment_by_recurrence(jnp.where(small, 1, x), m))


@_exponential_moment.defjvp
def _exponential_moment_jvp(m, primals, tangents):
    (x,), (dx,) = primals, tangents
    return exponential_moment(x, m), -exponential_moment(x, m + 1) * dx


def _moment_by_recurrence(x: Array, m: int) -> Array:
    moment = -jnp.expm1(-x) / x
    for i in range(1, m + 1):
        moment = (i * moment - jnp.exp(-x)) / x
    return moment


def decay_integral(t: Float[Array, "..."], rate: Float[Array, "..."]) -> Float[Array, "..."]:
    """∫₀ᵗ e^{−rate · s} ds = t φ(t · rate), with both derivatives free of cancellation, too.

    The derivative by t is e^{−t · rate}; as a derivative of the product it would be what two terms of size 1/x
    leave of each other, and lose its digits from x = t · rate ≈ 10 on.
    """
    return cast(Array, _decay_integral(t, rate))


@jax.custom_jvp
def _decay_integral(t: Array, rate: Array) -> Array:
    return t * exponential_moment(t * rate)


@_decay_integral.defjvp
def _decay_integral_jvp(primals, tangents):
    (t, rate), (dt, drate) = primals, tangents
    x = t * rate
    return _decay_integral(t, rate), jnp.exp(-x) * dt - t * t * exponential_moment(x, 1) * drate


def truncated_phi(x: Float[Array, "..."], order: int) -> Float[Array, "..."]:
    """The first `order` terms of φ(x) = 1 − x/2! + x²/3! − …; order 1 is the constant 1."""
    total = jnp.zeros_like(x)
    for n in reversed(range(order)):
        total = total * -x + 1 / math.factorial(n + 1)
    return total


def squared_norm(k: Float[Array, "*axes K"]) -> Float[Array, "*axes"]:
    """λ = ‖k‖²."""
    return per_head(lambda k: jnp.sum(k * k, axis=-1), k)


@jax.custom_jvp
def unit_lower_inverse(lower: Float[Array, "*batch C C"]) -> Float[Array, "*batch C C"]:
    """(I + L)⁻¹ for strictly lower triangular L (entries on and above the diagonal are ignored).

    Forward substitution inside diagonal blocks of 8, then pairs of blocks are merged by
    [[A, 0], [L, D]]⁻¹ = [[A⁻¹, 0], [−D⁻¹ L A⁻¹, D⁻¹]]. Always at the highest matmul precision. The shorter
    Neumann product (I − L)(I + L²)(I + L⁴)… is not an alternative: with correlated keys its terms grow
    far beyond the result and cancel.
    """
    size, block = lower.shape[-1], 8
    padded = block
    while padded < size:
        padded *= 2
    pad = [(0, 0)] * (lower.ndim - 2) + [(0, padded - size)] * 2
    lower = jnp.pad(jnp.tril(lower, -1), pad)

    inverse = _substitute(_blocks(lower, block, 0, 0))
    while block < padded:
        corner = _blocks(lower, 2 * block, block, 0, block)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -_highest(second, _highest(corner, first))
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        bottom = jnp.concatenate([corner, second], axis=-1)
        inverse = jnp.concatenate([top, bottom], axis=-2)
        block *= 2
    return inverse[..., 0, :size, :size]


@unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(primals, tangents):
    (lower,), (dlower,) = primals, tangents
    inverse = unit_lower_inverse(lower)
    return inverse, -_highest(_highest(inverse, jnp.tril(dlower, -1)), inverse)


def _highest(x: Array, y: Array) -> Array:
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def _blocks(x: Array, stride: int, row: int, column: int, size: int | None = None) -> Array:
    """The size × size blocks at (row, column) + i·(stride, stride), stacked on axis −3."""
    size = stride if size is None else size
    starts = range(0, x.shape[-1], stride)
    cut = [x[..., s + row : s + row + size, s + column : s + column + size] for s in starts]
    return jnp.stack(cut, axis=-3)


def _substitute(lower: Array) -> Array:
    """Row by row: X_i = e_i − Σ_{j<i} L_ij X_j, in elementwise products (the blocks are too small for matmuls)."""
    size = lower.shape[-1]
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    for i in range(1, size):
        row = jnp.sum(lower[..., i, :i, None] * inverse[..., :i, :], axis=-2)
        inverse = inverse.at[..., i, :].add(-row)
    return inverse
