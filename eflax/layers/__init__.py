"""Flax NNX token mixers with explicit state, and the residual blocks that stand on them.

Every mixer is called as ``y, state = layer(x, state=None, segment_ids=None)``: a sequence may be split into
calls anywhere, down to single tokens, and packed documents do not see each other.
"""

from typing import Any

from eflax.layers.attention import KVCache, SoftmaxAttention
from eflax.layers.blocks import Block, SwiGLU, swiglu_width
from eflax.layers.convolution import ShortConvolution
from eflax.layers.heads import EFLA, DeltaNet, GatedDeltaNet, GatedEFLA, HeadMixer, LinearAttention
from eflax.layers.mamba import Mamba, Mamba2
from eflax.layers.mixer import RecurrentMixer
from eflax.layers.parts import (
    DecayGate,
    RMSNorm,
    elu_plus_one,
    fan_in_uniform,
    l2_normalize,
    no_weight_decay,
)
from eflax.layers.signatures import tell_signatures
from eflax.layers.state import MixerState

LAYERS: dict[str, type[Any]] = {
    "linear-attention": LinearAttention,
    "mamba": Mamba,
    "mamba2": Mamba2,
    "deltanet": DeltaNet,
    "gated-deltanet": GatedDeltaNet,
    "efla": EFLA,
    "gated-efla": GatedEFLA,
    "transformer": SoftmaxAttention,
}

tell_signatures(*LAYERS.values(), HeadMixer, Block, SwiGLU, RMSNorm, ShortConvolution, DecayGate)

__all__ = [
    "EFLA",
    "LAYERS",
    "Block",
    "DecayGate",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedEFLA",
    "HeadMixer",
    "KVCache",
    "LinearAttention",
    "Mamba",
    "Mamba2",
    "MixerState",
    "RMSNorm",
    "RecurrentMixer",
    "ShortConvolution",
    "SoftmaxAttention",
    "SwiGLU",
    "elu_plus_one",
    "fan_in_uniform",
    "l2_normalize",
    "no_weight_decay",
    "swiglu_width",
]
