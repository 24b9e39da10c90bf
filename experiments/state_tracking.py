"""State tracking: train on short sequences, test on longer ones (Recurrent Looped Transformer, arXiv 2610.07591).

`python -m experiments.state_tracking` needs no flag and no network; `--help` tells the rest.
"""

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # Ctrl-C ends the imports without a traceback; later StopRequest takes over
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

from eflax.data.algorithmic import Batch, pad
from eflax.data.algorithmic_tasks import TASKS
from eflax.evaluation.length import accuracy, sum_scores
from eflax.progress import Progress
from eflax.training import (
    TRAINING,
    Checkpoints,
    Diverged,
    RunFolder,
    RunFolderError,
    StopRequest,
    Trainer,
)
from experiments import command
from experiments.command import FlagError, run_command
from experiments.state_tracking_flags import PRECISIONS, Flags, Plan, make_plan
from experiments.state_tracking_models import (
    Arm,
    Selected,
    build_model,
    forward,
    keep_best,
    make_score,
    make_step,
    num_parameters,
    optimizer,
    start,
)
from experiments.state_tracking_report import write_report

EXPERIMENT = "state_tracking"
NOT_SAVED = (*command.NOT_SAVED, "lengths", "eval_only")
POINT = {"seed": "a whole number", "final": "a number", "sequence": "a number", "token": "a number"}
RECORDS = TRAINING | {
    "length": {"length": "a positive whole number", "count": "a positive whole number", **POINT},
    "validation": {"validation": "a positive whole number", "best_step": "a whole number", **POINT},
    "parameters": {"parameters": "a positive whole number"},
    "diverged": {"diverged": "text"},
}


def main(args: Sequence[str] | None = None) -> int:
    """Run the experiment; `args` are the command-line flags. Returns the exit code."""
    args = list(sys.argv[1:] if args is None else args)
    if args[:1] == ["generate"]:
        from experiments.state_tracking_generate import main as generate

        return generate(args[1:])
    if args[:1] == ["time"]:
        from experiments.state_tracking_time import main as timing

        return timing(args[1:])
    return run_command(EXPERIMENT, lambda: parse_flags(args), run)


def parse_flags(args: Sequence[str] | None = None) -> Flags:
    """Return the flags of the command line; with --resume, those of the run that it continues, changed by it."""
    return command.parse_flags(Flags, EXPERIMENT, args, read_flags)


def read_flags(folder: Path) -> Flags:
    """Return the flags of the run in a folder. Raises RunFolderError where there is none."""
    return command.read_flags(Flags, EXPERIMENT, folder, make_plan, NOT_SAVED)


def run(flags: Flags, out: Path, console: Console) -> int:
    """Train and evaluate all that the flags ask for, as far as it is not done, and write the report."""
    with StopRequest() as stop, jax.default_matmul_precision(PRECISIONS[flags.precision]):
        plan = make_plan(flags)
        check_models(flags, plan, stop)
        config = {"experiment": EXPERIMENT, **command.saved_flags(flags, NOT_SAVED), "plan": asdict(plan)}
        with RunFolder(out, config, flags.resume is not None, RECORDS) as folder:
            console.print(
                f"{plan.task}: {len(plan.arms)} models, seeds {', '.join(map(str, plan.seeds))}, "
                f"{plan.steps} steps of {plan.batch_size}; results in {out}"
            )
            trainer = Trainer(
                folder, stop, plan.steps, flags.checkpoint_every, validate_every=flags.validate_every
            )
            diverged = []
            for arm in plan.arms:
                if error := Run(arm, flags, plan, trainer).run():
                    diverged.append(error)
                write_report(folder, plan, console)  # what is done can be read while the next model trains
            console.print(f"Figures, tables, metrics and checkpoints: {out}")
    for error in diverged:
        print(f"error: {error}", file=sys.stderr)
    return 1 if diverged else 0


def check_models(flags: Flags, plan: Plan, stop: StopRequest) -> None:
    """Trace every model on abstract tokens, so that what cannot run is told before anything does."""
    tokens = jax.ShapeDtypeStruct((1, TASKS[plan.task].num_tokens(8)), jnp.int32)
    for arm in plan.arms:
        try:
            jax.eval_shape(lambda x, arm=arm: logits_of(flags)(build_model(arm, plan.sizes, 0), x), tokens)
        except (ValueError, TypeError) as error:
            raise FlagError(f"--model {arm.name}: {error}") from error
        stop.check()


def logits_of(flags: Flags) -> Callable[..., Any]:
    """Return the forward pass that training uses."""
    return forward(truncate=flags.truncate, remat=flags.remat, unroll=flags.unroll)


