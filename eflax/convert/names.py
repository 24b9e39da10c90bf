"""Which tensors of flash-linear-attention are which of our parameters.

Theirs have outputs first, [out, in]; ours have them last, [in, out], and stand side by side where several map the same
input. So one of ours is made of pieces, runs of rows of theirs, which become columns. Blocks of ours are stacked.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eflax.convert.errors import ConversionError
from eflax.convert.tensors import Shape
from eflax.layers import HeadMixer, Mamba2, SoftmaxAttention
from eflax.models import LanguageModel


@dataclass(frozen=True)
class Piece:
    """Rows of one of their tensors, from ``start`` on."""

    name: str
    rows: int
    start: int = 0


type Pieces = dict[str, tuple[Piece, ...]]  # of ours, by its path


@dataclass(frozen=True)
class Link:
    """One of our parameters and the pieces that it is made of.

    Attributes:
        path: of ours, from the model on, joined by "/".
        layer: its place in the stack of blocks; None for what is not stacked.
        pieces: their columns in order.
        columns: whether rows of theirs are columns of ours; not so for the embedding.
    """

    path: str
    layer: int | None
    pieces: tuple[Piece, ...]
    columns: bool = True


def _tensor(name: str, **rows: int) -> dict[str, Piece]:
    """Return the parts of a tensor, in their order."""
    pieces, start = {}, 0
    for part, count in rows.items():
        pieces[part] = Piece(name, count, start)
        start += count
    return pieces


def _heads(mixer: HeadMixer) -> Pieces:
    keys, values = mixer.num_heads * mixer.key_dim, mixer.num_value_heads * mixer.value_dim
    heads, gated = mixer.num_value_heads, "gate" if mixer.output_gate else None
    rows = {"q": keys, "k": keys, "v": values}
    found: Pieces = {
        "projection/kernel": tuple(Piece(f"{part}_proj.weight", count) for part, count in rows.items()),
        "out/kernel": (Piece("o_proj.weight", mixer.width),),
        "norm/scale": (Piece("o_norm.weight" if mixer.convolves else "norm.weight", mixer.value_dim),),
    }
    if mixer.convolves:
        parts = (Piece(f"{part}_conv1d.weight", count) for part, count in rows.items())
        found["convolution/kernel"] = tuple(parts)
    if "beta" in mixer.cell.arguments:
        found["beta/kernel"] = (Piece("b_proj.weight", heads),)
    if "g" in mixer.cell.arguments:
        found["decay/projection/kernel"] = (Piece("a_proj.weight", heads),)
        found |= {f"decay/{name}": (Piece(name, heads),) for name in ("A_log", "dt_bias")}
    if gated:
        found["gate/kernel"] = (Piece("g_proj.weight", values),)
    if mixer.feature_map == "elementwise_product":
        for ours, theirs in (("query_map", "feature_map_q"), ("key_map", "feature_map_k")):
            for place, layer in (("first", "layer1"), ("second", "layer2")):
                for kind, name in (("kernel", "weight"), ("bias", "bias")):
                    found[f"{ours}/{place}/{kind}"] = (Piece(f"{theirs}.{layer}.{name}", mixer.key_dim),)
    return found


def _mamba2(mixer: Mamba2) -> Pieces:
    heads = mixer.num_value_heads
    x, state = heads * mixer.value_dim, mixer.num_heads * mixer.key_dim
    projection = _tensor("in_proj.weight", z=x, x=x, B=state, C=state, dt=heads)
    kernel = _tensor("conv1d.weight", x=x, B=state, C=state)
    bias = _tensor("conv1d.bias", x=x, B=state, C=state)
    return {
        "gate/kernel": (projection["z"],),
        "projection/kernel": tuple(projection[part] for part in "CBx"),
        "decay/projection/kernel": (projection["dt"],),
        "decay/A_log": (Piece("A_log", heads),),
        "decay/dt_bias": (Piece("dt_bias", heads),),
        "convolution/kernel": tuple(kernel[part] for part in "CBx"),
        "convolution/bias": tuple(bias[part] for part in "CBx"),
        "D": (Piece("D", heads),),
        "norm/scale": (Piece("norm.weight", x),),
        "out/kernel": (Piece("out_proj.weight", mixer.width),),
    }


def _attention(mixer: SoftmaxAttention) -> Pieces:
    queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    rows = {"q": queries, "k": keys, "v": keys}
    return {
        "projection/kernel": tuple(Piece(f"{part}_proj.weight", count) for part, count in rows.items()),
        "out/kernel": (Piece("o_proj.weight", mixer.width),),
    }


def _block(block: Any) -> Pieces:
    """Return the pieces of a block, by paths from the block on."""
    mixer, width = block.mixer, block.mixer.width
    if isinstance(mixer, Mamba2):
        theirs, norm, pieces = "mixer", "norm", _mamba2(mixer)
    else:
        theirs, norm = "attn", "attn_norm"
        pieces = _attention(mixer) if isinstance(mixer, SoftmaxAttention) else _heads(mixer)
    found = {
        f"mixer/{path}": tuple(replace(piece, name=f"{theirs}.{piece.name}") for piece in parts)
        for path, parts in pieces.items()
    }
    found["mixer_norm/scale"] = (Piece(f"{norm}.weight", width),)
    if block.mlp is not None:
        inner = block.mlp.gate.out_features
        found["mlp_norm/scale"] = (Piece("mlp_norm.weight", width),)
        for part, rows in (("gate", inner), ("up", inner), ("down", width)):
            found[f"mlp/{part}/kernel"] = (Piece(f"mlp.{part}_proj.weight", rows),)
    return found


def links(model: LanguageModel) -> Iterator[Link]:
    """Return what each parameter of a model, which may be abstract, is made of."""
    config = model.config
    backbone, norm = ("backbone", "norm_f") if config.pattern[0].layer == "mamba2" else ("model", "norm")
    yield Link("embedding", None, (Piece(f"{backbone}.embeddings.weight", config.vocab_size),), columns=False)
    for index in range(config.num_layers):
        layer, place = divmod(index, len(config.pattern))
        for path, pieces in _block(model.blocks[place]).items():
            named = (replace(piece, name=f"{backbone}.layers.{index}.{piece.name}") for piece in pieces)
            yield Link(f"blocks/{place}/{path}", layer, tuple(named))
    yield Link("norm/scale", None, (Piece(f"{backbone}.{norm}.weight", config.width),))
    if not config.tied:
        yield Link("head", None, (Piece("lm_head.weight", config.vocab_size),))


def their_shapes(model: LanguageModel, ours: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shapes of their tensors.

    Args:
        model: may be abstract.
        ours: what has a shape, by path: the parameters of the model.
    """
    shapes: dict[str, Shape] = {}
    for link in links(model):
        shape = ours[link.path].shape[0 if link.layer is None else 1 :]
        inner = tuple(shape[:-1]) if link.columns else tuple(shape[1:])
        for piece in link.pieces:
            rows = max(piece.start + piece.rows, shapes.get(piece.name, (0,))[0])
            taps = (1,) if piece.name.endswith("conv1d.weight") else ()
            shapes[piece.name] = (rows, *taps, *inner)
    return shapes


