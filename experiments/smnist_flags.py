"""Flags of the sequential-MNIST experiment, its presets, and the plan that follows from them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from eflax.cells import CELLS
from eflax.data.images import NAMES
from experiments.command import FlagError

SWEEP = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
MAX_SEED = 2**32 - 1
KEYS = {"unit": True, "raw": False}


@dataclass(frozen=True)
class Preset:
    """Values of the flags that are not given."""

    dataset: str
    steps: int
    batch_size: int
    lr: dict[str, float]
    seed: int
    own_seeds: bool
    eval_limit: int | None


PRESETS = {
    # Same learning rate and seed for all; sized to end within six minutes on two CPU cores, most of it training.
    "quick": Preset("mnist-small", 250, 64, {"": 3e-3}, 43, False, 500),
    # One epoch of 60,000 images; the script's cells differ in learning rate and in seed.
    "released": Preset("mnist", 469, 128, {"": 1e-3, "efla": 3e-3}, 43, True, None),
    "equal-lr": Preset("mnist", 469, 128, {"": 1e-3}, 43, False, None),
}


CELL_HELP = (
    f"Cells to compare: {', '.join(CELLS)}. A cell followed by ':unit' or ':raw' gets L2-normalised or raw keys; "
    "the controls of the comparison are delta_rule:raw and efla:unit."
)
BY_PRESET = "(default: by preset)"

type Number = Annotated[int, arg(metavar="N")]
type ByPreset[T] = Annotated[T | None, arg(metavar="VALUE", help_behavior_hint=BY_PRESET)]


@dataclass(frozen=True)
class Flags:
    """Train pixel-level sequential-MNIST classifiers and compare how they bear perturbed inputs.

    With no flag and no network, DeltaNet and EFLA are trained on the MNIST subset that ships with the package and
    evaluated on 32 perturbations of test images: intensity scale 1 to 10, Gaussian noise 0 to 1, pixel dropout 0
    to 1. Tables, figures, metrics and checkpoints are written below --out. Ctrl-C saves; --resume continues.
    """

    cell: Annotated[tuple[str, ...], arg(metavar="NAME ...", help=CELL_HELP)] = ("delta_rule", "efla")

    # Values of the flags not given.
    # - quick: mnist-small, 250 steps of 64 images, lr 3e-3 and seed 43 for all, 500 test images.
    # - released: the protocol of the authors' script: mnist, one epoch (469 steps of 128 images), lr 3e-3 for
    # efla and 1e-3 for others, seed 43 for the first cell, 44 for the second and so on, all test images.
    # - equal-lr: the same, but lr 1e-3 and seed 43 for all.
    preset: Literal["quick", "released", "equal-lr"] = "quick"

    # The data: mnist-small (ships with the package), mnist or fashion-mnist (downloaded once and checked), or
    # the path of an npz file with x_train, y_train, x_test, y_test, or of a folder with the four idx or
    # idx.gz files.
    dataset: ByPreset[str] = None

    # Cache folder of downloads; by default ~/.cache/eflax, or eflax below XDG_CACHE_HOME.
    data_dir: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None

    # Optimizer steps of each training.
    steps: ByPreset[int] = None

    # Images in a batch; the last of an epoch holds those that are left over.
    batch_size: ByPreset[int] = None

    # Learning rate: one number for all, or by cell as in --lr delta_rule=1e-3 efla=3e-3.
    lr: Annotated[tuple[str, ...], arg(metavar="LR ...", help_behavior_hint=BY_PRESET)] = ()

    # Train each cell at the learning rates 1e-4, 3e-4, 1e-3, 3e-3 and 1e-2 (the paper's Figure 2).
    lr_sweep: bool = False

    # First seed, of the initial parameters and of the order of the images.
    seed: ByPreset[int] = None

    # Trainings of each cell, with seeds that follow each other; tables and figures then show mean and sample SD.
    seeds: Number = 1

    # L2-normalise keys in all cells without ":unit" or ":raw"; own leaves it to the cell: unit keys for
    # delta_rule and gated_delta_rule, raw keys for others.
    normalize_keys: Literal["own", "true", "false"] = "own"

    # Form in which the cell is evaluated: recurrent, associative, parallel, chunkwise, pallas_gpu (on a Hopper GPU) or
    # pallas_tpu (on a TPU).
    form: Annotated[str | None, arg(metavar="FORM", help_behavior_hint="(default: the fastest)")] = None

    # Tokens in a chunk, for the chunkwise form.
    chunk_size: Number = 64

    # Evaluate on the first so many test images; 0 means all.
    eval_limit: ByPreset[int] = None

    # Steps between checkpoints.
    checkpoint_every: Number = 50

    # New folder for all results; by default runs/smnist-DATE-TIME.
    out: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None

    # Continue the run in this folder, with its flags; a flag that says otherwise is an error.
    resume: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None


@dataclass(frozen=True)
class Arm:
    """One training: a cell with its kind of keys (such as "efla" or "efla:unit"), a learning rate and a seed."""

    variant: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        """Return the name in metrics.jsonl and of the checkpoint folder."""
        return f"{self.variant.replace(':', '-')}-lr{self.lr:g}-seed{self.seed}"


@dataclass(frozen=True)
class Plan:
    """What a run does: the flags with the preset filled in, and the trainings that follow."""

    arms: tuple[Arm, ...]
    dataset: str
    steps: int
    batch_size: int
    eval_limit: int | None


def with_absolute_paths(flags: Flags) -> Flags:
    """Return flags that mean the same from every working directory, as a resume needs."""
    dataset, folder = flags.dataset, flags.data_dir
    if dataset is not None and dataset not in NAMES:
        dataset = str(Path(dataset).absolute())
    return replace(flags, dataset=dataset, data_dir=None if folder is None else folder.absolute())


def make_plan(flags: Flags) -> Plan:
    """Fill in the preset and list the trainings.

    Raises:
        FlagError: a flag has a value that cannot be used.
    """
    preset = PRESETS[flags.preset]
    steps = _positive("steps", preset.steps if flags.steps is None else flags.steps)
    batch_size = _positive("batch-size", preset.batch_size if flags.batch_size is None else flags.batch_size)
    for name, value in (("seeds", flags.seeds), ("chunk-size", flags.chunk_size)):
        _positive(name, value)
    _positive("checkpoint-every", flags.checkpoint_every)
    limit = preset.eval_limit if flags.eval_limit is None else (flags.eval_limit or None)
    if limit is not None and limit < 0:
        raise FlagError(f"--eval-limit {limit}: must not be negative; 0 means all images")
    return Plan(
        arms=_arms(flags, preset),
        dataset=preset.dataset if flags.dataset is None else flags.dataset,
        steps=steps,
        batch_size=batch_size,
        eval_limit=limit,
    )


def _arms(flags: Flags, preset: Preset) -> tuple[Arm, ...]:
    variants = [_variant(name, flags.normalize_keys) for name in flags.cell]
    if not variants or len(set(variants)) < len(variants):
        raise FlagError(f"--cell {' '.join(flags.cell)}: give one or several cells, each once")
    rates = _learning_rates(flags, preset, variants)
    first = preset.seed if flags.seed is None else flags.seed
    stride = len(variants) if preset.own_seeds else 1
    if not 0 <= first <= MAX_SEED - stride * flags.seeds:
        raise FlagError(f"--seed {first}: must not be negative, nor above {MAX_SEED - stride * flags.seeds}")
    arms = []
    for position, variant in enumerate(variants):
        for lr in SWEEP if flags.lr_sweep else (rates[variant],):
            seed = first + (position if preset.own_seeds else 0)
            arms += [Arm(variant, lr, seed + stride * n) for n in range(flags.seeds)]
    return tuple(arms)


def _variant(name: str, normalize_keys: str) -> str:
    cell, colon, keys = name.partition(":")
    if cell not in CELLS or (colon and keys not in KEYS):
        raise FlagError(
            f'--cell {name}: there are {", ".join(CELLS)}, each alone or with ":unit" or ":raw" added'
        )
    if not keys and normalize_keys != "own":
        keys = "unit" if normalize_keys == "true" else "raw"
    return f"{cell}:{keys}" if keys else cell


def _learning_rates(flags: Flags, preset: Preset, variants: list[str]) -> dict[str, float]:
    if flags.lr and flags.lr_sweep:
        raise FlagError("--lr and --lr-sweep exclude each other: leave one out")
    given: dict[str, float] = {}
    known = {"", *variants, *(variant.partition(":")[0] for variant in variants)}
    for text in flags.lr:
        name, value = _learning_rate(text)
        if name not in known:
            raise FlagError(f"--lr {text}: no such cell in --cell {' '.join(flags.cell)}")
        if name in given:
            raise FlagError(f"--lr {' '.join(flags.lr)}: given twice for {name or 'all cells'}")
        given[name] = value
    given = given or preset.lr
    rates = {}
    for variant in variants:
        names = [name for name in (variant, variant.partition(":")[0], "") if name in given]
        if not names:
            raise FlagError(f"--lr {' '.join(flags.lr)}: says nothing about {variant}; add {variant}=NUMBER")
        rates[variant] = given[names[0]]
    return rates


def _learning_rate(text: str) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise FlagError(f"--lr {text}: must be a positive number, or CELL=NUMBER")
    return name, value


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise FlagError(f"--{name} {value}: must be at least 1")
    return value
