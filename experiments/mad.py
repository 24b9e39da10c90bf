"""MAD: six synthetic tasks that tell token mixers apart (arXiv 2403.17844; EFLA paper, 4.2).

`python -m experiments.mad` needs no flag and no network; `--help` tells the rest.
"""

import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # Ctrl-C ends the imports without a traceback; later StopRequest takes over
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from eflax.data.algorithmic import TEST, TRAIN, VALIDATION
from eflax.data.mad import Batch, MadTask, shuffled_rows, steps_per_epoch
from eflax.training import TRAINING, Checkpoints, RunFolder, StopRequest, Trainer, read_config
from eflax.training.members import divergences
from experiments import command, mad_join
from experiments.command import FlagError, run_command, training_label
from experiments.mad_flags import Flags, Plan, make_plan, resolve
from experiments.mad_models import MadModel, Mixer
from experiments.mad_report import write_report
from experiments.mad_training import Grid, cut, keep_best, make_score, make_step, optimizer, start

EXPERIMENT = "mad"
NOT_SAVED = (*command.NOT_SAVED, "together", "dry_run", "eval_only")
RECORDS = TRAINING | {
    "validation": {"validation": "a positive whole number", "split": "text", "running": "a whole number"},
    "test": {
        "test": "a positive whole number",
        "lr": "a number",
        "weight_decay": "a number",
        "seed": "a whole number",
        "accuracy": "a number",
        "micro": "a number",
        "perplexity": "a number",
        "selected_accuracy": "a number",
        "best_step": "a whole number",
        "diverged": "a whole number",
    },
}


def main(args: Sequence[str] | None = None) -> int:
    """Run the experiment; `args` are the command-line flags. Returns the exit code."""
    args = list(sys.argv[1:] if args is None else args)
    if args[:1] == ["join"]:
        return mad_join.main(args[1:], read_flags, RECORDS)
    return run_command(EXPERIMENT, lambda: parse_flags(args), run)


def parse_flags(args: Sequence[str] | None = None) -> Flags:
    """Return the flags of the command line; with --resume, those of the run that it continues, changed by it."""
    return resolve(command.parse_flags(Flags, EXPERIMENT, args, read_flags))


def read_flags(folder: Path) -> Flags:
    """Return the flags of the run in a folder. Raises RunFolderError where there is none."""
    return command.read_flags(Flags, EXPERIMENT, folder, make_plan, NOT_SAVED)


def run(flags: Flags, out: Path, console: Console) -> int:
    """Train and test all that the flags ask for, as far as it is not done, and write the report."""
    with StopRequest() as stop:
        plan = make_plan(flags)
        tell(plan, count_parameters(plan, stop), console, flags.dry_run)
        if flags.dry_run:
            return 0
        config = {"experiment": EXPERIMENT, **command.saved_flags(flags, NOT_SAVED)}
        config |= {"settings": asdict(plan.settings)}
        if flags.resume is not None:  # which may go on with other tasks and layers than the run began with
            began = read_config(out)
            config |= {name: began.get(name) for name in ("tasks", "layers")}
        with RunFolder(out, config, flags.resume is not None, RECORDS) as folder:
            console.print(f"results in {out}")
            failed = []
            for task, mixer in product(plan.tasks, plan.mixers):
                failed += Run(task, mixer, flags, plan, folder, stop).run()
                stop.check()
            write_report(folder, plan.settings, console)
            console.print(f"Figures, tables, metrics and checkpoints: {out}")
    for error in failed:
        print(f"error: {error}", file=sys.stderr)
    return 1 if failed else 0


def count_parameters(plan: Plan, stop: StopRequest) -> dict[str, int]:
    """Return the parameters of each layer's model, traced so that what cannot run is told before anything does."""
    task, counts = plan.tasks[0], {}
    tokens = jax.ShapeDtypeStruct((1, task.length), jnp.int32)
    for mixer in plan.mixers:
        try:
            build = partial(build_model, task, mixer, plan)
            jax.eval_shape(lambda x, build=build: build(0)(x), tokens)
            params = nnx.state(nnx.eval_shape(lambda build=build: build(0)), nnx.Param)
        except (ValueError, TypeError) as error:
            raise FlagError(f"--layers {mixer.label}: {error}") from error
        counts[mixer.label] = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))
        stop.check()
    return counts


def build_model(task: MadTask, mixer: Mixer, plan: Plan, seed: int | jax.Array) -> MadModel:
    """Return a model at its initial parameters."""
    return MadModel(task, mixer, plan.settings.sizes, rngs=nnx.Rngs(jax.random.key(seed)))


def tell(plan: Plan, parameters: dict[str, int], console: Console, whole: bool) -> None:
    """Print what is to be trained, in steps and in operations, six a parameter and token; `whole`: by task."""
    settings = plan.settings
    members, each = len(settings.members), settings.epochs
    steps = {task.label: settings.steps(task) for task in plan.tasks}
    tokens = {task.label: each * task.train_size * task.length * members for task in plan.tasks}
    operations = 6.0 * sum(parameters.values()) * sum(tokens.values())
    if whole:
        table = Table("task", "steps of a layer", "tokens, all members")
        for label in steps:
            table.add_row(label, f"{steps[label]:,}", f"{tokens[label]:.2e}")
        console.print(table)
        console.print("parameters: " + ", ".join(f"{name} {count:,}" for name, count in parameters.items()))
    grid = (
        f"{len(settings.lrs)} learning rates × {len(settings.weight_decays)} weight decays × "
        f"{len(settings.seeds)} seeds"
    )
    console.print(
        f"{settings.protocol} protocol, {len(plan.tasks)} tasks × {len(plan.mixers)} layers: "
        f"{len(plan.tasks) * len(plan.mixers)} trainings of {grid}, at most "
        f"{len(plan.mixers) * sum(steps.values()):,} steps and {operations:.1e} operations"
    )


