"""Layers of flash-linear-attention 0.6.0: their options in config.json to those of ours and back."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eflax.convert.errors import ConversionError
from eflax.convert.settings import Settings
from eflax.layers import HeadMixer, Mamba2, SoftmaxAttention

type Values = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A kind of model: its names there and here, and how the options of its layer are read and written."""

    model_type: str
    architecture: str
    layer: str
    read: Callable[[Settings, int], Values]
    write: Callable[[Any], Values]
    norm_epsilon: float = 1e-6
    has_mlp: bool = True


def _read_heads(settings: Settings, width: int, num_heads: int) -> Values:
    """Return the sizes of heads where both keys and values are given per width."""
    sizes = {}
    for name in ("expand_k", "expand_v"):
        expand = settings.take(name, float, 1.0)
        size = width * expand / num_heads
        if not math.isclose(size, round(size)):
            raise ConversionError(
                f"config.json: {name!r} is {expand!r}: {size} entries a head are no whole number"
            )
        sizes[name] = round(size)
    return {
        "num_heads": num_heads,
        "head_dim": sizes["expand_k"],
        "expand_v": sizes["expand_v"] / sizes["expand_k"],
    }


def _write_heads(mixer: HeadMixer) -> Values:
    _refuse(mixer.num_value_heads != mixer.num_heads, "num_value_heads other than num_heads", mixer)
    keys, values = mixer.num_heads * mixer.key_dim, mixer.num_heads * mixer.value_dim
    return {"num_heads": mixer.num_heads, "expand_k": keys / mixer.width, "expand_v": values / mixer.width}


def _read_delta_net(settings: Settings, width: int) -> Values:
    settings.require("use_gate", False, why="DeltaNet has no output gate here")
    _require_convolution(settings)
    settings.require("use_beta", True, why="beta is always learned here")
    settings.require("use_output_norm", True, why="heads are always normalised here")
    settings.require("qk_norm", "l2", why="queries and keys are unit vectors here")
    settings.require("qk_activation", "silu", why="the short convolution ends in SiLU here")
    return _read_heads(settings, width, settings.take("num_heads", int, 16)) | _read_edits(settings)


def _require_convolution(settings: Settings) -> None:
    settings.require("use_short_conv", True, why="the layer has a short convolution here")
    settings.require("conv_bias", False, why="its short convolution has no bias here")


def _read_edits(settings: Settings) -> Values:
    negative = settings.take("allow_neg_eigval", bool, False)
    return {"allow_negative_eigenvalues": negative, "kernel_size": settings.take("conv_size", int, 4)}


def _write_edits(mixer: HeadMixer) -> Values:
    assert mixer.convolution is not None
    return {"allow_neg_eigval": mixer.max_beta == 2.0, "conv_size": mixer.convolution.kernel.shape[-2]}


def _read_gated_delta_net(settings: Settings, width: int) -> Values:
    settings.require("use_gate", True, why="Gated DeltaNet has an output gate here")
    settings.require("output_gate_activation", "swish", "silu", why="the output gate is SiLU here")
    _require_convolution(settings)
    num_heads = settings.take("num_heads", int, 6)
    return {
        "num_heads": num_heads,
        "num_value_heads": settings.take_optional("num_v_heads", int) or num_heads,
        "head_dim": settings.take("head_dim", int, 256),
        "expand_v": settings.take("expand_v", float, 2.0),
        **_read_edits(settings),
    }


def _write_gated_delta_net(mixer: HeadMixer) -> Values:
    return {
        "num_heads": mixer.num_heads,
        "num_v_heads": mixer.num_value_heads,
        "head_dim": mixer.key_dim,
        "expand_v": mixer.value_dim / mixer.key_dim,
        **_write_edits(mixer),
    }


def _read_linear_attention(settings: Settings, width: int) -> Values:
    num_heads = settings.take("num_heads", int, 4)
    settings.require("num_kv_heads", None, num_heads, why="queries do not share keys here")
    settings.require(
        "feature_map", "elementwise_product", "elu", why="the features are elementwise_product or elu here"
    )
    settings.require("tie_feature_map_qk", False, why="queries and keys have a feature map each here")
    settings.require("elementwise_affine", True, None, why="the norm of the heads has a scale here")
    for name in ("norm_q", "norm_k"):
        settings.require(name, False, why="features are not divided by their sum here")
    return _read_heads(settings, width, num_heads) | {
        "feature_map": settings.take("feature_map", str, "elementwise_product"),
        "normalize": settings.take("norm_feature_map", bool, False),
    }


def _write_linear_attention(mixer: HeadMixer) -> Values:
    return _write_heads(mixer) | {"feature_map": mixer.feature_map, "norm_feature_map": mixer.normalize}


