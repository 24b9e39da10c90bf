"""What the mathematics promises, with judges from outside: SciPy, hand-written solvers, the attention formula."""

from itertools import pairwise

import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import regimes
from budgets import BUDGETS, assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad_vec, solve_ivp
from scipy.linalg import expm

from eflax import cells

K, V = 4, 3
ANY = "parallel"  # the quickest to compile, for what is a matter of coefficients and not of the form
forms_of = {name: harness.portable_forms(harness.cell_of(name)) for name in oracle.CASES}


def token(rng, beta=0.8, g=0.0, key_norm=None):
    k = rng.normal(size=K)
    k = k if key_norm is None else key_norm * k / np.linalg.norm(k)
    return {
        "q": rng.normal(size=(1, 1, 1, K)),
        "k": k.reshape(1, 1, 1, K),
        "v": rng.normal(size=(1, 1, 1, V)),
        "beta": np.full((1, 1, 1), beta),
        "g": np.full((1, 1, 1), g),
        "initial_state": rng.normal(size=(1, 1, K, V)),
    }


def after(case_name, inputs, form):
    """The state after one token, computed in float64."""
    _, state = harness.call(case_name, jax.tree.map(jnp.asarray, inputs), form=form)
    assert state.dtype == jnp.float64
    return np.asarray(state[0, 0])


def parts(inputs):
    return inputs["k"].ravel(), inputs["v"].ravel(), inputs["initial_state"][0, 0]


@pytest.mark.parametrize("form", forms_of["efla"])
@pytest.mark.parametrize("beta", [0.0, 1e-6, 0.8, 30.0])
def test_efla_token_is_the_matrix_exponential_and_its_integral(float64, form, beta):
    inputs = token(np.random.default_rng(0), beta)
    k, v, S = parts(inputs)
    A, b = np.outer(k, k), np.outer(k, v)
    integral, _ = quad_vec(lambda tau: expm(-(beta - tau) * A) @ b, 0, beta, epsabs=1e-13, epsrel=1e-12)
    np.testing.assert_allclose(
        after("efla", inputs, form), expm(-beta * A) @ S + integral, rtol=1e-9, atol=1e-11
    )


@pytest.mark.parametrize("gate", [1.0, 0.97, 0.5, 0.05])
@pytest.mark.parametrize("case_name", ["gated_efla", "gated_efla-log_rate", "gated_efla-decay_first"])
def test_gated_efla_token_solves_its_ode(float64, case_name, gate):
    """dS/dt = -(decay I + erase k k^T) S + beta k v^T over unit time; decay_first does the two one after another."""
    beta, rng = 0.7, np.random.default_rng(1)
    inputs = token(rng, beta, np.log(gate))
    k, v, S = parts(inputs)
    decay, erase = {
        "gated_efla": (1 - gate, gate * beta),
        "gated_efla-log_rate": (-np.log(gate), beta),
        "gated_efla-decay_first": (0.0, beta),
    }[case_name]
    S = gate * S if case_name == "gated_efla-decay_first" else S
    A = decay * np.eye(K) + erase * np.outer(k, k)

    def flow(t, s):
        return (beta * np.outer(k, v) - A @ s.reshape(K, V)).ravel()

    solution = solve_ivp(flow, (0, 1), S.ravel(), "DOP853", rtol=1e-12, atol=1e-13)
    expected = solution.y[:, -1].reshape(K, V)
    for form in forms_of[case_name]:
        np.testing.assert_allclose(after(case_name, inputs, form), expected, rtol=1e-9, atol=1e-10)


def runge_kutta(f, S, h, order):
    k1 = f(S)
    if order == 1:
        return S + h * k1
    if order == 2:  # Heun
        return S + h / 2 * (k1 + f(S + h * k1))
    k2 = f(S + h / 2 * k1)
    k3 = f(S + h / 2 * k2)
    return S + h / 6 * (k1 + 2 * k2 + 2 * k3 + f(S + h * k3))


@pytest.mark.parametrize("order", [1, 2, 4])
def test_orders_are_runge_kutta_steps(float64, order):
    inputs = token(np.random.default_rng(2))
    k, v, S = parts(inputs)
    expected = runge_kutta(lambda S: np.outer(k, v - S.T @ k), S, 0.8, order)
    for form in forms_of["efla"]:
        np.testing.assert_allclose(
            after(f"efla-order{order}", inputs, form), expected, rtol=1e-11, atol=1e-12
        )


def test_order_one_is_the_delta_rule():
    inputs, weights, _ = harness.problem("delta_rule")
    euler, delta = (harness.compiled(name, ANY)(inputs, weights) for name in ("efla-order1", "delta_rule"))
    assert_close(euler, oracle.as_float64(delta), 1e-6)


