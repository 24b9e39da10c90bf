"""What training a language model costs: parameters, floating-point operations, and the share of a device's peak."""

import math

import jax
from flax import nnx

from eflax.layers import HeadMixer, Mamba, Mamba2, SoftmaxAttention
from eflax.models import LanguageModel

# Dense bfloat16 products with float32 sums, operations a second, from the makers' data sheets.
PEAKS = {
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
}


def count_parameters(model: LanguageModel) -> int:
    """Return the number of parameters; the model may be abstract."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def training_flops_per_token(model: LanguageModel, length: int) -> int:
    """Return the operations that one token of a training step needs, forward and backward.

    Six a parameter that a token is multiplied with (all but the embedding), and three times those of the mixers
    themselves: with a matrix state 2KV a head for each of reading, writing and, where the cell erases, retrieving;
    with softmax attention 2 · 2K a head for half of the `length` tokens of a sequence. What an implementation computes
    beyond that, in chunks or again in the backward pass, does not count, so that shares of the peak can be compared.
    """
    embedding = 0 if model.config.tied else math.prod(model.embedding.shape)
    mixers = sum(_mixer(block.mixer, length) for block in model.blocks) * model.config.repeats
    return 6 * (count_parameters(model) - embedding) + 3 * mixers


def _mixer(mixer, length: int) -> int:
    if isinstance(mixer, SoftmaxAttention):
        return 2 * 2 * mixer.num_heads * mixer.head_dim * length // 2
    if isinstance(mixer, Mamba):
        return 3 * 2 * mixer.channels * mixer.state_dim
    assert isinstance(mixer, HeadMixer)
    edits = 2 if isinstance(mixer, Mamba2) or "beta" not in mixer.cell.arguments else 3
    return edits * 2 * mixer.num_value_heads * mixer.key_dim * mixer.value_dim


def peak_flops() -> float | None:
    """Return the peak of one device of this machine in operations a second, None where it is not known."""
    kind = jax.devices()[0].device_kind
    return next((peak for name, peak in PEAKS.items() if name in kind), None)
