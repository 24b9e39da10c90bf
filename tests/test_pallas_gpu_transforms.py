"""The GPU kernels under JAX's transformations, their choice and refusal, and their lowering; without a GPU."""

from unittest import mock

import harness
import jax
import jax.numpy as jnp
import kernels
import numpy as np
import oracle
import pytest
from budgets import BUDGETS, assert_close
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from regimes import Shape

from eflax import cells
from eflax.layers import DeltaNet
from eflax.models import LanguageModel, named_config
from pallas_kernels import device
from pallas_kernels.rank_one import gpu
from pallas_kernels.short_convolution.gpu import short_convolution as convolution


@pytest.mark.parametrize("shared", [(), ("q", "k", "v", "beta", "g")], ids=["all", "initial_state"])
def test_vmap_is_a_loop(shared):
    """vmap of value and gradient, with an axis on every input or on the initial state only."""
    base, weights = kernels.problem("gated_delta_rule", shape=Shape(T=65, B=1, H=1, HV=1, K=64, V=64))
    factors = jnp.asarray([0.5, 1.0], jnp.float32)

    def vary(x):
        return jnp.stack([x * factor.astype(x.dtype) for factor in factors])

    inputs = {name: x if name in shared else vary(x) for name, x in base.items()}
    axes = {name: None if name in shared else 0 for name in inputs}

    def slope(inputs):
        return jax.value_and_grad(lambda x: kernels.loss("gated_delta_rule", x, weights)[0])(inputs)[1]

    with kernels.interpreted():
        mapped = jax.block_until_ready(jax.jit(jax.vmap(slope, in_axes=(axes,)))(inputs))
    for i in range(2):
        one = {name: x if name in shared else x[i] for name, x in inputs.items()}
        expected = kernels.expected("gated_delta_rule", one, weights)["gradients"]
        assert_close(
            jax.tree.map(lambda x, i=i: x[i], mapped), expected, BUDGETS["bfloat16"].backward, str(i)
        )


def test_residuals_that_a_policy_saves_are_not_computed_again():
    """By the launches in the jaxpr: the interpreter's callbacks do not go through jax.checkpoint."""
    inputs, weights = kernels.problem("efla", shape=Shape(T=64, B=1, H=1, HV=1, K=64, V=64))
    once = dict.fromkeys(kernels.KERNELS, 1)
    twice = once | dict.fromkeys(kernels.AHEAD, 2)
    save = jax.checkpoint_policies.save_only_these_names(*gpu.RESIDUALS)

    def slope(**options):
        f = jax.checkpoint(lambda inputs: kernels.loss("efla", inputs, weights)[0], **options)
        return jax.jit(jax.grad(f))

    with kernels.h200():
        assert kernels.kernels_in(slope(policy=save), inputs) == once
        assert kernels.kernels_in(slope(), inputs) == twice


@pytest.mark.parametrize(
    ("options", "tokens", "kernel"),
    [
        ({}, 9, "rank_one_forward"),
        ({"allow_negative_eigenvalues": True}, 9, None),
        ({"allow_negative_eigenvalues": True}, 8, "rank_one_decode"),
        ({"allow_negative_eigenvalues": True, "form": "pallas_gpu"}, 9, "rank_one_forward"),
    ],
)
def test_negative_eigenvalues_take_kernels_only_by_name(options, tokens, kernel):
    layer = DeltaNet(128, num_heads=2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **options)
    with kernels.h200():
        found = kernels.kernels_in(layer, jnp.ones((1, tokens, 128), jnp.bfloat16))
    assert kernel in found if kernel else not found


