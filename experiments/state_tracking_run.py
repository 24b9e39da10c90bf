"""The trainings of one state-tracking model, of all its seeds side by side, and their evaluation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from eflax.data.algorithmic import Batch, pad
from eflax.data.algorithmic_tasks import TASKS
from eflax.evaluation.length import accuracy, sum_scores
from eflax.progress import Progress
from eflax.training import Checkpoints, RunFolderError, Trainer
from eflax.training.members import divergences
from experiments.command import training_label
from experiments.state_tracking_flags import Flags, Plan
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

    def run(self) -> list[str]:
        """Do what is left; returns what went wrong with each seed that diverged."""
        if not self.finished() or self.lengths_left(self.plan.steps):
            state, step = self.start(), self.plan.steps
            state, step = self.restore(state) if self.flags.eval_only else (self.train(state), step)
            self.evaluate(state, step)
        return [f"{self.arm.name}: {record['diverged']}" for record in self.records() if "diverged" in record]

    def records(self) -> list[dict[str, Any]]:
        """Return what is on record of this model."""
        return [record for record in self.folder.records() if record.get("run") == self.arm.name]

    def finished(self) -> bool:
        """Whether the last step is on record, or that every seed diverged before it."""
        records = self.records()
        last = any("validation" in record and record["step"] == self.plan.steps for record in records)
        return last or sum("diverged" in record for record in records) == len(self.plan.seeds)

    def train(self, state: Selected) -> Selected:
        """Train to the last step, or until no seed runs any more."""
        if not self.records():
            parameters = num_parameters(state.params, len(self.plan.seeds))
            self.folder.append([{"run": self.arm.name, "step": 0, "parameters": parameters}])
        examples = self.task.validation(self.plan.validation_size)
        validate = partial(self.validate, examples)
        batches = self.task.batches(self.plan.batch_size)
        labels = [{"seed": seed} for seed in self.plan.seeds]
        return self.trainer.train(
            self.arm.name,
            state,
            self.step,
            batches,
            validate,
            finished=lambda state: bool((state.diverged > 0).all()),
            diverged=lambda state: divergences(state.diverged, labels),
            label=training_label(self.arm.name, self.plan.arms.index(self.arm), len(self.plan.arms)),
        )

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

    def validate(self, examples: Batch, _: int, state: Selected) -> tuple[Selected, list[dict[str, Any]]]:
        """Return the state with the best parameters so far, and a record for each seed that has not diverged."""
        totals = self.totals(state.train.params, state, examples)
        count = len(examples["tokens"])
        state = keep_best(state, jnp.asarray(totals["loss"] / count, jnp.float32))
        best, diverged = np.asarray(state.best_step), np.asarray(state.diverged)
        return state, [
            {"validation": count, **self.point(totals, index, count), "best_step": int(best[index])}
            for index in range(len(self.plan.seeds))
            if not diverged[index]
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

        Those of a seed that diverged say when, and step 0 is best where it was before the first validation. All lengths
        of the paper are padded to the longest, so that one compiled program serves them.
        """
        lengths, marks = self.lengths_left(step), self.marks(state)
        longest = self.task.num_tokens(max(self.task.test_lengths))
        with Progress(f"evaluate {self.arm.name}", len(lengths), unit="lengths") as progress:
            for length in lengths:
                examples = self.task.test(length, self.plan.test_size)
                examples = pad(examples, max(longest, examples["tokens"].shape[1]))
                totals, count = self.totals(state.best, state, examples), len(examples["tokens"])
                points = [self.point(totals, index, count) for index in range(len(self.plan.seeds))]
                same = {"run": self.arm.name, "step": step, "length": length, "count": count}
                self.folder.append(same | point | mark for point, mark in zip(points, marks, strict=True))
                progress.advance(1, accuracy=sum(point[self.task.metric] for point in points) / len(points))
                self.trainer.stop.check()

    def marks(self, state: Selected) -> list[dict[str, int]]:
        """Return of each seed which step's parameters are its best, and at which it diverged if it did."""
        steps = np.asarray(state.best_step).tolist(), np.asarray(state.diverged).tolist()
        return [
            {"best_step": best} | ({"diverged_at": at} if at else {}) for best, at in zip(*steps, strict=True)
        ]
