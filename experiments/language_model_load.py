"""The model and tokenizer of a training run, for commands that use them."""

from pathlib import Path

from flax import nnx

from eflax.data import DataError
from eflax.data.tokenizers import Tokenizer, load_tokenizer
from eflax.models import LanguageModel
from eflax.training import CheckpointError, Checkpoints, adamw, initial_state
from eflax.training.step import decay_mask
from experiments.command import FlagError
from experiments.language_model_flags import make_plan
from experiments.language_model_train import RUN, build_model, read_flags


def load_run(folder: Path, *, best: bool, max_length: int | None = None) -> tuple[LanguageModel, Tokenizer]:
    """Return the model of a run with its newest parameters, or those of the best validation, and its tokenizer.

    Args:
        folder: of the run.
        best: take the parameters of the lowest validation loss.
        max_length: tokens that a state of softmax attention holds; by default those of a sequence in training.

    Raises:
        RunFolderError, CheckpointError, FlagError: there is no run, no checkpoint, or no tokenizer.
    """
    flags = read_flags(folder)
    try:
        tokenizer = load_tokenizer(make_plan(flags).tokenizer)
    except DataError as error:
        raise FlagError(str(error)) from error
    plan = make_plan(flags, tokenizer.vocab_size)
    model = build_model(flags, plan, max_length)
    checkpoints = Checkpoints(folder / "checkpoints" / (f"{RUN}-best" if best else RUN))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    if checkpoints.latest_step() is None:
        raise CheckpointError(
            f"{checkpoints.folder} holds no checkpoint; train with --validation, or leave --best out"
        )
    try:
        if best:
            params, _ = checkpoints.restore(params)
        else:
            # The schedule has a counter, whose value does not matter here.
            state, _ = checkpoints.restore(initial_state(model, adamw(lambda step: 0.0, decayed=decay_mask)))
            params = state.params
    finally:
        checkpoints.close()
    return nnx.merge(graph, params, rest), tokenizer
