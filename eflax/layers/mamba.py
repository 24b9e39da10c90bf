"""Mamba-2 and Mamba: state space mixers around the cells ``ssd`` and ``selective_ssm``."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from eflax import cells
from eflax.cells.checks import check_count
from eflax.layers.convolution import ShortConvolution
from eflax.layers.heads import HeadMixer, identity
from eflax.layers.mixer import RecurrentMixer
from eflax.layers.parts import RMSNorm, inverse_softplus_uniform, linear, log_entries
from eflax.layers.state import check_counts, check_divides


class Mamba2(HeadMixer):
    """Mamba-2: in the words of linear attention q is C, k is B, v is dt · x, and g = -exp(A_log) · dt.

    y = projection(RMSNorm((cell(q, k, v, g) + D · x) · silu(gate))), where [C, B, x] are the channels of the
    short convolution (with a bias), dt = softplus(projection + dt_bias) per head, A starts uniform in 1 … 16.

    Args:
        width: D, the width of x and y.
        num_heads: heads HV of x; a head has expand · width / num_heads channels.
        num_groups: heads H of B and C, a divisor of num_heads.
        state_dim: K, the size of B and C.
        expand: width of the channels of x per width of the layer.
        norm_epsilon: of the RMSNorm before the output projection, over all heads together.
        kernel_size: tokens under the short convolution.
        form: the form of the cell, None for the fastest that serves. Whether one given by name serves is seen at the
            first call, see ``set_form``.
        chunk_size: tokens in a chunk, for the chunkwise forms.
        dtype: of matrix products and activations. Gates, norms and states are float32 always. On a Hopper GPU kernels
            need bfloat16 or float16.
        param_dtype: of the projections and the convolution.
        rngs: the source of initial parameters.
    """

    cell = cells.ssd
    query_map = key_map = staticmethod(identity)
    convolution_bias = True
    decay_rate = (1.0, 16.0)
    output_gate = True

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        num_groups: int = 1,
        state_dim: int = 128,
        expand: int = 2,
        norm_epsilon: float = 1e-5,
        kernel_size: int = 4,
        form: str | None = None,
        chunk_size: int = 64,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_counts(width=width, state_dim=state_dim, expand=expand)
        channels = check_divides("expand * width", expand * width, "num_heads", num_heads)
        check_divides("num_heads", num_heads, "num_groups", num_groups)
        super().__init__(
            width,
            num_groups,
            num_value_heads=num_heads,
            head_dim=state_dim,
            expand_v=channels / state_dim,
            kernel_size=kernel_size,
            form=form,
            chunk_size=chunk_size,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.norm = RMSNorm(expand * width, norm_epsilon, rngs=rngs)
        self.D = nnx.Param(jnp.ones(num_heads, jnp.float32))

    def arguments(self, x: Float[Array, "B T D"], stream: Float[Array, "B T S"]) -> dict[str, Array]:
        """Return C, B, dt · x and the log decay under the cell's names q, k, v, g."""
        q, k, v = self.split(stream)
        g, dt = self.decay(x)
        v = (dt[..., None] * v.astype(jnp.float32)).astype(self.dtype)
        return {"q": q, "k": k, "v": v, "g": g}

    def cell_options(self) -> dict[str, Any]:
        """Return nothing: the queries are not scaled."""
        return {}

    def output(
        self, x: Float[Array, "B T D"], stream: Float[Array, "B T S"], o: Float[Array, "B T HV V"]
    ) -> Float[Array, "B T D"]:
        """Add the skip D · x, gate, normalise, and project back to the width."""
        _, _, v = self.split(stream)
        o = o + self.D[...].astype(self.dtype)[None, None, :, None] * v
        y = o.reshape(*o.shape[:2], -1) * jax.nn.silu(self.gate(x))
        return self.out(self.norm(y))


class Mamba(RecurrentMixer):
    """Mamba: a selective state space with a decay for each channel and state entry.

    u = silu(convolution(projection(x))), [r, B, C] = projection(u), dt = softplus(projection(r) + dt_bias),
    A = -exp(A_log) with A_log = log(1 … state_dim) at the start,
    y = projection((cell(u, dt, A, B, C) + D · u) · silu(gate(x))).

    Args:
        width: D, the width of x and y.
        state_dim: N, state entries of a channel.
        expand: channels per width.
        dt_rank: the size of r; width / 16, rounded up, by default.
        kernel_size: tokens under the short convolution.
        form: the form of the cell, None for the fastest that serves. Whether one given by name serves is seen at the
            first call, see ``set_form``.
        chunk_size: tokens in a chunk, for the chunkwise forms.
        dtype: of matrix products and activations. dt, A and the state are float32 always.
        param_dtype: of the projections and the convolution.
        rngs: the source of initial parameters.
    """

    cell = cells.selective_ssm

    def __init__(
        self,
        width: int,
        *,
        state_dim: int = 16,
        expand: int = 2,
        dt_rank: int | None = None,
        kernel_size: int = 4,
        form: str | None = None,
        chunk_size: int = 64,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.set_form(form, chunk_size)
        check_counts(width=width, state_dim=state_dim, expand=expand)
        self.width, self.channels, self.state_dim, self.dtype = width, expand * width, state_dim, dtype
        self.dt_rank = -(-width // 16) if dt_rank is None else dt_rank
        check_count("dt_rank", self.dt_rank)
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.projection = linear(width, self.channels, **options)
        self.gate = linear(width, self.channels, **options)
        self.convolution = ShortConvolution(
            self.channels, kernel_size, use_bias=True, param_dtype=param_dtype, rngs=rngs
        )
        self.selection = linear(self.channels, self.dt_rank + 2 * state_dim, **options)
        self.dt = linear(self.dt_rank, self.channels, preferred_element_type=jnp.float32, **options)
        self.dt_bias = nnx.Param(inverse_softplus_uniform(1e-3, 0.1)(rngs.params(), (self.channels,)))
        self.A_log = nnx.Param(log_entries(self.channels, state_dim))
        self.D = nnx.Param(jnp.ones(self.channels, jnp.float32))
        self.out = linear(self.channels, width, **options)

    def init_recurrent(self, batch_size: int) -> Array | tuple[Array, ...]:
        """Return the initial state of the cell, [B, channels, N] float32."""
        return self.cell.init_state(batch_size, self.channels, self.state_dim)

    def stream(self, x: Float[Array, "B T D"]) -> Float[Array, "B T S"]:
        """Project x to the channels."""
        return self.projection(x)

    def arguments(self, x: Float[Array, "B T D"], stream: Float[Array, "B T S"]) -> dict[str, Array]:
        """Return x, dt, A, B, C of the cell, all of them functions of the stream."""
        r, b, c = jnp.split(self.selection(stream), (self.dt_rank, self.dt_rank + self.state_dim), axis=-1)
        dt = jax.nn.softplus(self.dt(r) + self.dt_bias[...][None, None])
        return {"x": stream, "dt": dt, "A": -jnp.exp(self.A_log[...]), "B": b, "C": c}

    def output(
        self, x: Float[Array, "B T D"], stream: Float[Array, "B T S"], o: Float[Array, "B T S"]
    ) -> Float[Array, "B T D"]:
        """Add the skip D · u, gate, and project back to the width."""
        o = o + self.D[...].astype(self.dtype)[None, None] * stream
        return self.out(o * jax.nn.silu(self.gate(x)))
