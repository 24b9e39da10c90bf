"""The cells under JAX's transformations, their compilation counts, memory, and what they do to NaN."""

from functools import partial

import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import regimes
from budgets import BUDGETS, assert_close
from jax.sharding import PartitionSpec as P

from eflax import cells

SHAPE = regimes.Shape(T=21, B=1, H=1, HV=2, K=4, V=3)
N = 3  # size of the mapped axis
FORWARD, BACKWARD = BUDGETS["float32"]
events = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration_secs, **kwargs: events.append((event, kwargs))
)


def compilations():
    return [
        info.get("fun_name") for event, info in events if "backend_compile" in event or "jaxpr_trace" in event
    ]


def stacked(case_name, shared=()):
    """N problems on a leading axis; the shared inputs have none."""
    base, weights, _ = harness.problem(case_name, "random", SHAPE)
    rng = np.random.default_rng(0)

    def vary(x):
        return jnp.stack([x * jnp.float32(rng.uniform(0.5, 1.0)) for _ in range(N)])

    inputs = {name: x if name in shared else jax.tree.map(vary, x) for name, x in base.items()}
    return inputs, {name: None if name in shared else 0 for name in inputs}, weights


@pytest.mark.parametrize(("case_name", "form"), harness.KINDS_FORMS)
def test_vmap_is_a_loop(case_name, form):
    """vmap of value and gradient; and the gradient of a vmapped loss, where shared inputs collect a sum."""
    shared = ("k", "B", "initial_state")
    inputs, axes, weights = stacked(case_name, shared)

    def loss(inputs):
        return harness.weighted_sum(harness.call(case_name, inputs, form=form, chunk_size=10), weights)

    def vmap_of_grad_and_grad_of_vmap(inputs):
        mapped = jax.vmap(jax.value_and_grad(loss), in_axes=(axes,))(inputs)
        return mapped, jax.grad(lambda inputs: jax.vmap(loss, in_axes=(axes,))(inputs).sum())(inputs)

    mapped, total = jax.jit(vmap_of_grad_and_grad_of_vmap)(inputs)
    slope = jax.jit(jax.value_and_grad(loss))
    looped = [slope(row(inputs, shared, i)) for i in range(N)]
    looped = jax.tree.map(lambda *xs: np.stack(xs).astype(np.float64), *looped)
    assert_close(mapped, looped, FORWARD)
    summed = {n: jax.tree.map(lambda x: x.sum(0), x) if n in shared else x for n, x in looped[1].items()}
    assert_close(total, summed, FORWARD)


def row(inputs, shared, index):
    return {n: x if n in shared else jax.tree.map(lambda x: x[index], x) for n, x in inputs.items()}


@pytest.mark.parametrize(("case_name", "form"), harness.case_forms(harness.KINDS, ["chunkwise"]))
def test_rematerialised_gradients_are_equal(case_name, form):
    inputs, weights, _, expected = harness.referee(case_name, "random", regimes.BASE)

    @jax.checkpoint
    def loss(inputs):
        return harness.weighted_sum(harness.call(case_name, inputs, form=form, chunk_size=16), weights)

    assert_close(jax.jit(jax.grad(loss))(inputs), expected["gradients"], BACKWARD)


@pytest.mark.parametrize(
    ("case_name", "form"),
    [*harness.case_forms(["gated_delta_rule"], ["chunkwise"]), *harness.quick_forms(harness.KINDS)],
)
def test_second_call_compiles_nothing(case_name, form):
    """Called directly, without jit around it, forward and backward, with other values of the same shapes."""
    inputs, weights, ids = harness.problem(case_name, "packed", SHAPE)
    twice = [inputs, jax.tree.map(lambda x: x * jnp.float32(0.5), inputs)]

    def direct(inputs):
        return harness.call(case_name, inputs, ids, form=form, chunk_size=16)

    def gradient(inputs):
        return jax.grad(lambda inputs: harness.weighted_sum(direct(inputs), weights))(inputs)

    for run in (direct, gradient):
        run(twice[0])
        events.clear()
        run(twice[1])
        assert not compilations(), run


