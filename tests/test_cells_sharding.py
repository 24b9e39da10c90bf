"""The cells inside shard_map, batch or heads sharded, equal the cells on one device."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
import harness, oracle, regimes
from budgets import BUDGETS, assert_close

mesh = Mesh(np.array(jax.devices()), ("d",))
assert mesh.size == 2
BATCH, HEADS = 0, 2
for name, form, axes in (
    ("linear_attention", "recurrent", [HEADS]),
    ("linear_attention", "chunkwise", [BATCH]),
    ("gated_efla", "recurrent", [BATCH]),
    ("gated_efla", "chunkwise", [BATCH, HEADS]),
    ("selective_ssm", "recurrent", [BATCH]),
    ("selective_ssm", "chunkwise", [BATCH]),
):
    inputs, _, ids = harness.problem(name, "packed", regimes.BASE)
    inputs.pop("initial_state")
    def run(inputs, ids, name=name, form=form):
        return harness.call(name, inputs, ids, form=form, chunk_size=16)
    expected = oracle.as_float64(jax.jit(run)(inputs, ids))
    for axis in axes:
        spec = P(*[None] * axis, "d")
        specs = {n: P() if n == "A" else spec for n in oracle.CASES[name].arguments}
        id_spec = P("d") if axis == BATCH else P()
        state_spec = spec if axis == BATCH else P(None, "d")
        sharded = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(specs, id_spec), out_specs=(spec, state_spec)))
        assert_close(sharded(inputs, ids), expected, BUDGETS["float32"].forward, f"{name} {form} {axis}")
print("equal")
"""


def test_sharded_batch_and_heads_equal_one_device():
    """In a process of its own, since the number of host devices is fixed when JAX starts."""
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("equal"), done.stdout + done.stderr
