"""The judge is judged first: against NumPy loops, complex steps, a matrix exponential and an ODE solver."""

import jax
import numpy as np
import oracle
import pytest
import regimes
from scipy.integrate import solve_ivp
from scipy.linalg import expm

from eflax import cells

SHAPE = regimes.Shape(T=9, B=1, H=1, HV=2, K=3, V=2)
SEGMENTS = np.array([[4, 4, 4, 1, 1, 4, 4, 4, 4]], np.int32)


def test_every_cell_has_a_reference():
    assert {case.cell for case in oracle.CASES.values()} == set(cells.CELLS)
    for case in oracle.CASES.values():
        assert cells.CELLS[case.cell].arguments == case.arguments
        assert cells.CELLS[case.cell].name == case.cell


def plain_coefficients(case, k, beta, g):
    """(erase, write, log decay) of one token by the textbook formulas, which hold for complex numbers too."""
    energy = k @ k
    if case.cell in ("linear_attention", "ssd"):
        return 0.0, 1.0, g
    if "order" in case.options:
        terms = [beta, -(beta**2) * energy / 2, beta**3 * energy**2 / 6, -(beta**4) * energy**3 / 24]
        a = sum(terms[: case.options["order"]])
        return a, a, g
    if case.cell in ("delta_rule", "gated_delta_rule"):
        return beta, beta, g
    if case.cell == "gated_efla" and not case.options:
        rate, erase = 1 - np.exp(g), np.exp(g) * beta
        eta = rate + erase * energy
        return (1 - np.exp(-erase * energy)) / energy, beta * (1 - np.exp(-eta)) / eta, -rate
    a = (1 - np.exp(-beta * energy)) / energy
    if case.options.get("variant") == "log_rate":
        x = beta * energy - g
        return a, beta * (1 - np.exp(-x)) / x, g
    return a, a, g


def plain_loop(case, inputs, scale):
    """Outputs and state of one batch row, head by head and token by token, in whatever dtype the inputs have."""
    q, k, v = (inputs[name][0] for name in "qkv")
    T, HV, V = v.shape
    dtype = np.result_type(*jax.tree.leaves(inputs))
    start = inputs["initial_state"] if case.cell == "linear_attention" else (inputs["initial_state"], None)
    outputs, finals, totals = np.zeros((1, T, HV, V), dtype), [], []
    for head in range(HV):
        key_head = head // (HV // k.shape[1])
        S = start[0][0, head].astype(dtype)
        z = np.zeros(S.shape[0], dtype) if start[1] is None else start[1][0, head].astype(dtype)
        for t in range(T):
            if t and SEGMENTS[0, t] != SEGMENTS[0, t - 1]:
                S, z = 0 * S, 0 * z
            kt, vt, qt = k[t, key_head], v[t, head], scale * q[t, key_head]
            beta, g = (inputs[n][0, t, head] if n in inputs else d for n, d in (("beta", 1.0), ("g", 0.0)))
            a, w, g = plain_coefficients(case, kt, beta, g)
            S = np.exp(g) * (np.eye(len(kt)) - a * np.outer(kt, kt)) @ S + w * np.outer(kt, vt)
            z = z + kt
            normalizer = z @ qt + 1e-6 if case.cell == "linear_attention" and not case.options else 1.0
            outputs[0, t, head] = S.T @ qt / normalizer
        finals.append(S)
        totals.append(z)
    state = np.stack(finals)[None]
    return outputs, (state, np.stack(totals)[None]) if case.cell == "linear_attention" else state


def plain_selective(inputs):
    x, dt, B, C = (inputs[name][0] for name in ("x", "dt", "B", "C"))
    h = inputs["initial_state"][0].astype(np.result_type(*inputs.values()))
    outputs = []
    for t in range(len(x)):
        if t and SEGMENTS[0, t] != SEGMENTS[0, t - 1]:
            h = 0 * h
        for channel in range(x.shape[1]):
            h[channel] = (
                np.exp(dt[t, channel] * inputs["A"][channel]) * h[channel]
                + dt[t, channel] * x[t, channel] * B[t]
            )
        outputs.append(h @ C[t])
    return np.stack(outputs)[None], h[None]


