"""Folders of ours that hold a language model: imported ones, and runs of `experiments.language_model`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

from eflax.convert.errors import ConversionError
from eflax.models import LanguageModel, LanguageModelConfig
from eflax.models.configs import BlockConfig
from eflax.training import CheckpointError, Checkpoints, adamw, initial_state, read_config
from eflax.training.run_folder import CONFIG
from eflax.training.step import decay_mask

IMPORTED, TRAINED = "convert", "language_model"  # what such folders call their experiment
RUN = "model"


@dataclass(frozen=True)
class Source:
    """What a folder says about its model.

    Attributes:
        config: its shape.
        dtype: of products and activations.
        max_length: tokens that a state of softmax attention holds by default.
        tokenizer: what `load_tokenizer` takes, None where none is known.
        imported: whether the folder was written by `import_folder`, and not by a training.
    """

    config: LanguageModelConfig
    dtype: str
    max_length: int
    tokenizer: str | None
    imported: bool


def is_imported(folder: Path) -> bool:
    """Whether a folder was written by `import_folder`. Raises RunFolderError where it holds nothing of ours."""
    return read_config(folder).get("experiment") == IMPORTED


def read_source(folder: Path) -> Source:
    """Return what a folder says about its model.

    Raises:
        RunFolderError, ConversionError: it holds no language model, or its config.json is damaged.
    """
    values = read_config(folder)
    kind = values.get("experiment")
    if kind not in (IMPORTED, TRAINED):
        raise ConversionError(f"{folder / CONFIG}: 'experiment' is {kind!r}, which is no language model")
    try:
        plan = values["plan"]
        tokenizer = plan["tokenizer"]
        if kind == IMPORTED and tokenizer is not None and (folder / tokenizer).is_file():
            tokenizer = str(folder / tokenizer)
        return Source(_config(plan["config"]), plan["dtype"], plan["length"], tokenizer, kind == IMPORTED)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{folder / CONFIG} is damaged ({error!r}); restore what was there") from error


def _config(values: dict[str, Any]) -> LanguageModelConfig:
    """Return a configuration that `dataclasses.asdict` and JSON have made a tree of."""
    pattern = (
        BlockConfig(block["layer"], tuple((name, value) for name, value in block["options"]), block["mlp_width"])
        for block in values["pattern"]
    )
    return LanguageModelConfig(**values | {"pattern": tuple(pattern)})


def load_model(folder: Path, *, max_length: int | None = None, best: bool = False) -> LanguageModel:
    """Return the model of a folder with its parameters.

    Args:
        folder: written by `import_folder`, or by a training.
        max_length: tokens that a state of softmax attention holds; by default what the folder says.
        best: take the parameters of the lowest validation loss, which a training may have kept.

    Raises:
        RunFolderError, ConversionError, CheckpointError: there is no model, or it is damaged.
    """
    source = read_source(folder)
    model = LanguageModel(
        source.config,
        dtype=jnp.dtype(source.dtype).type,
        max_length=source.max_length if max_length is None else max_length,
        rngs=nnx.Rngs(0),
    )
    return restore(model, folder, best=best, imported=source.imported)


def restore(model: LanguageModel, folder: Path, *, best: bool, imported: bool = False) -> LanguageModel:
    """Return a model with the newest parameters of a run, or with those of the lowest validation loss.

    Args:
        model: of the shape that the run has.
        folder: of the run.
        best: take the parameters of the lowest validation loss.
        imported: the folder holds parameters alone, without the state of an optimizer.

    Raises:
        CheckpointError: there are none, they are damaged, or they do not fit the model.
    """
    checkpoints = Checkpoints(folder / "checkpoints" / (f"{RUN}-best" if best else RUN))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    try:
        if checkpoints.latest_step() is None:
            raise CheckpointError(
                f"{checkpoints.folder} holds no checkpoint; train with --validation, or leave --best out"
            )
        if best or imported:
            params, _ = checkpoints.restore(params)
        else:
            # The schedule has a counter, whose value does not matter here.
            state, _ = checkpoints.restore(initial_state(model, adamw(lambda step: 0.0, decayed=decay_mask)))
            params = state.params
    finally:
        checkpoints.close()
    return nnx.merge(graph, params, rest)
