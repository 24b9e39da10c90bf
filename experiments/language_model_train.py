"""Training of a language model: from flags to a folder with metrics and checkpoints."""

import math
import os
from collections.abc import Sequence
from contextlib import ExitStack, closing, redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

from eflax.cells import UnsupportedForm
from eflax.data import DataError
from eflax.data.packing import Windows, text_batches
from eflax.data.text_cache import TokenStore, load_tokens
from eflax.data.tokenizers import Tokenizer, load_tokenizer
from eflax.models import LanguageModel
from eflax.training import TRAINING, Diverged, RunFolder, StopRequest, Trainer, adamw
from eflax.training.events import EventFiles
from eflax.training.flops import count_parameters, peak_flops, training_flops_per_token
from eflax.training.processes import first_goes_first, join_processes, leads
from eflax.training.schedule import warmup_cosine
from eflax.training.sharding import check_batch, make_mesh, own_rows, place_batch, sharded_state
from eflax.training.step import TrainState, decay_mask, make_train_step
from eflax.training.token_loss import language_model_loss
from experiments import command
from experiments.command import FlagError
from experiments.language_model_flags import Flags, Plan, make_plan, resolve
from experiments.language_model_validation import RUN, Validation

EXPERIMENT, EVENTS, TOKENIZER_PRINT = "language_model", "events", "tokenizer_fingerprint"
NOT_SAVED = (
    *command.NOT_SAVED,
    "dry_run",
    "cache",
    "fsdp",
    "tensor",
    "form",
    "remat",
    "unroll",
    "accumulate",
    "coordinator",
    "process",
    "processes",
    "tensorboard",
)
RECORDS = TRAINING | {
    "validation": {"validation": "text", "nll": "a number", "tokens": "a number"},
    "diverged": {"diverged": "text"},
}


def main(args: Sequence[str]) -> int:
    """Train; `args` are the command-line flags. Returns the exit code."""
    parse = partial(command.parse_flags, Flags, f"{EXPERIMENT} train", args, read_flags)
    return command.run_command(EXPERIMENT, parse, run)


def read_flags(folder: Path) -> Flags:
    """Return the flags of the run in a folder. Raises RunFolderError where there is none."""
    return command.read_flags(Flags, EXPERIMENT, folder, make_plan, NOT_SAVED)


def run(flags: Flags, out: Path, console: Console) -> int:
    """Train as the flags say, or tell what would be done."""
    if flags.coordinator is not None and flags.out is None and flags.resume is None:
        raise FlagError("--out: all processes write into one folder; give its path to each")
    try:
        join_processes(flags.coordinator, flags.process, flags.processes)
        written = flags.resume is not None and (out / EVENTS).is_dir()
        events = EventFiles(out / EVENTS) if flags.tensorboard or written else None
    except (ValueError, ImportError) as error:
        raise FlagError(str(error)) from error
    with StopRequest() as stop, ExitStack() as stack:
        if not leads():
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        with first_goes_first("data"):
            training = Training(flags, console)
        if flags.dry_run:
            training.tell_costs()
            return 0
        stop.check()
        with RunFolder(out, training.run_config(), flags.resume is not None, RECORDS) as folder:
            console.print(f"Metrics and checkpoints: {out}")
            if events is not None:
                folder.listener = stack.enter_context(closing(events)).write
            with jax.set_mesh(training.mesh):  # kernels are cut as it says
                code = training.train(folder, stop)
            if code == 0:
                way_on = f"Next: python -m experiments.{EXPERIMENT} generate {out}, or eval"
                console.print(way_on, soft_wrap=True)
            return code


