"""Folders that hold a language model: those written here, and runs of `experiments.language_model`."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from eflax.convert.errors import ConversionError
from eflax.convert.tensors import read_json
from eflax.models import LanguageModel, LanguageModelConfig
from eflax.models.configs import BlockConfig
from eflax.training import CheckpointError, Checkpoints, RunFolder, adamw, initial_state, read_config
from eflax.training.run_folder import CONFIG
from eflax.training.step import TrainState, decay_mask

IMPORTED, TRAINED = "convert", "language_model"  # what such folders call their experiment
RUN = "model"
TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # files of Hugging Face folders


@dataclass(frozen=True)
class Source:
    """What a folder says about its model.

    Attributes:
        config: its shape.
        dtype: of products and activations.
        max_length: tokens that a state of softmax attention holds by default.
        tokenizer: what `load_tokenizer` takes, None where none is known.
        imported: whether the folder was written by `save_model`, and not by a training.
    """

    config: LanguageModelConfig
    dtype: str
    max_length: int
    tokenizer: str | None
    imported: bool


def save_model(
    model: LanguageModel,
    out: Path,
    *,
    dtype: str = "float32",
    max_length: int = 2048,
    tokenizer: str | None = None,
    origin: Mapping[str, Any] | None = None,
) -> None:
    """Write a model into a folder that `load_model` and `experiments.language_model` read.

    Args:
        model: with its parameters.
        out: a new folder, or an empty one.
        dtype: of products and activations when the model is used.
        max_length: tokens that a state of softmax attention holds by default.
        tokenizer: what `load_tokenizer` takes; files of `TOKENIZERS` are copied.
        origin: where the model comes from, for config.json.

    Raises:
        ConversionError: ``out`` is in use.
    """
    check_new(out)
    with new_folder(out) as folder:
        name = tokenizer
        if tokenizer is not None and Path(tokenizer).is_file():
            name = Path(tokenizer).name if _travels(tokenizer) else str(Path(tokenizer).absolute())
        plan = {"config": asdict(model.config), "dtype": dtype, "length": max_length, "tokenizer": name}
        with RunFolder(folder, {"experiment": IMPORTED, **(origin or {}), "plan": plan}):
            copy_tokenizer(tokenizer, folder)
            checkpoints = Checkpoints(folder / "checkpoints" / RUN)
            try:
                checkpoints.save(0, nnx.state(model, nnx.Param))
            finally:
                checkpoints.close()


def copy_tokenizer(tokenizer: str | None, folder: Path) -> str | None:
    """Copy a tokenizer that is a file of Hugging Face's into a folder; returns its name there, None for others."""
    if tokenizer is None or not _travels(tokenizer):
        return None
    return Path(shutil.copy(tokenizer, folder)).name


def _travels(tokenizer: str) -> bool:
    return Path(tokenizer).name in TOKENIZERS and Path(tokenizer).is_file()


def is_imported(folder: Path) -> bool:
    """Whether a folder was written by `save_model`. Raises RunFolderError where it holds nothing of ours."""
    return read_config(folder).get("experiment") == IMPORTED


def read_source(folder: Path) -> Source:
    """Return what a folder says about its model.

    Raises:
        RunFolderError, ConversionError: it holds no language model, or its config.json is damaged.
    """
    if not (folder / CONFIG).is_file():
        raise ConversionError(f"{folder} holds no model: there is no {CONFIG}")
    if "model_type" in read_json(folder / CONFIG):
        raise ConversionError(
            f"{folder} has the layout of Hugging Face; import it, as eflax.convert --help tells"
        )
    values = read_config(folder)
    kind = values.get("experiment")
    if kind not in (IMPORTED, TRAINED):
        raise ConversionError(f"{folder / CONFIG}: 'experiment' is {kind!r}, which is no language model")
    try:
        plan = values["plan"]
        tokenizer = plan["tokenizer"]
        if (
            plan["dtype"] not in ("float32", "bfloat16")
            or type(plan["length"]) is not int
            or plan["length"] < 1
        ):
            raise ConversionError(f"{folder / CONFIG}: dtype or length cannot be; restore what was there")
        if kind == IMPORTED and tokenizer is not None and (folder / tokenizer).is_file():
            tokenizer = str(folder / tokenizer)
        return Source(_config(plan["config"]), plan["dtype"], plan["length"], tokenizer, kind == IMPORTED)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{folder / CONFIG} is damaged ({error!r}); restore what was there") from error


