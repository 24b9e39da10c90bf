"""Tokens a second, share of the peak and memory of training steps of language models on this machine.

`python -m experiments.language_model_throughput --model efla-340m deltanet-340m` measures whole steps (forward,
backward, optimizer) on random tokens, float32 master weights and moments under bfloat16 compute.
"""

import csv
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from tyro.conf import arg

from eflax.models import LanguageModel, named_config
from eflax.models.language_model import Remat
from eflax.training.flops import count_parameters, peak_flops, training_flops_per_token
from eflax.training.sharding import check_batch, make_mesh, place_batch, sharded_state
from eflax.training.step import adamw, decay_mask, make_train_step
from eflax.training.token_loss import language_model_loss

MEASURED = ("ms", "tokens_per_s", "mfu", "peak_GiB_of_process", "loss")


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

    # The table; nothing is written by default.
    out: Annotated[Path | None, arg(metavar="FILE")] = None


def main(flags: Flags) -> int:
    """Measure all combinations and print a line for each."""
    rows = []
    for name in flags.model:
        for shape in flags.shape:
            for remat in flags.remat:
                rows.append(measure(name, shape, remat, flags))
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
                jax.clear_caches()
    if flags.out is not None:
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        with flags.out.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, fieldnames=list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return 0


def measure(name: str, shape: str, remat: Remat, flags: Flags) -> dict[str, object]:
    """Return the row of one model, batch shape and remat policy; what does not fit says so and is not timed."""
    batch_size, length = (int(size) for size in shape.split("x"))
    mesh = make_mesh()
    check_batch(batch_size, 1, mesh)
    options = {"form": flags.form, "remat": remat, "unroll": flags.unroll, "max_length": length}
    build = partial(LanguageModel, named_config(name), dtype=jnp.bfloat16, **options)
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
    compiled = time.perf_counter() - began
    memory = step.memory_analysis()
    row: dict[str, object] = {
        "model": name,
        "shape": shape,
        "remat": remat,
        "form": flags.form or "default",
        "parameters_M": round(count_parameters(model) / 1e6, 1),
        "compile_s": round(compiled, 1),
        "compiled_GiB": round((memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**30, 2),
    }
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
        return row | dict.fromkeys(MEASURED) | {"loss": "does not fit"}
    seconds = statistics.median(times[1:])
    per_token, peak = training_flops_per_token(model, length), peak_flops()
    rate = batch_size * length / seconds
    used = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    measured = (
        round(1e3 * seconds, 2),
        round(rate),
        round(rate * per_token / (peak * jax.device_count()), 4) if peak else None,
        round(used / 2**30, 2) if used else None,
        round(float(metrics["loss"]), 4),
    )
    return row | dict(zip(MEASURED, measured, strict=True))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Flags)))
