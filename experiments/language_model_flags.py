"""Flags of language-model training, its presets, and the plan that follows from them."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from eflax.models import CONFIG_NAMES, LanguageModelConfig, named_config
from eflax.models.language_model import Remat
from eflax.training.schedule import steps_for_tokens
from experiments.command import FlagError, with_flags

BY_PRESET = "(default: by preset)"

type Number = Annotated[int, arg(metavar="N")]
type ByPreset[T] = Annotated[T | None, arg(metavar="VALUE", help_behavior_hint=BY_PRESET)]
type Optional[T] = Annotated[T | None, arg(metavar="VALUE", help_behavior_hint="")]


@dataclass(frozen=True)
class Preset:
    """Values of the flags that are not given; sizes of batches and warm-up in tokens."""

    size: str
    data: tuple[str, ...]
    tokenizer: str
    tokens: int
    warmup_tokens: int
    batch_tokens: int
    length: int
    lr: float
    lr_end: float
    dtype: Literal["float32", "bfloat16"]
    remat: Remat
    accumulate: int = 1
    unroll: int = 1


ALL = 32  # layers to be compiled side by side: more than any model has for which that is the default
SLIMPAJAMA = ("hf:cerebras/SlimPajama-627B",)
PRESETS = {
    # A minute on two CPU cores.
    "tiny": Preset(
        "tiny", ("python-topics",), "bytes", 100_000, 10_000, 2048, 128, 3e-3, 3e-4, "float32", "none"
    ),
    "50m": Preset(
        "50m",
        (),
        "mistral-v1",
        10**8,
        5 * 10**6,
        2**16,
        2048,
        1e-3,
        1e-4,
        "bfloat16",
        "none",
        unroll=ALL,
    ),
    # The recipes of the EFLA paper, appendix A. Learning rates start where they end.
    "340m": Preset(
        "340m", SLIMPAJAMA, "mistral-v1", 8 * 10**9, 10**9, 2**20, 2048, 3e-4, 3e-5, "bfloat16", "products", 8
    ),
    "1.3b": Preset(
        "1.3b",
        SLIMPAJAMA,
        "mistral-v1",
        50 * 10**9,
        2 * 10**9,
        2**21,
        2048,
        3e-4,
        3e-5,
        "bfloat16",
        "block",
        16,
    ),
}


@dataclass(frozen=True)
class Flags:
    """Train a language model.

    With no flag and no network, a tiny EFLA model is trained for a minute on the bytes of Python's language reference:
    enough for the frequencies of letters, not for words, which take some --tokens 5000000.
    Metrics and checkpoints are written below --out. Ctrl-C and SIGTERM save; --resume continues, also on another
    number of devices.
    """

    # Values of the flags not given: tiny, 50m, or the recipes of the EFLA paper for 340m and 1.3b.
    preset: Literal["tiny", "50m", "340m", "1.3b"] = "tiny"

    # The token mixer: linear-attention, mamba, mamba2, deltanet, gated-deltanet, efla, gated-efla or transformer.
    layer: str = "efla"

    # Layers to be repeated in this order, for a hybrid, such as --pattern efla efla efla transformer; their number is
    # then that of --layer, or --num-layers.
    pattern: Annotated[tuple[str, ...], arg(metavar="LAYER ...")] = ()

    # Number of layers; a pattern is repeated to fill it.
    num_layers: ByPreset[int] = None

    # Training data, one or several: files, folders or patterns of .txt, .jsonl(.gz, .zst), .parquet, .array_record,
    # ids as .u16(.xz) or .u32(.xz), hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT of the Hugging Face hub, or
    # python-topics. Quote a pattern, or the shell makes several sources of it.
    data: Annotated[tuple[str, ...], arg(metavar="SOURCE ...", help_behavior_hint=BY_PRESET)] = ()

    # How often each of --data is drawn from; by default in proportion to its size.
    weights: Annotated[tuple[float, ...], arg(metavar="W ...")] = ()

    # Data to validate on, each on its own.
    validation: Annotated[tuple[str, ...], arg(metavar="SOURCE ...")] = ()

    # bytes, mistral-v1, or the path of a SentencePiece model or a tokenizer.json.
    tokenizer: ByPreset[str] = None

    # The field of the text, where documents have fields.
    field: str = "text"

    # Read at most about so many tokens of each source, for instance of a large one on the hub.
    max_tokens: Optional[int] = None

    # Folder of tokenised data; by default ~/.cache/eflax, or eflax below XDG_CACHE_HOME.
    cache: Optional[Path] = None

    # Whether the model forgets at the start of each document (packing), or reads on (as the paper's code does).
    documents: Literal["separate", "joined"] = "separate"

    # Tokens to train on.
    tokens: ByPreset[int] = None

    # Tokens until the learning rate has its peak.
    warmup_tokens: ByPreset[int] = None

    # Tokens of a step.
    batch_tokens: ByPreset[int] = None

    # Tokens of a sequence.
    length: ByPreset[int] = None

    # Parts of a batch that are computed one after the other, to save memory.
    accumulate: ByPreset[int] = None

    # Peak learning rate.
    lr: ByPreset[float] = None

    # Learning rate at the start and at the end.
    lr_end: ByPreset[float] = None

    # Decay of all parameters but norm scales, biases, A_log, dt_bias and D.
    weight_decay: float = 0.1

    # Weight of the squared logarithm of the softmax's denominator; 1e-4 is usual where it is used.
    z_loss: float = 0.0

    # Of the initial parameters and of the order of the data.
    seed: Number = 42

    # Of products and activations; parameters, moments, norms, gates and states are float32.
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        arg(metavar="{float32,bfloat16}", help_behavior_hint=BY_PRESET),
    ] = None

    # Form of the recurrent cells.
    form: Annotated[str | None, arg(metavar="FORM", help_behavior_hint="(default: the fastest)")] = None

    # Tokens in a chunk, for the chunkwise form.
    chunk_size: Number = 64

    # What the backward pass computes again, from fast to small.
    remat: Annotated[
        Remat | None, arg(metavar="{none,kernels,products,block}", help_behavior_hint=BY_PRESET)
    ] = None

    # Layers compiled side by side: more are faster to run and slower to compile.
    unroll: ByPreset[int] = None

    # Devices that share each parameter and cut batches; those left over hold copies.
    fsdp: Number = 1

    # Devices that share each product.
    tensor: Number = 1

    # Train with other processes, on this machine or others: auto where Slurm, Open MPI, GKE or a TPU pod tells of them,
    # else HOST:PORT of process 0, the same for all, with --process and --processes. All need the same --out.
    coordinator: Optional[str] = None

    # Index of this process, from 0.
    process: Optional[int] = None

    # Number of processes.
    processes: Optional[int] = None

    # Steps between checkpoints.
    checkpoint_every: Number = 500

    # Steps between validations.
    validate_every: Number = 500

    # Steps between looks at the loss.
    log_every: Number = 10

    # Write metrics for TensorBoard, too, into the folder events of the run; --resume goes on with it.
    tensorboard: bool = False

    # Print sizes, memory and steps, compile a step, and stop.
    dry_run: bool = False

    # A new folder for the run; by default runs/language_model-TIME.
    out: Optional[Path] = None

    # The folder of a run to continue, with its flags.
    resume: Optional[Path] = None


def resolve(flags: Flags) -> Flags:
    """Return the flags with the values of the preset where none were given."""
    preset = PRESETS[flags.preset]
    values = {
        field.name: getattr(preset, field.name) for field in fields(preset) if hasattr(flags, field.name)
    }
    return replace(
        flags, **{name: value for name, value in values.items() if getattr(flags, name) in (None, ())}
    )


@dataclass(frozen=True)
class Plan:
    """What follows from the flags."""

    config: LanguageModelConfig
    data: tuple[str, ...]
    tokenizer: str
    steps: int
    warmup_steps: int
    batch_size: int
    length: int
    accumulate: int
    lr: float
    lr_end: float
    dtype: str
    remat: Remat
    unroll: int


def make_plan(flags: Flags, vocab_size: int | None = None) -> Plan:
    """Return the plan. Raises FlagError for a value that cannot be used."""
    given: Any = resolve(flags)  # None is left nowhere that a preset has a value for
    for name in ("chunk_size", "fsdp", "tensor", "checkpoint_every", "validate_every", "log_every"):
        _positive(name, getattr(flags, name))
    sizes = ("tokens", "warmup_tokens", "batch_tokens", "length", "accumulate")
    tokens, warmup, batch_tokens, length, accumulate = (
        _positive(name, getattr(given, name)) for name in sizes
    )
    if batch_tokens % length:
        raise FlagError(f"--batch-tokens {batch_tokens}: must be a multiple of --length {length}")
    for name in ("lr", "lr_end"):
        if not 0 < getattr(given, name) < float("inf"):
            raise FlagError(f"--{name.replace('_', '-')} {getattr(given, name)}: must be a positive number")
    for name in ("weight_decay", "z_loss"):
        if not 0 <= getattr(flags, name) < float("inf"):
            raise FlagError(
                f"--{name.replace('_', '-')} {getattr(flags, name)}: must be 0 or a positive number"
            )
    for name in ("max_tokens", "num_layers"):
        if getattr(flags, name) is not None:
            _positive(name, getattr(flags, name))
    if flags.seed < 0 or flags.seed >= 2**32:
        raise FlagError(f"--seed {flags.seed}: must lie in 0..{2**32 - 1}")
    if not given.data:
        raise FlagError("--data: give at least one source of text; --help lists the kinds")
    positive = all(0 < weight < float("inf") for weight in flags.weights)
    if flags.weights and (len(flags.weights) != len(given.data) or not positive):
        raise FlagError(
            f"--weights {flags.weights}: give a positive one for each of the {len(given.data)} sources; quote a "
            "pattern to make one source of its files"
        )
    config = _config(flags, PRESETS[flags.preset], vocab_size)
    steps, warmup_steps = (steps_for_tokens(count, batch_tokens) for count in (tokens, warmup))
    if warmup_steps >= steps:
        by_preset = f" of --preset {flags.preset}" if flags.warmup_tokens is None else ""
        raise FlagError(
            f"--warmup-tokens {warmup}{by_preset}: no shorter than the training of --tokens {tokens} ({steps} "
            "steps); give less warm-up or more tokens"
        )
    return Plan(
        config=config,
        data=given.data,
        tokenizer=given.tokenizer,
        steps=steps,
        warmup_steps=warmup_steps,
        batch_size=batch_tokens // length,
        length=length,
        accumulate=accumulate,
        lr=given.lr,
        lr_end=given.lr_end,
        dtype=given.dtype,
        remat=given.remat,
        unroll=_positive("unroll", given.unroll),
    )


def _config(flags: Flags, preset: Preset, vocab_size: int | None) -> LanguageModelConfig:
    name = f"{flags.layer}-{preset.size}"
    if name not in CONFIG_NAMES:
        layers = [
            known.removesuffix(f"-{preset.size}") for known in CONFIG_NAMES if known.endswith(preset.size)
        ]
        raise FlagError(f"--layer {flags.layer}: there is no such layer; there are {', '.join(layers)}")
    given = {"vocab_size": vocab_size, "num_layers": flags.num_layers}
    changes = {field: value for field, value in given.items() if value is not None}
    try:
        return named_config(name, pattern=flags.pattern, **changes)
    except ValueError as error:
        raise FlagError(with_flags(str(error), ("num_layers", "pattern"))) from error


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise FlagError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    return value
