"""State tracking: train on short sequences, test on longer ones (Recurrent Looped Transformer, arXiv 2610.07591).

`python -m experiments.state_tracking` needs no flag and no network; `--help` tells the rest.
"""

import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":  # Ctrl-C ends the imports without a traceback; later StopRequest takes over
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import jax
import jax.numpy as jnp
from rich.console import Console

from eflax.data.algorithmic_tasks import TASKS
from eflax.training import TRAINING, RunFolder, StopRequest, Trainer
from experiments import command
from experiments.command import FlagError, run_command
from experiments.state_tracking_flags import PRECISIONS, Flags, Plan, make_plan
from experiments.state_tracking_models import build_model
from experiments.state_tracking_report import write_report
from experiments.state_tracking_run import Run, logits_of

EXPERIMENT = "state_tracking"
NOT_SAVED = (*command.NOT_SAVED, "lengths", "eval_only")
POINT = {"seed": "a whole number", "final": "a number", "sequence": "a number", "token": "a number"}
RECORDS = TRAINING | {
    "length": {"length": "a positive whole number", "count": "a positive whole number", **POINT},
    "diverged_at": {"diverged_at": "a positive whole number"},
    "validation": {"validation": "a positive whole number", "best_step": "a whole number", **POINT},
    "parameters": {"parameters": "a positive whole number"},
    "diverged": {"diverged": "text", "seed": "a whole number"},
}


def main(args: Sequence[str] | None = None) -> int:
    """Run the experiment; `args` are the command-line flags. Returns the exit code."""
    args = list(sys.argv[1:] if args is None else args)
    if args[:1] == ["generate"]:
        from experiments.state_tracking_generate import main as generate

        return generate(args[1:])
    if args[:1] == ["time"]:
        from experiments.state_tracking_time import main as timing

        return timing(args[1:])
    return run_command(EXPERIMENT, lambda: parse_flags(args), run)


def parse_flags(args: Sequence[str] | None = None) -> Flags:
    """Return the flags of the command line; with --resume, those of the run that it continues, changed by it."""
    return command.parse_flags(Flags, EXPERIMENT, args, read_flags)


def read_flags(folder: Path) -> Flags:
    """Return the flags of the run in a folder. Raises RunFolderError where there is none."""
    return command.read_flags(Flags, EXPERIMENT, folder, make_plan, NOT_SAVED)


def run(flags: Flags, out: Path, console: Console) -> int:
    """Train and evaluate all that the flags ask for, as far as it is not done, and write the report."""
    with StopRequest() as stop, jax.default_matmul_precision(PRECISIONS[flags.precision]):
        plan = make_plan(flags)
        check_models(flags, plan, stop)
        config = {"experiment": EXPERIMENT, **command.saved_flags(flags, NOT_SAVED), "plan": asdict(plan)}
        with RunFolder(out, config, flags.resume is not None, RECORDS) as folder:
            console.print(
                f"{plan.task}: {len(plan.arms)} models, seeds {', '.join(map(str, plan.seeds))}, "
                f"{plan.steps} steps of {plan.batch_size}; results in {out}"
            )
            trainer = Trainer(
                folder, stop, plan.steps, flags.checkpoint_every, validate_every=flags.validate_every
            )
            diverged = []
            for arm in plan.arms:
                diverged += Run(arm, flags, plan, trainer).run()
                write_report(folder, plan, console)  # what is done can be read while the next model trains
            console.print(f"Figures, tables, metrics and checkpoints: {out}")
    for error in diverged:
        print(f"error: {error}", file=sys.stderr)
    return 1 if diverged else 0


def check_models(flags: Flags, plan: Plan, stop: StopRequest) -> None:
    """Trace every model on abstract tokens, so that what cannot run is told before anything does."""
    tokens = jax.ShapeDtypeStruct((1, TASKS[plan.task].num_tokens(8)), jnp.int32)
    for arm in plan.arms:
        try:
            jax.eval_shape(lambda x, arm=arm: logits_of(flags)(build_model(arm, plan.sizes, 0), x), tokens)
        except (ValueError, TypeError) as error:
            raise FlagError(f"--model {arm.name}: {error}") from error
        stop.check()


if __name__ == "__main__":
    command.leave(main())