def _config(values: dict[str, Any]) -> LanguageModelConfig:
    """Return a configuration that `dataclasses.asdict` and JSON have made a tree of."""
    blocks = (
        BlockConfig(
            block["layer"], tuple((name, value) for name, value in block["options"]), block["mlp_width"]
        )
        for block in values["pattern"]
    )
    fields: dict[str, Any] = values | {"pattern": tuple(blocks)}
    return LanguageModelConfig(**fields)


def load_model(
    folder: Path, *, max_length: int | None = None, dtype: str | None = None, best: bool = False
) -> LanguageModel:
    """Return the model of a folder with its parameters.

    Args:
        folder: written by `save_model`, or by a training.
        max_length: tokens that a state of softmax attention holds; by default what the folder says.
        dtype: of products and activations; by default what the folder says.
        best: take the parameters of the lowest validation loss, which a training may have kept.

    Raises:
        RunFolderError, ConversionError, CheckpointError: there is no model, or it is damaged.
    """
    source = read_source(folder)

    def build() -> LanguageModel:
        return LanguageModel(
            source.config,
            dtype=jnp.dtype(dtype or source.dtype).type,
            max_length=source.max_length if max_length is None else max_length,
            rngs=nnx.Rngs(0),
        )

    return restore(nnx.eval_shape(build), folder, best=best, imported=source.imported)


def restore(model: LanguageModel, folder: Path, *, best: bool, imported: bool = False) -> LanguageModel:
    """Return a model with the newest parameters of a run, or with those of the lowest validation loss.

    Args:
        model: of the shape that the run has; its own parameters are not used and may be abstract.
        folder: of the run.
        best: take the parameters of the lowest validation loss.
        imported: the folder holds parameters alone, without the state of an optimizer.

    Raises:
        CheckpointError: there are none, they are damaged, or they do not fit the model.
    """
    checkpoints = Checkpoints(folder / "checkpoints" / (f"{RUN}-best" if best else RUN))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def train_state(params: PyTree) -> TrainState:
        # The schedule has a counter, whose value does not matter here.
        return initial_state(nnx.merge(graph, params, rest), adamw(lambda step: 0.0, decayed=decay_mask))

    try:
        if checkpoints.latest_step() is None:
            raise CheckpointError(_nothing(checkpoints.folder, folder, best, imported))
        if best or imported:
            params, _ = checkpoints.restore(_placed(params))
        else:
            state, _ = checkpoints.restore(_placed(jax.eval_shape(train_state, params)))
            params = state.params
    finally:
        checkpoints.close()
    return nnx.merge(graph, params, rest)


def _nothing(where: Path, folder: Path, best: bool, imported: bool) -> str:
    """Return what to say, and to do, where there is no checkpoint."""
    if best:
        way_out = (
            "leave --best out to take its newest parameters; a training keeps the best with --validation"
        )
        return f"{where} holds no parameters of the lowest validation loss of {folder}; {way_out}"
    if imported:
        return f"{where} holds no checkpoint, so the parameters of {folder} are gone; convert the model again"
    way_out = f"train on until there is one, with --resume {folder}, or give the folder of another run"
    return f"{where} holds no checkpoint yet: the training in {folder} saved nothing; {way_out}"


def _placed(tree: PyTree) -> PyTree:
    """Return a tree of arrays as shapes and types on the first device."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), tree)


def check_new(out: Path) -> None:
    """Raise ConversionError unless a folder is new or empty."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConversionError(f"{out} is in use; give a new folder")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Give a folder that gets the name ``out`` when all is written, and is removed when something fails."""
    partial = out.absolute().parent / f".{out.name}.{os.getpid()}.part"
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in partial.rglob("*"):
            if path.is_file():
                path.chmod(0o666 & ~_umask())  # safetensors' files are their owner's alone
                with path.open("rb") as stream:
                    os.fsync(stream.fileno())
        os.rename(partial, out.absolute())  # fails where another process has filled `out` meanwhile
    finally:
        shutil.rmtree(partial, ignore_errors=True)
