"""The model and tokenizer of a training run, or of an imported folder, for commands that use them."""

from pathlib import Path

from flax import nnx

from eflax.convert import ConversionError, is_imported, load_model, restore
from eflax.convert.folders import read_source
from eflax.data import DataError
from eflax.data.tokenizers import Tokenizer, load_tokenizer
from eflax.models import LanguageModel
from eflax.training import read_config
from experiments.command import FlagError
from experiments.language_model_flags import make_plan
from experiments.language_model_train import TOKENIZER_PRINT, build_model, read_flags


def load_run(folder: Path, *, best: bool, max_length: int | None = None) -> tuple[LanguageModel, Tokenizer]:
    """Return the model of a run with its newest parameters, or those of the best validation, and its tokenizer.

    Args:
        folder: of the run, or one that `eflax.convert` wrote.
        best: take the parameters of the lowest validation loss.
        max_length: tokens that a state of softmax attention holds; by default those of a sequence in training.

    Raises:
        RunFolderError, CheckpointError, FlagError: there is no run, no checkpoint, or no tokenizer.
    """
    if is_imported(folder):
        return _load_imported(folder, best, max_length)
    flags = read_flags(folder)
    tokenizer = _tokenizer(make_plan(flags).tokenizer)
    if tokenizer.fingerprint != read_config(folder).get(TOKENIZER_PRINT, tokenizer.fingerprint):
        raise FlagError(
            f"the tokenizer {tokenizer.name} is not the one that {folder} was trained with; bring that one back"
        )
    plan = make_plan(flags, tokenizer.vocab_size)
    model = nnx.eval_shape(lambda: build_model(flags, plan, max_length))
    return restore(model, folder, best=best), tokenizer


def _load_imported(folder: Path, best: bool, max_length: int | None) -> tuple[LanguageModel, Tokenizer]:
    try:
        source = read_source(folder)
        if source.tokenizer is None:
            raise FlagError(f"{folder} has no tokenizer; convert the model again with --tokenizer")
        tokenizer = _tokenizer(source.tokenizer)
        if tokenizer.vocab_size > source.config.vocab_size:
            raise FlagError(
                f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids and the model in {folder} "
                f"{source.config.vocab_size}; convert the model again with its own --tokenizer"
            )
        return load_model(folder, best=best, max_length=max_length), tokenizer
    except ConversionError as error:
        raise FlagError(str(error)) from error


def _tokenizer(name: str) -> Tokenizer:
    try:
        return load_tokenizer(name)
    except DataError as error:
        raise FlagError(str(error)) from error
