"""Sequential MNIST: train classifiers over pixel sequences, then perturb their inputs (EFLA paper, 4.3 and 4.4).

`python -m experiments.smnist` needs no flag and no network; `--help` tells the rest.
"""

import signal
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

if __name__ == "__main__":  # Ctrl-C ends the imports without a traceback; later StopRequest takes over
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, PyTree
from rich.console import Console

from eflax.cells import UnsupportedForm
from eflax.data import DataError, ImageSet, image_batches, load_images
from eflax.evaluation import FAMILIES, count_correct
from eflax.models import SequenceClassifier
from eflax.progress import Progress
from eflax.training import (
    Diverged,
    RunFolder,
    StopRequest,
    Trainer,
    TrainStep,
    adamw,
    cross_entropy,
    initial_state,
    make_train_step,
)
from experiments import command
from experiments.command import FlagError, run_command, training_label
from experiments.smnist_config import EXPERIMENT, RECORDS, read_flags, to_config
from experiments.smnist_flags import KEYS, Arm, Flags, Plan, make_plan, with_absolute_paths
from experiments.smnist_report import write_report


def main(args: Sequence[str] | None = None) -> int:
    """Run the experiment; `args` are the command-line flags. Returns the exit code."""
    return run_command(EXPERIMENT, lambda: parse_flags(args), run)


def parse_flags(args: Sequence[str] | None = None) -> Flags:
    """Return the flags of the command line; with --resume, those of the run that it continues, changed by it."""
    return with_absolute_paths(command.parse_flags(Flags, EXPERIMENT, args, read_flags))


def run(flags: Flags, out: Path, console: Console) -> int:
    """Train and evaluate all that the flags ask for, as far as it is not done, and write the report."""
    with StopRequest() as stop:
        plan = make_plan(flags)
        check_cells(flags, plan, stop)
        data = load_data(flags, plan)
        stop.check()
        config = to_config(flags, plan, data.fingerprint())
        with RunFolder(out, config, flags.resume is not None, RECORDS) as folder:
            console.print(
                f"Trainings: {len(plan.arms)} of {plan.steps} steps on {plan.dataset}; results in {out}"
            )
            trainer = Trainer(folder, stop, plan.steps, checkpoint_every=flags.checkpoint_every)
            compiled = Compiled(flags)
            diverged = [error for arm in plan.arms if (error := run_arm(arm, compiled, plan, data, trainer))]
            write_report(folder, plan, console)
            console.print(f"Figures, tables, metrics and checkpoints: {out}")
    for error in diverged:
        print(f"error: {error}", file=sys.stderr)
    return 1 if diverged else 0


def load_data(flags: Flags, plan: Plan) -> ImageSet:
    """Return the images. Raises FlagError where they cannot be read, or are fewer than a batch."""
    try:
        data = load_images(plan.dataset, flags.data_dir)
    except (DataError, OSError) as error:
        raise FlagError(f"--dataset: {error}") from error
    if plan.batch_size > len(data.x_train):
        raise FlagError(f"--batch-size {plan.batch_size}: there are only {len(data.x_train)} training images")
    return data


def check_cells(flags: Flags, plan: Plan, stop: StopRequest) -> None:
    """Trace every model on an abstract image, so that what cannot run is told before anything does."""
    for variant in dict.fromkeys(arm.variant for arm in plan.arms):
        try:
            build = partial(build_model, variant, 0, flags)
            jax.eval_shape(lambda build=build: build()(jnp.zeros((1, 784), jnp.float32)))
        except UnsupportedForm as error:
            raise FlagError(f"--form {flags.form}: {error}") from error
        except ValueError as error:
            raise FlagError(f"--cell {variant}: {error}") from error
        stop.check()


def build_model(variant: str, seed: int, flags: Flags) -> SequenceClassifier:
    """Return the classifier of a variant such as "efla" or "efla:unit", at its initial parameters."""
    cell, _, keys = variant.partition(":")
    options = {"normalize_keys": KEYS.get(keys), "form": flags.form, "chunk_size": flags.chunk_size}
    return SequenceClassifier(cell=cell, rngs=nnx.Rngs(seed), **options)


