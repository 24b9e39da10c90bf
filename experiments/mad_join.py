"""`python -m experiments.mad join`: put the records of MAD runs together into one folder, with one report.

For runs that were done side by side, each on a device of its own.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from tyro.conf import arg

from eflax.training import RunFolder, read_config
from experiments.command import FlagError, run_command
from experiments.mad_flags import Flags, make_plan
from experiments.mad_report import write_report


@dataclass(frozen=True)
class JoinFlags:
    """Put the records of several runs together and report on all of them; the runs stay as they are."""

    # Folders of runs with the same settings and different trainings.
    runs: Annotated[tuple[Path, ...], arg(metavar="PATH ...")]

    # New folder; by default runs/mad-DATE-TIME. It can be resumed as any other.
    out: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None

    @property
    def resume(self) -> Path | None:
        """Nothing is continued."""
        return None


def main(args: Sequence[str], read: Callable[[Path], Flags], records: dict[str, dict[str, str]]) -> int:
    """Join runs, whose flags `read` reads and whose records look like `records`. Returns the exit code."""

    def parse() -> JoinFlags:
        flags = tyro.cli(JoinFlags, args=args, prog="python -m experiments.mad join")
        out = flags.out or Path("runs") / time.strftime("mad-%Y%m%d-%H%M%S")
        return JoinFlags(flags.runs, out)

    def run(flags: JoinFlags, out: Path, console: Console) -> int:
        first, found = read_config(flags.runs[0]), {}
        settings = make_plan(read(flags.runs[0])).settings
        joined = first | {"tasks": [], "layers": []}
        for path in flags.runs:
            config = read_config(path)
            if make_plan(read(path)).settings != settings:
                raise FlagError(f"--runs {path}: its settings differ from those of {flags.runs[0]}")
            for name in ("tasks", "layers"):
                joined[name] = list(dict.fromkeys(joined[name] + config[name]))
            with RunFolder(path, config, resume=True, layouts=records) as folder:
                found |= _new(path, folder.records(), found)
        with RunFolder(out, joined, layouts=records) as folder:
            folder.append(record for mine in found.values() for record in mine)
            write_report(folder, settings, console)
            console.print(f"Figure, tables and metrics: {out}")
        return 0

    return run_command("mad", parse, run)


def _new(path: Path, records: list[dict[str, Any]], found: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the records of a run by training. Raises FlagError if there is one that was found before."""
    mine: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        mine.setdefault(record.get("run", ""), []).append(record)
    for name in mine:
        if name in found:
            raise FlagError(f"--runs {path}: another run has {name}, too")
    return mine
