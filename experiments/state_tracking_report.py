"""Tables and figures of a state-tracking run, all from its records."""

from collections.abc import Iterable, Sequence
from statistics import mean, stdev
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Column, Table

from eflax.data.algorithmic_tasks import TASKS
from eflax.training import RunFolder
from experiments.state_tracking_flags import Plan
from experiments.state_tracking_published import published_curve, published_validation

METRICS = ("final", "token", "sequence")
LOST = "diverged: seed@step"

type Records = list[dict[str, Any]]
type Row = dict[str, Any]


def write_report(folder: RunFolder, plan: Plan, console: Console) -> None:
    """Write the CSV tables and the PNG figures into `folder`, and print the tables."""
    records = folder.records()
    points = [row for arm in plan.arms for row in length_rows(arm.name, plan, records)]
    validations = [row for arm in plan.arms for row in validation_rows(arm.name, plan, records)]
    if points:
        folder.write_table("lengths.csv", points)
        _save(_draw_lengths(plan, points), folder, "lengths.png")
        _print_lengths(plan, points, console)
    if validations:
        folder.write_table("validation.csv", validations)
        _save(_draw_validations(plan, validations), folder, "validation.png")
        _print_validations(plan, validations, console)


def length_rows(name: str, plan: Plan, records: Records) -> list[Row]:
    """Return a row for each test length of a model: mean and sample SD over the seeds, in 0..1, and what is published.

    Of evaluations of several checkpoints the newest counts. Seeds that diverged are named, and are not in the means.
    """
    mine = [record for record in records if record.get("run") == name and "length" in record]
    newest = [record for record in mine if record["step"] == max(record["step"] for record in mine)]
    rows = []
    for length in sorted({record["length"] for record in newest}):
        found = [record for record in newest if record["length"] == length]
        row: Row = {"task": plan.task, "model": name, "length": length, "step": found[0]["step"]}
        sound = [record for record in found if "diverged_at" not in record]
        for metric in METRICS:
            row |= _statistics(metric, [record[metric] for record in sound])
        at = published_curve(plan.task, name).get(length, (None, None))
        row |= {"published_mean": _fraction(at[0]), "published_sd": _fraction(at[1])}
        row |= {"seeds": len(sound), "count": found[0]["count"]}
        lost = [(record["seed"], record["diverged_at"]) for record in found if "diverged_at" in record]
        rows.append(row | {"diverged": _lost(lost)})
    return rows


def validation_rows(name: str, plan: Plan, records: Records) -> list[Row]:
    """Return a row for each validation of a model: mean and sample SD over the seeds, and what is published.

    Seeds that had diverged by then are named, and are not in the means.
    """
    mine = [record for record in records if record.get("run") == name]
    parameters = next((record["parameters"] for record in mine if "parameters" in record), None)
    diverged = [(record["seed"], record["step"]) for record in mine if "diverged" in record]
    rows = []
    for step in sorted({record["step"] for record in mine if "validation" in record}):
        found = [record for record in mine if "validation" in record and record["step"] == step]
        row: Row = {"task": plan.task, "model": name, "parameters": parameters, "step": step}
        row |= _statistics("loss", [record["example_loss"] for record in found])
        for metric in METRICS:
            row |= _statistics(metric, [record[metric] for record in found])
        at = published_validation(plan.task, step, name) or (None, None)
        row |= {"published_mean": _fraction(at[0]), "published_sd": _fraction(at[1])}
        row |= {"best_steps": " ".join(str(record["best_step"]) for record in found)}
        rows.append(row | {"diverged": _lost((seed, at) for seed, at in diverged if at <= step)})
    return rows


def _lost(diverged: Iterable[tuple[int, int]]) -> str:
    """Return seeds and the steps at which they diverged as text."""
    return " ".join(f"{seed}@{step}" for seed, step in diverged)


def _statistics(name: str, values: Sequence[float]) -> Row:
    spread = stdev(values) if len(values) > 1 else None
    return {f"{name}_mean": mean(values) if values else None, f"{name}_sd": spread}