class Compiled:
    """The compiled functions of each variant, shared by all its learning rates and seeds.

    For that the learning rate is part of the optimizer's state, a number like any other.
    """

    def __init__(self, flags: Flags) -> None:
        self.flags = flags
        self.train_step = cache(self._train_step)
        self.predict = cache(self._predict)

    def _train_step(self, variant: str) -> TrainStep:
        return make_train_step(self._model(variant), optimizer(0.0), loss_function)

    def _predict(self, variant: str) -> Callable[[PyTree, PyTree, Array], Array]:
        graph = nnx.graphdef(self._model(variant))
        return jax.jit(lambda params, rest, pixels: nnx.merge(graph, params, rest)(pixels))

    def _model(self, variant: str) -> SequenceClassifier:
        return nnx.eval_shape(lambda: build_model(variant, 0, self.flags))


def optimizer(lr: float) -> optax.GradientTransformation:
    """Return the optimizer of the released script: AdamW with PyTorch's defaults on all parameters, clip 1."""
    fixed = ("b1", "b2", "eps", "weight_decay", "clip_norm", "decayed")
    return optax.inject_hyperparams(adamw, static_args=fixed)(learning_rate=lr)


def run_arm(arm: Arm, compiled: Compiled, plan: Plan, data: ImageSet, trainer: Trainer) -> str | None:
    """Do what is left of one training and its evaluation; returns what went wrong if it diverged."""
    records = [record for record in trainer.folder.records() if record.get("run") == arm.name]
    for record in records:
        if "diverged" in record:
            return record["diverged"]
    if not points_left(arm, trainer.folder):
        return None
    state = initial_state(build_model(arm.variant, arm.seed, compiled.flags), optimizer(arm.lr))
    batches = image_batches(data.x_train, data.y_train, plan.batch_size, arm.seed)
    try:
        label = training_label(arm.name, plan.arms.index(arm), len(plan.arms))
        state = trainer.train(arm.name, state, compiled.train_step(arm.variant), batches, label=label)
    except Diverged as error:
        message = f"{arm.name} {error}"
        trainer.folder.append([{"run": arm.name, "step": plan.steps, "diverged": message}])
        return message
    predict = partial(compiled.predict(arm.variant), state.params, state.rest)
    evaluate(arm, predict, plan, data, points_left(arm, trainer.folder), trainer)
    return None


def points_left(arm: Arm, folder: RunFolder) -> list[tuple[str, int]]:
    """Return the points (family, index of its strength) at which the arm has no accuracy on record yet."""
    records = [record for record in folder.records() if record.get("run") == arm.name]
    done = {(record["family"], record["strength"]) for record in records if "family" in record}
    points = [(name, i) for name, spec in FAMILIES.items() for i in range(len(spec.strengths))]
    return [(name, i) for name, i in points if (name, FAMILIES[name].strengths[i]) not in done]


def loss_function(
    model: SequenceClassifier, batch: dict[str, Array]
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the cross-entropy of a batch of `image_batches`, and its accuracy."""
    logits = model(batch["pixels"].astype(jnp.float32) / 255)
    return cross_entropy(logits, batch["label"], batch["weight"])


def evaluate(
    arm: Arm,
    predict: Callable[[Float[Array, "B T"]], Float[Array, "B K"]],
    plan: Plan,
    data: ImageSet,
    points: list[tuple[str, int]],
    trainer: Trainer,
) -> None:
    """Leave a record of the accuracy at each point (family, index of its strength); stops between two."""
    images = data.x_test[: plan.eval_limit].reshape(-1, data.x_test[0].size)
    labels = data.y_test[: plan.eval_limit]
    with Progress(f"evaluate {arm.name}", len(points), unit="points") as progress:
        for family, index in points:
            correct = count_correct(predict, images, labels, family, index)
            strength = FAMILIES[family].strengths[index]
            point = {"family": family, "strength": strength, "correct": correct, "count": len(labels)}
            trainer.folder.append([{"run": arm.name, "step": plan.steps, **point}])
            progress.advance(1, accuracy=correct / len(labels))
            trainer.stop.check()


if __name__ == "__main__":
    command.leave(main())