def one_device(f):
    """Inside of shard_map."""
    return jax.shard_map(f, mesh=jax.make_mesh((1,), ("d",)), in_specs=P(), out_specs=P())


@pytest.mark.parametrize("case_name", oracle.DEFAULTS)
def test_one_argument_known_and_the_rest_traced(case_name):
    """As where a decay is a constant of the model. A wrong constant is still refused."""
    inputs, _, _ = harness.problem(case_name, "random", SHAPE)
    for name in oracle.CASES[case_name].arguments:
        traced = {other: x for other, x in inputs.items() if other != name}

        def loss(traced, known):
            o, _ = harness.call(case_name, traced | known, form="recurrent")
            return o.sum()

        for transform in (one_device, jax.grad, lambda f: jax.grad(jax.checkpoint(f))):
            jax.eval_shape(transform(partial(loss, known={name: inputs[name]})), traced)
        if name in ("g", "A"):
            with pytest.raises(ValueError, match=f"^{name} has the value"):
                jax.eval_shape(partial(loss, known={name: 1 - inputs[name]}), traced)


@pytest.mark.parametrize("case_name", oracle.DEFAULTS)
def test_a_scan_of_steps_equals_the_whole(case_name):
    """With the last argument a constant of the loop: A of the selective SSM, the decay of the gated cells."""
    inputs, _, _ = harness.problem(case_name, "random", SHAPE)
    cell = harness.cell_of(case_name)
    constant = "A" if "A" in inputs else cell.arguments[-1]
    if constant != "A":
        inputs[constant] = jnp.broadcast_to(inputs[constant][:, :1], inputs[constant].shape)
    known = inputs["A"] if constant == "A" else inputs[constant][:, 0]
    tokens = {n: jnp.moveaxis(inputs[n], 1, 0) for n in cell.arguments if n != constant}

    def step(state, token):
        return cell.step(state, *((token | {constant: known})[name] for name in cell.arguments))

    state, outputs = jax.lax.scan(step, inputs["initial_state"], tokens)
    expected, final = harness.forward(case_name, "recurrent")(inputs)
    assert_close(jnp.moveaxis(outputs, 0, 1), np.asarray(expected), FORWARD)
    assert_close(state, oracle.as_float64(final), FORWARD)


@pytest.mark.parametrize("case_name", oracle.DEFAULTS)
def test_second_step_compiles_nothing(case_name):
    inputs, _, _ = harness.problem(case_name)
    cell = harness.cell_of(case_name)
    tokens = [[inputs[n] if n == "A" else inputs[n][:, t] for n in cell.arguments] for t in range(3)]
    state, _ = cell.step(inputs["initial_state"], *tokens[0])
    state, _ = cell.step(state, *tokens[1])
    events.clear()
    cell.step(state, *tokens[2])
    assert not compilations()


@pytest.mark.parametrize(("case_name", "form"), harness.DISTINCT_FORMS)
def test_nan_in_nan_out(case_name, form):
    """Nothing hides a NaN: from its token on every output of its row is NaN, other rows are untouched.

    So are the tokens before it, but in `chunkwise` those of its chunk and in `parallel` all of them.
    """
    inputs, _, _ = harness.problem(case_name)
    name = "v" if harness.has_scale(case_name) else "x"
    inputs[name] = inputs[name].at[0, 20].set(jnp.nan)
    outputs, state = harness.forward(case_name, form, 16)(inputs)
    untouched = {"chunkwise": 16, "parallel": 0}.get(form, 20)
    assert np.isfinite(outputs[0, :untouched]).all()
    assert np.isnan(outputs[0, 20:]).all()
    assert np.isnan(jax.tree.leaves(state)[0][0]).all()
    assert np.isfinite(outputs[1]).all()


