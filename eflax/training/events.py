"""Metrics for TensorBoard, beside metrics.jsonl."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eflax.training.run_folder import Record

NOT_VALUES = ("step", "time")


class EventFiles:
    """Writes the numbers of records that have a step as scalars; text in a record becomes part of their names.

    A record {"run": "model", "step": 5, "validation": "books", "nll": 3.2} is the scalar model/books/nll at step 5. A
    resumed run that repeats steps replaces them.

    Args:
        folder: of the event files, which `tensorboard --logdir` takes; created if need be.

    Raises:
        ImportError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import tensorboardX
        except ImportError as error:
            raise ImportError(
                "event files for TensorBoard need tensorboardX: pip install 'eflax[text]'"
            ) from error
        self._folder, self._kind = folder, tensorboardX.SummaryWriter
        self._writer: Any = None

    def write(self, records: Iterable[Record]) -> None:
        """Add records; they are on disk when this returns."""
        for record in records:
            if "step" in record:
                self._write(record)
        if self._writer is not None:
            self._writer.flush()

    def _write(self, record: Record) -> None:
        if self._writer is None:
            self._writer = self._kind(str(self._folder), purge_step=record["step"])
        values = {name: value for name, value in record.items() if name not in NOT_VALUES}
        path = [value for value in values.values() if isinstance(value, str)]
        for name, value in values.items():
            if not isinstance(value, str):
                self._writer.add_scalar("/".join([*path, name]), value, record["step"], record.get("time"))

    def close(self) -> None:
        """End the file."""
        if self._writer is not None:
            self._writer.close()
