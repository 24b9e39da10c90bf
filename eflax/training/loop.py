"""The training loop: steps, metrics, progress, checkpoints, a clean stop, a resume that changes nothing."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import grain
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from eflax.progress import Progress
from eflax.training.checkpoint import Checkpoints
from eflax.training.interrupt import StopRequest
from eflax.training.run_folder import WAY_OUT, Record, RunFolder, RunFolderError
from eflax.training.step import Metrics


@runtime_checkable
class Trained(Protocol):
    """What is trained: a tree of arrays that can say which of them are parameters, such as a `TrainState`."""

    @property
    def params(self) -> PyTree:
        """The parameters."""
        ...


type Step[State] = Callable[[State, Any], tuple[State, Metrics]]
type Validate[State] = Callable[[int, State], tuple[State, list[Record]]]
type Divergences[State] = Callable[[State], list[Record]]


class Diverged(ArithmeticError):
    """The loss, the gradient or a parameter is no longer finite; the last checkpoint before that is kept.

    Attributes:
        step: the first at which that was seen.
    """

    def __init__(self, what: str, step: int) -> None:
        super().__init__(
            f"diverged at step {step}: {what}; lower the learning rate (the last good checkpoint is kept)"
        )
        self.step = step


@dataclass(frozen=True)
class Trainer:
    """How and where to train.

    Attributes:
        folder: receives the metrics and, below `checkpoints/`, the checkpoints.
        stop: asked after every step whether to save and stop.
        steps: number of optimizer steps in all.
        checkpoint_every: steps between checkpoints; one is also written at the start, at the end, at a stop.
        log_every: steps between writes to metrics.jsonl, which also are the points where the loss is looked
            at (asking more often would keep an accelerator waiting).
        validate_every: steps between validations, where there are any; the last step has one, too.
        rates: maps steps a second to what is shown and put into metrics.jsonl with the last step of each write, such
            as tokens a second. Steps that had to wait for compilation, validation or a checkpoint do not count.
        loss_limit: a larger loss counts as divergence.
        asynchronous: go on while a checkpoint is being written.
        record_every: of so many steps only the last leaves a record: long trainings are logged more thinly.
    """

    folder: RunFolder
    stop: StopRequest
    steps: int
    checkpoint_every: int = 50
    log_every: int = 10
    validate_every: int = 100
    rates: Callable[[float], dict[str, float]] | None = None
    loss_limit: float = math.inf
    asynchronous: bool = False
    record_every: int = 1

    def train[State: Trained](
        self,
        name: str,
        state: State,
        train_step: Step[State],
        batches: grain.DatasetIterator,
        validate: Validate[State] | None = None,
        finished: Callable[[State], bool] = lambda _: False,
        diverged: Divergences[State] = lambda _: [],
        label: str | None = None,
    ) -> State:
        """Train to the last step, from the newest checkpoint of `name` in the folder if there is one.

        Every step leaves a record {"run": name, "step": 1, 2, …, "loss", …, "time"} in the metrics, or every
        ``record_every``-th. A continued run sees the same batches and ends with the same parameters as one that was
        never stopped; records newer than the checkpoint are dropped first, so none is there twice.

        Args:
            name: of this training within the folder.
            state: the initial state; its buffers are given away.
            train_step: maps (state, batch) to (state, metrics), see `make_train_step`. Of several trainings in one
                state "running" is the number that took the step; where none did there is no loss to judge.
            batches: at its first batch.
            validate: maps (step, state) to the state to go on with, which may keep what it found, and to what
                becomes records {"run": name, "step": …, …} in the metrics, without a "loss".
            finished: whether a state needs no further step; asked every `log_every` steps and after validations.
            diverged: those of several trainings in one state that stand still since they diverged, see `divergences`;
                each becomes a record in the metrics and is told. The loss is that of the others.
            label: what the progress display calls it; by default "train" and the name.

        Raises:
            Interrupted: `stop` was requested; a checkpoint was written.
            Diverged: a loss or gradient norm was NaN or infinite.
            CheckpointError: the newest checkpoint cannot be used.
            RunFolderError: metrics.jsonl lacks steps that the newest checkpoint has behind it, or has steps, and there
                is no checkpoint.
        """
        checkpoints = Checkpoints(self.folder.path / "checkpoints" / name, asynchronous=self.asynchronous)
        try:
            step = checkpoints.latest_step()
            if step is None:
                step = 0
                self._check_begins(name)
                checkpoints.save(step, state, batches=batches.get_state())
            else:
                state, meta = checkpoints.restore(state)
                batches.set_state(meta["batches"])
                self._check_history(name, step)
            looked = self._looks(step, validate is not None)
            if step < self.steps and not (looked and finished(state)):
                self.folder.keep(lambda record: record.get("run") != name or record["step"] <= step)
                with Progress(label or f"train {name}", self.steps, step) as progress:
                    tools = progress, checkpoints, validate, finished, diverged
                    state = self._advance(name, step, state, train_step, batches, *tools)
            return state
        finally:
            checkpoints.close()

    def _validates(self, step: int) -> bool:
        return step % self.validate_every == 0 or step == self.steps

    def _looks(self, step: int, validated: bool) -> bool:
        """Whether the state is looked at after this step, wherever a training was stopped and resumed."""
        return step % self.log_every == 0 or (validated and self._validates(step))

    def _logged(self, name: str) -> list[int]:
        records = self.folder.records() if self.folder.leads else []
        return [record["step"] for record in records if record.get("run") == name and "time" in record]

    def _check_begins(self, name: str) -> None:
        if logged := self._logged(name):
            raise RunFolderError(
                f"{self.folder.path}: metrics.jsonl has {name} up to step {logged[-1]}, and its checkpoints are gone; "
                f"bring them back, or take its lines out of metrics.jsonl to train it anew"
            )

    def _check_history(self, name: str, step: int) -> None:
        if not self.folder.leads:
            return
        logged = [logged for logged in self._logged(name) if logged <= step]
        if logged != list(range(self.record_every, step + 1, self.record_every)):
            raise RunFolderError(
                f"{self.folder.path}: metrics.jsonl has the loss of {len(logged)} steps of {name}, whose "
                f"checkpoint is of step {step}; {WAY_OUT}"
            )

    def _advance[State: Trained](
        self,
        name: str,
        step: int,
        state: State,
        train_step: Step[State],
        batches: grain.DatasetIterator,
        progress: Progress,
        checkpoints: Checkpoints,
        validate: Validate[State] | None,
        finished: Callable[[State], bool],
        diverged: Divergences[State],
    ) -> State:
        pending: list[tuple[int, Metrics]] = []
        told = diverged(state)
        clock = _Clock(self.rates)
        while step < self.steps:
            state, metrics = train_step(state, next(batches))
            step += 1
            pending.append((step, metrics))
            # Several processes must stop at the same step, and asking them is not free.
            ask = jax.process_count() == 1 or step % self.log_every == 0
            stopping = ask and self.stop.agree()
            save = stopping or step % self.checkpoint_every == 0 or step == self.steps
            due = validate is not None and self._validates(step)
            looks = self._looks(step, due)
            if save or looks:
                records = _to_records(name, pending, self.loss_limit)
                records[-1] |= (rates := clock.read(len(records)))
                self.folder.append(record for record in records if record["step"] % self.record_every == 0)
                pending.clear()
                loss = {key: value for key, value in records[-1].items() if key == "loss"}
                progress.advance(len(records), **loss, **rates)
                lost = [record for record in diverged(state) if record not in told]
                self.folder.append({"run": name, **record} for record in lost)
                for record in lost:
                    progress.tell(f"{name}: {record['diverged']}")
                told += lost
            if validate is not None and due:
                state, found = validate(step, state)
                self.folder.append({"run": name, "step": step, **record} for record in found)
            over = looks and finished(state)
            if save or over:
                _check_params(state.params, step)
                checkpoints.save(step, state, batches=batches.get_state())
            if over:
                break
            if stopping:
                self.stop.check()
            if save or due:
                clock.restart()
        return state


class _Clock:
    """Measures steps a second from one look at the metrics, which waits for the device, to the next."""

    def __init__(self, rates: Callable[[float], dict[str, float]] | None) -> None:
        self._rates = rates
        self._since: float | None = None  # the first steps wait for compilation

    def restart(self) -> None:
        """Leave out what was done besides steps."""
        self._since = None if self._since is None else time.monotonic()

    def read(self, steps: int) -> dict[str, float]:
        """Return the rates of the steps since the last call."""
        before, self._since = self._since, time.monotonic()
        return {} if before is None or self._rates is None else self._rates(steps / (self._since - before))


def _to_records(name: str, pending: list[tuple[int, Metrics]], loss_limit: float) -> list[Record]:
    now = round(time.time(), 3)
    records = []
    for step, metrics in pending:
        values = {key: float(value) for key, value in metrics.items()}
        for key in ("loss", "grad_norm") if values.get("running", 1) else ():
            if not math.isfinite(values[key]):
                raise Diverged(f"{key} is {values[key]}", step)
        if values["loss"] > loss_limit:
            raise Diverged(f"loss is {values['loss']:.4g}, above {loss_limit:.4g}", step)
        # What is not finite now is of a training beside others, which has diverged.
        finite = {key: value for key, value in values.items() if math.isfinite(value)}
        records.append({"run": name, "step": step, **finite, "time": now})
    return records


def _check_params(params: PyTree, step: int) -> None:
    if not all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params)):
        raise Diverged("a parameter is not finite", step)
