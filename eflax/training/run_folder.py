"""The folder of one run: held by one process at a time, config checked and metrics cut back at resume."""

import csv
import fcntl
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from eflax.data.download import write_atomically
from eflax.training.processes import largest, leads

CONFIG, METRICS, LOCK = "config.json", "metrics.jsonl", ".lock"
PACKAGES = ("eflax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")

type Record = dict[str, Any]

# A record that has the field on the left must have those on the right, each of its kind.
type Layouts = dict[str, dict[str, str]]
TRAINING: Layouts = {"run": {"step": "a whole number"}, "step": {"run": "text"}, "loss": {"loss": "a number"}}
KINDS: dict[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "a number": lambda value: type(value) in (int, float),  # True is not one
    "a whole number": lambda value: type(value) is int,
    "a positive whole number": lambda value: type(value) is int and value > 0,
}
WAY_OUT = "restore what was there, or start a new run with --out"


class RunFolderError(ValueError):
    """An output folder cannot be used as asked; the message names it and the way out."""


class RunFolder:
    """Owner of an output folder with `config.json` and `metrics.jsonl`; use it as a context manager.

    What is set as its `listener` is called with all records that are added. Of several processes (`jax.distributed`)
    the first reads and writes; for the others there are no records.

    Args:
        path: the folder, created if need be.
        config: what the run is, as JSON can hold it. It is written when the run begins; at a resume it must
            equal what was written then.
        resume: continue the run that the folder holds.
        layouts: what the records of metrics.jsonl look like; checked whenever they are read.

    Raises:
        RunFolderError: another process uses the folder; it holds a run and `resume` is off, or none and
            `resume` is on; it holds foreign files; or `config` differs from that of the run, or a record
            from its layout (the message names the field).
    """

    def __init__(
        self, path: Path, config: Mapping[str, Any], resume: bool = False, layouts: Layouts = TRAINING
    ) -> None:
        self.path, self._layouts = path, layouts
        self._log = path / METRICS
        self.leads = leads()
        self._lock: int | None = None
        self.listener: Callable[[list[Record]], None] = lambda records: None
        fault: Exception | None = None
        try:
            if self.leads:
                self._open(path, config, resume)
        except Exception as error:
            fault = error
        if largest(fault is not None):  # all processes stop
            raise fault or RunFolderError(f"{path}: process 0 cannot use the folder; it says why")

    def _open(self, path: Path, config: Mapping[str, Any], resume: bool) -> None:
        if not resume:
            _refuse_foreign(path)
        self._lock = _hold(path, resume)
        try:
            if resume:
                compare_configs(read_config(path), json.loads(json.dumps(config)))
                self.keep(lambda record: True)  # cut off the line that a killed process left unfinished
            elif (path / CONFIG).exists():
                raise RunFolderError(
                    f"--out {path} holds a run; give another --out, or --resume {path} where the command has it"
                )
            else:
                write_atomically(path / CONFIG, (json.dumps(_describe_run(config), indent=2) + "\n").encode())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes use the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def append(self, records: Iterable[Record]) -> None:
        """Add records to metrics.jsonl, one line each; returns when they are on disk."""
        if not self.leads:
            return
        records = list(records)
        with self._log.open("a") as stream:
            stream.write("".join(json.dumps(record) + "\n" for record in records))
            stream.flush()
            os.fsync(stream.fileno())
        self.listener(records)

    def records(self) -> list[Record]:
        """Return the records of metrics.jsonl; a last line that a killed process left unfinished is not one.

        Raises:
            RunFolderError: another line is not a JSON object, or not of its layout.
        """
        return read_records(self.path, self._layouts) if self.leads else []

    def keep(self, wanted: Callable[[Record], bool]) -> None:
        """Drop the records that are not `wanted`, and an unfinished last line."""
        if not self.leads:
            return
        kept = [json.dumps(record) + "\n" for record in self.records() if wanted(record)]
        write_atomically(self._log, "".join(kept).encode())

    def write_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write `rows`, which share their keys, as the CSV file `name`."""
        if not self.leads:
            return
        with (self.path / name).open("w", newline="") as stream:
            writer = csv.DictWriter(stream, fieldnames=list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def read_config(path: Path) -> dict[str, Any]:
    """Return the `config` that a run wrote into its folder.

    Raises:
        RunFolderError: the folder holds no readable run.
    """
    file = path / CONFIG
    if not path.is_dir():
        raise RunFolderError(f"{path}: no such folder, so no run; give the folder that a training printed")
    if not file.is_file():
        raise RunFolderError(
            f"{path}: there is no {CONFIG}, so no run; give the folder that a training printed"
        )
    try:
        config = json.loads(file.read_text())["config"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunFolderError(
            f"{file} is damaged or was not written by eflax ({error!r}); {WAY_OUT}"
        ) from error
    if not isinstance(config, dict):
        raise RunFolderError(f"{file}: 'config' is {config!r} and must be a JSON object; {WAY_OUT}")
    return config


def read_records(path: Path, layouts: Layouts = TRAINING) -> list[Record]:
    """Return the records of a run, which may still go on; a last line that is unfinished is not one.

    Raises:
        RunFolderError: another line is not a JSON object, or not of its layout.
    """
    log = path / METRICS
    lines = log.read_text(errors="replace").split("\n") if log.exists() else [""]
    records = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is unfinished
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if fault := _fault(record, line, layouts):
            raise RunFolderError(f"{log}, line {number}: {fault}; {WAY_OUT}")
        records.append(record)
    return records


def compare_configs(saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise RunFolderError naming the first field in which two configs, or configs in them, differ.

    What one of them leaves open (None) comes last: elsewhere in them may be what that comes to.
    """
    fields = dict.fromkeys([*given, *saved])
    for field in sorted(fields, key=lambda field: saved.get(field) is None or given.get(field) is None):
        before, now = saved.get(field), given.get(field)
        if isinstance(before, dict) and isinstance(now, dict):
            compare_configs(before, now)
        elif before != now:
            before, now = (repr(part) if part is not None else "its default" for part in (before, now))
            raise RunFolderError(
                f"resume with another {field!r}: the run began with {before}, and now it is {now}; leave it out, "
                "or bring changed data back, to continue the run, or start a new one with --out"
            )


