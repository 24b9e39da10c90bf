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
for name in ("linear_attention", "ssd", "gated_efla", "selective_ssm"):
    inputs, _, ids = harness.problem(name, "packed", regimes.BASE)
    inputs.pop("initial_state")
    arguments = oracle.CASES[name].arguments
    for form in ("recurrent", "chunkwise"):
        def loss(inputs, ids, name=name, form=form):
            o, state = harness.call(name, inputs, ids, form=form, chunk_size=16)
            return o, state
        for axis in (0, 2) if name != "selective_ssm" else (0,):
            spec = P(*[None] * axis, "d")
            specs = {n: P() if n == "A" else spec for n in arguments}
            id_spec = P("d") if axis == 0 else P()
            state_spec = spec if axis == 0 else P(None, "d")
            sharded = jax.jit(jax.shard_map(loss, mesh=mesh, in_specs=(specs, id_spec), out_specs=(spec, state_spec)))
            expected = oracle.as_float64(jax.jit(loss)(inputs, ids))
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