class Run:
    """The trainings of one model, of all seeds together, and their evaluation."""

    def __init__(self, arm: Arm, flags: Flags, plan: Plan, trainer: Trainer) -> None:
        self.arm, self.flags, self.plan, self.trainer = arm, flags, plan, trainer
        self.task, self.folder = TASKS[plan.task], trainer.folder
        model = nnx.eval_shape(lambda: build_model(arm, plan.sizes, 0))
        update = optimizer(plan.lr, plan.steps, plan.sizes.width)
        self.start = partial(start, arm, plan.sizes, plan.seeds, update)
        self.step = make_step(model, update, logits_of(flags), plan.seeds)
        self.score = make_score(model, forward(unroll=flags.unroll))

    def run(self) -> str | None:
        """Do what is left; returns what went wrong if a training diverged."""
        for record in self.records():
            if "diverged" in record:
                return record["diverged"]
        if self.finished() and not self.lengths_left(self.plan.steps):
            return None
        state, step = self.start(), self.plan.steps
        try:
            state, step = self.restore(state) if self.flags.eval_only else (self.train(state), step)
        except Diverged as error:
            message = f"{self.arm.name} {error}"
            self.folder.append([{"run": self.arm.name, "step": step, "diverged": message}])
            return message
        self.evaluate(state, step)
        return None

    def records(self) -> list[dict[str, Any]]:
        """Return what is on record of this model."""
        return [record for record in self.folder.records() if record.get("run") == self.arm.name]

    def finished(self) -> bool:
        """Whether the last step is on record."""
        return any("validation" in record and record["step"] == self.plan.steps for record in self.records())

    def train(self, state: Selected) -> Selected:
        """Train to the last step."""
        if not self.records():
            parameters = num_parameters(state.params, len(self.plan.seeds))
            self.folder.append([{"run": self.arm.name, "step": 0, "parameters": parameters}])
        examples = self.task.validation(self.plan.validation_size)
        validate = partial(self.validate, examples)
        batches = self.task.batches(self.plan.batch_size)
        return self.trainer.train(self.arm.name, state, self.step, batches, validate)

    def restore(self, state: Selected) -> tuple[Selected, int]:
        """Return the newest checkpoint and its step."""
        checkpoints = Checkpoints(self.folder.path / "checkpoints" / self.arm.name)
        try:
            state, meta = checkpoints.restore(state)
        finally:
            checkpoints.close()
        if not int(state.best_step.max()):
            raise RunFolderError(
                f"{self.folder.path}: {self.arm.name} has not been validated yet; train it further"
            )
        return state, meta["step"]

    def validate(self, examples: Batch, step: int, state: Selected) -> tuple[Selected, list[dict[str, Any]]]:
        """Return the state with the best parameters so far, and a record for each seed."""
        totals = self.totals(state.train.params, state, examples)
        count = len(examples["tokens"])
        state = keep_best(
            state, jnp.asarray(totals["loss"] / count, jnp.float32), jnp.asarray(step, jnp.int32)
        )
        best = np.asarray(state.best_step)
        return state, [
            {"validation": count, **self.point(totals, index, count), "best_step": int(best[index])}
            for index in range(len(self.plan.seeds))
        ]

    def totals(self, params: Any, state: Selected, examples: Batch) -> dict[str, Any]:
        """Return the summed scores [seeds] of these parameters."""
        return sum_scores(partial(self.score, params, state.train.rest), examples, self.flags.eval_batch_size)

    def point(self, totals: dict[str, Any], index: int, count: int) -> dict[str, Any]:
        """Return the accuracies and the loss of one seed."""
        mine = {key: float(value[index]) for key, value in totals.items()}
        found = {metric: accuracy(mine, metric, count) for metric in ("final", "sequence", "token")}
        return {"seed": self.plan.seeds[index], **found, "example_loss": mine["loss"] / count}

    def lengths_left(self, step: int) -> list[int]:
        """Return the test lengths that are not on record for this step."""
        done = {
            record["length"] for record in self.records() if "length" in record and record["step"] == step
        }
        return [n for n in self.flags.lengths or self.task.test_lengths if n not in done]

    def evaluate(self, state: Selected, step: int) -> None:
        """Leave records of the best parameters at each length; stops between two.

        All lengths of the paper are padded to the longest, so that one compiled program serves them.
        """
        lengths, best = self.lengths_left(step), np.asarray(state.best_step)
        longest = self.task.num_tokens(max(self.task.test_lengths))
        with Progress(f"evaluate {self.arm.name}", len(lengths), unit="lengths") as progress:
            for length in lengths:
                examples = self.task.test(length, self.plan.test_size)
                examples = pad(examples, max(longest, examples["tokens"].shape[1]))
                totals, count = self.totals(state.best, state, examples), len(examples["tokens"])
                points = [self.point(totals, index, count) for index in range(len(self.plan.seeds))]
                self.folder.append(
                    {
                        "run": self.arm.name,
                        "step": step,
                        "length": length,
                        "count": count,
                        **point,
                        "best_step": int(at),
                    }
                    for point, at in zip(points, best, strict=True)
                )
                progress.advance(1, accuracy=sum(point[self.task.metric] for point in points) / len(points))
                self.trainer.stop.check()


if __name__ == "__main__":
    sys.exit(main())
