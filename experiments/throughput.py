"""Time the cells: each cell × form × shape on this machine, numerics first, peers beside them.

`python -m experiments.throughput` measures EFLA on shapes that suit the platform; `--help` tells the rest.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

if __name__ == "__main__":  # Ctrl-C ends the imports without a traceback; later StopRequest takes over
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import jax
import jax.numpy as jnp
import tyro
from jaxtyping import Array, PyTree
from rich.console import Console
from rich.table import Table
from tyro.conf import arg

from eflax.cells import CELLS, UnsupportedForm
from eflax.evaluation.agreement import BUDGETS, worst_error
from eflax.progress import Progress
from eflax.training import Interrupted, RunFolder, StopRequest
from experiments.throughput_inputs import (
    Shape,
    make_inputs,
    make_weights,
    parse_shape,
    reference_function,
    task_function,
)
from experiments.throughput_peers import PEERS, peer_results, peer_versions
from experiments.timing import seconds_per_call

SHAPES = {"cpu": ("128x784x1x64", "1x4096x4x64"), "gpu": ("8x4096x16x128", "1x65536x16x128", "32x2048x8x128")}

WRONG = "WRONG"
MAX_SEED = 2**32 - 1  # of jax.random, which takes larger ones modulo 2**32

Task = Literal["forward", "gradient", "state-gradient", "full-gradient"]


@dataclass(frozen=True)
class Flags:
    """Time cells × forms × shapes on this machine: median ms, tokens/s, temporary memory.

    Each combination is first compared with the recurrent form in float32 on the same rounded inputs (outputs or
    gradients, RMS ratio); one that is off is reported and not timed, and the exit code is then 1. Peers (a PyTorch
    loop, flash-linear-attention, FlashQLA) run beside where they are installed. The table is also written as CSV.
    """

    # Cells to time: names of eflax.cells.CELLS.
    cell: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ("efla",)

    # Forms to time; by default all that a cell has.
    form: Annotated[tuple[str, ...], arg(metavar="FORM ...", help_behavior_hint="")] = ()

    # BxTxHxK or BxTxHxKxV (for selective_ssm H·V channels with K state entries); by default by platform.
    shape: Annotated[tuple[str, ...], arg(metavar="SHAPE ...", help_behavior_hint="")] = ()

    # What is timed: outputs, or gradients of a weighted sum of the outputs, of the final state alone, or of both.
    task: tuple[Task, ...] = ("forward", "gradient", "state-gradient")

    # Dtype of q, k, v (gates are float32).
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    # Tokens in a chunk, for the chunkwise form.
    chunk_size: int = 64

    # Timed repetitions after one warm-up; the median counts.
    repeats: int = 5

    # Combinations that need more temporary memory than this (GB) are listed, not run; the default is for this platform.
    memory_limit: float = field(default_factory=lambda: 2.0 if jax.default_backend() == "cpu" else 8.0)

    # Other implementations to time, where they are installed: torch-loop; and on a GPU fla, of 16-bit dtypes, and
    # flash_qla, of gated_delta_rule. None without a name.
    peer: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = PEERS

    # Seed of the inputs.
    seed: int = 0

    # New folder for the table and config; by default runs/throughput-DATE-TIME.
    out: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None


@dataclass(frozen=True)
class Row:
    """One line of the table. `error` is the worst RMS ratio of any result; times and memory may be missing."""

    cell: str
    form: str
    shape: str
    task: str
    dtype: str
    error: float | None = None
    ms: float | None = None
    tokens_per_s: float | None = None
    temp_mb: float | None = None
    note: str = ""


def main(args: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if any numeric check failed, 2 for unusable flags, 128 + signal when stopped."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # peers need memory of the same GPU
    flags = tyro.cli(Flags, args=args, prog="python -m experiments.throughput")
    out = flags.out or Path("runs") / time.strftime("throughput-%Y%m%d-%H%M%S")
    # A file takes the whole table.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 132)
    try:
        shapes = plan_shapes(flags)
        config = {"experiment": "throughput", **asdict(flags), "out": str(out)}
        config["peer_versions"] = peers = peer_versions(flags.peer)
        with RunFolder(out, config) as folder:
            forms = sum(len(flags.form or CELLS[name].forms) for name in flags.cell)
            total = forms * len(shapes) * len(flags.task)
            console.print(f"Rows: {total}; results in {out}")
            if peers:
                console.print("For peers:", ", ".join(f"{name} {version}" for name, version in peers.items()))
            rows, stopped = collect(flags, shapes, total, folder)
            console.print(render(rows))
            console.print(f"Table and config: {out}")
    except (ValueError, OSError) as error:  # a RunFolderError is a ValueError
        print(f"error: {error}", file=sys.stderr)
        return 2
    return stopped or int(any(row.note.startswith(WRONG) for row in rows))


def collect(flags: Flags, shapes: list[Shape], total: int, folder: RunFolder) -> tuple[list[Row], int]:
    """Measure and write the rows; returns them, and the exit code of a stop before the last of them, else 0."""
    rows = []
    try:
        with StopRequest() as stop, Progress("measure", total, unit="row") as progress:
            for row in measurements(flags, shapes):
                rows.append(row)
                folder.append([asdict(row)])
                folder.write_table("throughput.csv", [asdict(row) for row in rows])
                progress.advance(row.form in CELLS[row.cell].forms)  # peers come on top
                stop.check()
    except Interrupted as interrupted:
        return rows, interrupted.exit_code
    except KeyboardInterrupt:  # a second signal acts at once
        return rows, 130
    return rows, 0


def plan_shapes(flags: Flags) -> list[Shape]:
    """Check the flags before any work and return the shapes. Raises ValueError naming the flag."""
    for name, values, choices in (("cell", flags.cell, CELLS), ("task", flags.task, get_args(Task))):
        if not values:
            raise ValueError(f"--{name}: give at least one of {', '.join(choices)}")
    for name in flags.cell:
        if name not in CELLS:
            raise ValueError(f"--cell {name}: there are {', '.join(CELLS)}")
        for form in flags.form:
            if form not in CELLS[name].forms:
                raise ValueError(f"--form {form}: {name} has {', '.join(CELLS[name].forms)}")
    for name in flags.peer:
        if name not in PEERS:
            raise ValueError(f"--peer {name}: there are {', '.join(PEERS)}")
    for name, value in (("chunk-size", flags.chunk_size), ("repeats", flags.repeats)):
        if value < 1:
            raise ValueError(f"--{name} {value}: must be at least 1")
    if not flags.memory_limit > 0:
        raise ValueError(f"--memory-limit {flags.memory_limit}: must be positive, in GB")
    if not 0 <= flags.seed <= MAX_SEED:
        raise ValueError(f"--seed {flags.seed}: must not be negative, nor above {MAX_SEED}")
    texts = flags.shape or SHAPES.get(jax.default_backend(), SHAPES["gpu"])
    return [parse_shape(text) for text in texts]


def measurements(flags: Flags, shapes: list[Shape]) -> Iterator[Row]:
    """All rows, one by one."""
    for name in flags.cell:
        for shape in shapes:
            inputs = make_inputs(name, shape, jnp.dtype(flags.dtype), flags.seed)
            for task in flags.task:
                weights, reference = make_weights(name, task, inputs, flags.seed), None
                for form in flags.form or CELLS[name].forms:
                    if reference is None:
                        reference = reference_results(name, task, shape, inputs, weights)
                    yield measure(name, form, shape, task, (inputs, weights), reference, flags)
                if reference is not None:
                    for peer in peer_results(
                        flags.peer, name, task, inputs, weights, reference, flags.repeats, flags.memory_limit
                    ):
                        row = Row(name, peer.peer, str(shape), task, flags.dtype)
                        if peer.refusal:
                            yield replace(row, note=f"not run: {peer.refusal}")
                        else:
                            yield timed(row, shape, peer.error, peer.seconds)


def reference_results(
    name: str, task: Task, shape: Shape, inputs: dict[str, Array], weights: PyTree
) -> PyTree:
    """The same results by the recurrent form in float32, from the same rounded inputs."""
    arguments = jax.tree.map(lambda x: x.astype(jnp.float32), (inputs, weights))
    return jax.jit(reference_function(name, task, shape))(*arguments)


def measure(
    name: str, form: str, shape: Shape, task: Task, arguments: PyTree, reference: PyTree, flags: Flags
) -> Row:
    """Compile, look at the memory, compare with the reference, then time."""
    row = Row(name, form, str(shape), task, flags.dtype)
    try:
        run = jax.jit(task_function(name, task, form, flags.chunk_size)).lower(*arguments).compile()
    except UnsupportedForm as error:
        return replace(row, note=f"not run: {error}")
    analysis: Any = run.memory_analysis()
    row = replace(row, temp_mb=analysis.temp_size_in_bytes / 1e6)
    if analysis.temp_size_in_bytes > flags.memory_limit * 1e9:
        return replace(row, note="not run: above --memory-limit")
    error, budget = worst_error(run(*arguments), reference), BUDGETS[flags.dtype]
    limit = budget.forward if task == "forward" else budget.backward
    if not error <= limit:
        return replace(row, error=error, note=f"{WRONG}: above {limit:g}")
    seconds = seconds_per_call(lambda: run(*arguments), jax.block_until_ready, flags.repeats)
    return timed(row, shape, error, seconds)


def timed(row: Row, shape: Shape, error: float, seconds: float) -> Row:
    """The row with its measurements."""
    rate = shape.batch * shape.time / seconds
    return replace(row, error=error, ms=seconds * 1e3, tokens_per_s=rate)


def render(rows: list[Row]) -> Table:
    """The whole table, for the terminal."""
    table = Table("cell", "form", "BxTxHxKxV", "task", "dtype", "error", "ms", "tokens/s", "temp MB", "")
    for row in rows:
        table.add_row(row.cell, row.form, row.shape, row.task, row.dtype, *numbers(row), row.note)
    return table


def numbers(row: Row) -> tuple[str, ...]:
    """The numbers of a row as text, empty where there is none."""
    values = ((row.error, ".1e"), (row.ms, ".2f"), (row.tokens_per_s, ".3g"), (row.temp_mb, ".0f"))
    return tuple("" if value is None else format(value, spec) for value, spec in values)


if __name__ == "__main__":
    sys.exit(main())
