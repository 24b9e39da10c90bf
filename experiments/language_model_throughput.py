"""Tokens a second, share of the peak and memory of training steps of language models on this machine.

`python -m experiments.language_model_throughput --model efla-340m deltanet-340m` measures whole steps (forward,
backward, optimizer) on random tokens, float32 master weights and moments under bfloat16 compute. Beside them stand
those of flash-linear-attention, where it is installed, in a process of its own with weights in bfloat16.
"""

import csv
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from tyro.conf import arg

from eflax.cells import UnsupportedForm
from eflax.models import LanguageModel, named_config
from eflax.models.language_model import Remat
from eflax.training.flops import count_parameters, peak_flops, training_flops_per_token
from eflax.training.sharding import check_batch, make_mesh, place_batch, sharded_state
from eflax.training.step import adamw, decay_mask, make_train_step
from eflax.training.token_loss import language_model_loss
from experiments.language_model_peers import PeerError, measure_fla
from experiments.throughput_peers import FLA


@dataclass(frozen=True)
class Flags:
    """Measure training steps of language models."""

    # Names of configurations, such as efla-340m.
    model: Annotated[tuple[str, ...], arg(metavar="NAME ...")] = ("efla-340m", "deltanet-340m")

    # Batches as SEQUENCESxTOKENS.
    shape: Annotated[tuple[str, ...], arg(metavar="BxT ...")] = ("16x2048",)

    # What the backward pass computes again, from fast to small.
    remat: tuple[Remat, ...] = ("products",)

    # The form of the recurrent cells; by default the fastest.
    form: Annotated[str | None, arg(metavar="FORM", help_behavior_hint="(default: the fastest)")] = None

    # Layers compiled side by side.
    unroll: int = 1

    # Tokens of each sequence whose logits are computed at once.
    loss_chunk: int = 128

    # Number of steps that are timed, after one that is not.
    steps: int = 20

    # Whose training step of the same models to time beside ours; none without a name. fla: flash-linear-attention.
    peer: tuple[Literal["fla"], ...] = (FLA,)

    # Seconds that a peer may take for a model, with trying and compiling its kernels.
    peer_limit: float = 300.0

    # The table; nothing is written by default.
    out: Annotated[Path | None, arg(metavar="FILE")] = None


@dataclass(frozen=True)
class Row:
    """One line of the table; what is not known is None or empty.

    `compile_s` of a peer are its first steps. `ours_over_theirs` is our best rate of tokens over that of the peer, on
    the same model and shape.
    """

    model: str
    peer: str
    shape: str
    remat: str = "none"
    form: str = "default"
    weights: str = "float32"
    parameters_M: float | None = None
    compile_s: float | None = None
    compiled_GiB: float | None = None
    ms: float | None = None
    tokens_per_s: int | None = None
    mfu: float | None = None
    peak_GiB_of_process: float | None = None
    loss: float | None = None
    ours_over_theirs: float | None = None
    versions: str = ""
    note: str = ""


def main(flags: Flags) -> int:
    """Measure all combinations; print a line for each, and write it, as soon as it is there. 2 for unusable flags."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # peers need memory of the same GPU
    rows: list[Row] = []
    try:
        for name, shape in product(flags.model, flags.shape):
            check_batch(sizes(shape)[0], 1, make_mesh())
            build = builder(name, shape, "none", flags)
            nnx.eval_shape(lambda build=build: build(rngs=nnx.Rngs(0)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, shape in product(flags.model, flags.shape):
        for remat in flags.remat:
            try:
                row = measure(name, shape, remat, flags)
            except UnsupportedForm as error:
                row = Row(name, "", shape, remat, flags.form or "default", note=f"not run: {error}")
            add(rows, row, flags.out)
            jax.clear_caches()
        best = max(
            (row.tokens_per_s or 0 for row in rows if (row.model, row.shape) == (name, shape)), default=0
        )
        for peer in flags.peer:
            add(rows, measure_peer(peer, name, shape, best, flags), flags.out)
    return 0


def add(rows: list[Row], row: Row, out: Path | None) -> None:
    """Add a row, print what it has, and write all rows."""
    rows.append(row)
    known = {key: value for key, value in asdict(row).items() if value not in (None, "")}
    print("  ".join(f"{key} {value}" for key, value in known.items()), flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("w", newline="") as stream:
            writer = csv.DictWriter(
                stream, fieldnames=[field.name for field in fields(Row)], lineterminator="\n"
            )
            writer.writeheader()
            writer.writerows(map(asdict, rows))


def sizes(shape: str) -> tuple[int, int]:
    """Return sequences and tokens of a shape. Raises ValueError."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape):
        raise ValueError(f"--shape {shape}: must be SEQUENCESxTOKENS, as 16x2048")
    batch_size, length = (int(size) for size in shape.split("x"))
    return batch_size, length


