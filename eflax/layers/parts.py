"""The parts that the token mixers share: initialisers, feature maps, norm, decay gate.

Precision, whatever the compute dtype: norms, gates and decays are computed in float32, and the parameters
``A_log``, ``dt_bias``, ``D`` and the norm scales are float32. Only the matrix products and the activations
between them use the compute dtype.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from eflax.cells.checks import check_float_type
from eflax.cells.tiles import per_head

# PyTorch's default for linear layers and convolutions, uniform ±1/sqrt(fan_in), as in the code that the
# layers follow. For EFLA it is more than taste: keys are raw, so it decides λ = |k|² at the start. With the
# convolution kernels uniform ±1/2, λ ≈ 4.5 for K = 128 and unit input, and βλ ≈ 2 is near the maximum of the
# write amplitude (at 1.26). With N(0, 0.02²) kernels λ ≈ 0.02: EFLA would start as plain linear attention.
fan_in_uniform = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")

NOT_DECAYED = frozenset({"A_log", "D", "bias", "dt_bias", "scale"})


def no_weight_decay(path: Iterable[Any]) -> bool:
    """Whether the parameter at ``path`` is exempt from weight decay: norm scales, A_log, dt_bias, D, biases.

    Args:
        path: the keys from the model to the parameter: names, or the key objects of ``jax.tree_util``.
    """
    return any(getattr(part, "key", getattr(part, "name", part)) in NOT_DECAYED for part in path)


def linear(inputs: int, outputs: int, *, dtype, param_dtype, rngs: nnx.Rngs, **options) -> nnx.Linear:
    """Make a linear layer without bias, initialised uniform ±1/sqrt(inputs)."""
    check_float_type("dtype", dtype)
    check_float_type("param_dtype", param_dtype)
    options = {"use_bias": False, "kernel_init": fan_in_uniform} | options
    return nnx.Linear(inputs, outputs, dtype=dtype, param_dtype=param_dtype, rngs=rngs, **options)


def l2_normalize(x: Float[Array, "... K"], epsilon: float = 1e-6) -> Float[Array, "... K"]:
    """Return x / sqrt(Σx² + epsilon) over the last axis, in float32 and rounded back to the dtype of x.

    The gradient is finite at zero: x = 0 gives 0 with the derivative 1/sqrt(epsilon).
    """

    def normalized(x: Array) -> Array:
        y = x.astype(jnp.float32)
        return (y * jax.lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + epsilon)).astype(x.dtype)

    return per_head(normalized, x)


def elu_plus_one(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return elu(x) + 1 > 0, by exp(x) where x < 0: (exp(x) - 1) + 1 would lose it in low precision."""
    # The minimum keeps the branch that is not taken finite, and so its gradient.
    return jnp.where(x < 0, jnp.exp(jnp.minimum(x, 0)), x + 1)


class ElementwiseProduct(nnx.Module):
    """The feature map (x W + b) · (x U + c), learned, of flash-linear-attention's linear attention."""

    def __init__(self, width: int, *, dtype, param_dtype, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "use_bias": True, "rngs": rngs}
        self.first = linear(width, width, **options)
        self.second = linear(width, width, **options)

    def __call__(self, x: Float[Array, "... K"]) -> Float[Array, "... K"]:
        """Map the last axis, which is a head."""
        return self.first(x) * self.second(x)


class RMSNorm(nnx.RMSNorm):
    """x / sqrt(mean(x²) + epsilon) · scale over the last axis, in float32, rounded back to the dtype of x."""

    def __init__(self, width: int, epsilon: float = 1e-6, *, rngs: nnx.Rngs):
        super().__init__(width, epsilon=epsilon, dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs)

    def __call__(
        self, x: Float[Array, "... D"], mask: Bool[Array, "... D"] | None = None
    ) -> Float[Array, "... D"]:
        """Normalise the last axis; ``mask`` says which entries the mean square counts, all by default."""
        normalized = super().__call__
        if mask is not None:
            return normalized(x, mask).astype(x.dtype)
        return per_head(lambda x: normalized(x).astype(x.dtype), x)


def inverse_softplus_uniform(low: float, high: float) -> Callable[..., Array]:
    """Return an initialiser of b with softplus(b) log-uniform in [low, high]."""

    def init(key, shape, dtype=jnp.float32):
        dt = jnp.exp(jax.random.uniform(key, shape, dtype, jnp.log(low), jnp.log(high)))
        return dt + jnp.log(-jnp.expm1(-dt))  # log(e^dt - 1), exact for small dt

    return init


def log_entries(channels: int, state_dim: int) -> Float[Array, "D N"]:
    """Return Mamba's initial A_log: log(1 … N) for each channel."""
    return jnp.tile(jnp.log(jnp.arange(1, state_dim + 1, dtype=jnp.float32)), (channels, 1))


class DecayGate(nnx.Module):
    """The log decay per head g = -exp(A_log) · dt with dt = softplus(projection(x) + dt_bias), in float32.

    A = exp(A_log) starts uniform in the range ``rate``, softplus(dt_bias) log-uniform in the range ``step``.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        rate: tuple[float, float] = (0.0, 16.0),
        step: tuple[float, float] = (1e-3, 0.1),
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        low, high = rate
        # The draw from [0, 1) is turned round to (low, high], so that the logarithm exists where low = 0.
        draw = jax.random.uniform(rngs.params(), (num_heads,), jnp.float32)
        self.A_log = nnx.Param(jnp.log(high - (high - low) * draw))
        self.dt_bias = nnx.Param(inverse_softplus_uniform(*step)(rngs.params(), (num_heads,)))
        self.projection = linear(
            width,
            num_heads,
            dtype=dtype,
            param_dtype=param_dtype,
            preferred_element_type=jnp.float32,
            rngs=rngs,
        )

    def __call__(self, x: Float[Array, "*B D"]) -> tuple[Float[Array, "*B H"], Float[Array, "*B H"]]:
        """Return the log decay g ≤ 0 and the step dt > 0, both float32."""
        lead = (1,) * (x.ndim - 1)
        dt = jax.nn.softplus(self.projection(x) + self.dt_bias[...].reshape(*lead, -1))
        return -jnp.exp(self.A_log[...]).reshape(*lead, -1) * dt, dt
