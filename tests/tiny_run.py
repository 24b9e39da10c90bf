"""A training run of a small network, to be killed: `python tiny_run.py OUT [--resume]`."""

import sys
import time
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eflax.data import image_batches
from eflax.training import (
    Interrupted,
    RunFolder,
    StopRequest,
    Trainer,
    adamw,
    cross_entropy,
    initial_state,
    make_train_step,
)

STEPS = 60


class Network(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(784, 16, rngs=rngs)
        self.outer = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, pixels):
        return self.outer(jax.nn.tanh(self.inner(pixels)))


def loss_function(model, batch):
    logits = model(batch["pixels"].astype(jnp.float32) / 255)
    return cross_entropy(logits, batch["label"], batch["weight"])


def start():
    return initial_state(Network(nnx.Rngs(0)), adamw(1e-2)), train_step()


@cache
def train_step():
    return make_train_step(Network(nnx.Rngs(0)), adamw(1e-2), loss_function)


def batches():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (70, 28, 28)).astype(np.uint8)
    return image_batches(images, rng.integers(0, 10, 70).astype(np.int32), batch_size=16, seed=1)


def main(out: Path, resume: bool) -> int:
    state, step = start()

    def slow_step(state, batch):
        time.sleep(0.03)
        return step(state, batch)

    with RunFolder(out, {"steps": STEPS}, resume) as folder, StopRequest() as stop:
        trainer = Trainer(folder, stop, STEPS, checkpoint_every=7, log_every=3)
        try:
            state = trainer.train("tiny", state, slow_step, batches())
        except Interrupted as interrupted:
            return interrupted.exit_code
    np.savez(out / "final.npz", *jax.tree.leaves(state))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), "--resume" in sys.argv))
