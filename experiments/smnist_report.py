"""Tables and figures of a sequential-MNIST run, all from its records."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Column, Table

from eflax.evaluation import FAMILIES
from eflax.training import RunFolder
from experiments.smnist_flags import Arm, Plan

MOST_COLUMNS = 4
EMA = 0.85  # of the loss curves, as in the paper's figures
ONE_SEED = (
    "One seed: under perturbation seeds can differ more than cells do, so compare with --seeds N. "
    "--cell delta_rule efla delta_rule:raw efla:unit adds the controls."
)

type Records = list[dict[str, Any]]
type Row = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """The trainings that differ in their seed alone."""

    variant: str
    lr: float
    runs: tuple[str, ...]
    seeds: tuple[int, ...]


def group_arms(arms: Sequence[Arm]) -> list[Group]:
    """Put the trainings that differ in their seed alone together, in their order."""
    found: dict[tuple[str, float], list[Arm]] = {}
    for arm in arms:
        found.setdefault((arm.variant, arm.lr), []).append(arm)
    return [
        Group(variant, lr, tuple(arm.name for arm in arms), tuple(arm.seed for arm in arms))
        for (variant, lr), arms in found.items()
    ]


def write_report(folder: RunFolder, plan: Plan, console: Console) -> None:
    """Write the CSV tables and the PNG figures into `folder`, and print the tables."""
    records = folder.records()
    groups = group_arms(plan.arms)
    points = [row for group in groups for row in robustness_rows(group, records)]
    summary = [summary_row(group, records) for group in groups]
    folder.write_table("summary.csv", summary)
    folder.write_table("robustness.csv", points)
    _save(_draw_robustness(groups, points), folder, "robustness.png")
    _save(_draw_curves(groups, records), folder, "learning_curves.png")
    if len({group.lr for group in groups}) > 2:
        _save(_draw_sweep(groups, summary), folder, "lr_sweep.png")
    _print(points, summary, console)
    if all(row["clean_sd"] is None for row in summary):
        console.print(ONE_SEED)


def robustness_rows(group: Group, records: Records) -> list[Row]:
    """Return a row for each perturbation and strength: mean and sample SD of the accuracy over the seeds."""
    rows = []
    for family, spec in FAMILIES.items():
        for strength in spec.strengths:
            values = _accuracies(group, records, family, strength)
            row = {"cell": group.variant, "lr": group.lr, "family": family, "strength": strength}
            rows.append({**row, **_statistics("accuracy", values), "num_seeds": len(values)})
    return rows


def summary_row(group: Group, records: Records) -> Row:
    """Return the clean accuracy, the mean accuracy over each family, and the final loss, over the seeds.

    A diverged training has no accuracy and no final loss; it is counted, so that it does not go unseen.
    """
    row: Row = {"cell": group.variant, "lr": group.lr, "seeds": " ".join(map(str, group.seeds))}
    clean_family, clean = "scale", FAMILIES["scale"].strengths[0]
    row |= _statistics("clean", _accuracies(group, records, clean_family, clean))
    for family, spec in FAMILIES.items():
        by_strength = [_accuracies(group, records, family, strength) for strength in spec.strengths]
        row |= _statistics(family, [mean(values) for values in zip(*by_strength, strict=True)])
    diverged = [
        record["run"] for record in records if record.get("run") in group.runs and "diverged" in record
    ]
    curves = [_losses(run, records) for run in group.runs if run not in diverged]
    row |= _statistics("final_loss", [float(smooth(losses)[-1]) for losses in curves if losses])
    return row | {"diverged": len(diverged)}


def smooth(values: Sequence[float]) -> np.ndarray:
    """Return the exponential moving average with weight `EMA` on the past, begun at the first value."""
    averages = np.array(values, np.float64)
    for at in range(1, len(averages)):
        averages[at] += EMA * (averages[at - 1] - averages[at])
    return averages


def _accuracies(group: Group, records: Records, family: str, strength: float) -> list[float]:
    wanted = (family, strength)
    return [
        record["correct"] / record["count"]
        for record in records
        if record.get("run") in group.runs and (record.get("family"), record.get("strength")) == wanted
    ]


def _losses(run: str, records: Records) -> list[float]:
    return [record["loss"] for record in records if record.get("run") == run and "loss" in record]


def _statistics(name: str, values: list[float]) -> Row:
    spread = stdev(values) if len(values) > 1 else None
    return {f"{name}_mean": mean(values) if values else None, f"{name}_sd": spread}


def _draw_robustness(groups: list[Group], points: list[Row]) -> Figure:
    rates = list(dict.fromkeys(group.lr for group in groups))
    swept = len(rates) * len({group.variant for group in groups}) == len(groups) > len(rates) > 1
    layers = [[group for group in groups if group.lr == lr] for lr in rates] if swept else [groups]
    figure, axes = plt.subplots(len(layers), 3, figsize=(12, 3.6 * len(layers)), sharey=True, squeeze=False)
    for layer, row in zip(layers, axes, strict=True):
        for (family, spec), panel in zip(FAMILIES.items(), row, strict=True):
            for group in layer:
                same = {"cell": group.variant, "lr": group.lr, "family": family}
                rows = [point for point in points if same.items() <= point.items()]
                label = f"{group.variant}, lr {group.lr:g}{_over(group)}"
                _line(panel, spec.strengths, rows, "accuracy", label)
            panel.set(title=spec.title, xlabel=spec.axis, ylim=(0, 1))
            panel.grid(alpha=0.3)
        row[0].set_ylabel("test accuracy")
        row[0].legend(fontsize="small")
    return figure


def _line(panel: Axes, x: Sequence[float], rows: Sequence[Row], name: str, label: str) -> None:
    """Draw the mean, with a band of one SD on either side where there are several seeds."""
    middle = np.array([row[f"{name}_mean"] for row in rows], float)  # None becomes NaN, which is not drawn
    spread = np.array([row[f"{name}_sd"] for row in rows], float)
    (line,) = panel.plot(x, middle, marker="o", markersize=3, label=label)
    panel.fill_between(x, middle - spread, middle + spread, color=line.get_color(), alpha=0.2, linewidth=0)


def colors(groups: Sequence[Group]) -> list[np.ndarray]:
    """Return an RGB color for each group: a hue for each cell, the darker the higher the learning rate."""
    variants = list(dict.fromkeys(group.variant for group in groups))
    chosen = []
    for group in groups:
        hue = np.array(to_rgb(f"C{variants.index(group.variant) % 10}"))
        rates = sorted({other.lr for other in groups if other.variant == group.variant})
        shade = np.interp(rates.index(group.lr), (0, len(rates) - 1), (-0.6, 0.5)) if len(rates) > 1 else 0.0
        chosen.append(hue + abs(shade) * ((shade < 0) - hue))  # towards white below 0, towards black above
    return chosen


def _draw_curves(groups: list[Group], records: Records) -> Figure:
    figure, panel = plt.subplots(figsize=(9, 4.2))
    for color, group in zip(colors(groups), groups, strict=True):
        curves = [losses for run in group.runs if (losses := _losses(run, records))]
        for losses in curves:
            panel.plot(range(1, len(losses) + 1), losses, color=color, alpha=0.2, linewidth=0.7)
        length = min(map(len, curves), default=0)
        if not length:
            continue
        smoothed = np.array([smooth(losses)[:length] for losses in curves])
        steps = np.arange(1, length + 1)
        panel.plot(steps, smoothed.mean(0), color=color, label=f"{group.variant}, lr {group.lr:g}")
        if len(curves) > 1:
            low, high = smoothed.mean(0) - smoothed.std(0, ddof=1), smoothed.mean(0) + smoothed.std(0, ddof=1)
            panel.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
    panel.set_title(f"thin: each step, thick: moving average, {EMA}{_over(groups[0])}")
    panel.set(xlabel="step", ylabel="training loss (nats)", ylim=(0, None))
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))  # beside, not on the curves
    panel.grid(alpha=0.3)
    return figure


def _draw_sweep(groups: list[Group], summary: list[Row]) -> Figure:
    panels = {"clean": "Clean"} | {name: f"Mean over: {spec.title}" for name, spec in FAMILIES.items()}
    figure, axes = plt.subplots(1, len(panels), figsize=(15, 3.6), sharey=True)
    for (name, heading), panel in zip(panels.items(), axes, strict=True):
        for variant in dict.fromkeys(group.variant for group in groups):
            rows = [row for row in summary if row["cell"] == variant]
            _line(panel, [row["lr"] for row in rows], rows, name, variant + _over(groups[0]))
        panel.set(title=heading, xlabel="learning rate", xscale="log", ylim=(0, 1))
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("test accuracy")
    axes[0].legend(fontsize="small")
    return figure


def _over(group: Group) -> str:
    """Return what the band is, where there is one."""
    return f" (±1 SD of {len(group.seeds)} seeds)" if len(group.seeds) > 1 else ""


def _save(figure: Figure, folder: RunFolder, name: str) -> None:
    figure.tight_layout()
    figure.savefig(folder.path / name, dpi=130)
    plt.close(figure)


def _print(points: list[Row], summary: list[Row], console: Console) -> None:
    names = ("clean", *FAMILIES)
    if len(summary) <= MOST_COLUMNS:  # wider tables are for the CSV file
        for family, spec in FAMILIES.items():
            table = Table(spec.axis, *(f"{row['cell']}\nlr {row['lr']:g}" for row in summary))
            table.title = f"{spec.title}: test accuracy (%)"
            for strength in spec.strengths:
                same = {"family": family, "strength": strength}
                rows = [point for point in points if same.items() <= point.items()]
                table.add_row(f"{strength:g}", *(_percent(row, "accuracy") for row in rows))
            console.print(table)
    some_diverged = any(row["diverged"] for row in summary)
    table = Table(Column("cell", no_wrap=True), "lr", *names, "loss", *["diverged"] * some_diverged)
    table.title = "Test accuracy (%): clean, and mean over each perturbation"
    table.caption = f"loss: of the training, moving average ({EMA}) at its end"
    for row in summary:
        loss = "-" if row["final_loss_mean"] is None else f"{row['final_loss_mean']:.3f}"
        values = [_percent(row, name) for name in names]
        table.add_row(row["cell"], f"{row['lr']:g}", *values, loss, *[str(row["diverged"])] * some_diverged)
    console.print(table)


def _percent(row: Row, name: str) -> str:
    middle, spread = row[f"{name}_mean"], row[f"{name}_sd"]
    if middle is None:
        return "-"
    return f"{100 * middle:.1f}" + ("" if spread is None else f" ± {100 * spread:.1f}")