class Run:
    """The trainings of one layer at one task, all of the grid together, and their test."""

    def __init__(
        self, task: MadTask, mixer: Mixer, flags: Flags, plan: Plan, folder: RunFolder, stop: StopRequest
    ) -> None:
        self.name = f"{task.label}@{mixer.label}"
        trainings = list(product(plan.tasks, plan.mixers))
        self.label = training_label(self.name, trainings.index((task, mixer)), len(trainings))
        self.task, self.flags, self.settings = task, flags, plan.settings
        self.folder, self.stop, self.steps = folder, stop, plan.settings.steps(task)
        self.build = partial(build_model, task, mixer, plan)
        self.update = partial(optimizer, plan.settings.schedule, self.steps, plan.settings.decay == "all")

    def run(self) -> list[str]:
        """Do what is left; returns what went wrong."""
        records = [record for record in self.folder.records() if record.get("run") == self.name]
        tested = [record for record in records if "test" in record]
        if self.flags.eval_only and not records:  # it has not begun
            return []
        if not any(record.get("finished") for record in tested):
            model = nnx.eval_shape(lambda: self.build(0))
            self.score = make_score(model, self.flags.together)
            state = start(self.build, self.settings.members, self.update)
            tested = self.test(self.restore(state) if self.flags.eval_only else self.train(model, state))
        if any(record["best_step"] for record in tested):
            return []
        return [f"{self.name}: every member of the grid diverged before its first validation"]

    def train(self, model: MadModel, state: Grid) -> Grid:
        """Train to the last step, or until no member runs any more."""
        settings, folder = self.settings, self.folder
        examples = {key: jnp.asarray(x) for key, x in self.training_examples().items()}
        judged = self.task.split(VALIDATION if settings.select == "validation" else TEST, settings.test_size)
        step = make_step(model, self.update, self.flags.together)
        record_every = max(1, self.steps // 1000)
        trainer = Trainer(
            folder,
            self.stop,
            self.steps,
            self.flags.checkpoint_every,
            log_every=max(10, record_every),
            record_every=record_every,
            validate_every=steps_per_epoch(self.task.train_size, settings.batch_size),
        )
        return trainer.train(
            self.name,
            state,
            lambda grid, rows: step(grid, rows, examples),
            shuffled_rows(self.task.train_size, settings.batch_size, settings.seeds),
            partial(self.validate, cut(judged, settings.batch_size), settings.test_size),
            finished=lambda grid: bool(grid.over.all()),
            diverged=lambda grid: divergences(grid.diverged, [x._asdict() for x in settings.members]),
            label=self.label,
        )

    def training_examples(self) -> Batch:
        """Return the training examples, weighted as the loss has it."""
        examples = self.task.split(TRAIN)
        if self.settings.loss == "all" and self.task.next_token:
            examples["weight"] = np.ones_like(examples["weight"])
        return examples

    def validate(
        self, parts: dict[str, Any], count: int, step: int, state: Grid
    ) -> tuple[Grid, list[dict[str, Any]]]:
        """Return the grid with the best parameters so far, and a record of the scores of all members."""
        scores = self.score(state.params, state.train.rest, parts)
        state = keep_best(state, scores, self.settings.enough)
        found = {key: [float(f"{value:.6g}") for value in np.asarray(x)] for key, x in scores.items()}
        running = int((~np.asarray(state.over)).sum())
        return state, [{"validation": count, "split": self.settings.select, **found, "running": running}]

    def restore(self, state: Grid) -> Grid:
        """Return the newest checkpoint."""
        checkpoints = Checkpoints(self.folder.path / "checkpoints" / self.name)
        try:
            return checkpoints.restore(state)[0]
        finally:
            checkpoints.close()

    def test(self, state: Grid) -> list[dict[str, Any]]:
        """Leave and return a record of the best parameters of each member on the test examples."""
        size = self.settings.test_size
        parts = cut(self.task.split(TEST, size), self.settings.batch_size)
        scores = {key: np.asarray(x) for key, x in self.score(state.best, state.train.rest, parts).items()}
        step = int(state.step.max())
        finished = step == self.steps or bool(state.over.all())
        records = [
            {
                "run": self.name,
                "step": step,
                "test": size,
                "finished": finished,
                **member._asdict(),
                **{key: float(x[n]) for key, x in scores.items()},
                "selected_accuracy": float(state.accuracy[n]),
                "best_step": int(state.best_step[n]),
                "diverged": int(state.diverged[n]),
            }
            for n, member in enumerate(self.settings.members)
        ]
        self.folder.append(records)
        return records


if __name__ == "__main__":
    command.leave(main())
