"""Flags of the state-tracking experiment, its presets, and the plan that follows from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from eflax.data.algorithmic_tasks import TASKS
from experiments.command import FlagError
from experiments.state_tracking_models import Arm, Sizes, parse_model

type TaskName = Literal["parity", "parity-short", "mod5-flat", "mod5-brackets", "swaps", "s5", "addition"]
type PresetName = Literal["quick", "paper", "splits", "feedback", "feedback-splits", "sixteen", "baselines"]
type Precision = Literal["float32", "bf16x6", "bf16x3", "tf32"]

# What JAX calls them. On other devices than GPUs "tf32" is float32, too.
PRECISIONS = {
    "float32": "highest",
    "bf16x6": "BF16_BF16_F32_X6",
    "bf16x3": "BF16_BF16_F32_X3",
    "tf32": "default",
}
MAX_SEED = 2**32 - 1
BY_PRESET = "(default: by preset)"
SPLITS = ("4+4", "5+3", "6+2", "7+1", "8+0")
LONG_TASKS = ("mod5-flat", "mod5-brackets")  # 5,000 steps in the paper's comparison, all others 2,000


@dataclass(frozen=True)
class Preset:
    """Values of the flags that are not given; `steps` None: as the paper trains the task."""

    models: tuple[str, ...] = ("rlt1:4+4",)
    seeds: tuple[int, ...] = (42, 43, 44)
    steps: int | None = None
    batch_size: int = 512
    lr: float = 1e-4
    width: int = 512
    num_heads: int = 4
    test_size: int | None = None
    validation_size: int | None = None
    task: str = "parity"


PRESETS = {
    # Sized for minutes on two CPU cores: it shows the effect, not the paper's numbers.
    "quick": Preset(("rlt1:2+1", "gpt:3"), (42,), 600, 128, 2e-4, 64, 2, 256, 256, "parity-short"),
    "paper": Preset(),
    "splits": Preset((*(f"rlt1:{split}" for split in SPLITS), "gpt:8")),
    "feedback": Preset(("rlt1:4+4", "rlt2:4+4", "rlt0:4+4", "gpt:8")),
    "feedback-splits": Preset(tuple(f"{model}:{split}" for model in ("rlt0", "rlt2") for split in SPLITS)),
    "sixteen": Preset((*(f"rlt1:{e}+{16 - e}" for e in range(8, 17)), "gpt:16"), (42,), batch_size=1024),
    "baselines": Preset(
        ("deltanet:8", "deltanet,allow_negative_eigenvalues=true:8", "efla:8", "gated-deltanet:8", "mamba2:8")
    ),
}

MODEL_HELP = (
    "Models to train: rlt1, rlt2, rlt0 or gpt, or a stack of layers such as deltanet, mamba2 or efla+transformer, with "
    "options of the layer behind commas: deltanet,allow_negative_eigenvalues=true. The depth may follow a colon: "
    "rlt1:5+3 (encoder + decoder), gpt:8; else it is that of --split."
)

type Number = Annotated[int, arg(metavar="N")]
type ByPreset[T] = Annotated[T | None, arg(metavar="VALUE", help_behavior_hint=BY_PRESET)]


@dataclass(frozen=True)
class Flags:
    """Train models to track a state, and see how far beyond their training lengths they do.

    With no flag, two small models learn parity of up to 10 bits on the CPU in minutes. With --model or a preset, the
    protocol of the Recurrent Looped Transformer's paper (arXiv 2610.07591): all seeds of a model are trained together,
    the parameters of least validation loss are kept and tested on longer sequences. Tables, figures, metrics and
    checkpoints are written below --out. Ctrl-C saves; --resume continues. `generate --help` and `time --help` tell of
    two more commands: to show a trained model's state on one example, and to time the train step.
    """

    # What to learn: parity, mod-5 arithmetic flat or in brackets, products in S5 of swaps or of all, addition; or
    # parity-short, of up to 10 bits, which is no task of the paper.
    task: ByPreset[TaskName] = None

    # Values of the flags that are not given; quick without --model, else paper.
    # - quick: small models for two CPU cores.
    # - paper: the protocol, for the models of --model: 2,000 steps (mod-5: 5,000) of 512, lr 1e-4, seeds 42 to 44.
    # - splits: that with every split of RLT-1, and GPT. feedback: RLT-1, RLT-2 and RLT-0 4+4, GPT.
    # - feedback-splits: RLT-0 and RLT-2 at every split. sixteen: sixteen layers, seed 42, batches of 1,024.
    # - baselines: eight-layer stacks of DeltaNet, with and without negative eigenvalues, EFLA, Gated DeltaNet, Mamba-2.
    preset: Annotated[
        PresetName | None, arg(metavar="NAME", help_behavior_hint="(default: quick, or paper)")
    ] = None

    model: Annotated[
        tuple[str, ...], arg(metavar="NAME ...", help=MODEL_HELP, help_behavior_hint=BY_PRESET)
    ] = ()

    # Layers of models without their own: encoder + decoder. GPT and stacks have as many in all.
    split: Annotated[str, arg(metavar="E+D")] = "4+4"

    # Seeds of the initial parameters, trained side by side. The data are the same for all.
    seeds: Annotated[tuple[int, ...], arg(metavar="N ...", help_behavior_hint=BY_PRESET)] = ()

    # Optimizer steps.
    steps: ByPreset[int] = None

    # Examples in a batch.
    batch_size: ByPreset[int] = None

    # Learning rate after the warm-up. That of matrices is larger by 1024 / width (width-µP).
    lr: ByPreset[float] = None

    # Width of the residual stream.
    width: ByPreset[int] = None

    # Heads of the attention of RLT and GPT.
    num_heads: ByPreset[int] = None

    # Tokens that share a feedback in rlt2.
    interval: Number = 4

    # Positions that a decoder sees of itself, the current one included.
    window: Number = 8

    # Cut the gradient through the decoder's state every so many tokens, a multiple of the interval.
    truncate: Annotated[
        int | None, arg(metavar="N", help_behavior_hint="(default: never, as in the paper)")
    ] = None

    # Recompute the decoder in the backward pass: less memory, more time.
    remat: bool = False

    # Decoder steps in one iteration of the compiled loop.
    unroll: Number = 1

    # Of matrix products on a GPU: float32; 6 or 3 products of bfloat16 for one, near float32; or TF32 (10 bits).
    precision: Precision = "float32"

    # Test lengths; by default the paper's. May differ at --resume.
    lengths: Annotated[
        tuple[int, ...], arg(metavar="N ...", help_behavior_hint="(default: the paper's)")
    ] = ()

    # Test sequences of each length.
    test_size: ByPreset[int] = None

    # Validation sequences of each validation length.
    validation_size: ByPreset[int] = None

    # Steps between validations.
    validate_every: Number = 100

    # Steps between checkpoints. One holds four copies of the parameters of every seed.
    checkpoint_every: Number = 500

    # Sequences evaluated at a time.
    eval_batch_size: Number = 256

    # With --resume: train no further, and evaluate the best parameters so far.
    eval_only: bool = False

    # New folder for all results; by default runs/state_tracking-DATE-TIME.
    out: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None

    # Continue the run in this folder, with its flags; a flag that says otherwise is an error.
    resume: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None


@dataclass(frozen=True)
class Plan:
    """What a run does: the flags with the preset filled in."""

    task: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    steps: int
    batch_size: int
    lr: float
    sizes: Sizes
    test_size: int
    validation_size: int


def make_plan(flags: Flags) -> Plan:
    """Fill in the preset and list the models.

    Raises:
        FlagError: a flag has a value that cannot be used.
    """
    preset = PRESETS[flags.preset or ("paper" if flags.model else "quick")]
    task = TASKS[flags.task or preset.task]
    for name in ("interval", "window", "unroll", "validate_every", "checkpoint_every", "eval_batch_size"):
        _positive(name, getattr(flags, name))
    if flags.truncate is not None:
        _positive("truncate", flags.truncate)
    for length in flags.lengths:
        try:
            task.check_length(length)
        except ValueError as error:
            raise FlagError(f"--lengths {length}: {error}") from error
    if flags.eval_only and flags.resume is None:
        raise FlagError("--eval-only: say with --resume FOLDER which run to evaluate")
    chosen = {
        name: getattr(preset, name) if getattr(flags, name) is None else getattr(flags, name)
        for name in ("steps", "batch_size", "lr", "width", "num_heads", "test_size", "validation_size")
    }
    defaults = {
        "steps": 5000 if task.name in LONG_TASKS else 2000,
        "test_size": task.test_size,
        "validation_size": task.validation_size,
    }
    chosen |= {name: value for name, value in defaults.items() if chosen[name] is None}
    if not 0 < chosen["lr"] < float("inf"):
        raise FlagError(f"--lr {chosen['lr']}: must be a positive number")
    for name, value in chosen.items():
        if name != "lr":
            _positive(name, value)
    sizes = Sizes(chosen.pop("width"), chosen.pop("num_heads"), flags.interval, flags.window)
    arms = tuple(parse_model(text, flags.split) for text in flags.model or preset.models)
    if len({arm.name for arm in arms}) < len(arms):
        raise FlagError(f"--model {' '.join(flags.model)}: give each model once")
    return Plan(task.name, arms, _seeds(flags.seeds or preset.seeds), sizes=sizes, **chosen)


def _seeds(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(seeds)) < len(seeds) or not all(0 <= seed <= MAX_SEED for seed in seeds):
        raise FlagError(
            f"--seeds {' '.join(map(str, seeds))}: give different numbers from 0 to {MAX_SEED}, each once"
        )
    return seeds


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise FlagError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    return value
