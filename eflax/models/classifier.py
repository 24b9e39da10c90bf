"""The pixel-sequence classifier of the EFLA paper's robustness experiment, over any cell."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from eflax import cells
from eflax.cells.checks import check_count, check_form
from eflax.layers.parts import (
    DecayGate,
    elu_plus_one,
    fan_in_uniform,
    inverse_softplus_uniform,
    l2_normalize,
    linear,
    log_entries,
)
from eflax.layers.state import check_divides

UNIT_KEYS = ("delta_rule", "gated_delta_rule")  # the cells whose keys are normalised by custom
xavier_uniform = jax.nn.initializers.xavier_uniform()


def fan_in_bias(inputs: int) -> Callable[..., Array]:
    """Return PyTorch's default initialiser of a bias: uniform ±1/sqrt(inputs)."""

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, -(inputs**-0.5), inputs**-0.5)

    return init


class SequenceClassifier(nnx.Module):
    """Embed each pixel, run a cell over the sequence, classify the final state's answer to the last query.

    The model of the released script, with 63,371 parameters for EFLA and DeltaNet at the default sizes:

        h_t = gelu(pixel_t · w + position_t)                    exact GELU
        k, v = projections of h_t, beta = sigmoid(projection - 2), …
        logits = head(LayerNorm(Sᵀ q_T)),  q_T = projection of h_T

    There is no residual, convolution, MLP or gate. Only the last position is read out: no other output and no
    other query is computed. Queries are raw; LayerNorm hides their length.

    Args:
        cell: a name of ``cells.CELLS``.
        length: T, the pixels of a sequence.
        width: of the embedding, and of queries, keys and values over all heads.
        num_heads: heads of the cell; a head has K = V = width / num_heads. Not for selective_ssm.
        num_classes: logits.
        normalize_keys: L2-normalise the keys; None: for delta_rule and gated_delta_rule, as is their custom.
        form: the form of the cell, None for the fastest that serves.
        chunk_size: tokens in a chunk, for the chunkwise forms.
        dtype: of the activations; gates, states, LayerNorm and logits are float32.
        rngs: the source of initial parameters.
    """

    def __init__(
        self,
        cell: str = "efla",
        *,
        length: int = 784,
        width: int = 64,
        num_heads: int = 1,
        num_classes: int = 10,
        normalize_keys: bool | None = None,
        form: str | None = None,
        chunk_size: int = 64,
        dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        if cell not in cells.CELLS:
            raise ValueError(f"cell={cell!r} is unknown; there are {', '.join(cells.CELLS)}")
        check_form(cell, form, cells.CELLS[cell].forms)
        check_count("chunk_size", chunk_size)
        self.length, self.dtype = length, dtype
        self.embedding = nnx.Param(fan_in_uniform(rngs.params(), (1, width), jnp.float32))
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (length, width), jnp.float32))
        options: dict[str, Any] = {"form": form, "chunk_size": chunk_size, "dtype": dtype, "rngs": rngs}
        if cell == "selective_ssm":
            if num_heads != 1 or normalize_keys:
                raise ValueError(
                    f"num_heads={num_heads}, normalize_keys={normalize_keys}: selective_ssm has neither"
                )
            self.memory = SelectiveMemory(width, **options)
        else:
            normalize_keys = cell in UNIT_KEYS if normalize_keys is None else normalize_keys
            self.memory = HeadMemory(
                cell, width, num_heads, length=length, normalize_keys=normalize_keys, **options
            )
        # The plain variance: E[x²] - E[x]² would cancel in float32 where a read-out has a large mean.
        self.norm = nnx.LayerNorm(width, epsilon=1e-5, dtype=jnp.float32, use_fast_variance=False, rngs=rngs)
        self.head = nnx.Linear(
            width,
            num_classes,
            kernel_init=fan_in_uniform,
            bias_init=fan_in_bias(width),
            dtype=jnp.float32,
            rngs=rngs,
        )

    def __call__(self, pixels: Float[Array, "B T"] | Float[Array, "B T 1"]) -> Float[Array, "B classes"]:
        """Return the logits, float32, of sequences of pixels, usually in [0, 1]."""
        if pixels.ndim == 2:
            pixels = pixels[..., None]
        if pixels.ndim != 3 or pixels.shape[1:] != (self.length, 1):
            raise ValueError(
                f"pixels: expected shape [B, {self.length}] or [B, {self.length}, 1], got {pixels.shape}; "
                "the learned positions fix the length: build the model with that length"
            )
        # As a product of elements, not a matrix product with the inner size 1: XLA fuses it into the GELU.
        embedding, positions = (p[...].astype(self.dtype)[None] for p in (self.embedding, self.positions))
        h = jax.nn.gelu(pixels.astype(self.dtype) * embedding + positions, approximate=False)
        o = self.memory(h)
        return self.head(self.norm(o.astype(jnp.float32)))