@pytest.mark.parametrize("case_name", [name for name, case in oracle.CASES.items() if "g" in case.arguments])
def test_strong_decay_is_not_clipped(case_name):
    """One token of g = -30 among tokens of 0 multiplies the state by e^-30 (published variant: e^-(1 - e^-30))."""
    inputs, _, _ = harness.problem(case_name)
    inputs |= {"k": 0 * inputs["k"], "g": (0 * inputs["g"]).at[:, 20].set(-30.0)}
    rate = 1 - np.exp(-30.0) if case_name == "gated_efla" else 30.0
    for form in ("recurrent", "chunkwise"):
        _, state = harness.forward(case_name, form)(inputs)
        expected = np.asarray(inputs["initial_state"], np.float64) * np.exp(-rate)
        np.testing.assert_allclose(state, expected, rtol=3e-6)


def test_decay_over_a_long_sequence_never_exceeds_one():
    """mamba#352: prefix sums over the whole sequence lose the small differences; sums inside a chunk do not."""
    T = 16_384
    g = np.full((1, T, 1), -0.3, np.float32)
    g[:, 5_000:16_000] = 0.0
    k = np.zeros((1, T, 1, 1), np.float32)
    k[:, [100, 7_000, 16_380]] = 1.0
    q, v = np.ones_like(k), np.ones_like(k)
    state, expected = 0.0, np.zeros(T)
    for t in range(T):
        state = np.exp(float(g[0, t, 0])) * state + float(k[0, t, 0, 0])
        expected[t] = state
    outputs, _ = cells.ssd(*map(jnp.asarray, (q, k, v, g)), form="chunkwise")
    np.testing.assert_allclose(np.asarray(outputs)[0, :, 0, 0], expected, rtol=1e-5, atol=1e-30)
    assert np.asarray(outputs).max() <= 1.0 + 1e-5


# ------------------------------------------------------------------------------------------ memory and work
WIDE = {"H": 1, "HV": 1, "B": 1, "K": 64, "V": 64}


def compiled_loss(case_name, form, T, chunk_size=64, queries=True, outputs=True):
    """The compiled gradient of a loss on the final state, and on the outputs too if asked."""
    inputs, weights, _ = harness.problem(case_name, "random", regimes.Shape(T=T, **WIDE))
    if not queries:
        inputs["q"] = None

    def loss(inputs):
        o, state = harness.call(case_name, inputs, form=form, chunk_size=chunk_size)
        return (
            harness.weighted_sum((o, state), weights) if outputs else harness.weighted_sum(state, weights[1])
        )

    return jax.jit(jax.grad(loss)).lower(inputs).compile()


def bytes_per_token(compile_loss):
    """Growth of temporary memory from T = 512 to T = 1024, per token."""
    small, large = (compile_loss(T=T).memory_analysis().temp_size_in_bytes for T in (512, 1024))
    return (large - small) / 512


@pytest.mark.parametrize("case_name", ["ssd", "gated_delta_rule"])
def test_chunkwise_gradient_keeps_a_state_a_chunk(case_name):
    """Per token: T/C states (K V / C numbers each) and some rows of C, K and V numbers, not K V numbers."""
    K, V, C = WIDE["K"], WIDE["V"], 64
    grown = bytes_per_token(partial(compiled_loss, case_name, "chunkwise"))
    assert grown <= 4 * (4 * K * V / C + 24 * (C + K + V) / 3)
    recurrent = bytes_per_token(partial(compiled_loss, case_name, "recurrent"))
    assert recurrent >= 4 * K * V
    assert grown <= recurrent / 2


@pytest.mark.parametrize("case_name", ["efla", "ssd"])
def test_loss_on_the_state_alone_computes_no_outputs(case_name):
    def work(**keywords):
        analysis = compiled_loss(case_name, "chunkwise", 512, **keywords).cost_analysis()
        return analysis["flops"]

    everything, unused, absent = work(), work(outputs=False), work(queries=False, outputs=False)
    assert absent < 0.8 * everything
    assert unused < 1.1 * absent