def test_orders_converge_to_the_exact_flow(float64):
    inputs = jax.tree.map(jnp.asarray, regimes.draw(oracle.CASES["efla-order4"], "random", regimes.BASE))
    arguments = [inputs[name] for name in "qkv"] + [inputs["beta"]]
    flow = harness.cell_of("efla")
    exact, _ = flow(*arguments, form=ANY)
    errors = [float(jnp.abs(flow(*arguments, order=n, form=ANY)[0] - exact).max()) for n in (1, 2, 4, 8, 12)]
    assert all(later < 0.5 * earlier for earlier, later in pairwise(errors))
    assert errors[-1] < 1e-8


def test_unit_keys_and_softplus_give_the_sigmoid_delta_rule():
    inputs, _, _ = harness.problem("efla")
    inputs["k"] = inputs["k"] / jnp.linalg.norm(inputs["k"], axis=-1, keepdims=True)
    z = 3.0 * jnp.asarray(np.random.default_rng(3).normal(size=inputs["beta"].shape), jnp.float32)
    flow, _ = harness.call("efla", inputs | {"beta": jax.nn.softplus(z)}, form=ANY)
    delta, _ = harness.call("delta_rule", inputs | {"beta": jax.nn.sigmoid(z)}, form=ANY)
    assert_close(flow, np.asarray(delta), BUDGETS["float32"].forward)


@pytest.mark.parametrize("form", forms_of["ssd"])
def test_ssd_is_masked_attention(float64, form):
    """o_t = sum over s <= t of exp(g_{s+1} + ... + g_t) (q_t . k_s) v_s, written out."""
    shape = regimes.BASE._replace(HV=2)
    inputs = regimes.draw(oracle.CASES["ssd"], "random", shape)
    inputs["initial_state"] = np.zeros_like(inputs["initial_state"])
    q, k, v, g = (inputs[name] for name in ("q", "k", "v", "g"))
    expected = np.zeros_like(v)
    for t in range(shape.T):
        for s in range(t + 1):
            weight = np.exp(g[:, s + 1 : t + 1].sum(axis=1)) * np.einsum("bhk,bhk->bh", q[:, t], k[:, s])
            expected[:, t] += weight[..., None] * v[:, s]
    outputs, _ = harness.forward("ssd", form)(jax.tree.map(jnp.asarray, inputs))
    assert_close(outputs, expected, BUDGETS["float64"].forward)


def test_ssd_parallel_equals_recurrent():
    inputs, weights, _ = harness.problem("ssd")
    parallel, recurrent = (
        harness.compiled("ssd", form)(inputs, weights) for form in ("parallel", "recurrent")
    )
    assert_close(parallel, oracle.as_float64(recurrent), BUDGETS["float32"].backward)


UNGATED = {
    "ssd": "linear_attention-unnormalized",
    "gated_delta_rule": "delta_rule",
    "gated_efla": "efla",
    "gated_efla-log_rate": "efla",
    "gated_efla-decay_first": "efla",
}


@pytest.mark.parametrize("gated", UNGATED)
def test_no_decay_gives_the_ungated_cell(gated):
    inputs, _, _ = harness.problem(gated)
    inputs["g"] = 0 * inputs["g"]
    plain = {name: x for name, x in inputs.items() if name != "g"}
    if gated == "ssd":
        plain["initial_state"] = (inputs["initial_state"], jnp.zeros(inputs["initial_state"].shape[:3]))
    o_gated, state_gated = harness.forward(gated, ANY)(inputs)
    o_plain, state_plain = harness.forward(UNGATED[gated], ANY)(plain)
    assert_close(o_gated, np.asarray(o_plain), 1e-6)
    assert_close(state_gated, np.asarray(jax.tree.leaves(state_plain)[0]), 1e-6)


def test_normalized_attention_of_one_token_returns_its_value():
    """fla#1261: o = v whatever q and k are, so that neither has a gradient."""
    q = jnp.asarray(np.random.default_rng(4).uniform(0.5, 1, size=(1, 1, 1, K)), jnp.float32)
    v = jnp.asarray(np.random.default_rng(5).normal(size=(1, 1, 1, V)), jnp.float32)
    attention = harness.cell_of("linear_attention")
    for form in forms_of["linear_attention"]:
        o, _ = attention(q, q, v, form=form)
        np.testing.assert_allclose(o, v, rtol=1e-5)
        slope = jax.grad(lambda k, form=form: attention(q, k, v, form=form)[0].sum())(q)
        assert np.abs(slope).max() < 1e-3


