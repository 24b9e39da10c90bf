"""Compile a whole training step of a language model for TPUs that need not be there, and tell whether it fits.

`python -m experiments.language_model_compile` writes the table of the 340M model on eight chips. Needs the extra `tpu`.
"""

import os
import sys

# Before libtpu is loaded: no TPU is asked for, and others may use the library too.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.update(
    TPU_SKIP_MDS_QUERY="1",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE="v5litepod-8",
)

import re
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from jax.experimental import topologies
from rich.console import Console

from eflax.models import LanguageModel, named_config
from eflax.training import adamw, initial_state, make_train_step
from eflax.training.sharding import batch_sharding, make_mesh, state_shardings
from eflax.training.step import decay_mask
from eflax.training.token_loss import language_model_loss
from experiments import kernel_table

TABLE = Path(__file__).parent / "results" / "kernels" / "tpu-train-steps.csv"
MEMORY = {"v5e": 16, "v6e": 32}  # GiB of a chip


@dataclass(frozen=True)
class Flags:
    """Compile the training step of a language model for eight TPU chips."""

    # Named configurations.
    model: tuple[str, ...] = ("efla-340m",)

    # Devices of the axes data, fsdp and tensor, as 2x2x2.
    mesh: tuple[str, ...] = ("4x1x2",)

    # Sequences of a batch and their length, as 32x2048.
    shape: str = "64x2048"

    # What the backward pass keeps: as --remat of language_model.
    remat: str = "products"

    # Where the table goes.
    out: Path = TABLE


@dataclass(frozen=True)
class Row:
    """One compiled step."""

    tpu: str
    model: str
    mesh: str
    shape: str
    remat: str
    arguments: float = 0.0  # GiB a chip: parameters, moments, batch
    temporaries: float = 0.0  # GiB a chip
    memory: int = 0  # GiB that a chip has
    kernels: int = 0  # calls of TPU kernels in the program
    all_gathers: int = 0
    all_reduces: int = 0
    seconds: float = 0.0  # to trace, lower and compile

    @property
    def key(self) -> tuple:
        """What tells steps apart."""
        return self.tpu, self.model, self.mesh, self.shape, self.remat


def main(flags: Flags) -> int:
    """Compile all, print and write the table; 1 where a step does not fit, 2 where nothing can be compiled."""
    rows = []
    for tpu in MEMORY:
        try:
            devices = topologies.get_topology_desc(f"{tpu}:2x4", platform="tpu").devices
        except Exception as error:  # without libtpu JAX raises errors of several types
            print(
                f"error: the compiler for TPUs cannot be used; install the extra tpu. {error}",
                file=sys.stderr,
            )
            return 2
        for name in flags.model:
            for mesh in flags.mesh:
                rows.append(compiled(Row(tpu, name, mesh, flags.shape, flags.remat), devices))
                print(*asdict(rows[-1]).values(), flush=True)
    kernel_table.write(flags.out, rows)
    Console(width=140).print(kernel_table.render(rows))
    return int(any(row.arguments + row.temporaries > row.memory for row in rows))


def compiled(row: Row, devices: Any) -> Row:
    """The row with what the compiler says of its step."""
    began = time.perf_counter()
    data, fsdp, tensor = map(int, row.mesh.split("x"))
    mesh = make_mesh(fsdp, tensor, data, devices)
    batch_size, length = map(int, row.shape.split("x"))
    options: Any = {"dtype": jnp.bfloat16, "remat": row.remat, "max_length": length}
    build = partial(LanguageModel, named_config(row.model), **options)
    optimizer = adamw(3e-4, b2=0.95, weight_decay=0.1, decayed=decay_mask)
    with jax.set_mesh(mesh):
        model = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
        state = jax.eval_shape(lambda: initial_state(build(rngs=nnx.Rngs(0)), optimizer))
        shardings = state_shardings(state, mesh)
        placed = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings
        )
        tokens = jax.ShapeDtypeStruct((batch_size, length), jnp.int32, sharding=batch_sharding(mesh))
        weight = jax.ShapeDtypeStruct(tokens.shape, jnp.float32, sharding=tokens.sharding)
        batch = {"tokens": tokens, "targets": tokens, "weight": weight}
        step: Any = make_train_step(model, optimizer, language_model_loss, shardings=shardings)
        done = step.trace(placed, batch).lower(lowering_platforms=("tpu",)).compile()
    memory, text = done.memory_analysis(), done.as_text()
    count = lambda operation: len(re.findall(rf" {operation}(?:-start)?\(", text))  # noqa: E731
    return Row(
        *row.key,
        arguments=round(memory.argument_size_in_bytes / 2**30, 2),
        temporaries=round(memory.temp_size_in_bytes / 2**30, 2),
        memory=MEMORY[row.tpu],
        kernels=text.count('custom_call_target="tpu_custom_call"'),
        all_gathers=count("all-gather"),
        all_reduces=count("all-reduce"),
        seconds=round(time.perf_counter() - began, 1),
    )


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Flags, prog="python -m experiments.language_model_compile")))