def _fault(record: Any, line: str, layouts: Layouts) -> str | None:
    """Return what is wrong with a record of metrics.jsonl, None where nothing is."""
    if not isinstance(record, dict):
        return f"not a JSON object: {line[:60]!r}"
    for mark, fields in layouts.items():
        for name, kind in fields.items() if mark in record else ():
            if not KINDS[kind](record.get(name)):
                found = repr(record[name]) if name in record else "missing"
                return f"{name!r} is {found} and must be {kind}"
    return None


def _hold(path: Path, resume: bool) -> int:
    """Return a file descriptor whose lock lasts until it is closed or the process ends, however it ends."""
    if resume and not path.is_dir():
        raise RunFolderError(f"--resume {path}: no such folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except (OSError, ValueError) as error:
        raise RunFolderError(f"--out {path}: cannot write there ({error})") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(handle, 32).decode(errors="replace").strip()
        os.close(handle)
        raise RunFolderError(
            f"{path} is in use by process {holder or '?'}; wait for it or give another --out"
        ) from error
    os.truncate(handle, 0)
    os.write(handle, f"{os.getpid()}\n".encode())
    return handle


def _refuse_foreign(path: Path) -> None:
    """Raise if a folder without a run holds other files; before the lock, so that nothing is added to them."""
    if (path / CONFIG).exists() or not path.is_dir():
        return
    foreign = [
        entry.name for entry in path.iterdir() if entry.name != LOCK and not entry.name.endswith(".part")
    ]
    if foreign:
        raise RunFolderError(f"--out {path} is not empty ({foreign[0]}); give a new folder")


def _describe_run(config: Mapping[str, Any]) -> Record:
    devices = jax.devices()
    return {
        "config": config,
        "command": ["python", *sys.orig_argv[1:]],
        "revision": _revision(),
        "versions": {"python": platform.python_version()}
        | {name: package_version(name) for name in PACKAGES},
        "devices": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
    }


def package_version(package: str) -> str:
    """Return the version of a package of this environment, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _revision() -> str:
    """Return the git revision of the source, with "-dirty" when changed; "unknown" where git does not track it."""
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
