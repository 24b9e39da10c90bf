"""Flags of the MAD experiment, and the plan that follows from them."""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from eflax.data.mad import MadTask
from eflax.data.mad_tasks import TASKS
from experiments.command import FlagError, split_options
from experiments.mad_models import Mixer, parse_mixer
from experiments.mad_settings import (
    PRESETS,
    PROTOCOLS,
    Decayed,
    Positions,
    Precision,
    PresetName,
    ProtocolName,
    Schedule,
    Settings,
    Split,
    check_value,
)

BY_PRESET = "(default: by preset)"
BY_PROTOCOL = "(default: by protocol)"
TASK_HELP = (
    f"Tasks: {', '.join(TASKS)}, each with changes of its difficulty behind commas, as in "
    "in-context-recall,vocab_size=32,length=256; there are vocab_size, length, train_size, and noise or copies. "
    "A resumed run may be given others."
)
LAYER_HELP = (
    "Layers that mix tokens: deltanet, efla, gated-deltanet, gated-efla, linear-attention, mamba, mamba2 or "
    "transformer, with options behind commas: deltanet,num_heads=1. A resumed run may be given others."
)

type Number = Annotated[int, arg(metavar="N")]
type ByPreset[T] = Annotated[T | None, arg(metavar="VALUE", help_behavior_hint=BY_PRESET)]
type ByProtocol[T] = Annotated[T | None, arg(metavar="VALUE", help_behavior_hint=BY_PROTOCOL)]
type Several[T] = Annotated[tuple[T, ...], arg(metavar="VALUE ...", help_behavior_hint=BY_PRESET)]


@dataclass(frozen=True)
class Flags:
    """Train small models on the synthetic tasks of the MAD benchmark (arXiv 2403.17844) with any layer.

    With no flag, three layers learn in-context recall of 16 pairs on the CPU in minutes. With --tasks, --layers,
    --protocol or a preset, the benchmark: two pairs of layer and SwiGLU of width 128, 200 epochs, six combinations of
    learning rate and weight decay, of which the best counts; all of them and all seeds are trained as one program.
    Tables, figures, metrics and checkpoints are written below --out. Ctrl-C saves; --resume continues, also with other
    --tasks and --layers, so that a long run can be done in pieces; `join --help` tells how to put together runs that
    were done side by side.
    """

    tasks: Annotated[
        tuple[str, ...], arg(metavar="NAME ...", help=TASK_HELP, help_behavior_hint=BY_PRESET)
    ] = ()

    layers: Annotated[
        tuple[str, ...], arg(metavar="NAME ...", help=LAYER_HELP, help_behavior_hint=BY_PRESET)
    ] = ()

    # Values of the flags that are not given; quick without --tasks, --layers and --protocol, else benchmark.
    # - quick: small models for two CPU cores.
    # - benchmark: the baseline of all six tasks for seven layers, three seeds.
    # - sweep: the benchmark's whole set of 66 settings under its own protocol, for DeltaNet and EFLA.
    preset: ByPreset[PresetName] = None

    # How to train and to judge.
    # - clean: examples of their own select checkpoints, learning rate and weight decay; the test examples are used
    # once. Cosine schedule, loss of the answers alone, weight decay of matrices alone, three seeds.
    # - mad: what the released code does, which selects by the test examples, seed 12345.
    protocol: ByPreset[ProtocolName] = None

    # Also train at every one-at-a-time change of difficulty that the benchmark has for a task.
    sweep: bool = False

    # Learning rate over the training: half a cosine to 1e-6, or constant. The released code configures a cosine that
    # its trainer ignores.
    schedule: ByProtocol[Schedule] = None

    # Examples whose perplexity selects the checkpoint of a training, and whose accuracy selects learning rate and
    # weight decay.
    select: ByProtocol[Split] = None

    # What the loss of the recall tasks covers: the answers, or all next tokens, most of which cannot be known.
    loss: ByProtocol[Positions] = None

    # What decays: matrices and embeddings, or also norm scales, biases and what decay gates are made of.
    decay: ByProtocol[Decayed] = None

    # End a training when the accuracy on the examples that select exceeds this; 1 never does.
    enough: ByPreset[float] = None

    # Passes over the training examples.
    epochs: ByPreset[int] = None

    # Examples in a batch, in training and for the accuracy, which is averaged over batches.
    batch_size: ByPreset[int] = None

    # Learning rates of the grid.
    lrs: Several[float] = ()

    # Weight decays of the grid.
    weight_decays: Several[float] = ()

    # Seeds of the initial parameters and of the order of the examples.
    seeds: Several[int] = ()

    # Width of the models.
    width: ByPreset[int] = None

    # Of matrix products and activations; the kernels for Hopper GPUs need bfloat16.
    dtype: ByPreset[Precision] = None

    # Test examples, and as many for validation.
    test_size: ByPreset[int] = None

    # Members of the grid that are computed side by side, all by default. Fewer need less memory; and once all of them
    # are done they cost no more time, which with all would be when the whole grid is.
    together: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all)")] = None

    # Steps between checkpoints. One holds four copies of the parameters of every member of the grid.
    checkpoint_every: Number = 2000

    # Print what would be trained, and stop.
    dry_run: bool = False

    # With --resume: train no further, and test the best parameters so far.
    eval_only: bool = False

    # New folder for all results; by default runs/mad-DATE-TIME.
    out: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None

    # Continue the run in this folder, with its flags; a flag that says otherwise is an error, but for --tasks and
    # --layers.
    resume: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None


