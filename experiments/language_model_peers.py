"""Other people's training steps of the same language models, each in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

from eflax.convert import ConversionError
from eflax.convert.configs import write_config
from eflax.models import LanguageModel
from eflax.training.flops import count_parameters

NEEDED = ("torch", "transformers", "fla")
COMMAND = (sys.executable, "-m", "experiments.language_model_fla")


class PeerError(RuntimeError):
    """A peer cannot be measured, or failed; the message says why."""


def measure_fla(
    model: LanguageModel, batch_size: int, length: int, steps: int, limit: float
) -> dict[str, Any]:
    """Return what `experiments.language_model_fla` measures of the same model in flash-linear-attention.

    Args:
        model: ours; may be abstract.
        batch_size: sequences in a batch.
        length: tokens of each.
        steps: that are timed.
        limit: seconds that all of it may take, with starting and with trying and compiling kernels.

    Raises:
        PeerError: something is not installed, the model has no counterpart there or is of another size, this machine
            has several devices, or the process failed or took too long.
    """
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise PeerError(f"{', '.join(missing)} not installed")
    if (count := jax.device_count()) > 1:
        raise PeerError(f"it is measured on one device, and ours has {count} (see CUDA_VISIBLE_DEVICES)")
    try:
        config, _ = write_config(model)
    except ConversionError as error:
        raise PeerError(str(error)) from error
    found = run(
        COMMAND, {"config": config, "batch_size": batch_size, "length": length, "steps": steps}, limit
    )
    if found["parameters"] != (ours := count_parameters(model)):
        raise PeerError(f"it has {found['parameters']:,} parameters there and {ours:,} here")
    return found


def run(command: Sequence[str], request: dict[str, Any], limit: float) -> dict[str, Any]:
    """Return the result of a process that gets a request, both JSON files; raises PeerError with its last line."""
    with TemporaryDirectory() as folder:
        asked, answer, log = (Path(folder) / name for name in ("request", "result", "log"))
        asked.write_text(json.dumps(request))
        with log.open("wb") as stream:
            process = [*command, str(asked), str(answer)]
            try:
                done = subprocess.run(
                    process, stdout=stream, stderr=subprocess.STDOUT, timeout=limit, check=False
                )
            except subprocess.TimeoutExpired as error:
                raise PeerError(f"stopped after {limit:g} s, see --peer-limit") from error
        if done.returncode or not answer.exists():
            lines = log.read_text(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
            raise PeerError(f"exit code {done.returncode}: {last[:300]}")
        return json.loads(answer.read_text())