@pytest.mark.parametrize(("remat", "forward"), [("kernels", 1), ("products", 2)])
def test_a_language_model_runs_the_kernels_again_where_it_is_asked_to(remat, forward):
    config = named_config("efla-tiny", vocab_size=10, num_layers=1)
    model = LanguageModel(config, dtype=jnp.bfloat16, remat=remat, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        logits, _ = nnx.merge(graph, params, rest)(jnp.zeros((1, 64), jnp.int32))
        return jnp.sum(logits**2)

    with kernels.h200():
        counts = kernels.kernels_in(jax.grad(loss), params)
    assert [counts[name] for name in kernels.AHEAD] == [forward] * 3
    assert sum(counts.values()) == 3 * forward + 3


def test_documents_do_not_touch_each_other():
    """Bit-equal outputs and gradients of a document when the one before it changes; the edge lies inside a chunk."""
    edge, shape = 80, Shape(T=130, B=1, H=1, HV=1, K=64, V=64)
    inputs, weights = kernels.problem("gated_delta_rule", shape=shape)
    ids = jnp.asarray(np.arange(130)[None] >= edge, jnp.int32)
    other = {
        name: x if name == "initial_state" else x.at[:, :edge].multiply(0.5) for name, x in inputs.items()
    }
    other["initial_state"] = inputs["initial_state"] + 1.0
    with kernels.interpreted():
        before, after = (
            jax.device_get(kernels.evaluate("gated_delta_rule", x, weights, ids)) for x in (inputs, other)
        )
    np.testing.assert_array_equal(before["state"], after["state"])
    pairs = [(before["outputs"], after["outputs"])]
    pairs += [(before["gradients"][name], after["gradients"][name]) for name in ("q", "k", "v", "beta", "g")]
    for x, y in pairs:
        np.testing.assert_array_equal(x[:, edge:], y[:, edge:])
        assert np.any(x[:, :edge] != y[:, :edge])


def test_nan_goes_on_and_stays_in_its_head():
    inputs, _ = kernels.problem("gated_delta_rule", shape=Shape(T=130, B=1, H=1, HV=2, K=64, V=64))
    inputs["v"] = inputs["v"].at[0, 70, 0, 3].set(jnp.nan)
    with kernels.interpreted():
        outputs, state = jax.device_get(harness.forward("gated_delta_rule", "pallas_gpu", 64)(inputs))
    outputs = outputs.astype(np.float32)
    assert np.isnan(outputs[0, 70:, 0, 3]).all() and np.isnan(state[0, 0, :, 3]).all()
    assert np.isfinite(outputs[0, :64]).all()  # the chunks before it
    assert np.isfinite(outputs[0, :, 1]).all() and np.isfinite(state[0, 1]).all()
    assert np.isfinite(np.delete(outputs[0, :, 0], 3, axis=-1)).all()  # columns of the state do not mix


def test_calls_of_one_shape_are_traced_once():
    inputs, _ = kernels.problem("ssd", shape=Shape(T=66, B=1, H=1, HV=1, K=64, V=64))
    shape = inputs["v"].shape[:2]
    with kernels.interpreted(), mock.patch.object(gpu, "make_plan", wraps=gpu.make_plan) as traced:
        for edge in (5, 64):
            ids = jnp.broadcast_to(jnp.arange(shape[1]) >= edge, shape).astype(jnp.int32)
            jax.block_until_ready(harness.call("ssd", inputs, ids, form="pallas_gpu"))
    assert traced.call_count == 1


def test_kernels_count_in_32_bits_where_jax_has_64(float64):
    """Traced, in segments, with a scale that is an array of another dtype; the interpreter does not run then."""
    inputs, weights = kernels.problem("gated_delta_rule", shape=Shape(T=190, B=1, H=1, HV=1, K=64, V=128))
    ids, scale = jnp.zeros((1, 190), jnp.int32), jnp.bfloat16(0.5)

    def loss(inputs):
        result = harness.call("gated_delta_rule", inputs, ids, form="pallas_gpu", scale=scale)
        return harness.weighted_sum(result, weights)

    x, kernel, tail = (jnp.ones((*lead, 128), jnp.bfloat16) for lead in ((1, 16), (4,), (1, 3)))

    def convolve(x):
        return jnp.sum(convolution(x, tail, kernel.astype(jnp.float32), None, ids[:, :16]) ** 2)

    with kernels.h200(), mock.patch.object(gpu, "choose_segments", lambda *sizes: 2):
        assert kernels.kernels_in(jax.grad(loss), inputs)["rank_one_forward"] == 3
        assert kernels.kernels_in(jax.vmap(loss), jax.tree.map(lambda x: x[None], inputs))
        text = jax.jit(jax.grad(convolve)).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q": jnp.float32, "k": jnp.float32, "v": jnp.float32}, "q, k and v are float32"),
        ({"q": jnp.float16}, "q is float16 and k bfloat16"),
        ({"v": jnp.float32}, "v is float32 and k bfloat16"),
        ({}, "keys have 257 entries"),
    ],
)
def test_what_the_kernels_cannot_serve_is_refused(change, reason):
    inputs, _ = kernels.problem("efla", shape=Shape(T=9, B=1, H=1, HV=1, K=64 if change else 257, V=64))
    inputs |= {name: inputs[name].astype(dtype) for name, dtype in change.items()}
    with kernels.interpreted():
        with pytest.raises(cells.UnsupportedForm, match=f"form='pallas_gpu' cannot serve: {reason}"):
            harness.call("efla", inputs, form="pallas_gpu")
        assert not kernels.kernels_in(lambda x: harness.call("efla", x), inputs)  # form=None picks another


@pytest.mark.parametrize(
    ("kind", "is_one"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", True),
        ("NVIDIA H20-3e", True),
        ("NVIDIA GH200 480GB", True),
        ("NVIDIA A100-SXM4-80GB", False),
        ("NVIDIA GB200", False),
    ],
)
def test_hopper_gpus_are_known_by_their_names(kind, is_one):
    with mock.patch.object(device, "device_kind", lambda: kind):
        assert device.is_hopper() == is_one