class Training:
    """Everything that is known before the first step; raises FlagError where something does not fit."""

    def __init__(self, flags: Flags, console: Console) -> None:
        self.flags, self.console = flags, console
        make_plan(flags)  # before the data, which may take long
        self.tokenizer, self.stores, self.validation = self.load_data()
        self.plan = plan = make_plan(flags, self.tokenizer.vocab_size)
        try:
            self.mesh = make_mesh(flags.fsdp, flags.tensor)
            check_batch(plan.batch_size, plan.accumulate, self.mesh)
            self.build = partial(build_model, flags, plan)
            self.model = nnx.eval_shape(self.build)
            tokens = jax.ShapeDtypeStruct((1, plan.length), jnp.int32)
            jax.eval_shape(lambda tokens: self.build().hidden(tokens), tokens)
        except UnsupportedForm as error:
            raise FlagError(f"--form {flags.form}: {error}") from error
        except ValueError as error:
            raise FlagError(str(error)) from error
        self.schedule = warmup_cosine(
            plan.lr, start=plan.lr_end, end=plan.lr_end, warmup_steps=plan.warmup_steps, steps=plan.steps
        )
        decay = flags.weight_decay
        self.optimizer = adamw(self.schedule, b1=0.9, b2=0.95, weight_decay=decay, decayed=decay_mask)

    def load_data(self) -> tuple[Tokenizer, list[TokenStore], list[TokenStore]]:
        """Return the tokenizer, and the tokens of the sources to train and to validate on."""
        flags, plan = self.flags, make_plan(self.flags)
        try:
            tokenizer = load_tokenizer(plan.tokenizer, flags.cache)
            load = partial(load_tokens, tokenizer=tokenizer, cache=flags.cache, field=flags.field)
            stores = [load(source, max_tokens=flags.max_tokens) for source in plan.data]
            validation = [load(source) for source in flags.validation]
            separate = flags.documents == "separate"
            for store in stores:
                Windows(store, plan.length, separate=separate)
            for store in validation:
                Windows(store, plan.length, separate=separate, remainder=True)
        except (DataError, OSError) as error:
            raise FlagError(f"--data, --validation or --tokenizer: {error}") from error
        return tokenizer, stores, validation

    def run_config(self) -> dict[str, Any]:
        """Return what identifies the run, which how it is computed does not."""
        prints = [store.fingerprint for store in (*self.stores, *self.validation)]
        saved = command.saved_flags(resolve(self.flags), NOT_SAVED)
        plan = {name: value for name, value in asdict(self.plan).items() if name not in NOT_SAVED}
        prints = {TOKENIZER_PRINT: self.tokenizer.fingerprint, "data_fingerprints": prints}
        return {"experiment": EXPERIMENT, **saved, "plan": plan, **prints}

    def start(self) -> tuple[TrainState, Any]:
        """Return the initial state on the mesh, and the train step."""
        state, shardings = sharded_state(self.build, self.optimizer, self.mesh)
        loss = partial(language_model_loss, z_loss=self.flags.z_loss)
        options = {"accumulate": self.plan.accumulate, "shardings": shardings, "learning_rate": self.schedule}
        return state, make_train_step(self.model, self.optimizer, loss, **options)

    def train(self, folder: RunFolder, stop: StopRequest) -> int:
        """Train to the end; returns the exit code."""
        flags, plan = self.flags, self.plan
        trainer = Trainer(
            folder,
            stop,
            plan.steps,
            flags.checkpoint_every,
            flags.log_every,
            flags.validate_every,
            rates=self.rates,
            loss_limit=3 * math.log(plan.config.vocab_size),
            asynchronous=True,
        )
        state, step = self.start()
        separate = flags.documents == "separate"
        batches = text_batches(
            self.stores,
            plan.length,
            plan.batch_size,
            flags.seed,
            weights=flags.weights or None,
            separate=separate,
            rows=own_rows(plan.batch_size, self.mesh, plan.accumulate),
        )

        def place_and_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
            return step(state, place_batch(batch, self.mesh, plan.accumulate))

        validation = Validation(
            self.model, self.validation, plan, self.mesh, folder, self.console, separate=separate
        )
        try:
            trainer.train(RUN, state, place_and_step, batches, validation if self.validation else None)
        except Diverged as error:
            folder.append([{"run": RUN, "step": error.step, "diverged": str(error)}])
            self.console.print(f"error: {error}")
            return 1
        finally:
            validation.close()
        return 0

    def rates(self, steps_per_second: float) -> dict[str, float]:
        """Return tokens a second and, where the device's peak is known, the share of it that is used."""
        tokens = steps_per_second * self.plan.batch_size * self.plan.length
        rates = {"tokens_per_s": round(tokens, 1)}
        if peak := peak_flops():
            used = tokens * training_flops_per_token(self.model, self.plan.length)
            rates["mfu"] = round(used / (peak * self.mesh.size), 4)
        return rates

    def tell_costs(self) -> None:
        """Print what the training would take, and compile its step."""
        plan, say = self.plan, self.console.print
        count = count_parameters(self.model)
        tokens = sum(len(store.tokens) for store in self.stores)
        say(
            f"{count:,} parameters, {plan.steps:,} steps of {plan.batch_size} sequences of {plan.length} tokens"
        )
        say(f"{plan.steps * plan.batch_size * plan.length / tokens:.2f} epochs of {tokens:,} tokens")
        flops = training_flops_per_token(self.model, plan.length) * plan.batch_size * plan.length
        say(f"{flops:.3g} operations a step, {flops * plan.steps:.3g} in all")
        state, step = self.start()
        names = ("tokens", "targets", "segment_ids")
        shape = len(own_rows(plan.batch_size, self.mesh, plan.accumulate)), plan.length
        rows = {name: np.zeros(shape, np.int32) for name in names} | {"weight": np.ones(shape, np.float32)}
        batch = place_batch(rows, self.mesh, plan.accumulate)
        memory = step.lower(state, batch).compile().memory_analysis()
        arguments, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        say(
            f"memory of a device: {arguments / 2**30:.2f} GiB of state and batch, {temporary / 2**30:.2f} GiB more"
        )


def build_model(flags: Flags, plan: Plan, max_length: int | None = None) -> LanguageModel:
    """Return the model at its initial parameters; `max_length` is that of softmax attention, by default a sequence."""
    return LanguageModel(
        plan.config,
        dtype=jnp.dtype(plan.dtype).type,
        form=flags.form,
        chunk_size=flags.chunk_size,
        max_length=plan.length if max_length is None else max_length,
        remat=plan.remat,
        unroll=plan.unroll,
        rngs=nnx.Rngs(flags.seed),
    )