def builder(name: str, shape: str, remat: Remat, flags: Flags) -> Callable[..., LanguageModel]:
    """Return what builds the model, given rngs."""
    options = {"form": flags.form, "remat": remat, "unroll": flags.unroll, "max_length": sizes(shape)[1]}
    return partial(LanguageModel, named_config(name), dtype=jnp.bfloat16, **options)


def measure(name: str, shape: str, remat: Remat, flags: Flags) -> Row:
    """Return the row of one model, batch shape and remat policy; what does not fit says so and is not timed."""
    batch_size, length = sizes(shape)
    mesh = make_mesh()
    check_batch(batch_size, 1, mesh)
    build = builder(name, shape, remat, flags)
    optimizer = adamw(3e-4, b2=0.95, weight_decay=0.1, decayed=decay_mask)
    state, shardings = sharded_state(lambda: build(rngs=nnx.Rngs(0)), optimizer, mesh)
    model = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
    loss = partial(language_model_loss, chunk_size=flags.loss_chunk)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch_size, length + 1), np.int32)
    ones = np.ones((batch_size, length), np.float32)
    batch = place_batch({"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weight": ones}, mesh)
    began = time.perf_counter()
    with jax.set_mesh(mesh):  # kernels are cut as it says
        step = make_train_step(model, optimizer, loss, shardings=shardings).lower(state, batch).compile()  # type: ignore
    compiled, memory = time.perf_counter() - began, step.memory_analysis()
    row = Row(
        name,
        "",
        shape,
        remat,
        flags.form or "default",
        parameters_M=round(count_parameters(model) / 1e6, 1),
        compile_s=round(compiled, 1),
        compiled_GiB=gibibytes(memory.argument_size_in_bytes + memory.temp_size_in_bytes),
        versions=f"jax {jax.__version__}",
    )
    times, metrics = [], {}
    try:
        for _ in range(flags.steps + 1):
            began = time.perf_counter()
            state, metrics = step(state, batch)
            float(metrics["loss"])
            times.append(time.perf_counter() - began)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return replace(row, note="does not fit")
    used = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    row = replace(row, peak_GiB_of_process=gibibytes(used), loss=round(float(metrics["loss"]), 4))
    return timed(row, model, statistics.median(times[1:]))


def measure_peer(peer: str, name: str, shape: str, ours: int, flags: Flags) -> Row:
    """Return the row of a peer beside our best rate; what went wrong is its note."""
    row = Row(name, peer, shape, form="chunk", weights="bfloat16")
    model = nnx.eval_shape(lambda: builder(name, shape, "none", flags)(rngs=nnx.Rngs(0)))
    try:
        found = measure_fla(model, *sizes(shape), flags.steps, flags.peer_limit)
    except PeerError as error:
        return replace(row, note=f"not run: {error}")
    row = replace(
        row,
        parameters_M=round(found["parameters"] / 1e6, 1),
        compile_s=round(found["warm_up"], 1),
        peak_GiB_of_process=gibibytes(found["peak_bytes"]),
        loss=round(found["loss"], 4),
        versions=found["versions"],
    )
    row = timed(row, model, found["seconds"])
    return replace(
        row, ours_over_theirs=round(ours / row.tokens_per_s, 3) if ours and row.tokens_per_s else None
    )


def timed(row: Row, model: LanguageModel, seconds: float) -> Row:
    """Return the row with the time of a step and what follows from it."""
    batch_size, length = sizes(row.shape)
    rate, peak = batch_size * length / seconds, peak_flops()
    share = rate * training_flops_per_token(model, length) / (peak * jax.device_count()) if peak else None
    return replace(
        row,
        ms=round(1e3 * seconds, 2),
        tokens_per_s=round(rate),
        mfu=None if share is None else round(share, 4),
    )


def gibibytes(size: int | None) -> float | None:
    """Return a size in GiB, as the table has it."""
    return None if size is None else round(size / 2**30, 2)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Flags, prog="python -m experiments.language_model_throughput")))
