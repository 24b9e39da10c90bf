"""Show how a trained model follows the state: `python -m experiments.state_tracking generate --help`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib

matplotlib.use("Agg")  # no display is needed

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import tyro
from flax import nnx
from jaxtyping import Float
from rich.console import Console
from rich.table import Table
from tyro.conf import arg

from eflax.data.algorithmic import PAD, Batch, Task
from eflax.data.algorithmic_tasks import TASKS
from eflax.training import CheckpointError, Checkpoints, RunFolderError
from experiments.command import FlagError
from experiments.state_tracking import read_flags
from experiments.state_tracking_flags import PRECISIONS, Plan, make_plan
from experiments.state_tracking_models import Arm, Selected, build_model, forward, optimizer, start


@dataclass(frozen=True)
class GenerateFlags:
    """Show the answers of a trained model after every prefix of one test example, as text and as a figure.

    The parameters are those of least validation loss so far.
    """

    # Folder of a run of the experiment.
    run: Annotated[Path, arg(metavar="FOLDER")]

    # Model, by its name in the run's tables; the first by default.
    model: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: the first)")] = None

    # Seed; the first by default.
    seed: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: the first)")] = None

    # Length of the example; by default the first test length.
    length: Annotated[
        int | None, arg(metavar="N", help_behavior_hint="(default: the first of the tests)")
    ] = None

    # Number of the example in the test set, from 0.
    example: Annotated[int, arg(metavar="N")] = 0

    # The figure; by default example-MODEL-SEED-LENGTH-NUMBER.png in the folder.
    out: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None


def main(args: Sequence[str] | None = None) -> int:
    """Show what the flags ask for. Returns the exit code."""
    flags = tyro.cli(GenerateFlags, args=args, prog="python -m experiments.state_tracking generate")
    try:
        return show(flags, Console(highlight=False))
    except (FlagError, RunFolderError, CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def show(flags: GenerateFlags, console: Console) -> int:
    """Print the answers after each prefix, and write the figure."""
    saved = read_flags(flags.run)
    plan = make_plan(saved)
    task = TASKS[plan.task]
    arm = _choose("--model", flags.model, {arm.name: arm for arm in plan.arms})
    seed = _choose("--seed", flags.seed, {seed: index for index, seed in enumerate(plan.seeds)})
    example = draw(task, plan, flags)
    with jax.default_matmul_precision(PRECISIONS[saved.precision]):
        chances, taken = predict(flags.run, arm, plan, seed, example["tokens"])
    name = f"{arm.name}-seed{plan.seeds[seed]}-length{flags.length or task.test_lengths[0]}-{flags.example}"
    print_answers(task, example, chances, name, console)
    console.print(taken)
    out = flags.out or flags.run / f"example-{name}.png"
    draw_answers(task, example, chances, name, out)
    console.print(f"Figure: {out}")
    return 0


def _choose(flag: str, wanted: Any, known: dict[Any, Any]) -> Any:
    if wanted is not None and wanted not in known:
        raise FlagError(f"{flag} {wanted}: the run has {', '.join(map(str, known))}")
    return known[next(iter(known)) if wanted is None else wanted]


def draw(task: Task, plan: Plan, flags: GenerateFlags) -> dict[str, np.ndarray]:
    """Return the arrays [T] of one test example."""
    if not 0 <= flags.example < plan.test_size:
        raise FlagError(
            f"--example {flags.example}: the run has tests 0 to {plan.test_size - 1} of each length"
        )
    try:
        examples: Batch = task.test(flags.length or task.test_lengths[0], plan.test_size)
    except ValueError as error:
        raise FlagError(f"--length: {error}") from error
    row = {key: x[flags.example] for key, x in examples.items()}
    return {key: x[: int((row["tokens"] != PAD).sum())] for key, x in row.items()}


def predict(
    run: Path, arm: Arm, plan: Plan, seed: int, tokens: np.ndarray
) -> tuple[Float[np.ndarray, "T V"], str]:
    """Return the probability of every token as the answer after each prefix, and whose parameters were taken."""
    update = optimizer(plan.lr, plan.steps, plan.sizes.width)
    checkpoints = Checkpoints(run / "checkpoints" / arm.name)
    try:
        state, _ = checkpoints.restore(start(arm, plan.sizes, plan.seeds, update))
    finally:
        checkpoints.close()
    assert isinstance(state, Selected)
    graph = nnx.graphdef(nnx.eval_shape(lambda: build_model(arm, plan.sizes, 0)))
    params, rest = jax.tree.map(lambda x: x[seed], (state.best, state.train.rest))
    logits = jax.jit(lambda p, r, x: forward()(nnx.merge(graph, p, r), x))(
        params, rest, jnp.asarray(tokens)[None]
    )
    taken, at = f"Parameters of step {state.best_step[seed]}", int(state.diverged[seed])
    taken += f"; seed {plan.seeds[seed]} diverged at step {at}" if at else ""
    return np.asarray(jax.nn.softmax(logits[0], axis=-1)), taken


def print_answers(
    task: Task, example: dict[str, np.ndarray], chances: Float[np.ndarray, "T V"], name: str, console: Console
) -> None:
    """Print what is read, the answer, the right one and the probability given to it, position by position."""
    table = Table("position", "read", "answer", "right", "probability of it", "")
    table.title = f"{task.name}: {name}"
    for place, (token, target) in enumerate(zip(example["tokens"], example["targets"], strict=True)):
        answer = int(chances[place].argmax())
        known = target != PAD
        right, chance = (task.symbol(int(target)), f"{chances[place, target]:.4f}") if known else ("", "")
        mark = "" if not known else "" if answer == target else "wrong"
        table.add_row(str(place), task.symbol(int(token)), task.symbol(answer), right, chance, mark)
    console.print(table)


def draw_answers(
    task: Task, example: dict[str, np.ndarray], chances: Float[np.ndarray, "T V"], name: str, out: Path
) -> None:
    """Draw the probability of each answer after each prefix, and the right answers over it."""
    known = np.flatnonzero(example["targets"] != PAD)
    likely = np.flatnonzero(chances[known].max(0) > 0.01)
    answers = np.union1d(likely, example["targets"][known])
    figure, panel = plt.subplots(figsize=(max(6.0, 0.16 * len(known)), max(2.5, 0.16 * len(answers))))
    image = panel.imshow(chances[known][:, answers].T, aspect="auto", cmap="Blues", vmin=0, vmax=1)
    panel.plot(np.searchsorted(answers, example["targets"][known]), "rx", markersize=4)
    panel.set_yticks(range(len(answers)), [task.symbol(int(a)) for a in answers], fontsize="x-small")
    panel.set_xticks(
        range(len(known)), [task.symbol(int(t)) for t in example["tokens"][known]], fontsize="x-small"
    )
    panel.tick_params(axis="x", rotation=90)
    panel.set(xlabel="read", ylabel="answer", title=f"{name}; × the right answer")
    figure.colorbar(image, label="probability")
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    plt.close(figure)
