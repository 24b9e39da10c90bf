"""Tables and figure of a MAD run, all from its records."""

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Column, Table

from eflax.data.mad_tasks import TASKS
from eflax.training import RunFolder
from experiments.mad_flags import parse_task
from experiments.mad_published import PUBLISHED, published
from experiments.mad_settings import Settings

METRICS = ("macro", "micro")

type Records = list[dict[str, Any]]
type Row = dict[str, Any]


def write_report(folder: RunFolder, settings: Settings, console: Console) -> None:
    """Write the CSV tables and the PNG figure of all that is on record into `folder`, and print the tables."""
    members = member_rows(folder.records())
    if not members:
        return
    results = [result_row(rows) for rows in _grouped(members, ("task", "setting", "layer"))]
    scores = [score_row(rows) for rows in _grouped(results, ("task", "layer"))]
    folder.write_table("grid.csv", members)
    folder.write_table("results.csv", results)
    folder.write_table("scores.csv", scores)
    figure = _draw(scores, settings)
    figure.savefig(folder.path / "scores.png", dpi=130)
    plt.close(figure)
    for metric in METRICS:
        console.print(_table(scores, metric, settings))
    _print_choices(results, console)


def member_rows(records: Records) -> list[Row]:
    """Return a row for each training that was tested, tasks in their order; of several tests the newest counts."""
    rows: dict[tuple[Any, ...], Row] = {}
    for record in records:
        if "test" in record:
            setting, _, layer = record["run"].partition("@")
            member = {key: record[key] for key in ("lr", "weight_decay", "seed")}
            kept = ("perplexity", "selected_accuracy", "best_step", "diverged", "step", "finished", "test")
            rows[record["run"], *member.values()] = {
                "task": setting.partition(",")[0],
                "setting": setting,
                "layer": layer,
                **member,
                "macro": record["accuracy"],
                "micro": record["micro"],
                **{key: record[key] for key in kept},
            }
    return sorted(rows.values(), key=lambda row: list(TASKS).index(row["task"]))


def result_row(rows: Sequence[Row]) -> Row:
    """Return the test accuracy of a layer at one setting, mean and sample SD over the seeds.

    Learning rate and weight decay are those of which the fewest seeds diverged, and of these the best mean accuracy on
    the examples that select.
    """

    def merit(found: Sequence[Row]) -> tuple[int, float]:
        return -sum(row["diverged"] > 0 for row in found), mean(row["selected_accuracy"] for row in found)

    best = max(_grouped(rows, ("lr", "weight_decay")), key=merit)
    row = {key: best[0][key] for key in ("task", "setting", "layer", "lr", "weight_decay")}
    for metric in METRICS:
        row |= _statistics(metric, [found[metric] for found in best])
    row |= {"selected_accuracy": mean(found["selected_accuracy"] for found in best)}
    row |= {"chance": parse_task(row["setting"]).chance, "seeds": " ".join(str(x["seed"]) for x in best)}
    row |= {"best_steps": " ".join(str(x["best_step"]) for x in best), "finished": best[0]["finished"]}
    return row | {"diverged": sum(x["diverged"] > 0 for x in rows), "trainings": len(rows)}


def score_row(rows: Sequence[Row]) -> Row:
    """Return the score of a layer at a task, the mean over its settings, and what is published of the benchmark's."""
    row = {"task": rows[0]["task"], "layer": rows[0]["layer"], "settings": len(rows)}
    for metric in METRICS:
        row[metric] = mean(found[metric] for found in rows)
        row[f"{metric}_sd"] = rows[0][f"{metric}_sd"] if len(rows) == 1 else None
    row["chance"] = mean(found["chance"] for found in rows)
    found = published(row["task"], row["layer"]) if rows[0]["setting"] == row["task"] else {}
    return row | {f"published: {source}": found.get(source) for source in PUBLISHED}


