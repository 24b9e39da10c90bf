"""Mixers of queries, keys and values: linear attention, DeltaNet, EFLA and their gated forms.

They are one layer, as DeltaNet and Gated DeltaNet in flash-linear-attention,

    [q, k, v] = silu(convolution(projection(x)))          no biases, kernel 4
    q = query_map(q) / sqrt(K),  k = key_map(k)           the feature maps of the class
    beta = sigmoid(projection(x)),  g = decay gate(x)     where the cell has them, float32
    y = projection(RMSNorm per head(cell(q, k, v, ...)) · silu(gate(x)))

and a class says which cell, which feature maps, and whether there is the output gate.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from eflax import cells
from eflax.cells.checks import check_count
from eflax.cells.numerics import LOW_PRECISION
from eflax.layers.convolution import ShortConvolution
from eflax.layers.mixer import RecurrentMixer
from eflax.layers.parts import (
    DecayGate,
    ElementwiseProduct,
    RMSNorm,
    elu_plus_one,
    l2_normalize,
    linear,
)
from eflax.layers.state import check_counts, check_divides
from pallas_kernels.device import is_hopper
from pallas_kernels.rank_one.decode import LONGEST


def identity(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return x."""
    return x


class HeadMixer(RecurrentMixer):
    """The layer of this module; see the subclasses.

    Args:
        width: D, the width of x and y.
        num_heads: heads H of queries and keys.
        num_value_heads: heads HV of values, a multiple of H; H by default. Value heads share a key head.
        head_dim: K, the size of keys and queries; width / num_heads by default.
        expand_v: the size of values is V = expand_v · K; None is the default of the class.
        allow_negative_eigenvalues: beta in (0, 2) instead of (0, 1): delta-rule cells may flip a direction. On a Hopper
            GPU, form=None then is "chunkwise" in 16 bits, see `form_for`; "pallas_gpu" by name is faster.
        variant: the form of the cell, of GatedEFLA only: "published", "log_rate" or "decay_first".
        order: terms kept of the series of the cell's step, of EFLA only; None is the exact step. A few terms are
            stable for short keys only (with order=1, DeltaNet's step, for beta · |k|² < 2).
        feature_map: of queries and keys, of LinearAttention only: "elu" (elu + 1) or "elementwise_product", learned
            and of any sign.
        normalize: whether a head's output is divided by the sum of its weights, of LinearAttention only; by default
            where the features are positive.
        norm_epsilon: added to the mean square of a head's output, which is 1e-4 to 1e-6 at the start (a unit query
            over sqrt(K), and less behind a fast decay): the usual 1e-5 or 1e-6 would damp the heads.
        kernel_size: tokens under the short convolution.
        form: the form of the cell, None for the fastest that serves. Whether one given by name serves is seen at the
            first call, see ``set_form``.
        chunk_size: tokens in a chunk, for the chunkwise forms.
        dtype: of matrix products and activations. Gates, norms and states are float32 always. On a Hopper GPU kernels
            need bfloat16 or float16.
        param_dtype: of the projections and the convolution.
        rngs: the source of initial parameters.
    """

    query_map = staticmethod(l2_normalize)
    key_map = staticmethod(l2_normalize)
    convolves: ClassVar[bool] = True
    convolution_bias: ClassVar[bool] = False
    decay_rate: ClassVar[tuple[float, float]] = (0.0, 16.0)  # the range of A at the start
    output_gate: ClassVar[bool] = False
    default_expand_v: ClassVar[float] = 1.0
    negative_eigenvalues: ClassVar[bool] = False  # whether the cell can have them
    variants: ClassVar[tuple[str, ...]] = ()  # of the cell, the default first
    has_order: ClassVar[bool] = False  # whether the step of the cell is a series that can be cut
    feature_maps: ClassVar[tuple[str, ...]] = ()  # to choose from, the default first

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        num_value_heads: int | None = None,
        head_dim: int | None = None,
        expand_v: float | None = None,
        allow_negative_eigenvalues: bool = False,
        variant: str | None = None,
        order: int | None = None,
        feature_map: str | None = None,
        normalize: bool | None = None,
        norm_epsilon: float = 1e-8,
        kernel_size: int = 4,
        form: str | None = None,
        chunk_size: int = 64,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.check_options(allow_negative_eigenvalues, variant, order, feature_map, normalize)
        check_counts(width=width, num_heads=num_heads, kernel_size=kernel_size)
        self.set_form(form, chunk_size)
        self.width, self.num_heads, self.dtype = width, num_heads, dtype
        self.num_value_heads = num_heads if num_value_heads is None else num_value_heads
        check_divides("num_value_heads", self.num_value_heads, "num_heads", num_heads)
        self.key_dim = check_divides("width", width, "num_heads", num_heads) if head_dim is None else head_dim
        check_count("head_dim", self.key_dim)
        expand_v = self.default_expand_v if expand_v is None else expand_v
        self.value_dim = round(self.key_dim * expand_v)
        check_count("the size of values, head_dim * expand_v,", self.value_dim)
        self.max_beta = 2.0 if allow_negative_eigenvalues else 1.0
        self.variant = variant or next(iter(self.variants), None)
        self.order = order
        self.feature_map = feature_map or next(iter(self.feature_maps), None)
        self.normalize = self.feature_map == "elu" if normalize is None else normalize

        keys, values = self.num_heads * self.key_dim, self.num_value_heads * self.value_dim
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.projection = linear(width, 2 * keys + values, **options)
        self.convolution = (
            ShortConvolution(
                2 * keys + values,
                kernel_size,
                use_bias=self.convolution_bias,
                parts=(keys, keys, values),
                param_dtype=param_dtype,
                rngs=rngs,
            )
            if self.convolves
            else None
        )
        if "beta" in self.cell.arguments:
            self.beta = linear(width, self.num_value_heads, preferred_element_type=jnp.float32, **options)
        if "g" in self.cell.arguments:
            self.decay = DecayGate(width, self.num_value_heads, rate=self.decay_rate, **options)
        if self.output_gate:
            self.gate = linear(width, values, **options)
        if self.feature_map == "elementwise_product":
            self.query_map = ElementwiseProduct(self.key_dim, **options)
            self.key_map = ElementwiseProduct(self.key_dim, **options)
        self.norm = RMSNorm(self.value_dim, norm_epsilon, rngs=rngs)
        self.out = linear(values, width, **options)

    def check_options(
        self,
        allow_negative_eigenvalues: bool,
        variant: str | None,
        order: int | None,
        feature_map: str | None,
        normalize: bool | None,
    ) -> None:
        """Raise ValueError for an option that the cell of the class does not have."""
        name = type(self).__name__
        if allow_negative_eigenvalues and not self.negative_eigenvalues:
            raise ValueError(f"allow_negative_eigenvalues=True: {name} has none; DeltaNet's may be negative")
        if variant is not None and variant not in self.variants:
            raise ValueError(f"variant={variant!r}: {name} has {self.variants or 'no variants'}")
        if order is not None:
            if not self.has_order:
                raise ValueError(f"order={order!r}: {name} has none; EFLA's step may be cut to an order")
            check_count("order", order)
        if feature_map is not None and feature_map not in self.feature_maps:
            raise ValueError(
                f"feature_map={feature_map!r}: {name} has {self.feature_maps or 'one of its own'}"
            )
        if normalize is not None and not self.feature_maps:
            raise ValueError(f"normalize={normalize!r}: {name} has no such option; LinearAttention's is one")

    def init_recurrent(self, batch_size: int) -> Array | tuple[Array, ...]:
        """Return the initial state of the cell, [B, HV, K, V] float32."""
        return self.cell.init_state(batch_size, self.num_value_heads, self.key_dim, self.value_dim)

    def form_for(self, x: Float[Array, "B T D"]) -> str | None:
        """Return the layer's form; where it has none, "chunkwise" for what 16-bit kernels of a GPU would spoil.

        That is a key that comes again and again while edits turn round what they meet: the inverse that the kernels
        keep in 16 bits then sums up rounding errors to the size of the outputs.
        """
        spoilt = self.max_beta > 1.0 and jnp.dtype(self.dtype) in LOW_PRECISION and x.shape[1] > LONGEST
        return "chunkwise" if self.form is None and spoilt and is_hopper() else self.form

    def stream(self, x: Float[Array, "B T D"]) -> Float[Array, "B T S"]:
        """Project x to q, k and v side by side."""
        return self.projection(x)

    def split(self, stream: Float[Array, "B T S"]) -> tuple[Array, Array, Array]:
        """Part the stream into q, k [B, T, H, K] and v [B, T, HV, V]."""
        keys = self.num_heads * self.key_dim
        q, k, v = jnp.split(stream, (keys, 2 * keys), axis=-1)
        lead = stream.shape[:2]
        q, k = (x.reshape(*lead, self.num_heads, self.key_dim) for x in (q, k))
        return q, k, v.reshape(*lead, self.num_value_heads, self.value_dim)

    def arguments(self, x: Float[Array, "B T D"], stream: Float[Array, "B T S"]) -> dict[str, Array]:
        """Return q, k, v, and beta and g where the cell has them."""
        q, k, v = self.split(stream)
        arguments = {"q": self.query_map(q), "k": self.key_map(k), "v": v}
        if "beta" in self.cell.arguments:
            arguments["beta"] = self.max_beta * jax.nn.sigmoid(self.beta(x))
        if "g" in self.cell.arguments:
            arguments["g"], _ = self.decay(x)
        return arguments

    def cell_options(self) -> dict[str, Any]:
        """Return the scale of the queries, K^-0.5, and the options that the cell has."""
        options: dict[str, Any] = {"scale": self.key_dim**-0.5}
        if self.variants:
            options["variant"] = self.variant
        if self.has_order:
            options["order"] = self.order
        if self.feature_maps:
            options["normalize"] = self.normalize
        return options

    def output(
        self, x: Float[Array, "B T D"], stream: Float[Array, "B T S"], o: Float[Array, "B T HV V"]
    ) -> Float[Array, "B T D"]:
        """Normalise each head, gate, and project back to the width."""
        y = self.norm(o).reshape(*o.shape[:2], self.num_value_heads * self.value_dim)
        if self.output_gate:
            y = y * jax.nn.silu(self.gate(x))
        return self.out(y)


