"""What the runnable experiments share: exit codes and errors of a command, and its flags, saved and read back."""

import io
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from inspect import formatannotation
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    Protocol,
    TypeAliasType,
    Union,
    get_args,
    get_origin,
    runtime_checkable,
)

import jax
import tyro
from rich.console import Console

from eflax.training import CheckpointError, Interrupted, RunFolderError, read_config
from eflax.training.run_folder import CONFIG, WAY_OUT

type Options = tuple[tuple[str, int | float | bool], ...]

NOT_SAVED = ("out", "resume")
AT_ONCE = 130  # exit code of a command that was told twice to stop


class FlagError(ValueError):
    """A flag has a value that cannot be used; the message names it and the way out."""


@runtime_checkable
class RunFlags(Protocol):
    """A frozen dataclass of flags, of which two say where a run lies; both None: in a new folder."""

    @property
    def out(self) -> Path | None:
        """A new folder."""
        ...

    @property
    def resume(self) -> Path | None:
        """The folder of the run to continue."""
        ...


def run_command[Flags: RunFlags](
    name: str, parse: Callable[[], Flags], run: Callable[[Flags, Path, Console], int]
) -> int:
    """Run the experiment `name` in its folder. Returns the exit code; errors of its user are told without traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an ASCII terminal shows "?" for σ, and the run goes on
    # A file takes the tables whole.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 132)
    out = Path()
    try:
        flags = parse()
        out = flags.resume or flags.out or Path("runs") / time.strftime(f"{name}-%Y%m%d-%H%M%S")
        return run(flags, out, console)
    except Interrupted as interrupted:
        way_on = "no training had begun"
        if (out / CONFIG).exists():
            way_on = f"continue with: python -m experiments.{name} --resume {out}"
        console.print(f"\n{interrupted}; {way_on}", soft_wrap=True)  # one line, to be copied
        return interrupted.exit_code
    except KeyboardInterrupt:  # before the run began, or a second time while it was stopping
        console.print(
            f"\nstopped at once; if {out} holds a run, --resume {out} continues from its last checkpoint"
        )
        return AT_ONCE
    except (FlagError, RunFolderError, CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        way_out = "take smaller batches or a smaller model; --help names the flags that save memory"
        print(f"error: {str(error).splitlines()[0]} {way_out}", file=sys.stderr)
        return 2


def leave(code: int) -> NoReturn:
    """End the process with the exit code of its command."""
    if code == AT_ONCE:
        # Python would first wait for threads of Orbax, which wait for the rest of a save that never comes.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def parse_flags[Flags: RunFlags](
    kind: Callable[..., Flags], name: str, args: Sequence[str] | None, read: Callable[[Path], Flags]
) -> Flags:
    """Return the flags of the command line; with --resume, those of the run that it continues, changed by it.

    Raises:
        FlagError: --resume and --out were both given.
        RunFolderError: the folder to resume holds no run, or a damaged one.
    """
    flags = tyro.cli(kind, args=args, prog=f"python -m experiments.{name}")
    if flags.resume is not None:
        if flags.out is not None:
            raise FlagError(f"--out {flags.out}: a resumed run goes on in its own folder; leave --out out")
        saved: Any = read(flags.resume)
        saved = replace(saved, resume=flags.resume)
        flags = tyro.cli(kind, args=args, default=saved, prog=f"python -m experiments.{name}")
    return flags


def with_flags(message: str, arguments: Sequence[str]) -> str:
    """Return a message about arguments of a function with the flags of the same names: "top_p=2" is "--top-p 2"."""

    def flag(found: re.Match[str]) -> str:
        return f"--{found[1].replace('_', '-')}{' ' if found[2] else ''}"

    return re.sub(rf"\b({'|'.join(arguments)})\b(=?)", flag, message)


def training_label(name: str, place: int, count: int) -> str:
    """Return what the progress display calls a training, the `place`-th of so many, counted from 0."""
    return f"training {place + 1} of {count}, {name}" if count > 1 else f"train {name}"


def split_options(flag: str, text: str) -> tuple[str, Options]:
    """Return the name and the options of the value of a flag, such as "deltanet,num_heads=1".

    Raises:
        FlagError: an option is not OPTION=VALUE, or its value no number and neither true nor false.
    """
    name, *options = text.split(",")
    return name, tuple(_option(flag, text, option) for option in options)


def _option(flag: str, text: str, option: str) -> tuple[str, int | float | bool]:
    name, _, value = option.partition("=")
    if value in ("true", "false"):
        return name, value == "true"
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    raise FlagError(f"{flag} {text}: {option!r} must be OPTION=VALUE with a number, true or false")


def saved_flags(flags: Any, not_saved: Sequence[str] = NOT_SAVED) -> dict[str, Any]:
    """Return the flags as JSON can hold them."""
    given = {name: value for name, value in asdict(flags).items() if name not in not_saved}
    return {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}


def read_flags[Flags](
    kind: Callable[..., Flags],
    experiment: str,
    folder: Path,
    check: Callable[[Flags], object],
    not_saved: Sequence[str] = NOT_SAVED,
) -> Flags:
    """Return the flags of the run in a folder.

    Raises:
        RunFolderError: the folder holds no run of this experiment, or a flag in its config.json cannot be, be it for
            a FlagError of `check`.
    """
    config, values = read_config(folder), {}
    if (found := config.get("experiment")) != experiment:
        raise RunFolderError(
            f"{folder / CONFIG}: 'experiment' is {found!r} and must be {experiment!r}; {WAY_OUT}"
        )
    for field in fields(kind):  # type: ignore  # it is a dataclass
        name, plain = field.name, _plain(field.type)
        if name in not_saved:
            continue
        if name not in config or not _fits(config[name], plain):
            found = repr(config[name]) if name in config else "missing"
            must = f"must be {formatannotation(plain)}"
            raise RunFolderError(f"{folder / CONFIG}: {name!r} is {found} and {must}; {WAY_OUT}")
        values[name] = _from_json(config[name], plain)
    flags = kind(**values)
    try:
        check(flags)
    except FlagError as error:
        raise RunFolderError(f"{folder / CONFIG}: {error}; {WAY_OUT}") from error
    return flags


def _plain(kind: Any) -> Any:
    """Return an annotation of a flag without what is there for the command line alone."""
    if isinstance(kind, TypeAliasType):
        return _plain(kind.__value__)
    if isinstance(get_origin(kind), TypeAliasType):  # one with a parameter
        return _plain(get_origin(kind).__value__[get_args(kind)])
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value that was read from JSON is what a flag of the plain type `kind` was written as."""
    kind = _plain(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in arguments
    if origin in (Union, UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is tuple:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    return type(value) is (str if kind is Path else kind) or (kind in (None, type(None)) and value is None)


def _from_json(value: Any, kind: Any) -> Any:
    """Return a value that fits as the flag has it."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if isinstance(value, str) and Path in kinds:
        return Path(value)
    return tuple(value) if isinstance(value, list) else value