def _grouped(rows: Sequence[Row], keys: Sequence[str]) -> list[list[Row]]:
    """Return the rows in groups of equal values of the keys."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(groups.values())


def _statistics(name: str, values: Sequence[float]) -> Row:
    return {name: mean(values), f"{name}_sd": stdev(values) if len(values) > 1 else None}


def _average(values: Sequence[float | None]) -> float | None:
    """Return the mean over all six tasks, None where one is missing."""
    there = [value for value in values if value is not None]
    return mean(there) if len(there) == len(TASKS) else None


def _by_task(scores: Sequence[Row], layer: str, key: str) -> list[float | None]:
    """Return a value of a layer for each task there is, None where it has none, and the average where all six are."""
    found = {row["task"]: row.get(key) for row in scores if row["layer"] == layer}
    values = [found.get(task) for task in _tasks(scores)]
    average = None if key.endswith("_sd") else _average(values)
    return [*values, *[average] * (len(values) == len(TASKS))]


def _tasks(scores: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["task"] for row in scores))


def _titles(scores: Sequence[Row]) -> list[str]:
    """Return the titles of what `_by_task` returns."""
    tasks = _tasks(scores)
    return [*(TASKS[task].title for task in tasks), *["Average"] * (len(tasks) == len(TASKS))]


def _draw(scores: Sequence[Row], settings: Settings) -> Figure:
    """Draw bars of all layers, grouped by task, with the published numbers as crosses and chance as a line."""
    layers, titles = list(dict.fromkeys(row["layer"] for row in scores)), _titles(scores)
    figure, panel = plt.subplots(figsize=(4 + len(titles), 4.2))
    places, width = np.arange(len(titles)), 0.8 / len(layers)
    named = set()
    for index, layer in enumerate(layers):
        at = places + (index - (len(layers) - 1) / 2) * width
        # None becomes NaN, which is not drawn.
        middle, spread = (
            100 * np.array(_by_task(scores, layer, key), float) for key in ("macro", "macro_sd")
        )
        panel.bar(at, middle, width, yerr=spread, color=f"C{index}", label=layer, error_kw={"linewidth": 0.8})
        for marker, source in zip("x+", PUBLISHED, strict=True):
            values = 100 * np.array(_by_task(scores, layer, f"published: {source}"), float)
            if not np.isnan(values).all():
                label = None if source in named else source
                panel.plot(at, values, f"k{marker}", markersize=4, markeredgewidth=0.8, label=label)
                named.add(source)
    for place, task in enumerate(_tasks(scores)):
        chance = [100 * row["chance"] for row in scores if row["task"] == task]
        panel.hlines(chance[:1], place - 0.45, place + 0.45, color="grey", linestyle=":", linewidth=0.9)
    panel.set_xticks(places, [title.replace(" ", "\n") for title in titles])
    panel.set(ylabel="test accuracy, macro (%)", ylim=(0, 105))
    seeds = len(settings.seeds)
    shown = f"mean ± SD of {seeds} seeds" if seeds > 1 else "one seed"
    panel.set_title(f"MAD, {settings.protocol} protocol: {shown}; dotted: chance", fontsize="medium")
    panel.grid(axis="y", alpha=0.3)
    panel.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    return figure


def _table(scores: Sequence[Row], metric: str, settings: Settings) -> Table:
    """Return the table of layers and tasks; below a layer what is published of it, of the macro accuracy."""
    table = Table(Column("layer", no_wrap=True), *_titles(scores))
    selected = "by validation" if settings.select == "validation" else "by the test examples themselves"
    table.title = f"MAD: test accuracy (%), {metric}, mean ± sample SD over seeds; selected {selected}"

    def add(label: str, layer: str, name: str, **options: Any) -> None:
        middle, spread = (_by_task(scores, layer, f"{name}{what}") for what in ("", "_sd"))
        if any(value is not None for value in middle):
            table.add_row(label, *map(_percent, middle, spread), **options)

    for layer in dict.fromkeys(row["layer"] for row in scores):
        add(layer, layer, metric)
        for source in PUBLISHED if metric == "macro" else ():
            add(f"  {source}", layer, f"published: {source}", style="dim")
    return table


def _print_choices(results: Sequence[Row], console: Console) -> None:
    table = Table(
        "task", "layer", "lr", "weight decay", "best steps", "diverged", title="Selected from the grid"
    )
    for row in results:
        diverged = f"{row['diverged']} of {row['trainings']}"
        setting = row["setting"] + ("" if row["finished"] else " (not finished)")
        choice = f"{row['lr']:g}", f"{row['weight_decay']:g}"
        table.add_row(setting, row["layer"], *choice, row["best_steps"], diverged)
    console.print(table)


def _percent(value: float | None, spread: float | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f}" + ("" if spread is None else f" ± {100 * spread:.1f}")