@dataclass(frozen=True)
class Plan:
    """What a run does: the flags with preset and protocol filled in."""

    tasks: tuple[MadTask, ...]
    mixers: tuple[Mixer, ...]
    settings: Settings


def resolve(flags: Flags) -> Flags:
    """Return the flags with preset, protocol, tasks and layers, so that a resume depends on no other flag."""
    asks = flags.tasks or flags.layers or flags.protocol
    name: PresetName = flags.preset or ("benchmark" if asks else "quick")
    preset = PRESETS[name]
    return replace(
        flags,
        preset=name,
        protocol=flags.protocol or preset.protocol,
        tasks=flags.tasks or preset.tasks,
        layers=flags.layers or preset.layers,
    )


def make_plan(flags: Flags) -> Plan:
    """Fill in what the flags leave to preset and protocol, and list what is to be trained.

    Raises:
        FlagError: a flag has a value that cannot be used.
    """
    flags = resolve(flags)
    preset, protocol = PRESETS[flags.preset or "quick"], PROTOCOLS[flags.protocol or "clean"]
    base = replace(protocol, **dict(preset.changes))
    given = {field.name: getattr(flags, field.name) for field in fields(Settings)}
    settings = replace(base, **{name: value for name, value in given.items() if value not in (None, ())})
    for name, value in asdict(settings).items():
        check_value(name, value)
    for name, value in (
        ("together", 1 if flags.together is None else flags.together),
        ("checkpoint_every", flags.checkpoint_every),
    ):
        check_value(name, value)
    if flags.eval_only and flags.resume is None:
        raise FlagError("--eval-only: say with --resume FOLDER which run to evaluate")
    tasks = [parse_task(text) for text in flags.tasks]
    if flags.sweep or preset.sweep:
        tasks = list(dict.fromkeys(setting for task in tasks for setting in task.sweep()))
    mixers = [parse_mixer(text) for text in flags.layers]
    for name, labels in (("tasks", [t.label for t in tasks]), ("layers", [m.label for m in mixers])):
        if len(set(labels)) < len(labels):
            raise FlagError(f"--{name} {' '.join(getattr(flags, name))}: give each once")
    return Plan(tuple(tasks), tuple(mixers), settings)


def parse_task(text: str) -> MadTask:
    """Return the task of a label such as "in-context-recall,length=256". Raises FlagError where there is none."""
    name, changes = split_options("--tasks", text)
    if name not in TASKS:
        raise FlagError(f"--tasks {text}: there are {', '.join(TASKS)}")
    base = TASKS[name]()
    known = {field.name: type(getattr(base, field.name)) for field in fields(base)}
    for option, value in changes:
        if option not in known or type(value) is not known[option]:
            kinds = ", ".join(
                f"{field}=N" if kind is int else f"{field}=0.5" for field, kind in known.items()
            )
            raise FlagError(f"--tasks {text}: {name} can be changed by {kinds}")
    try:
        return replace(base, **dict(changes))
    except ValueError as error:
        raise FlagError(f"--tasks {text}: {error}") from error
