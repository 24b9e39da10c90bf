"""Validation of a language model in training."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import PyTree
from rich.console import Console

from eflax.data.packing import Windows
from eflax.data.text_cache import TokenStore
from eflax.training import Checkpoints, RunFolder
from eflax.training.processes import from_first
from eflax.training.sharding import own_rows, place_batch
from eflax.training.step import TrainState
from eflax.training.token_loss import language_model_loss
from experiments.language_model_flags import Plan

RUN = "model"


class Validation:
    """Validates on each source, prints its loss, and keeps the parameters of the lowest mean in an own checkpoint."""

    def __init__(
        self,
        model: nnx.Module,
        stores: Sequence[TokenStore],
        plan: Plan,
        mesh: Mesh,
        folder: RunFolder,
        console: Console,
        *,
        separate: bool,
    ) -> None:
        self.stores, self.plan, self.mesh, self.folder, self.separate = stores, plan, mesh, folder, separate
        self.console = console
        self.best = Checkpoints(folder.path / "checkpoints" / f"{RUN}-best", keep=1)
        graph = nnx.graphdef(model)

        def sums(params: PyTree, rest: PyTree, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            _, metrics = language_model_loss(nnx.merge(graph, params, rest), batch)
            return metrics["nll"] * metrics["tokens"], metrics["tokens"]

        self.sums = jax.jit(sums)

    def __call__(self, step: int, state: TrainState) -> tuple[TrainState, list[dict[str, Any]]]:
        """Return the state as it is, and a record for each source."""
        records = []
        for store in self.stores:
            nll, tokens = self.score(store, state)
            records.append({"validation": self.label(store), "nll": nll / tokens, "tokens": tokens})
            told = f"step {step}: loss {nll / tokens:.4g} on {records[-1]['validation']}"
            self.console.print(told, markup=False, highlight=False, soft_wrap=True)
        mean = sum(record["nll"] for record in records) / len(records)
        known = [record["mean_nll"] for record in self.folder.records() if "mean_nll" in record]
        better = from_first(mean < min(known, default=math.inf))  # which alone has the records
        if better and (self.best.latest_step() or -1) < step:
            self.best.save(step, state.params, validation=mean)
        return state, [*records, {"mean_nll": mean}]

    def label(self, store: TokenStore) -> str:
        """Return what records call a source: its file, and where two are called the same, its path."""
        name = Path(store.name).name
        return store.name if sum(Path(other.name).name == name for other in self.stores) > 1 else name

    def score(self, store: TokenStore, state: TrainState) -> tuple[float, float]:
        """Return the summed nll of a store, and the number of tokens that were predicted."""
        windows = Windows(store, self.plan.length, separate=self.separate, remainder=True)
        size, nll, tokens = self.plan.batch_size // self.plan.accumulate, 0.0, 0.0
        mine = own_rows(size, self.mesh)
        for first in range(0, len(windows), size):
            rows = [windows[first + row] if first + row < len(windows) else None for row in mine]
            empty = {name: np.zeros_like(array) for name, array in windows[first].items()}
            batch = {name: np.stack([(row or empty)[name] for row in rows]) for name in empty}
            found = self.sums(state.params, state.rest, place_batch(batch, self.mesh))
            nll, tokens = nll + float(found[0]), tokens + float(found[1])
        return nll, tokens

    def close(self) -> None:
        """Release the checkpoints."""
        self.best.close()
