"""Ctrl-C and SIGTERM as a request to stop at the next safe point."""

import signal
from types import FrameType


class Interrupted(Exception):
    """The run was asked to stop and has saved what it needs to continue.

    Attributes:
        exit_code: 128 plus the signal's number, as shells report it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class StopRequest:
    """While it is entered, the first SIGINT or SIGTERM is only noted; a second one acts at once.

    `check` raises `Interrupted` at a safe point once a signal has come.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.number: int | None = None

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.number is not None

    def check(self) -> None:
        """Raise Interrupted if a signal has come."""
        if self.number is not None:
            raise Interrupted(self.number)
