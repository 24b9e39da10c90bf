"""One progress display for all long work: a live bar in a terminal, plain lines elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Shows label, done/total, rate, remaining time and the latest values; use it as a context manager.

    In a log file or a pipe, where a live bar cannot be drawn, a line is printed at most every ten seconds and one at
    the end, each with a new count.

    Args:
        label: what is being done, such as "train efla".
        total: number of units to do, 0 where it is not known.
        start: units already done, for instance before a resume; they do not count towards the rate.
        unit: name of a unit, for the rate ("step", "MB").
    """

    def __init__(self, label: str, total: int | float, start: int | float = 0, unit: str = "step") -> None:
        self.label, self.total, self.start, self.unit = label, total, start, unit
        self.done = start
        self._told: int | float | None = None  # what was done at the last line
        self._first: tuple[int | float, float] | None = None  # what was done first, and when it was
        self._note = ""
        self._console = Console(highlight=False, soft_wrap=True)
        self._bar: RichProgress | None = None
        self._task = TaskID(0)
        self._began = self._last_line = time.monotonic()

    def __enter__(self) -> "Progress":
        self._began = time.monotonic()
        self._last_line = self._began
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._bar = RichProgress(*columns, console=self._console)
            self._bar.start()
            self._task = self._bar.add_task(self.label, total=self.total, note="")
            self._bar.update(self._task, completed=self.start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None:
            self._print_line()

    def advance(self, amount: int | float = 1, **values: float) -> None:
        """Count `amount` more units as done and show the named values."""
        self.done += amount
        self._first = self._first or (self.done, time.monotonic())
        self._note = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        if self._bar is not None:
            note = "  ".join(part for part in (self._speed(), self._note) if part)
            self._bar.update(self._task, completed=self.done, note=note)
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._print_line()

    def tell(self, text: str) -> None:
        """Print a line that stays, above the bar."""
        self._console.print(text, markup=False)

    def _rate(self) -> float:
        """Return units a second since the first were done, which took compilation, too; 0 before that."""
        done, since = self._first or (self.done, 0.0)
        return (self.done - done) / max(time.monotonic() - since, 1e-9)

    def _speed(self) -> str:
        rate = self._rate()
        return f"{rate:.3g} {self.unit}/s" if rate > 0 else ""

    def _print_line(self) -> None:
        if self.done == self._told:
            return
        self._told, self._last_line = self.done, time.monotonic()
        rate = self._rate()
        remaining = (
            f"{(self.total - self.done) / rate:.0f} s left" if rate > 0 and self.done < self.total else ""
        )
        elapsed = f"{time.monotonic() - self._began:.0f} s"
        share = f"{self.done:g}/{self.total:g}" if self.total else f"{self.done:g}"  # 0: not known
        parts = (share, elapsed, self._speed(), remaining, self._note)
        self._console.print(f"{self.label}: " + "  ".join(part for part in parts if part))