_MAMBA2_HARMLESS = (  # initial values, evaluation strategy
    *("A_init_range", "conv_init", "dt_init_floor", "dt_max", "dt_min", "rescale_prenorm_residual"),
    *(
        "time_step_floor",
        "time_step_max",
        "time_step_min",
        "time_step_rank",
        "chunk_size",
        "residual_in_fp32",
    ),
)


def _read_mamba2(settings: Settings, width: int) -> Values:
    settings.require("n_groups", 1, why="each group is normalised on its own there, and all together here")
    for name in ("rmsnorm", "rms_norm"):
        settings.require(name, True, why="the layer ends in a norm here")
    settings.require("norm_before_gate", False, why="the gate stands before the norm here")
    settings.require("D_has_hdim", False, why="a head has one D here")
    settings.require("use_bias", False, why="the projections have no bias here")
    settings.require("use_conv_bias", True, why="the short convolution has a bias here")
    settings.require("hidden_act", "silu", "swish", why="the short convolution ends in SiLU here")
    for name in ("dt_limit", "time_step_limit"):  # the second in transformers' own Mamba-2
        settings.require(name, [0.0, math.inf], why="the step dt has no bounds here")
    settings.skip(*_MAMBA2_HARMLESS)
    expand, head_dim = settings.take("expand", int, 2), settings.take("head_dim", int, 64)
    num_heads = expand * width // head_dim
    if num_heads * head_dim != expand * width:
        raise ConversionError(
            f"config.json: 'head_dim' is {head_dim}, which does not divide {expand * width}"
        )
    settings.require("num_heads", num_heads, why=f"'head_dim' and 'expand' make {num_heads} heads")
    return {
        "num_heads": num_heads,
        "state_dim": settings.take("state_size", int, 128),
        "expand": expand,
        "kernel_size": settings.take("conv_kernel", int, 4),
    }


def _write_mamba2(mixer: Mamba2) -> Values:
    _refuse(mixer.num_heads != 1, "num_groups other than 1", mixer)
    assert mixer.convolution is not None
    return {
        "num_heads": mixer.num_value_heads,
        "head_dim": mixer.value_dim,
        "expand": mixer.num_value_heads * mixer.value_dim // mixer.width,
        "state_size": mixer.key_dim,
        "conv_kernel": mixer.convolution.kernel.shape[-2],
        "n_groups": 1,
        "hidden_act": "silu",
    }


def _read_transformer(settings: Settings, width: int) -> Values:
    settings.require("qk_norm", False, why="queries and keys are not normalised here")
    settings.require("elementwise_affine", True, None, why="norms have a scale here")
    return read_attention(settings, settings.take("num_heads", int, 32))


def read_attention(settings: Settings, num_heads: int) -> Values:
    """Return the options of softmax attention, be it in a model of its own or in a hybrid."""
    settings.require("qkv_bias", False, why="the projections have no bias here")
    options = {
        "num_heads": num_heads,
        "num_kv_heads": settings.take_optional("num_kv_heads", int) or num_heads,
        "rope_base": settings.take("rope_theta", float, 10_000.0),
    }
    window = settings.take_optional("window_size", int)
    return options if window is None else options | {"window": window}


def write_attention(mixer: SoftmaxAttention) -> Values:
    """Return what `read_attention` reads."""
    _refuse(mixer.num_heads * mixer.head_dim != mixer.width, "head_dim other than width / num_heads", mixer)
    return {
        "num_heads": mixer.num_heads,
        "num_kv_heads": mixer.num_kv_heads,
        "rope_theta": mixer.rope_base,
        "window_size": mixer.window,
        "qkv_bias": False,
    }


def _refuse(found: bool, what: str, mixer: Any) -> None:
    if found:
        raise ConversionError(
            f"{type(mixer).__name__} with {what} has no counterpart in flash-linear-attention"
        )


FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "delta_net",
            "DeltaNetForCausalLM",
            "deltanet",
            _read_delta_net,
            lambda mixer: _write_heads(mixer) | _write_edits(mixer),
        ),
        Family(
            "gated_deltanet",
            "GatedDeltaNetForCausalLM",
            "gated-deltanet",
            _read_gated_delta_net,
            _write_gated_delta_net,
        ),
        Family(
            "linear_attn",
            "LinearAttentionForCausalLM",
            "linear-attention",
            _read_linear_attention,
            _write_linear_attention,
        ),
        Family(
            "mamba2",
            "Mamba2ForCausalLM",
            "mamba2",
            _read_mamba2,
            _write_mamba2,
            norm_epsilon=1e-5,
            has_mlp=False,
        ),
        Family("transformer", "TransformerForCausalLM", "transformer", _read_transformer, write_attention),
    )
}
