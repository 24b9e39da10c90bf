"""Two training steps on meshes of eight CPU devices, compared with one device: `python mesh_run.py [--all]`."""

import sys
from functools import partial

import jax
import numpy as np
from flax import nnx

from eflax.models import LanguageModel, named_config
from eflax.training.sharding import check_batch, make_mesh, place_batch, sharded_state
from eflax.training.step import adamw, decay_mask, make_train_step
from eflax.training.token_loss import language_model_loss

CONFIG = named_config("efla-tiny", num_layers=2, vocab_size=64, width=32)
QUICK = [((1, 8, 1), 1), ((2, 2, 2), 4)]  # data, fsdp, tensor; accumulated parts
ALL = [((8, 1, 1), 1), ((1, 1, 8), 1), ((4, 1, 2), 1), ((2, 4, 1), 2), *QUICK]


def build():
    return LanguageModel(CONFIG, form="recurrent", remat="products", rngs=nnx.Rngs(0))


def steps(mesh, accumulate):
    optimizer = adamw(1e-3, b2=0.95, weight_decay=0.1, decayed=decay_mask)
    state, shardings = sharded_state(build, optimizer, mesh)
    step = make_train_step(
        nnx.eval_shape(build),
        optimizer,
        partial(language_model_loss, chunk_size=4, z_loss=1e-4),
        accumulate=accumulate,
        shardings=shardings,
    )
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (16, 9), np.int32)
    weight = (rng.random((16, 8)) < 0.7).astype(
        np.float32
    )  # parts of a batch differ in their number of tokens
    check_batch(16, accumulate, mesh)
    batch = place_batch(
        {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weight": weight}, mesh, accumulate
    )
    metrics = []
    for _ in range(2):
        state, values = step(state, batch)
        metrics.append({name: float(value) for name, value in values.items()})
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)], metrics


def main(meshes) -> int:
    one = make_mesh(devices=jax.devices()[:1])
    expected, expected_metrics = steps(one, 1)
    for sizes, accumulate in meshes:
        leaves, metrics = steps(make_mesh(*sizes[1:], data=sizes[0]), accumulate)
        for mine, theirs in zip(metrics, expected_metrics, strict=True):
            for name in theirs:
                np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-4, err_msg=f"{sizes} {name}")
        for mine, theirs in zip(leaves, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-4, err_msg=str(sizes))
        print(sizes, accumulate, metrics[-1], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(ALL if "--all" in sys.argv else QUICK))
