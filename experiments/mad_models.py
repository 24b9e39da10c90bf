"""The models of the MAD experiment: an embedding, two pairs of mixer and SwiGLU, and what reads the answers out."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eflax.data.mad import MadTask
from eflax.data.mad_tasks import Compression
from eflax.layers import LAYERS, Block, RMSNorm
from eflax.layers.parts import fan_in_uniform, linear
from eflax.models import named_config
from eflax.training import cross_entropy
from experiments.command import FlagError, Options, split_options

PAIRS = 2
EPSILON = 1e-5  # of the norms between the layers
small_normal = jax.nn.initializers.normal(0.02)


@dataclass(frozen=True)
class Mixer:
    """A layer by its name in ``eflax.layers.LAYERS``, with options other than those of the experiment."""

    layer: str
    options: Options = ()

    @property
    def label(self) -> str:
        """Return the name in tables and records: "deltanet" or "deltanet,num_heads=1"."""
        return ",".join([self.layer, *(f"{name}={value}".lower() for name, value in self.options)])


def parse_mixer(text: str) -> Mixer:
    """Return the mixer of a label. Raises FlagError where there is none."""
    layer, options = split_options("--layers", text)
    if layer not in LAYERS:
        raise FlagError(f"--layers {text}: there are {', '.join(LAYERS)}")
    return Mixer(layer, options)


@dataclass(frozen=True)
class Sizes:
    """What the models of a run share beside their mixers.

    Attributes:
        width: D, of the residual stream.
        dtype: of matrix products and activations; parameters, residual stream, norms, states and logits are float32.
    """

    width: int = 128
    dtype: str = "float32"


class MadModel(nnx.Module):
    """embedding → [x + mixer(norm(x)), x + SwiGLU(norm(x))] × 2 → norm → linear, without positional embedding.

    For compression the last position's vector alone goes on, to a decoder (`Decoder`) of all positions.

    A mixer has the options of `named_config`'s tiny models: two heads of 64 for a width of 128, or what gives a state
    of about the same size. (No paper states them; the benchmark means states to be of one size.) Embeddings start
    N(0, 0.02²), mixers and SwiGLU as the layers do, the read-out uniform ±1/sqrt(D), behind the decoder N(0, 0.02²).

    Args:
        task: gives the vocabulary, the length, and whether there is a decoder.
        mixer: the layer.
        sizes: see `Sizes`.
        rngs: the source of initial parameters.
    """

    def __init__(self, task: MadTask, mixer: Mixer, sizes: Sizes, *, rngs: nnx.Rngs):
        width, dtype = sizes.width, jnp.dtype(sizes.dtype)
        types = {"max_length": task.length} if mixer.layer == "transformer" else {}
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": jnp.float32, "rngs": rngs}
        mixing = dict(named_config(f"{mixer.layer}-tiny").pattern[0].options) | dict(mixer.options)
        self.embedding = nnx.Param(small_normal(rngs.params(), (task.vocab_size, width), jnp.float32))
        self.blocks = nnx.List(
            Block(LAYERS[mixer.layer](width, **mixing, **types, **options), norm_epsilon=EPSILON, rngs=rngs)
            for _ in range(PAIRS)
        )
        self.decoder = Decoder(width, **options) if isinstance(task, Compression) else None
        initial = fan_in_uniform if self.decoder is None else small_normal
        self.norm = RMSNorm(width, EPSILON, rngs=rngs)
        self.out = Affine(width, task.vocab_size, initial, **options)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Return float32 logits at every position."""
        x = jnp.take(self.embedding[...], tokens, axis=0, mode="fill")
        for block in self.blocks:
            x, _ = block(x)
        if self.decoder is not None:
            x = self.decoder(x[:, -1], tokens.shape[1])
        return self.out(self.norm(x))


class Affine(nnx.Module):
    """A linear layer with a bias, zero at the start; the result is float32."""

    def __init__(self, inputs: int, outputs: int, initial: Any, *, dtype, param_dtype, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.matrix = linear(
            inputs, outputs, kernel_init=initial, preferred_element_type=jnp.float32, **options
        )
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        """Map each position."""
        return self.matrix(x) + self.bias[...][None, None]


class Decoder(nnx.Module):
    """The auto-encoder's decoder: y_p = gelu(linear(norm(gelu(linear(norm(z + sinusoid(p))))))), without residual."""

    def __init__(self, width: int, **options: Any):
        self.layers = nnx.List(Affine(width, width, small_normal, **options) for _ in range(2))
        self.norms = nnx.List(RMSNorm(width, EPSILON, rngs=options["rngs"]) for _ in range(2))

    def __call__(self, z: Float[Array, "B D"], length: int) -> Float[Array, "B T D"]:
        """Return a vector for each of so many positions."""
        x = z[:, None] + sinusoids(length, z.shape[-1])[None]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = jax.nn.gelu(layer(norm(x)), approximate=False)
        return x


def sinusoids(length: int, width: int) -> Float[Array, "T D"]:
    """Return [sin ‖ cos] of position · 10000^(-i / (D/2 - 1)) for i < D/2."""
    half = width // 2
    rates = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / max(half - 1, 1))
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * rates[None]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def loss_function(model: MadModel, batch: dict[str, Array]) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the mean cross-entropy over the positions of weight 1, in nats, and the accuracy there."""
    return cross_entropy(model(batch["tokens"]), batch["targets"], batch["weight"])