@pytest.mark.parametrize("case_name", oracle.CASES)
def test_oracle_equals_plain_loops_and_complex_steps(case_name):
    case = oracle.CASES[case_name]
    inputs, weights = regimes.draw(case, "random", SHAPE), regimes.draw_weights(case, "random", SHAPE)
    scale = 1.0 if "x" in inputs else 0.7
    result = oracle.evaluate(case_name, inputs, weights, SEGMENTS, scale)

    def loop(inputs):
        return plain_selective(inputs) if "x" in inputs else plain_loop(case, inputs, scale)

    def loss(inputs):
        pairs = zip(jax.tree.leaves(loop(inputs)), jax.tree.leaves(weights), strict=True)
        return sum(np.sum(x * w) for x, w in pairs)

    for x, reference in zip(
        jax.tree.leaves(loop(inputs)), jax.tree.leaves((result["outputs"], result["state"])), strict=True
    ):
        np.testing.assert_allclose(reference, x, rtol=1e-12, atol=1e-13)
    rng = np.random.default_rng(0)
    for name, gradient in result["gradients"].items():  # one random direction for every input
        direction = jax.tree.map(lambda x: rng.normal(size=x.shape), inputs[name])
        shifted = inputs | {name: jax.tree.map(lambda x, d: x + 1e-30j * d, inputs[name], direction)}
        slope = np.imag(loss(shifted)) / 1e-30
        expected = sum(
            np.vdot(g, d) for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
        )
        np.testing.assert_allclose(expected, slope, rtol=1e-10, err_msg=name)


def one_token(case_name, rng, gate):
    inputs = {
        "q": rng.normal(size=(1, 1, 1, 4)),
        "k": rng.normal(size=(1, 1, 1, 4)),
        "v": rng.normal(size=(1, 1, 1, 3)),
        "beta": np.full((1, 1, 1), 0.8),
        "g": np.full((1, 1, 1), np.log(gate)),
        "initial_state": rng.normal(size=(1, 1, 4, 3)),
    }
    inputs = {name: inputs[name] for name in (*oracle.CASES[case_name].arguments, "initial_state")}
    weights = np.zeros((1, 1, 1, 3)), np.zeros((1, 1, 4, 3))
    return inputs, oracle.evaluate(case_name, inputs, weights)["state"][0, 0]


@pytest.mark.parametrize("gate", [1.0, 0.97, 0.05])
@pytest.mark.parametrize("case_name", ["efla", "gated_efla", "gated_efla-log_rate"])
def test_oracle_token_equals_its_ode(case_name, gate):
    """dS/dt = -(decay I + erase k k^T) S + beta k v^T over unit time."""
    inputs, state = one_token(case_name, np.random.default_rng(1), gate)
    k, v, beta, start = inputs["k"][0, 0, 0], inputs["v"][0, 0, 0], 0.8, inputs["initial_state"][0, 0]
    decay, erase = {
        "efla": (0.0, beta),
        "gated_efla": (1 - gate, gate * beta),
        "gated_efla-log_rate": (-np.log(gate), beta),
    }[case_name]
    A = decay * np.eye(4) + erase * np.outer(k, k)
    b = beta * np.outer(k, v)
    block = np.zeros((7, 7))  # Van Loan: exp of [[-A, b], [0, 0]] holds the transition and the integral
    block[:4, :4], block[:4, 4:] = -A, b
    transition = expm(block)
    np.testing.assert_allclose(state, transition[:4, :4] @ start + transition[:4, 4:], rtol=1e-11, atol=1e-12)
    solution = solve_ivp(
        lambda t, s: (-A @ s.reshape(4, 3) + b).ravel(),
        (0, 1),
        start.ravel(),
        "DOP853",
        rtol=1e-12,
        atol=1e-13,
    )
    np.testing.assert_allclose(state, solution.y[:, -1].reshape(4, 3), rtol=1e-9, atol=1e-10)
