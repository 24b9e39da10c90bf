"""One table and one figure of several trainings of language models, from what they and `eval` wrote."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import matplotlib

matplotlib.use("Agg")  # no display is needed

import matplotlib.pyplot as plt
import tyro
from flax import nnx
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Column, Table
from tyro.conf import Positional, arg

from eflax.training import RunFolder, read_config, read_records
from eflax.training.flops import count_parameters
from experiments import command
from experiments.command import FlagError
from experiments.language_model_flags import make_plan
from experiments.language_model_train import RECORDS, build_model, read_flags

EVALUATION = "eval.json"
TRAINING_LOSS = "training"
SHOWN = ("parameters", "tokens")  # beside the name of a run, where the CSV has more
SMOOTH = 20  # steps whose mean is one point of a curve of the training loss


@dataclass(frozen=True)
class Flags:
    """Compare trainings: perplexities, results of tasks, curves. The runs stay as they are, and may still go on."""

    # Folders of training runs. What eval found counts where it is in the folder: eval RUN … --out RUN/eval.json.
    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN ...")]

    # A new folder for table.csv, curves.csv and curves.png; by default runs/comparison-TIME.
    out: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")] = None

    @property
    def resume(self) -> Path | None:
        """Nothing is resumed."""
        return None


@dataclass(frozen=True)
class Run:
    """What is known of a training."""

    name: str
    settings: dict[str, Any]  # what runs are told apart by
    perplexities: dict[str, float]  # of the validations, the newest
    evaluation: dict[str, float]  # what `eval` found
    curves: dict[str, list[tuple[int, float]]]  # step and nll, of the training and of each validation


def main(args: Sequence[str]) -> int:
    """Compare; `args` are the command-line flags. Returns the exit code."""

    def parse() -> Flags:
        flags = tyro.cli(Flags, args=args, prog="python -m experiments.language_model compare")
        return Flags(flags.runs, flags.out or Path("runs") / time.strftime("comparison-%Y%m%d-%H%M%S"))

    return command.run_command("language_model", parse, compare)


def compare(flags: Flags, out: Path, console: Console) -> int:
    """Write the tables and the figure, and print the table."""
    if not flags.runs:
        raise FlagError("give the folders of the runs to compare")
    runs = [read_run(path) for path in flags.runs]
    if twice := [run.name for run in runs if sum(run.name == other.name for other in runs) > 1]:
        raise FlagError(f"two runs are called {twice[0]}; rename the folder of one")
    runs.sort(key=lambda run: (run.settings["layer"], run.settings["lr"], run.settings["seed"]))
    tables = {
        "perplexity": [run.perplexities for run in runs],
        "evaluation": [run.evaluation for run in runs],
    }
    columns = {
        kind: list(dict.fromkeys(name for found in results for name in found))
        for kind, results in tables.items()
    }
    rows = [
        {"run": run.name, **run.settings}
        | {f"{kind} {name}": tables[kind][i].get(name) for kind, names in columns.items() for name in names}
        for i, run in enumerate(runs)
    ]
    points = [
        {"run": run.name, "of": of, "step": step, "nll": round(nll, 4)}
        for run in runs
        for of, curve in run.curves.items()
        for step, nll in curve
    ]
    with RunFolder(out, {"runs": [str(path) for path in flags.runs]}) as folder:
        folder.write_table("table.csv", rows)
        if points:
            folder.write_table("curves.csv", points)
            figure = draw(runs)
            figure.savefig(out / "curves.png", dpi=130)
            plt.close(figure)
    for kind, names in columns.items():
        if names:
            table = Table("run", *SHOWN, *(Column(name, overflow="fold") for name in names), title=kind)
            for row in rows:
                shown = ["run", *SHOWN, *(f"{kind} {name}" for name in names)]
                table.add_row(*(_text(row[name]) for name in shown))
            console.print(table)
    console.print(f"Tables and figure: {out}")
    return 0


def read_run(path: Path) -> Run:
    """Return what is known of the training in a folder.

    Raises:
        RunFolderError, FlagError: there is none, or its files are damaged.
    """
    flags, config = read_flags(path), read_config(path)
    plan = make_plan(flags, config["plan"]["config"]["vocab_size"])
    records = read_records(path, RECORDS)
    losses = [(record["step"], record["nll"]) for record in records if "loss" in record]
    validations = [record for record in records if "validation" in record]
    curves = {}
    if losses:
        parts = [losses[first : first + SMOOTH] for first in range(0, len(losses), SMOOTH)]
        curves[TRAINING_LOSS] = [(part[-1][0], mean(nll for _, nll in part)) for part in parts]
    for record in validations:
        curves.setdefault(record["validation"], []).append((record["step"], record["nll"]))
    newest = max((record["step"] for record in validations), default=0)
    perplexities = {
        record["validation"]: _exp(record["nll"]) for record in validations if record["step"] == newest
    }
    settings = {
        "layer": " ".join(flags.pattern) or flags.layer,
        "lr": plan.lr,
        "lr_end": plan.lr_end,
        "seed": flags.seed,
        "parameters": count_parameters(nnx.eval_shape(partial(build_model, flags, plan))),
        "tokens": (losses[-1][0] if losses else 0) * plan.batch_size * plan.length,
    }
    return Run(path.resolve().name, settings, perplexities, read_evaluation(path), curves)


def read_evaluation(path: Path) -> dict[str, float]:
    """Return what `eval` wrote into the folder of a run, by source or task and metric; nothing where it did not."""
    file = path / EVALUATION
    if not file.exists():
        return {}
    try:
        results = json.loads(file.read_text())["results"]
        return {
            f"{name} {metric.partition(',')[0]}": float(value)
            for name, values in results.items()
            for metric, value in values.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FlagError(f"{file} is damaged or not of eval ({error!r}); write it again") from error


def draw(runs: Sequence[Run]) -> Figure:
    """Draw the loss over the steps, in a panel for the training and for each validation; colors are of layers."""
    panels = list(dict.fromkeys(of for run in runs for of in run.curves))
    layers = list(dict.fromkeys(run.settings["layer"] for run in runs))
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels) + 2, 4.2), squeeze=False)
    for axis, of in zip(axes[0], panels, strict=True):
        for run in runs:
            same = [other for other in runs if other.settings["layer"] == run.settings["layer"]]
            style = ("-", "--", ":", "-.")[same.index(run) % 4]
            color = f"C{layers.index(run.settings['layer'])}"
            axis.plot(*zip(*run.curves.get(of, []), strict=True), style, color=color, label=run.name)
        last = [run.curves[of][-1][1] for run in runs if of in run.curves]
        axis.set(xlabel="step", title=of, ylim=(min(last) - 0.1, max(last) + 1.0))
        axis.grid(alpha=0.3)
    axes[0][0].set(ylabel="loss (nats a token)")
    axes[0][-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    return figure


def _exp(nll: float) -> float:
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def _text(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
