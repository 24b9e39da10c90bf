"""Tables of compiled kernels, one row each: written as CSV, shown, and compared with what was written before."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol, get_type_hints, runtime_checkable

from rich.table import Table


@runtime_checkable
class Row(Protocol):
    """A dataclass of plain values; `key` tells kernels apart."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def key(self) -> tuple: ...  # noqa: D102


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows, of one class."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [field.name for field in fields(rows[0])], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def read(path: Path, kind: Callable[..., Any]) -> list[Any]:
    """The rows, of this dataclass, of a table that was written."""

    def parsed(line: dict[str, str]) -> Any:
        return kind(**{name: of(line[name]) for name, of in get_type_hints(kind).items()})

    with path.open() as stream:
        return [parsed(line) for line in csv.DictReader(stream)]


def render(rows: Sequence[Row]) -> Table:
    """The table, for the terminal."""
    table = Table(*(field.name for field in fields(rows[0])))
    for row in rows:
        table.add_row(*map(str, asdict(row).values()))
    return table


def compare(rows: Sequence[Row], table: Sequence[Row], cost: str, slack: float = 0.0) -> list[str]:
    """One line for each kernel whose cost is above that in the table, or that is not in it, or only in it.

    Args:
        rows: as compiled now.
        table: as compiled before.
        cost: the name of a column that must not grow.
        slack: by this part of what it was it may.
    """
    known, lines = {row.key: row for row in table}, []
    for row in rows:
        before = known.pop(row.key, None)
        if before is None:
            lines.append(f"{row.key} is not in the table")
        elif getattr(row, cost) > getattr(before, cost) * (1 + slack):
            lines.append(f"{row.key} has {cost} {getattr(row, cost)}; in the table {getattr(before, cost)}")
    return lines + [f"{key} is in the table only" for key in known]
