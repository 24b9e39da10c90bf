"""Training a language model: optimizer, schedule, accumulation, meshes."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eflax.models import LanguageModel, named_config
from eflax.training.flops import count_parameters, training_flops_per_token
from eflax.training.schedule import warmup_cosine
from eflax.training.sharding import check_batch, make_mesh
from eflax.training.step import adamw, decay_mask


def test_a_step_is_the_same_on_every_mesh():
    """In a process of its own, since the number of host devices is fixed when JAX starts."""
    flags = f"--xla_force_host_platform_device_count=8 {os.environ['XLA_FLAGS']}"
    root = Path(__file__).parent
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root.parent)}
    command = [sys.executable, str(root / "mesh_run.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_schedule_has_the_end_points_that_were_asked_for():
    rate = warmup_cosine(3e-4, start=3e-5, end=3e-5, warmup_steps=10, steps=110)
    values = [np.asarray(rate(step)) for step in (0, 5, 10, 60, 110, 200)]
    np.testing.assert_allclose(values, [3e-5, 1.65e-4, 3e-4, 1.65e-4, 3e-5, 3e-5], rtol=1e-5)
    with pytest.raises(ValueError, match="warm-up of 10 steps does not fit into a training of 10"):
        warmup_cosine(1.0, start=0.0, end=0.0, warmup_steps=10, steps=10)


def test_rates_biases_and_norms_do_not_decay():
    config = named_config("gated-efla-tiny", pattern=("gated-efla", "mamba2"), num_layers=2)
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    mask = jax.tree_util.tree_leaves_with_path(decay_mask(nnx.state(model, nnx.Param)))
    decays = {jax.tree_util.keystr(path[:-1], simple=True, separator="."): decay for path, decay in mask}
    exempt = {name.rpartition(".")[2] for name, decay in decays.items() if not decay}
    assert exempt == {"A_log", "D", "bias", "dt_bias", "scale"}
    assert all(decay for name, decay in decays.items() if name.endswith(("kernel", "embedding")))


def test_bfloat16_compute_keeps_float32_masters_and_moments():
    config = named_config("gated-efla-tiny")
    model = nnx.eval_shape(lambda: LanguageModel(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    params = nnx.state(model, nnx.Param)
    moments = jax.eval_shape(adamw(1e-3).init, params)
    types = {leaf.dtype for leaf in jax.tree.leaves((params, moments)) if leaf.ndim}
    assert types == {jnp.dtype(jnp.float32)}


def test_operations_of_a_token():
    """The embedding is looked up, not multiplied with; the state of a head is read, retrieved from and written to."""
    model = nnx.eval_shape(lambda: LanguageModel(named_config("efla-340m"), rngs=nnx.Rngs(0)))
    matrices = count_parameters(model) - 32_000 * 1024
    assert training_flops_per_token(model, 2048) == 6 * matrices + 3 * 24 * (6 * 8 * 128 * 128)


def test_what_a_mesh_cannot_cut_is_refused():
    with pytest.raises(ValueError, match="data=1 x fsdp=3 x tensor=1 needs 3 devices and there are 1"):
        make_mesh(fsdp=3)
    with pytest.raises(
        ValueError, match=r"9 sequences cannot be cut into 2 accumulated parts.*multiple of 2"
    ):
        check_batch(9, 2, make_mesh())
