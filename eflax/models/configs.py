"""Language models by name: the shapes of the EFLA paper's Table 1, and smaller ones of the same build.

The paper states head size 128, convolution kernel 4 and the vocabulary. Width, depth and MLP are those of the
configurations of flash-linear-attention that give its parameter counts: 374.4 M and 1,365.7 M for DeltaNet and EFLA.
Gated DeltaNet has 6 heads of 128 for a width of 1024, and values twice as wide (its own sizing rule, at the paper's
head size); Mamba and Mamba-2 have twice the layers and no MLP. The two smaller sizes are a choice of this project:
50m has equal parameters within 2 % for all layers, with tied embeddings so that most of them are in the layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from eflax.layers import LAYERS
from eflax.layers.state import check_counts

type Options = tuple[tuple[str, int | float | str | bool], ...]


@dataclass(frozen=True)
class BlockConfig:
    """A block: the layer that mixes tokens, by its name in ``eflax.layers.LAYERS``, and its MLP.

    Attributes:
        layer: name of the layer.
        options: arguments of the layer besides width, types and form, as pairs of name and value.
        mlp_width: inner width of the SwiGLU, 0 for none.
    """

    layer: str
    options: Options
    mlp_width: int

    def __post_init__(self):
        if self.layer not in LAYERS:
            raise ValueError(f"layer={self.layer!r} is unknown; there are {', '.join(LAYERS)}")


@dataclass(frozen=True)
class LanguageModelConfig:
    """The shape of a language model.

    Attributes:
        vocab_size: V, the number of token ids.
        width: D, of the residual stream.
        num_layers: blocks in all, a multiple of the pattern's length.
        pattern: blocks in their order, repeated to ``num_layers``; more than one makes a hybrid.
        tied: one matrix for embedding and read-out.
        norm_epsilon: of the norms before mixers, MLPs and read-out.
    """

    vocab_size: int
    width: int
    num_layers: int
    pattern: tuple[BlockConfig, ...]
    tied: bool = False
    norm_epsilon: float = 1e-6

    def __post_init__(self):
        check_counts(vocab_size=self.vocab_size, width=self.width, num_layers=self.num_layers)
        if not self.pattern or self.num_layers % len(self.pattern):
            raise ValueError(
                f"num_layers={self.num_layers} is no multiple of the {len(self.pattern)} blocks of the pattern; "
                "give a number of layers that is"
            )

    @property
    def repeats(self) -> int:
        """How often the pattern is repeated."""
        return self.num_layers // len(self.pattern)


@dataclass(frozen=True)
class _Size:
    vocab_size: int
    width: int
    mlp_width: int
    tied: bool


_SIZES = {
    "tiny": _Size(258, 128, 352, True),  # the ids of bytes
    "50m": _Size(32_000, 512, 1408, True),
    "340m": _Size(32_000, 1024, 2816, False),
    "1.3b": _Size(32_000, 2048, 5632, False),
}

type _Shape = tuple[int, dict[str, Any]]  # layers, and the arguments of the mixer

_PLAIN: dict[str, _Shape] = {
    "tiny": (4, {"num_heads": 2}),
    "50m": (10, {"num_heads": 4}),
    "340m": (24, {"num_heads": 8}),
    "1.3b": (24, {"num_heads": 16}),
}
_GATED: dict[str, _Shape] = {
    "tiny": (4, {"num_heads": 2, "head_dim": 48}),
    "50m": (9, {"num_heads": 3, "head_dim": 128}),
    "340m": (21, {"num_heads": 6, "head_dim": 128}),
    "1.3b": (21, {"num_heads": 12, "head_dim": 128}),
}
_MAMBA2: dict[str, _Shape] = {
    "tiny": (8, {"num_heads": 8, "state_dim": 32}),
    "50m": (19, {"num_heads": 16, "state_dim": 128}),
    "340m": (48, {"num_heads": 32, "state_dim": 128}),
    "1.3b": (48, {"num_heads": 64, "state_dim": 128}),
}
_MAMBA: dict[str, _Shape] = {size: (depth, {}) for size, (depth, _) in _MAMBA2.items()}
_ATTENTION: dict[str, _Shape] = {  # heads of 64
    size: (depth, {"num_heads": 2 * options["num_heads"]}) for size, (depth, options) in _PLAIN.items()
}
_SHAPES = {
    "linear-attention": _PLAIN,
    "mamba": _MAMBA,
    "mamba2": _MAMBA2,
    "deltanet": _PLAIN,
    "gated-deltanet": _GATED,
    "efla": _PLAIN,
    "gated-efla": _GATED,
    "transformer": _ATTENTION,
}
# MLPs other than those of the size: none beside Mamba; at 50m nine gated layers take those of ten plain ones.
_MLP_WIDTHS = dict.fromkeys(((layer, size) for layer in ("mamba", "mamba2") for size in _SIZES), 0) | {
    ("gated-deltanet", "50m"): 1280,
    ("gated-efla", "50m"): 1280,
}
CONFIG_NAMES = tuple(f"{layer}-{size}" for layer in _SHAPES for size in _SIZES)


def named_config(name: str, *, pattern: Sequence[str] = (), **changes: Any) -> LanguageModelConfig:
    """Return a configuration by its name, ``LAYER-SIZE``: "efla-340m", "transformer-50m", …

    Args:
        name: one of ``CONFIG_NAMES``.
        pattern: names of layers for a hybrid, such as ("efla", "efla", "transformer"): each block then has the shape
            that its layer has at this size, and the number of layers stays that of the name.
        changes: fields of `LanguageModelConfig` with other values.

    Raises:
        ValueError: there is no such name, layer or field.
    """
    layer, _, size = name.rpartition("-")
    if name not in CONFIG_NAMES:
        raise ValueError(
            f"there is no configuration {name!r}; a name is LAYER-SIZE with LAYER one of {', '.join(_SHAPES)} "
            f"and SIZE one of {', '.join(_SIZES)}"
        )
    fields = LanguageModelConfig.__dataclass_fields__
    if unknown := [field for field in changes if field not in fields]:
        raise ValueError(
            f"{unknown[0]}={changes[unknown[0]]!r} is no field of a configuration: {', '.join(fields)}"
        )
    for other in pattern:
        if other not in _SHAPES:
            raise ValueError(f"pattern={other!r}: there is no such layer; there are {', '.join(_SHAPES)}")
    shape = _SIZES[size]
    config = LanguageModelConfig(
        vocab_size=shape.vocab_size,
        width=shape.width,
        num_layers=changes.pop("num_layers", _SHAPES[layer][size][0]),
        pattern=tuple(_block(each, size) for each in pattern or (layer,)),
        tied=shape.tied,
    )
    return replace(config, **changes)


def _block(layer: str, size: str) -> BlockConfig:
    _, options = _SHAPES[layer][size]
    return BlockConfig(layer, tuple(options.items()), _MLP_WIDTHS.get((layer, size), _SIZES[size].mlp_width))