# ------------------------------------------------------------------------------------------ one EFLA token
def transition(beta, k):
    """I - alpha k k^T of one EFLA token as a float32 matrix: start from the identity and write nothing."""
    size = len(k)
    k = jnp.asarray(k, jnp.float32).reshape(1, 1, 1, size)
    zeros, gate = jnp.zeros((1, 1, 1, size)), jnp.full((1, 1, 1), beta, jnp.float32)
    _, state = _efla_token(zeros, k, zeros, gate, jnp.eye(size)[None, None])
    return np.asarray(state[0, 0], np.float64)


@jax.jit
def _efla_token(q, k, v, beta, state):
    return cells.efla(q, k, v, beta, initial_state=state)


@settings(max_examples=80, deadline=None)
@given(log_x=st.floats(-12, 4), log_energy=st.floats(-12, 4), seed=st.integers(0, 1000))
def test_spectrum_never_expands(log_x, log_energy, seed):
    """Eigenvalues are 1 and e^{-beta lambda}: within [0, 1] for beta lambda from 1e-12 to 1e4."""
    k = np.random.default_rng(seed).normal(size=K)
    k *= 10 ** (log_energy / 2) / np.linalg.norm(k)
    matrix = transition(10 ** (log_x - log_energy), k)
    eigenvalues = np.linalg.eigvalsh((matrix + matrix.T) / 2)
    assert eigenvalues.min() >= -2e-6
    assert eigenvalues.max() <= 1 + 2e-6
    assert abs(eigenvalues.min() - np.exp(-(10**log_x))) < 2e-6


def written(beta, energy):
    """alpha sqrt(lambda): what a token with q = v = 1 and one key channel reads back from an empty state."""
    ones, k = jnp.ones((1, 1, 1, 1)), jnp.sqrt(energy).reshape(1, 1, 1, 1)
    o, _ = cells.efla(ones, k, ones, beta.reshape(1, 1, 1))
    return o.sum()


@jax.jit
def _written_and_slopes(beta, energy):
    value, slopes = jax.value_and_grad(written, argnums=(0, 1))(beta, energy)
    return value, *slopes


def exact_alpha(beta, energy):
    """(alpha, d alpha/d beta, d alpha/d lambda) in float64: series below x = 1, closed forms above."""
    x = beta * energy
    if x > 1:
        phi, g2 = -np.expm1(-x) / x, (-np.expm1(-x) - x * np.exp(-x)) / x**2
    else:
        phi = g2 = 0.0
        factorial = 1.0  # (n + 1)! below
        for n in range(25):
            phi += (-x) ** n / factorial
            g2 += (n + 1) * (-x) ** n / (factorial * (n + 2))
            factorial *= n + 2
    return beta * phi, np.exp(-x), -(beta**2) * g2


@settings(max_examples=80, deadline=None)
@given(log_beta=st.floats(-6, 1.5), log_energy=st.floats(-12, 4))
def test_alpha_and_its_gradients(log_beta, log_energy):
    """The write strength of one token and its slopes in beta (e^{-x}) and lambda, seen through the public cell."""
    beta, energy = np.float32(10**log_beta), np.float32(10**log_energy)
    root = float(np.sqrt(energy))
    alpha, d_beta, d_energy = exact_alpha(float(beta), float(np.float32(root)) ** 2)
    value, slope_beta, slope_energy = (float(x) for x in _written_and_slopes(beta, energy))
    assert value == pytest.approx(alpha * root, rel=2e-6)
    assert slope_beta == pytest.approx(
        d_beta * root, rel=1e-5 * max(1.0, float(beta * energy)), abs=1e-6 * root * 1e-2
    )
    expected = d_energy * root + alpha / (2 * root)
    assert slope_energy == pytest.approx(expected, rel=1e-5, abs=1e-5 * alpha / root)


phi_and_slope = jax.jit(jax.value_and_grad(oracle.phi))


@settings(max_examples=50, deadline=None)
@given(log_x=st.floats(-12, 4))
def test_oracle_phi(log_x):
    """phi of the oracle: bounded by 1 and 1/x, convex and decreasing, and right where both branches meet."""
    x = np.float64(10**log_x)
    with jax.enable_x64(True):
        value, slope = map(float, phi_and_slope(jnp.float64(x)))
    assert 1 / (1 + x) <= value <= min(1.0, 1 / x)
    assert -0.5 <= slope < 0
    assert value == pytest.approx(exact_alpha(1.0, x)[0], rel=1e-14)
    assert slope == pytest.approx(exact_alpha(1.0, x)[2], rel=1e-12)