class LinearAttention(HeadMixer):
    """Linear attention, with the features elu + 1 and a normalised read-out by default; no convolution.

    Arguments: see `HeadMixer`.
    """

    cell = cells.linear_attention
    query_map = key_map = staticmethod(elu_plus_one)
    feature_maps = ("elu", "elementwise_product")
    convolves = False


class DeltaNet(HeadMixer):
    """DeltaNet: unit keys, beta in (0, 1) or, with negative eigenvalues, (0, 2).

    Arguments: see `HeadMixer`.
    """

    cell = cells.delta_rule
    negative_eigenvalues = True


class EFLA(HeadMixer):
    """EFLA: DeltaNet with the exact flow of its ODE, for which the keys stay raw; queries are unit vectors.

    The length of a key is the strength of its edit (λ = |k|²), so normalising keys would leave a re-labelled
    DeltaNet. Queries are normalised because the read-out of a raw query at the start is ten times smaller and
    would fall below the epsilon of the norm. See ``fan_in_uniform`` for λ at the start.

    Arguments: see `HeadMixer`.
    """

    cell = cells.efla
    key_map = staticmethod(identity)
    has_order = True


class GatedDeltaNet(HeadMixer):
    """Gated DeltaNet: DeltaNet with a decay per value head and an output gate, V = 2K by default.

    Arguments: see `HeadMixer`.
    """

    cell = cells.gated_delta_rule
    output_gate = True
    default_expand_v = 2.0
    negative_eigenvalues = True


class GatedEFLA(HeadMixer):
    """Gated EFLA: Gated DeltaNet with the exact flow of its ODE and raw keys, as EFLA.

    Arguments: see `HeadMixer`.
    """

    cell = cells.gated_efla
    key_map = staticmethod(identity)
    output_gate = True
    default_expand_v = 2.0
    variants = ("published", "log_rate", "decay_first")