def _fraction(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def _draw_lengths(plan: Plan, points: list[Row]) -> Figure:
    figure, panel = plt.subplots(figsize=(9, 4.2))
    task = TASKS[plan.task]
    for index, arm in enumerate(plan.arms):
        rows = [row for row in points if row["model"] == arm.name]
        if not rows:  # not tested yet
            continue
        _band(panel, "length", rows, task.metric, f"C{index}")
        paper = published_curve(plan.task, arm.name)
        if paper:
            values = [value for value, _ in paper.values()]
            panel.plot([*paper], values, f"C{index}x:", linewidth=0.8, markersize=4)
    if task.chance is not None:
        panel.axhline(100 * task.chance, color="grey", linewidth=0.7)
    panel.axvline(max(task.train_lengths), color="grey", linestyle="--", linewidth=0.7)
    ticks = sorted({row["length"] for row in points})
    panel.set(xscale="log", xlabel="test length", ylabel=f"{task.metric} accuracy (%)", ylim=(-2, 102))
    panel.set_xticks(ticks, [str(tick) for tick in ticks], minor=False, fontsize="small")
    panel.minorticks_off()
    panel.set_title(
        f"{plan.task}: line mean, band ±1 SD of {len(plan.seeds)} seeds; × published; dashed: trained to here"
    )
    _finish(panel)
    return figure


def _draw_validations(plan: Plan, rows: list[Row]) -> Figure:
    figure, panel = plt.subplots(figsize=(9, 4.2))
    metric = TASKS[plan.task].metric
    for index, arm in enumerate(plan.arms):
        mine = [row for row in rows if row["model"] == arm.name]
        if mine:  # not validated yet, or all diverged before
            _band(panel, "step", mine, metric, f"C{index}")
    panel.set(xlabel="step", ylabel=f"{metric} accuracy (%)", ylim=(-2, 102))
    panel.set_title(f"{plan.task}: validation at training lengths")
    _finish(panel)
    return figure


def _band(panel: Axes, axis: str, rows: list[Row], metric: str, color: str) -> None:
    """Draw the mean of a model over the column `axis`, and its spread over the seeds that have not diverged."""
    x, lost = [row[axis] for row in rows], rows[-1]["diverged"]
    label = rows[0]["model"] + (f" (diverged: {lost})" if lost else "")
    middle = 100 * np.array([row[f"{metric}_mean"] for row in rows], float)
    spread = 100 * np.array(
        [row[f"{metric}_sd"] for row in rows], float
    )  # None becomes NaN, which is not drawn
    panel.plot(x, middle, marker="o", markersize=3, color=color, label=label)
    panel.fill_between(x, middle - spread, middle + spread, color=color, alpha=0.15, linewidth=0)


def _finish(panel: Axes) -> None:
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def _save(figure: Figure, folder: RunFolder, name: str) -> None:
    figure.tight_layout()
    figure.savefig(folder.path / name, dpi=130)
    plt.close(figure)


def _print_lengths(plan: Plan, points: list[Row], console: Console) -> None:
    metric = TASKS[plan.task].metric
    names = list(dict.fromkeys(row["model"] for row in points))
    lengths = sorted({row["length"] for row in points})
    lost = {row["model"]: row["diverged"] for row in points if row["diverged"]}
    table = Table(Column("model", no_wrap=True), *map(str, lengths), *[LOST] * bool(lost))
    table.title = f"{plan.task}: {metric} accuracy (%) by test length, mean ± sample SD; below: published"
    for name in names:
        rows = {row["length"]: row for row in points if row["model"] == name}
        values = [_percent(rows.get(length), metric) for length in lengths]
        table.add_row(name, *values, *[lost.get(name, "")] * bool(lost))
        if any(row["published_mean"] is not None for row in rows.values()):
            table.add_row("  published", *(_percent(rows.get(length), "published") for length in lengths))
    console.print(table)


def _print_validations(plan: Plan, rows: list[Row], console: Console) -> None:
    metric = TASKS[plan.task].metric
    last = {row["model"]: row for row in rows}.values()
    lost = [LOST] * any(row["diverged"] for row in last)
    names = "parameters", "step", "loss", metric, "published", "best steps"
    table = Table(Column("model", no_wrap=True), *names, *lost)
    table.title = f"{plan.task}: last validation, at training lengths (%)"
    for row in last:
        count = "" if row["parameters"] is None else f"{row['parameters']:,}"
        figures = [f"{row['loss_mean']:.4f}", _percent(row, metric), _percent(row, "published")]
        rest = row["best_steps"], *[row["diverged"]] * len(lost)
        table.add_row(row["model"], count, str(row["step"]), *figures, *rest)
    console.print(table)


def _percent(row: Row | None, name: str) -> str:
    if row is None or row[f"{name}_mean"] is None:
        return "-"
    spread = row[f"{name}_sd"]
    return f"{100 * row[f'{name}_mean']:.2f}" + ("" if spread is None else f" ± {100 * spread:.2f}")