def views(link: Link, ours: Mapping[str, np.ndarray]) -> Iterator[tuple[Piece, np.ndarray]]:
    """Return the pieces of a link, each with the view of our array that it is, turned as theirs is."""
    array = ours[link.path] if link.layer is None else ours[link.path][link.layer]
    start = 0
    for piece in link.pieces:
        if link.columns:
            yield piece, array[..., start : start + piece.rows].T
        else:
            yield piece, array
        start += piece.rows
    if link.columns and start != array.shape[-1]:
        raise ConversionError(f"{link.path} has {array.shape[-1]} columns, of which {start} are known")


def to_ours(
    model: LanguageModel, shapes: Mapping[str, Shape], read: Callable[[str], np.ndarray]
) -> dict[str, np.ndarray]:
    """Return our parameters by path, stacked, float32.

    Args:
        model: may be abstract.
        shapes: of our parameters, by path.
        read: returns one of their tensors by name.
    """
    ours = {path: np.empty(shape, np.float32) for path, shape in shapes.items()}
    for link in links(model):
        for piece, view in views(link, ours):
            rows = read(piece.name)[piece.start : piece.start + piece.rows]
            view[...] = rows.reshape(view.shape)  # a kernel of theirs has an axis of length 1 more
    return ours


def to_theirs(
    model: LanguageModel, ours: Mapping[str, np.ndarray], shapes: Mapping[str, Shape]
) -> Callable[[str], np.ndarray]:
    """Return a function that makes one of their tensors by name; arguments as in `to_ours`, ``shapes`` theirs."""
    parts: dict[str, list[tuple[Piece, np.ndarray]]] = {name: [] for name in shapes}
    for link in links(model):
        for piece, view in views(link, ours):
            parts[piece.name].append((piece, view))

    def make(name: str) -> np.ndarray:
        tensor = np.empty(shapes[name], np.float32)
        for piece, view in parts[name]:
            tensor[piece.start : piece.start + piece.rows] = view.reshape(piece.rows, *shapes[name][1:])
        return tensor

    return make
