"""How MAD models are trained and judged: settings, protocols and presets."""

import sys
from dataclasses import dataclass
from typing import Literal

from eflax.data.mad import TEST_SIZE, MadTask, steps_per_epoch
from eflax.data.mad_tasks import TASKS
from experiments.command import FlagError
from experiments.mad_models import Sizes
from experiments.mad_training import Member

type PresetName = Literal["quick", "benchmark", "sweep"]
type ProtocolName = Literal["clean", "mad"]
type Schedule = Literal["cosine", "constant"]
type Split = Literal["validation", "test"]
type Positions = Literal["answers", "all"]
type Decayed = Literal["matrices", "all"]
type Precision = Literal["float32", "bfloat16"]

MOST = 2**32 - 1  # of seeds, and of any number
BASELINES = (
    "deltanet", "efla", "gated-deltanet", "gated-efla", "mamba2", "linear-attention", "transformer",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """How every model of a run is trained and judged; see the flags of the same names."""

    protocol: str
    schedule: str
    select: str
    loss: str
    decay: str
    seeds: tuple[int, ...]
    lrs: tuple[float, ...] = (1e-4, 5e-4, 1e-3)
    weight_decays: tuple[float, ...] = (0.0, 0.1)
    epochs: int = 200
    batch_size: int = 128
    test_size: int = TEST_SIZE
    enough: float = 0.999
    width: int = 128
    dtype: str = "bfloat16"

    @property
    def members(self) -> tuple[Member, ...]:
        """The trainings of a grid, seeds innermost."""
        return tuple(
            Member(lr, decay, seed) for lr in self.lrs for decay in self.weight_decays for seed in self.seeds
        )

    @property
    def sizes(self) -> Sizes:
        """What the models share."""
        return Sizes(self.width, self.dtype)

    def steps(self, task: MadTask) -> int:
        """Return the optimizer steps of a training."""
        return self.epochs * steps_per_epoch(task.train_size, self.batch_size)


PROTOCOLS = {
    "clean": Settings("clean", "cosine", "validation", "answers", "matrices", (1, 2, 3)),
    "mad": Settings("mad", "constant", "test", "all", "all", (12345,)),
}


@dataclass(frozen=True)
class Preset:
    """Values of the flags that are not given."""

    tasks: tuple[str, ...]
    layers: tuple[str, ...]
    changes: tuple[tuple[str, int | float | str | tuple[int | float, ...]], ...] = ()
    protocol: ProtocolName = "clean"
    sweep: bool = False


PRESETS = {
    # Sized for minutes on two CPU cores.
    "quick": Preset(
        ("in-context-recall,length=32,train_size=1600",),
        ("linear-attention", "deltanet", "efla"),
        (
            ("seeds", (1,)),
            ("lrs", (1e-3, 3e-3)),
            ("weight_decays", (0.0,)),
            ("epochs", 8),
            ("batch_size", 32),
            ("test_size", 512),
            ("width", 64),
            ("dtype", "float32"),
        ),
    ),
    "benchmark": Preset(tuple(TASKS), BASELINES),
    "sweep": Preset(tuple(TASKS), ("deltanet", "efla"), (), "mad", True),
}

_COUNT = (1, "at least 1")
_POSITIVE = (sys.float_info.min, "positive")
_NOT_NEGATIVE = (0, "at least 0")
LEAST = {
    **dict.fromkeys(("epochs", "batch_size", "test_size", "width", "together", "checkpoint_every"), _COUNT),
    **dict.fromkeys(("lrs", "enough"), _POSITIVE),
    **dict.fromkeys(("weight_decays", "seeds"), _NOT_NEGATIVE),
}


def check_value(name: str, value: int | float | str | tuple[int | float, ...]) -> None:
    """Raise FlagError for a value that a setting of this name cannot have."""
    values = value if isinstance(value, tuple) else (value,)
    flag = f"--{name.replace('_', '-')} {' '.join(map(str, values))}"
    least, what = LEAST.get(name, (None, ""))
    for number in values:
        if least is not None and not (isinstance(number, int | float) and least <= number <= MOST):
            raise FlagError(f"{flag}: must be {what} and at most {MOST}")
    if len(set(values)) < len(values):
        raise FlagError(f"{flag}: give each once")
