"""What a sequential-MNIST run writes into its folder about itself, read back and checked at --resume."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from eflax.training import TRAINING
from experiments import command
from experiments.smnist_flags import Flags, Plan, make_plan

EXPERIMENT = "smnist"

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
    given = command.saved_flags(flags)
    return {"experiment": EXPERIMENT, **given, "plan": asdict(plan), "data_sha256": fingerprint}


def read_flags(folder: Path) -> Flags:
    """Return the flags of the run in a folder.

    Raises:
        RunFolderError: the folder holds no run of this experiment, or a flag in its config.json cannot be.
    """
    return command.read_flags(Flags, EXPERIMENT, folder, make_plan)
