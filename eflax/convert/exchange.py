"""Whole folders: theirs to ours and back."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from eflax.convert.configs import read_config, write_config
from eflax.convert.errors import ConversionError
from eflax.convert.folders import (
    TOKENIZERS,
    check_new,
    copy_tokenizer,
    load_model,
    new_folder,
    read_source,
    save_model,
)
from eflax.convert.names import their_shapes, to_ours, to_theirs
from eflax.convert.tensors import MAX_BYTES, Shape, TensorFiles, read_json, write_tensors
from eflax.data import DataError
from eflax.data.tokenizers import load_tokenizer
from eflax.models import LanguageModel, LanguageModelConfig
from eflax.training.run_folder import CONFIG


@dataclass(frozen=True)
class Summary:
    """What was converted.

    Attributes:
        config: our configuration.
        parameters: how many.
        dtypes: of their tensors.
        stream_scale: how much larger the residual stream is there, to have one epsilon for all norms; 1 where all
            parameters are the same.
        tokenizer: that of the folder, None where there is none.
    """

    config: LanguageModelConfig
    parameters: int
    dtypes: tuple[str, ...]
    stream_scale: float
    tokenizer: str | None


def import_folder(
    source: Path,
    out: Path,
    *,
    tokenizer: str | None = None,
    dtype: str | None = None,
    ignored: Iterable[str] = (),
) -> Summary:
    """Turn config.json and safetensors into a folder that `load_model` and `experiments.language_model` read.

    Args:
        source: the folder of Hugging Face's layout.
        out: a new folder, or an empty one.
        tokenizer: what `load_tokenizer` takes; by default tokenizer.json or tokenizer.model of ``source``, which is
            copied, and none where there is neither.
        dtype: of products and activations; by default bfloat16 where a tensor is, and float32 otherwise.
        ignored: keys of config.json that do not change what the model computes, although they are not known here.

    Raises:
        ConversionError: ``out`` is in use, or something in ``source`` is not known; nothing is written.
    """
    check_new(out)
    values = read_json(source / CONFIG)
    if "model_type" not in values and "config" in values:
        raise ConversionError(f"{source} is a folder of ours, which is exported; see eflax.convert --help")
    config = read_config(values, ignored)
    if tokenizer is None:
        tokenizer = next((str(source / name) for name in TOKENIZERS if (source / name).is_file()), None)
    elif tokenizer not in ("bytes", "mistral-v1") and not Path(tokenizer).is_file():
        raise ConversionError(f"tokenizer={tokenizer!r} is neither bytes, mistral-v1 nor an existing file")
    model, shapes = abstract_model(config)
    with TensorFiles(source) as tensors:
        expected = their_shapes(model, shapes)
        given = dict(tensors.shapes)
        if config.tied and "lm_head.weight" in given:
            _check_tied(tensors, next(iter(expected)))
            del given["lm_head.weight"]
        _compare(source, given, expected)
        arrays = to_ours(
            model, {path: leaf.shape for path, leaf in shapes.items()}, lru_cache(1)(tensors.read)
        )
        dtypes = tuple(sorted(set(tensors.dtypes.values())))
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    filled = [(path, leaf.replace(jnp.asarray(arrays[_path(path)]))) for path, leaf in params]
    nnx.update(model, nnx.from_flat_state(filled))
    length = values.get("max_position_embeddings")
    save_model(
        model,
        out,
        dtype=dtype or ("bfloat16" if "bfloat16" in dtypes else "float32"),
        max_length=length if type(length) is int and length > 0 else 2048,
        tokenizer=tokenizer,
        origin={"source": str(source.absolute()), "source_config": values},
    )
    return Summary(config, sum(array.size for array in arrays.values()), dtypes, 1.0, tokenizer)


def export_folder(
    source: Path, out: Path, *, dtype: str = "float32", best: bool = False, max_bytes: int = MAX_BYTES
) -> Summary:
    """Turn a model of ours into config.json and safetensors that flash-linear-attention loads.

    Args:
        source: a folder that `import_folder` wrote, or a run of `experiments.language_model`.
        out: a new folder, or an empty one.
        dtype: of the tensors: float32, bfloat16 or float16.
        best: take the parameters of the lowest validation loss.
        max_bytes: of the tensors in a file.

    Raises:
        ConversionError, RunFolderError, CheckpointError: ``out`` is in use, the model has no counterpart, or
            ``source`` holds none; nothing is written.
    """
    check_new(out)
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConversionError(f"dtype={dtype!r} is unknown; there are float32, bfloat16 and float16")
    found = read_source(source)
    abstract, shapes = abstract_model(found.config)
    values, scale = write_config(abstract)
    model = load_model(source, best=best)
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    arrays = {_path(path): np.asarray(leaf[...], np.float32) for path, leaf in params}
    if scale != 1.0:
        arrays = _scale_stream(arrays, np.float32(scale), found.config.tied)
    expected = their_shapes(abstract, shapes)
    values |= {
        "dtype": dtype,
        "max_position_embeddings": found.max_length,
        **_special_tokens(found.tokenizer),
    }
    with new_folder(out) as folder:
        write_tensors(folder, expected, to_theirs(abstract, arrays, expected), dtype, max_bytes)
        copy_tokenizer(found.tokenizer, folder)
        (folder / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    count = sum(array.size for array in arrays.values())
    return Summary(found.config, count, (dtype,), scale, found.tokenizer)


def _special_tokens(tokenizer: str | None) -> dict[str, int | None]:
    """Return the ids that begin and end documents; transformers would take 1 and 2 where none are given."""
    if tokenizer is None:
        return {}
    try:
        loaded = load_tokenizer(tokenizer)
    except DataError as error:
        raise ConversionError(f"the ids that begin and end a document are not known: {error}") from error
    return {"bos_token_id": loaded.bos, "eos_token_id": loaded.eos}


def abstract_model(config: LanguageModelConfig) -> tuple[LanguageModel, dict[str, Any]]:
    """Return a model without values, and what has the shapes of its parameters, by path.

    Raises:
        ConversionError: the options of the configuration do not fit each other.
    """
    try:
        model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    except (ValueError, TypeError) as error:
        raise ConversionError(f"config.json: {error}") from error
    return model, {_path(path): leaf for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def _path(path: Iterable[Any]) -> str:
    return "/".join(map(str, path))


def _compare(folder: Path, given: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
    """Raise ConversionError naming every tensor that is missing, not known or of another shape."""
    faults = [f"missing: {name} {list(shape)}" for name, shape in expected.items() if name not in given]
    faults += [f"not known: {name} {list(shape)}" for name, shape in given.items() if name not in expected]
    faults += [
        f"of another shape: {name} {list(given[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if given.get(name, shape) != shape
    ]
    if faults:
        raise ConversionError(
            f"{folder}: the tensors are not those of its config.json:\n  " + "\n  ".join(faults)
        )


def _check_tied(tensors: TensorFiles, embedding: str) -> None:
    head = tensors.read("lm_head.weight")
    if embedding in tensors.shapes and not np.array_equal(head, tensors.read(embedding)):
        raise ConversionError(
            f"config.json: 'tie_word_embeddings' is on, but lm_head.weight {list(head.shape)} is not {embedding}"
        )


def _scale_stream(arrays: Mapping[str, np.ndarray], scale: np.float32, tied: bool) -> dict[str, np.ndarray]:
    """Return parameters of a model whose residual stream is ``scale`` times as large, with the same logits."""
    into_stream = ("embedding", "/mixer/out/kernel", "/mlp/down/kernel")
    scaled = {path: array * scale if path.endswith(into_stream) else array for path, array in arrays.items()}
    if tied:  # the read-out is the embedding
        scaled["norm/scale"] = scaled["norm/scale"] / scale
    return scaled
