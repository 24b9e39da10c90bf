"""What a sequential-MNIST run writes into its folder about itself, read back and checked at --resume."""

from dataclasses import asdict, fields
from inspect import formatannotation
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeAliasType, Union, get_args, get_origin

from eflax.training import TRAINING, RunFolderError, read_config
from eflax.training.run_folder import CONFIG, WAY_OUT
from experiments.smnist_flags import FlagError, Flags, Plan, make_plan

EXPERIMENT = "smnist"
NOT_SAVED = ("out", "resume")

RECORDS = TRAINING | {
    "family": {
        "family": "text",
        "strength": "a number",
        "correct": "a whole number",
        "count": "a positive whole number",
    },
    "diverged": {"diverged": "text"},
}


def to_config(flags: Flags, plan: Plan, fingerprint: str) -> dict[str, Any]:
    """Return what identifies a run: its flags, then what follows from them, then the data."""
    given = {name: value for name, value in asdict(flags).items() if name not in NOT_SAVED}
    given["data_dir"] = None if flags.data_dir is None else str(flags.data_dir)
    return {"experiment": EXPERIMENT, **given, "plan": asdict(plan), "data_sha256": fingerprint}


def read_flags(folder: Path) -> Flags:
    """Return the flags of the run in a folder.

    Raises:
        RunFolderError: the folder holds no run of this experiment, or a flag in its config.json cannot be.
    """
    config, values = read_config(folder), {}
    if (experiment := config.get("experiment")) != EXPERIMENT:
        raise RunFolderError(
            f"{folder / CONFIG}: 'experiment' is {experiment!r} and must be {EXPERIMENT!r}; {WAY_OUT}"
        )
    for field in fields(Flags):
        name, kind = field.name, _plain(field.type)
        if name in NOT_SAVED:
            continue
        if name not in config or not _fits(config[name], kind):
            found = repr(config[name]) if name in config else "missing"
            must = f"must be {formatannotation(kind)}"
            raise RunFolderError(f"{folder / CONFIG}: {name!r} is {found} and {must}; {WAY_OUT}")
        values[name] = config[name]
    values |= {"cell": tuple(values["cell"]), "lr": tuple(values["lr"])}
    values["data_dir"] = None if values["data_dir"] is None else Path(values["data_dir"])
    flags = Flags(**values)
    try:
        make_plan(flags)
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
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in arguments
    if origin in (Union, UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is tuple:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    return type(value) is (str if kind is Path else kind)
