"""Start a run in its own process, wait until it has come somewhere, and end it."""

import atexit
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
LONGEST_WAIT = 300  # seconds: a slow machine only makes the test slow


@cache
def compiled_programs() -> str:
    """A folder for compiled programs, removed at the end of the test process."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return folder.name


def launch(*command: str, devices: int = 1) -> subprocess.Popen[str]:
    """Start `python COMMAND` in the checkout, on the CPU; programs compiled by one process serve the next ones."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": compiled_programs(),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        [sys.executable, *command],
        text=True,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end; returns the exit code and what was printed."""
    output, _ = process.communicate(timeout=LONGEST_WAIT)
    return process.returncode, output


def end_when(process: subprocess.Popen[str], reached: Callable[[], bool], signal: int) -> tuple[int, str]:
    """Send `signal` as soon as `reached` holds; returns the exit code and what was printed."""
    deadline = time.monotonic() + LONGEST_WAIT
    while not reached():
        assert process.poll() is None, f"ended too early: {process.communicate()[0]}"
        assert time.monotonic() < deadline, "did not come that far"
        time.sleep(0.005)
    process.send_signal(signal)
    return finish(process)
