"""Several processes of one training, on one machine or many: how they find each other and what they agree on."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

DAYS = 7 * 24 * 3600 * 1000  # in ms


def join_processes(coordinator: str | None, process: int | None = None, processes: int | None = None) -> None:
    """Make this process one of several whose devices are used together; call it before anything uses a device.

    Args:
        coordinator: HOST:PORT of process 0, with `process` and `processes`; or auto where Slurm, Open MPI, GKE or a
            TPU pod tells JAX about the others; None: there are no others.
        process: index of this process, from 0.
        processes: how many there are.

    Raises:
        ValueError: the arguments do not fit together, or the processes did not find each other.
    """
    given = process is not None, processes is not None
    if coordinator in (None, "auto"):
        if any(given):
            raise ValueError("--process and --processes: give --coordinator HOST:PORT of process 0, too")
        if coordinator is None:
            return
    elif not all(given):
        raise ValueError(f"--coordinator {coordinator}: give --process and --processes, too")
    else:
        _check_place(coordinator, cast(int, process), cast(int, processes))
    try:
        if coordinator == "auto":
            jax.distributed.initialize()
        else:
            jax.distributed.initialize(coordinator, processes, process)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"--coordinator {coordinator}: the processes did not find each other ({error}); under Slurm, Open MPI, GKE "
            "or on a TPU pod give auto, elsewhere HOST:PORT of process 0 with --process and --processes"
        ) from error


def _check_place(coordinator: str, process: int, processes: int) -> None:
    """What JAX would end the process for, or wait for without end."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--coordinator {coordinator}: must be auto or HOST:PORT, as 10.0.0.1:9876")
    if processes < 1 or not 0 <= process < processes:
        raise ValueError(
            f"--process {process}, --processes {processes}: the first counts from 0 to below the second"
        )
    if process == 0:
        try:
            with socket.socket() as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("", int(port)))
        except OSError as error:
            raise ValueError(
                f"--coordinator {coordinator}: the port cannot be used ({error}); take another"
            ) from error


def leads() -> bool:
    """Whether this process is the first, which writes what is written once."""
    return jax.process_index() == 0


def from_first(value: int) -> int:
    """Return the first process's value of all processes'; all must call it."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def largest(value: int) -> int:
    """Return the largest value of all processes; all must call it."""
    if jax.process_count() == 1:
        return value
    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


@contextmanager
def first_goes_first(name: str) -> Iterator[None]:
    """A block that the first process leaves, with or without an error, before the others enter it.

    So they find what it has cached, or the same error. They wait as long as it takes, not in a collective operation,
    which would give up after half a minute.
    """
    wait = multihost.get_barrier_sync_fn()  # does nothing where there is one process
    if not leads():
        wait(key=name, timeout_ms=DAYS)
    try:
        yield
    finally:
        if leads():
            wait(key=name, timeout_ms=DAYS)


def whole(leaf: jax.Array) -> np.ndarray:
    """Return an array of which this process may hold a part only; all must call it."""
    if leaf.is_fully_addressable:
        return np.asarray(leaf)
    if leaf.is_fully_replicated:
        return np.asarray(leaf.addressable_data(0))
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
