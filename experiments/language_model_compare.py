"""One table and one figure of several trainings of language models, from what they and `eval` wrote."""

import json
import math
import time
from collections.abc import Mapping, Sequence
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
from rich.markup import escape
from rich.table import Column, Table
from tyro.conf import Positional, arg

from eflax.training import RunFolder, RunFolderError, read_config, read_records
from eflax.training.flops import count_parameters
from experiments import command
from experiments.command import FlagError
from experiments.language_model_flags import make_plan
from experiments.language_model_train import RECORDS, TOKENIZER_PRINT, build_model, read_flags

EVALUATION = "eval.json"
TRAINING = "training loss"
SMOOTH = 20  # steps, or a tenth of the training, whose mean is one point of its curve
SHOWN = ("layer", "lr", "seed", "parameters", "step", "validated")  # in the terminal, where the CSV has more
SIZES = (" documents", " tokens")  # of evaluations
AT_ONCE = 5  # columns of results in a table of the terminal
ABOVE = 1.5  # nats over the lowest loss, to which the figure reaches: what diverges leaves it
STYLES = ("-", "--", ":", "-.")

type Curve = list[tuple[int, float]]  # step and nll


@dataclass(frozen=True)
class Flags:
    """Compare trainings: perplexities, results of tasks, curves. The runs stay as they are, and may still go on."""

    # Folders of training runs. What eval found counts where it is in the folder: eval RUN … --out RUN/eval.json.
    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN ...")]

    # A new folder for table.csv, curves.csv and curves.png; by default comparisons/TIME.
    out: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")] = None

    @property
    def resume(self) -> Path | None:
        """Nothing is resumed."""
        return None


@dataclass(frozen=True)
class Run:
    """What is known of a training."""

    settings: dict[str, Any]  # what runs are told apart by, and how far it is
    results: dict[str, dict[str, float]]  # "perplexity" of the newest validation, and "evaluation": by name
    curves: dict[str, Curve]  # of the training and of each validation
    data: dict[str, Any]  # what must be the same for losses to compare


def main(args: Sequence[str]) -> int:
    """Compare; `args` are the command-line flags. Returns the exit code."""

    def parse() -> Flags:
        flags = tyro.cli(Flags, args=args, prog="python -m experiments.language_model compare")
        return Flags(flags.runs, flags.out or Path("comparisons") / time.strftime("%Y%m%d-%H%M%S"))

    return command.run_command("language_model", parse, compare)


