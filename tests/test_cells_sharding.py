"""The cells inside shard_map, batch or heads sharded, equal the cells on one device."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import importlib
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec as P
from eflax.cells.forms import EDIT_FORMS, Coefficients, Edits, pallas
ssm = importlib.import_module('eflax.cells.selective_ssm')
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

explicit = jax.device_put(jnp.ones((2, 3, 1, 4)), jax.NamedSharding(jax.make_mesh((2,), ("rows",)), P("rows")))
for call in (harness.cell_of("linear_attention"), jax.jit(harness.cell_of("linear_attention"))):
    try:
        call(explicit, explicit, explicit)
    except ValueError as error:
        assert "k is cut over 'rows' of a mesh with explicit axes" in str(error)
    else:
        raise AssertionError("an explicit mesh was let through")

# Kernels are cut by the mesh of the context. Here a form stands for one, and tells the shapes that it sees.
seen = []
def kernel(q, k, v, erase, write, log_decay, restart, state, scale):
    seen.append((k.shape, v.shape, state.shape))
    share = lambda x: jnp.repeat(x, v.shape[2] // k.shape[2], 2)
    edits = Edits(share(q * scale), share(k), v, erase, write, log_decay, restart)
    return EDIT_FORMS["recurrent"](edits, state, chunk_size=16, precision="highest")
kernels = pallas.Kernels("here", lambda *x: None, kernel)
draw = lambda *shape: jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32) / 3
q, k, v, w, state = draw(4, 20, 2, 8), draw(4, 20, 2, 8), draw(4, 20, 4, 8), draw(4, 20, 4), draw(4, 4, 8, 8)
def loss(q, k, v, w, state):
    found = pallas.evaluate(kernels, q, k, v, Coefficients(w, w, None), None, state, 0.5)
    return sum(jnp.sum(x * x) for x in found)
gradient = jax.value_and_grad(loss, range(5))
expected = jax.jit(gradient)(q, k, v, w, state)
for axes in (("data", "tensor"), ("tensor", "data")):
    auto = (AxisType.Auto,) * 2
    with jax.set_mesh(jax.make_mesh((2, 1), axes, auto)):
        found = jax.jit(gradient)(q, k, v, w, state)
    batch, heads = (2, 1) if axes[0] == "data" else (1, 2)
    b, h, hv = 4 // batch, 2 // heads, 4 // heads
    assert seen[-1] == ((b, 20, h, 8), (b, 20, hv, 8), (b, hv, 8, 8))
    assert_close(found, expected, BUDGETS["float32"].backward)

# The scan's, too: each device has its channels and sequences, and what all share has the gradient of all.
inputs, weights, ids = harness.problem("selective_ssm", "packed", regimes.Shape(T=20, B=2, H=1, HV=1, K=6, V=8))
def scan(x, dt, A, B, C, restart, state):
    seen.append((x.shape, A.shape, B.shape, state.shape))
    tokens = ssm.Tokens(x, dt, B, C, restart)
    state, y = ssm._scan_blocks(state, tokens, A, 10)
    return y, state
def summed(inputs):
    y, state = harness.call("selective_ssm", inputs, ids, form="pallas_tpu")
    return jnp.sum(y * y) + jnp.sum(state * state)
ssm.KERNELS["pallas_tpu"] = pallas.Kernels("pallas_tpu", lambda *x: None, scan)
gradient = jax.value_and_grad(summed)
expected = jax.jit(gradient)(inputs)
b, d, n = *inputs["x"].shape[::2], inputs["A"].shape[1]
for axes in (("data", "tensor"), ("tensor", "data")):
    with jax.set_mesh(jax.make_mesh((2, 1), axes, (AxisType.Auto,) * 2)):
        found = jax.jit(gradient)(inputs)
    batch, channels = (2, 1) if axes[0] == "data" else (1, 2)
    own = b // batch, d // channels
    assert seen[-1] == ((own[0], 20, own[1]), (own[1], n), (own[0], 20, n), (*own, n))
    assert_close(found, expected, BUDGETS["float32"].backward)
print("equal")
"""


def test_sharded_batch_and_heads_equal_one_device():
    """In a process of its own, since the number of host devices is fixed when JAX starts."""
    flags = f"--xla_force_host_platform_device_count=2 {os.environ['XLA_FLAGS']}"
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
