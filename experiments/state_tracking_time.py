"""Time the train step of the state-tracking models: `python -m experiments.state_tracking time --help`."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import median
from typing import Annotated, Any

import jax
import tyro
from flax import nnx
from rich.console import Console
from rich.table import Column, Table
from tyro.conf import arg

from eflax.data.algorithmic_tasks import TASKS
from experiments.command import FlagError
from experiments.state_tracking_flags import PRECISIONS, Flags, Plan, Precision, TaskName, make_plan
from experiments.state_tracking_models import (
    Arm,
    build_model,
    forward,
    make_step,
    num_parameters,
    optimizer,
    start,
)


@dataclass(frozen=True)
class TimeFlags:
    """Time the train step, all seeds together, of every combination of model, precision and unrolling.

    The sizes are the paper's. Making data is not timed; the first step, which compiles, has its own column.
    """

    # What to learn; it decides the length.
    task: TaskName = "swaps"

    # Models, as in the experiment.
    model: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ("rlt1:4+4", "gpt:8")

    # Precisions of matrix products.
    precision: tuple[Precision, ...] = ("float32", "bf16x3", "tf32")

    # Decoder steps in one iteration of the compiled loop.
    unroll: Annotated[tuple[int, ...], arg(metavar="N ...")] = (1,)

    # Recompute the decoder in the backward pass.
    remat: bool = False

    # Seeds, trained side by side.
    seeds: Annotated[tuple[int, ...], arg(metavar="N ...")] = (42, 43, 44)

    # Examples in a batch.
    batch_size: Annotated[int, arg(metavar="N")] = 512

    # Width of the residual stream.
    width: Annotated[int, arg(metavar="N")] = 512

    # Steps that are timed, each.
    steps: Annotated[int, arg(metavar="N")] = 20


@dataclass
class Timing:
    """What was measured of one combination, in seconds and GB."""

    compile: float
    steps: list[float] = field(default_factory=list)
    memory: float | None = None


def main(args: Sequence[str] | None = None) -> int:
    """Time what the flags ask for and print a table. Returns the exit code."""
    flags = tyro.cli(TimeFlags, args=args, prog="python -m experiments.state_tracking time")
    console = Console(highlight=False)
    try:
        return run(flags, console)
    except FlagError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def run(flags: TimeFlags, console: Console) -> int:
    """Print a row as soon as it is measured, and all of them at the end."""
    shared: dict[str, Any] = {
        "task": flags.task,
        "model": flags.model,
        "seeds": flags.seeds,
        "steps": flags.steps,
    }
    plan = make_plan(Flags(**shared, batch_size=flags.batch_size, width=flags.width))
    device = jax.devices()[0].device_kind
    table = Table(
        Column("model", no_wrap=True),
        "parameters",
        "precision",
        "unroll",
        "s/step",
        "least",
        "compile s",
        "GB",
    )
    table.title = f"{flags.task}: {len(plan.seeds)} seeds, {plan.batch_size} sequences, on {device}"
    for arm, precision, unroll in product(plan.arms, flags.precision, flags.unroll):
        count, timing = measure(arm, plan, precision, unroll, flags.remat)
        row = [
            arm.name,
            f"{count:,}",
            precision,
            str(unroll),
            f"{median(timing.steps):.4f}",
            f"{min(timing.steps):.4f}",
        ]
        row += [f"{timing.compile:.1f}", "-" if timing.memory is None else f"{timing.memory:.1f}"]
        console.print("  ".join(row), soft_wrap=True)
        table.add_row(*row)
    console.print(table)
    return 0


def measure(arm: Arm, plan: Plan, precision: str, unroll: int, remat: bool) -> tuple[int, Timing]:
    """Return the parameters of one model, and the times of its train step.

    The memory is the peak of the process on its device so far, where the device tells it.
    """
    with jax.default_matmul_precision(PRECISIONS[precision]):
        update = optimizer(plan.lr, plan.steps, plan.sizes.width)
        model = nnx.eval_shape(lambda: build_model(arm, plan.sizes, 0))
        step = make_step(model, update, forward(unroll=unroll, remat=remat), plan.seeds)
        state = start(arm, plan.sizes, plan.seeds, update)
        count = num_parameters(state.params, len(plan.seeds))
        batches = TASKS[plan.task].batches(plan.batch_size)
        timing = Timing(0.0)
        for index in range(plan.steps + 1):
            batch = jax.device_put(next(batches))
            before = time.perf_counter()
            state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
            elapsed = time.perf_counter() - before
            if index == 0:
                timing.compile = elapsed
            else:
                timing.steps.append(elapsed)
    statistics = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        timing.memory = statistics["peak_bytes_in_use"] / 1e9
    return count, timing