@pytest.mark.parametrize(("cell", "name"), [("gated_delta_rule", "g"), ("selective_ssm", "dt")])
def test_what_numpy_holds_in_64_bits_is_no_reason_to_refuse(without_shape_checks, cell, name):
    """JAX makes 32 bits of it."""
    inputs, _ = kernels.problem(cell)
    inputs[name] = np.asarray(inputs[name], np.float64)
    with kernels.h200():
        assert kernels.kernels_in(lambda: harness.call(cell, inputs))


def test_programs_are_for_the_default_device():
    """On a machine with a Hopper GPU, too."""
    (cpu, *_), gpus = jax.devices(), [mock.Mock(device_kind="NVIDIA H200")]
    with mock.patch.object(jax, "devices", lambda platform=None: [cpu] if platform == "cpu" else gpus):
        assert device.is_hopper()
        for chosen in (cpu, "cpu"):
            with jax.default_device(chosen):
                assert not device.is_hopper()


def test_a_machine_without_a_hopper_gpu_is_refused():
    inputs, _ = kernels.problem("efla")
    with pytest.raises(cells.UnsupportedForm, match=r"need a Hopper GPU.* this is 'cpu'"):
        harness.call("efla", inputs, form="pallas_gpu")


@pytest.mark.parametrize("cell", oracle.CASES)
def test_form_none_picks_the_kernels_where_they_serve(cell):
    """But not where they lose digits: see the budget of normalised linear attention."""
    inputs, _ = kernels.problem(cell)
    with kernels.interpreted():
        picked = bool(kernels.kernels_in(lambda x: harness.call(cell, x), inputs))
    assert picked == (cell != "linear_attention")


@pytest.mark.parametrize(
    ("cell", "shape", "packed"),
    [
        ("gated_delta_rule", Shape(T=130, B=8, H=8, HV=16, K=128, V=128), True),
        ("ssd", Shape(T=65, K=60, V=100), False),
    ],
)
def test_kernels_are_lowered_for_a_gpu(cell, shape, packed):
    """Forward and backward, to the end of Mosaic GPU's own passes: layouts of registers and shared memory."""
    inputs, weights = kernels.problem(cell, shape=shape)
    ids = kernels.segment_ids(shape) if packed else None
    ids = None if ids is None else jnp.resize(ids, (shape.B, shape.T))
    with kernels.h200():
        traced = jax.jit(jax.grad(lambda x: kernels.loss(cell, x, weights, ids)[0])).trace(inputs)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 5  # a solve and one backward kernel, or no solve and two


def test_kernels_are_lowered_inside_shard_map():
    """Not run: the interpreter stops at a second device. Not with check_vma: kernels mix varying types."""
    inputs, weights = kernels.problem("gated_delta_rule", shape=Shape(T=65, B=2, H=2, HV=2, K=64, V=64))
    tokens, state = P("batch", None, "heads"), P("batch", "heads")
    specs = {name: state if name == "initial_state" else tokens for name in inputs}

    def slope(inputs, weights):
        return jax.grad(lambda x: kernels.loss("gated_delta_rule", x, weights)[0])(inputs)

    in_specs = (specs, (tokens, state))

    def placed(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    with kernels.h200(batch=2, heads=2) as mesh:
        program = jax.shard_map(slope, mesh=mesh, in_specs=in_specs, out_specs=specs, check_vma=False)
        traced = jax.jit(program).trace(*jax.tree.map(placed, (inputs, weights), in_specs))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == len(kernels.KERNELS)


def test_shard_map_that_checks_what_varies_is_refused():
    """Outputs of kernels do not say over which mesh axes they vary; a sum over devices could then be left out."""
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    spec = jax.sharding.PartitionSpec("data")
    k, beta = jnp.ones((1, 64, 1, 64), jnp.bfloat16), jnp.ones((1, 64, 1))

    def outputs(form):
        def evaluate(k, beta):
            return cells.efla(k, k, k, beta, form=form)[0]

        return jax.shard_map(evaluate, mesh=mesh, in_specs=spec, out_specs=spec)(k, beta)

    with kernels.interpreted():
        assert outputs(None).shape == k.shape
        with pytest.raises(cells.UnsupportedForm, match="check_vma=False"):
            outputs("pallas_gpu")


def test_more_blocks_than_cuda_launches_are_refused():
    shape = (1, 70, 70_000, 64)
    q = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    gate = jax.ShapeDtypeStruct(shape[:3], jnp.float32)
    with kernels.h200(), pytest.raises(ValueError, match=r"70,000 blocks along its axis 'h'.*65,535"):
        jax.eval_shape(lambda *inputs: cells.delta_rule(*inputs, form="pallas_gpu"), q, q, q, gate)