def compare(flags: Flags, out: Path, console: Console) -> int:
    """Write the tables and the figure, and print the tables."""
    if not flags.runs:
        raise FlagError("give the folders of the runs to compare")
    if out.exists():
        raise FlagError(f"--out {out}: there is such a folder; give a new one")
    runs = [read_run(path, name) for path, name in zip(flags.runs, distinct_names(flags.runs), strict=True)]
    runs.sort(key=lambda run: tuple(run.settings[key] for key in ("layer", "lr", "seed", "run")))
    columns = {
        kind: list(dict.fromkeys(name for run in runs for name in run.results[kind]))
        for kind in ("perplexity", "evaluation")
    }
    rows = [
        run.settings
        | {f"{kind} {name}": run.results[kind].get(name) for kind, names in columns.items() for name in names}
        for run in runs
    ]
    points = [
        {"run": run.settings["run"], "of": of, "step": step, "nll": round(nll, 4)}
        for run in runs
        for of, curve in run.curves.items()
        for step, nll in curve
    ]
    figure = draw(runs)
    with RunFolder(
        out, {"experiment": "language_model compare", "runs": [str(x) for x in flags.runs]}
    ) as folder:
        folder.write_table("table.csv", rows)
        if points:
            folder.write_table("curves.csv", points)
        if figure is not None:
            figure.savefig(out / "curves.png", dpi=130)
            plt.close(figure)
    console.print(render("runs", {key: key for key in SHOWN}, rows))
    for kind, names in columns.items():
        shown = [name for name in names if kind == "perplexity" or not name.endswith(SIZES)]
        for first in range(0, len(shown), AT_ONCE):
            part = {f"{kind} {name}": name for name in shown[first : first + AT_ONCE]}
            console.print(render(kind, part, rows))
    for field in runs[0].data:
        if len({json.dumps(run.data[field]) for run in runs}) > 1:
            console.print(f"Not all have the same {field}: what depends on it does not compare.")
    console.print(f"Tables and figure: {out}", markup=False, soft_wrap=True)
    return 0


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Return as much of the ends of paths as tells them apart. Raises FlagError where two are the same."""
    whole = [path.resolve() for path in paths]
    if twice := [path for path in whole if whole.count(path) > 1]:
        raise FlagError(f"{twice[0]} is given twice; leave one out")
    names, count = [path.name for path in whole], 1
    while len(set(names)) < len(names):
        count += 1
        names = ["/".join(path.parts[-count:]) for path in whole]
    return names


def read_run(path: Path, name: str) -> Run:
    """Return what is known of the training in a folder.

    Raises:
        RunFolderError, FlagError: there is none, or its files are damaged.
    """
    config = read_config(path)
    if config.get("experiment") == "convert":
        raise FlagError(f"{path} holds an imported model, so there is no training to compare; leave it out")
    flags = read_flags(path)
    try:
        plan = make_plan(flags, config["plan"]["config"]["vocab_size"])
        records = read_records(path, RECORDS)
        losses = [(record["step"], float(record["nll"])) for record in records if "loss" in record]
        validations = [record for record in records if "validation" in record]
        newest = max((record["step"] for record in validations), default=0)
        step, diverged = losses[-1][0] if losses else 0, any("diverged" in record for record in records)
        curves = {TRAINING: smoothed(losses)} if losses else {}
        for record in validations:
            curves.setdefault(record["validation"], []).append((record["step"], float(record["nll"])))
        parameters = count_parameters(nnx.eval_shape(partial(build_model, flags, plan)))
        data = {"data": config["data_fingerprints"], "tokenizer": config[TOKENIZER_PRINT]}
    except (RunFolderError, FlagError):  # which are ValueErrors, too
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise FlagError(
            f"{path}: config.json or metrics.jsonl is damaged ({error!r}); leave it out"
        ) from error
    settings = {
        "run": name,
        "layer": " ".join(flags.pattern) or flags.layer,
        "lr": plan.lr,
        "lr_end": plan.lr_end,
        "seed": flags.seed,
        "weight_decay": flags.weight_decay,
        "num_layers": plan.config.num_layers,
        "width": plan.config.width,
        "parameters": parameters,
        "batch_size": plan.batch_size,
        "length": plan.length,
        "step": f"{step} of {plan.steps}" + ", diverged" * diverged,
        "validated": newest,
    }
    perplexities = {
        record["validation"]: _exp(record["nll"]) for record in validations if record["step"] == newest
    }
    evaluation, how = read_evaluation(path)
    return Run(settings, {"perplexity": perplexities, "evaluation": evaluation}, curves, data | how)


def read_evaluation(path: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Return what `eval` wrote into the folder of a run, by source or task and metric, and of what it is.

    Raises:
        FlagError: it is damaged.
    """
    file = path / EVALUATION
    if not file.exists():
        return {}, {"evaluation": None}
    try:
        saved = json.loads(file.read_text())
        found = {
            f"{name} {metric.removesuffix(',none')}": float(value)
            for name, values in saved["results"].items()
            for metric, value in values.items()
        }
        return found, {"evaluation": [saved["best"], saved["limit"]]}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FlagError(
            f"{file} is damaged or not of eval ({error!r}); remove it, and evaluate again"
        ) from error


def smoothed(losses: Curve) -> Curve:
    """Return the means of groups of steps; what is left over goes to the last."""
    size = max(1, min(SMOOTH, len(losses) // 10))
    groups = [losses[first : first + size] for first in range(0, len(losses) // size * size, size)]
    groups[-1] += losses[len(groups) * size :]
    return [(group[-1][0], mean(nll for _, nll in group)) for group in groups]


def draw(runs: Sequence[Run]) -> Figure | None:
    """Draw the loss over the steps, in a panel for the training and for each validation; colors are of layers.

    Returns None where there is nothing to draw.
    """
    panels = list(dict.fromkeys(of for run in runs for of in run.curves))
    layers = list(dict.fromkeys(run.settings["layer"] for run in runs))
    if not panels:
        return None
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels) + 2, 4.2), squeeze=False)
    lines = {}
    for axis, of in zip(axes[0], panels, strict=True):
        for run in runs:
            same = [other for other in runs if other.settings["layer"] == run.settings["layer"]]
            look = {
                "color": f"C{layers.index(run.settings['layer'])}",
                "linestyle": STYLES[same.index(run) % len(STYLES)],
            }
            curve = run.curves.get(of, [])
            steps, values = [step for step, _ in curve], [nll for _, nll in curve]
            marker = "o" if len(curve) < 10 else ""
            (lines[run.settings["run"]],) = axis.plot(steps, values, marker=marker, markersize=3, **look)
        finite = [nll for run in runs for _, nll in run.curves.get(of, []) if math.isfinite(nll)]
        if finite:
            axis.set(ylim=(min(finite) - 0.1, min(finite) + ABOVE))
        axis.set(xlabel="step", title=_plain(of))
        axis.grid(alpha=0.3)
    axes[0][0].set(ylabel="loss (nats a token)")
    names = [_plain(name) for name in lines]
    axes[0][-1].legend([*lines.values()], names, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    return figure


def render(title: str, columns: Mapping[str, str], rows: Sequence[dict[str, Any]]) -> Table:
    """Return columns of the rows, beside the names of the runs, as a table for the terminal."""
    heads = (Column(escape(head), overflow="fold") for head in ("run", *columns.values()))
    table = Table(*heads, title=title)
    for row in rows:
        table.add_row(*(escape(_text(row[key])) for key in ("run", *columns)))
    return table


def _exp(nll: float) -> float:
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # otherwise it begins a formula


def _text(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