class HeadMemory(nnx.Module):
    """A cell of queries, keys and values, run over h [B, T, D] and read at the last position: [B, D]."""

    def __init__(
        self,
        cell: str,
        width: int,
        num_heads: int,
        *,
        length: int,
        normalize_keys: bool,
        form: str | None,
        chunk_size: int,
        dtype,
        rngs: nnx.Rngs,
    ):
        check_divides("width", width, "num_heads", num_heads)
        if cell == "linear_attention" and normalize_keys:
            raise ValueError("normalize_keys=True: the keys of linear_attention are the features elu(k) + 1")
        self.cell, self.num_heads, self.normalize_keys = cell, num_heads, normalize_keys
        self.form, self.chunk_size = form, chunk_size
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": jnp.float32, "rngs": rngs}
        self.query = linear(width, width, kernel_init=xavier_uniform, **options)
        self.key = linear(width, width, kernel_init=xavier_uniform, **options)
        self.value = linear(width, width, kernel_init=xavier_uniform, **options)
        arguments = cells.CELLS[cell].arguments
        if "beta" in arguments:
            bias = jax.nn.initializers.constant(-2.0)
            gate = options | {"dtype": jnp.float32, "use_bias": True, "bias_init": bias}
            self.beta = linear(width, num_heads, **gate)
        if "g" in arguments:
            # A slow start, so that the first pixel still counts at the last: g ≈ -1/T.
            self.decay = DecayGate(
                width, num_heads, rate=(1.0, 1.0), step=(1 / length, 1 / length), **options
            )

    def heads(self, x: Float[Array, "*B D"]) -> Float[Array, "*B H K"]:
        """Part the last axis into heads."""
        return x.reshape(*x.shape[:-1], self.num_heads, -1)

    def __call__(self, h: Float[Array, "B T D"]) -> Float[Array, "B D"]:
        """Return what the final state answers to the query of the last position."""
        cell: Any = cells.CELLS[self.cell]
        q, k, v = self.heads(self.query(h[:, -1])), self.heads(self.key(h)), self.heads(self.value(h))
        if self.cell == "linear_attention":
            q, k = elu_plus_one(q), elu_plus_one(k)
        if self.normalize_keys:
            k = l2_normalize(k)
        gates: dict[str, Array] = {}
        if "beta" in cell.arguments:
            gates["beta"] = jax.nn.sigmoid(self.beta(h))
        if "g" in cell.arguments:
            gates["g"], _ = self.decay(h)
        _, state = cell(None, k, v, **gates, form=self.form, chunk_size=self.chunk_size)
        return cell.read(state, q).reshape(h.shape[0], -1)


class SelectiveMemory(nnx.Module):
    """The selective SSM, run over h [B, T, D] and read at the last position: [B, D].

    x, dt and B are projections of h, C of its last position alone. As in Mamba, dt = softplus(projection +
    dt_bias) with softplus(dt_bias) log-uniform in [1e-3, 0.1], and A = -(1 … N), at the start.
    """

    def __init__(
        self, width: int, state_dim: int = 16, *, form: str | None, chunk_size: int, dtype, rngs: nnx.Rngs
    ):
        self.form, self.chunk_size = form, chunk_size
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": jnp.float32, "rngs": rngs}
        self.x = linear(width, width, kernel_init=xavier_uniform, **options)
        self.B = linear(width, state_dim, kernel_init=xavier_uniform, **options)
        self.C = linear(width, state_dim, kernel_init=xavier_uniform, **options)
        self.dt = linear(width, width, preferred_element_type=jnp.float32, **options)
        self.dt_bias = nnx.Param(inverse_softplus_uniform(1e-3, 0.1)(rngs.params(), (width,)))
        self.A_log = nnx.Param(log_entries(width, state_dim))

    def __call__(self, h: Float[Array, "B T D"]) -> Float[Array, "B D"]:
        """Return the read-out of the last position."""
        dt = jax.nn.softplus(self.dt(h) + self.dt_bias[...][None, None])
        rates = -jnp.exp(self.A_log[...])
        _, state = cells.selective_ssm(
            self.x(h), dt, rates, self.B(h), None, form=self.form, chunk_size=self.chunk_size
        )
        return cells.selective_ssm.read(state, self.C(h[:, -1]))
