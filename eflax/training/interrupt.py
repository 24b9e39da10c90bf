"""Ctrl-C and SIGTERM as a request to stop at the next safe point."""

import os
import signal
import sys
from threading import Thread
from types import FrameType

from eflax.training.processes import largest


class Interrupted(Exception):
    """The run was asked to stop and has saved what it needs to continue.

    Attributes:
        exit_code: 128 plus the signal's number, as shells report it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class StopRequest:
    """While it is entered, the first SIGINT or SIGTERM is only told and noted; a second one acts at once.

    `check` raises `Interrupted` at a safe point once a signal has come. Use it in the main thread.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.number: int | None = None

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        # Python calls a handler only when its main thread comes out of compiled code, which may take a whole step.
        # A thread that reads the numbers of signals from a pipe tells at once.
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._teller = Thread(target=self._tell, args=(reader,), daemon=True)
        self._teller.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._writer)  # which ends the thread
        self._teller.join()

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number

    def _tell(self, reader: int) -> None:
        told = False
        with open(reader, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] in self.SIGNALS and not told:
                    told = True
                    name = signal.Signals(number[0]).name
                    # Not to the file itself: a live progress bar has put itself in the place of sys.stderr.
                    print(f"{name}: finishing the step, then saving; again to stop at once", file=sys.stderr)

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.number is not None

    def agree(self) -> bool:
        """Whether a signal has come to any process of the training; all processes must ask at the same step."""
        self.number = largest(self.number or 0) or None
        return self.requested

    def check(self) -> None:
        """Raise Interrupted if a signal has come."""
        if self.number is not None:
            raise Interrupted(self.number)
