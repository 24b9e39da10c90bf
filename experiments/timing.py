"""How long a call takes, with the calls before it still running, as in a training step."""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

LEAST = 0.02  # seconds of a measurement, so that starting and waiting, some 50 µs, weigh nothing
MOST = 100  # calls in a row, each of which holds its results


def seconds_per_call(call: Callable[[], Any], wait: Callable[[Any], Any], repeats: int) -> float:
    """Median over `repeats` measurements of several calls in a row, after one to see how many.

    Args:
        call: starts the work; may return before it is done.
        wait: waits for what the last call returned, and with it for all before it.
        repeats: how often to measure.
    """

    def measure(calls: int) -> float:
        start = time.perf_counter()
        result = None
        for _ in range(calls):
            result = call()
        wait(result)
        return (time.perf_counter() - start) / calls

    wait(call())
    calls = min(MOST, max(1, math.ceil(LEAST / measure(1))))
    return statistics.median(measure(calls) for _ in range(repeats))
