"""Configurations: config.json of flash-linear-attention 0.6.0 to `LanguageModelConfig` and back."""

from collections.abc import Iterable
from typing import Any

from eflax.convert.errors import ConversionError
from eflax.convert.families import FAMILIES, Family, Values, read_attention, write_attention
from eflax.convert.settings import Settings
from eflax.layers import Block
from eflax.models import LanguageModel, LanguageModelConfig
from eflax.models.configs import BlockConfig


def read_config(values: Values, ignored: Iterable[str] = ()) -> LanguageModelConfig:
    """Return the configuration of a model of flash-linear-attention, or of transformers' own Mamba-2.

    Args:
        values: what config.json holds.
        ignored: keys that do not change what the model computes, although they are not known here.

    Raises:
        ConversionError: it is of another kind, or has an option that has no counterpart.
    """
    settings = Settings(values, ignored)
    model_type = settings.take("model_type", str)
    if model_type not in FAMILIES:
        raise ConversionError(
            f"config.json: 'model_type' is {model_type!r} and must be one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    width, layers = settings.take("hidden_size", int, 2048), settings.take("num_hidden_layers", int)
    epsilon = _read_epsilon(settings, family)
    mlp = _read_mlp(settings, width) if family.has_mlp else 0
    options = family.read(settings, width)
    if family.layer != "transformer":
        options["norm_epsilon"] = epsilon
    blocks = [BlockConfig(family.layer, tuple(options.items()), mlp)] * layers
    if family.layer != "transformer" and family.has_mlp:
        for layer, attention in _read_hybrid(settings, layers).items():
            blocks[layer] = BlockConfig("transformer", tuple(attention.items()), mlp)
    config = LanguageModelConfig(
        vocab_size=settings.take("vocab_size", int, 32000),
        width=width,
        num_layers=layers,
        pattern=_period(blocks),
        tied=settings.take("tie_word_embeddings", bool, False),
        norm_epsilon=epsilon,
    )
    settings.skip("max_position_embeddings")
    settings.finish()
    return config


def _read_epsilon(settings: Settings, family: Family) -> float:
    found = {name: settings.take_optional(name, float) for name in _epsilon_keys(family)}
    values = {value for value in found.values() if value is not None} or {family.norm_epsilon}
    if len(values) > 1:
        raise ConversionError(f"config.json: {found} are one number under two names, and differ")
    return values.pop()


def _epsilon_keys(family: Family) -> tuple[str, ...]:
    """Return the names of epsilon; the second is that of transformers' own Mamba-2, whose tensors are named alike."""
    return ("norm_eps", "layer_norm_epsilon") if family.layer == "mamba2" else ("norm_eps",)


def _read_mlp(settings: Settings, width: int) -> int:
    settings.require("hidden_act", "swish", "silu", why="the MLP is a SwiGLU here")
    ratio, inner = settings.take("hidden_ratio", float, 4.0), settings.take_optional("intermediate_size", int)
    return -(-int(width * ratio * 2 / 3) // 256) * 256 if inner is None else inner


def _read_hybrid(settings: Settings, layers: int) -> dict[int, Values]:
    """Return the options of softmax attention for each layer that has it instead of the model's own mixer."""
    found: dict[int, Values] = {}
    attention = settings.get("attn")
    for values in attention if isinstance(attention, list) else [attention or {}]:
        if not isinstance(values, dict):
            raise ConversionError(
                f"config.json: 'attn' is {attention!r} and must be an object, or a list of them"
            )
        inner = Settings(values)
        for layer in inner.take("layers", list, []):
            if type(layer) is not int or not 0 <= layer < layers or layer in found:
                raise ConversionError(
                    f"config.json: 'attn' has the layer {layer!r}, which is not one of {layers} or there twice"
                )
            found[layer] = read_attention(inner, inner.take("num_heads", int))
        inner.finish()
    return found


def _period(blocks: list[BlockConfig]) -> tuple[BlockConfig, ...]:
    """Return the shortest run of blocks that they are repetitions of."""
    count = len(blocks)
    lengths = (n for n in range(1, count + 1) if count % n == 0 and blocks == blocks[:n] * (count // n))
    return tuple(blocks[: next(lengths)])


def write_config(model: LanguageModel) -> tuple[Values, float]:
    """Return config.json for a model, and how much larger its residual stream has to be there.

    Their models have one epsilon for all norms. Ours may have another in the heads than in the blocks. The heads' is
    the one written, since a head cannot be scaled; the stream can: one that is c times as large, with an epsilon c²
    times as large, gives the same x / sqrt(mean(x²) + epsilon).

    Args:
        model: may be abstract.

    Raises:
        ConversionError: the model has no counterpart there.
    """
    config = model.config
    family = _family(config)
    blocks: list[Block] = list(model.blocks)
    heads = {block.mixer.norm.epsilon for block in blocks if hasattr(block.mixer, "norm")}
    mlps = {block.mlp_width for block in config.pattern}
    if len(heads) > 1 or len(mlps) > 1:
        raise ConversionError(
            f"heads with the epsilons {sorted(heads)} and MLPs of the widths {sorted(mlps)}: "
            "there, all blocks are alike"
        )
    if (mlps == {0}) == family.has_mlp:
        raise ConversionError(
            f"mlp_width={mlps.pop()}: {family.model_type} has {'an' if family.has_mlp else 'no'} MLP"
        )
    epsilon = heads.pop() if heads else config.norm_epsilon
    values = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        **dict.fromkeys(_epsilon_keys(family), epsilon),
        "tie_word_embeddings": config.tied,
        **_write_mixers(model, family),
    }
    if family.has_mlp:
        values |= {"intermediate_size": mlps.pop(), "hidden_act": "swish"}
    return values, (epsilon / config.norm_epsilon) ** 0.5


def _family(config: LanguageModelConfig) -> Family:
    """Return the family of a model, which softmax attention in some of its layers does not change."""
    layers = {block.layer for block in config.pattern}
    own = layers - {"transformer"} or layers
    found = [family for family in FAMILIES.values() if {family.layer} == own]
    if not found or (len(layers) > 1 and not found[0].has_mlp):
        raise ConversionError(
            f"a model of the layers {', '.join(sorted(layers))} has no counterpart in flash-linear-attention; it "
            f"has models of one of {', '.join(family.layer for family in FAMILIES.values())}, and, but for mamba2, "
            "with some transformer layers"
        )
    return found[0]


def _write_mixers(model: LanguageModel, family: Family) -> Values:
    """Return the options of the model's own mixer, and which layers have softmax attention instead."""
    names = [block.layer for block in model.config.pattern]
    written = [
        write_attention(block.mixer) if name == "transformer" else family.write(block.mixer)
        for name, block in zip(names, model.blocks, strict=True)
    ]
    own = [values for name, values in zip(names, written, strict=True) if name == family.layer]
    if any(values != own[0] for values in own):
        raise ConversionError(f"the {family.layer} layers differ in their options; there, they are alike")
    if family.layer == "transformer" or "transformer" not in names:
        return own[0]
    specs: list[dict[str, Any]] = []
    for layer in range(model.config.num_layers):
        place = layer % len(names)
        if names[place] == "transformer":
            same = [spec for spec in specs if {**spec, "layers": None} == {**written[place], "layers": None}]
            if same:
                same[0]["layers"].append(layer)
            else:
                specs.append({"layers": [layer], **written[place]})
    return own[0] | {"attn": specs if len(specs) > 1 else specs[0]}
