"""The table of inputs: shapes, and what makes each input hard, as data.

`draw(case, regime, shape)` gives float64 NumPy inputs of a case; tests round them to the dtype they need.
A regime edits the random base draw in place. The selective SSM has other inputs, hence its own edits by the same names.
"""

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Shape(NamedTuple):
    """Sizes of one problem; the selective SSM takes its width from V and its state size from K."""

    T: int = 37
    B: int = 2
    H: int = 2
    HV: int = 4
    K: int = 8
    V: int = 12
    chunk_size: int = 16


BASE = Shape()
TAILS = tuple(Shape(T=T, B=1, HV=2, K=12, V=8) for T in (1, 17))  # one token, one more than a chunk; K > V
LONG = Shape(
    T=136, B=6, H=4, HV=8, K=4, V=3, chunk_size=64
)  # chunks of 64, a ragged tail, more heads and rows than `chunkwise` works on at once


class Regime(NamedTuple):
    """Edits of the base draw: of (q, k, v, beta, g, state) and of (x, dt, A, B, C, state); random otherwise."""

    rank_one: Callable
    selective: Callable | None = None
    packed: bool = False
    output_weight: float = 1.0
    state_weight: float = 1.0


def _unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _untouched(inputs, rng):
    pass


def _correlated_keys(inputs, rng):
    k = inputs["k"]
    common = rng.normal(size=k[:, :1].shape)
    inputs["k"] = _unit(common + 0.3 * rng.normal(size=k.shape))
    inputs["beta"][:] = 0.9
    inputs["g"][:] = 0.0


def _repeated_key(inputs, rng):
    inputs["k"] = np.broadcast_to(_unit(rng.normal(size=inputs["k"][:, :1].shape)), inputs["k"].shape).copy()
    inputs["beta"][:] = 1 / (1 + np.exp(-8.0))
    inputs["g"][:] = -1e-3


def _keys_of_norm(norm):
    def edit(inputs, rng):
        inputs["k"] = norm * _unit(inputs["k"])
        # A state that such keys have written is of order v / |k|. This hides a limit: from an initial state of order 1
        # the final state of `parallel` at T = 200 is off by 4e-5 in float32, above the budget of 1e-5, because one
        # difference cancels all that was erased. See the docstring of eflax/cells/forms/parallel.py.
        inputs["initial_state"] /= max(norm, 1.0)

    return edit


def _zero_keys(inputs, rng):
    inputs["k"][:, 1::3] = 0.0


def _mixed_magnitudes(inputs, rng):
    inputs["k"] *= 10 ** rng.uniform(-2, 2, size=(*inputs["k"].shape[:3], 1))
    inputs["beta"][:] = rng.uniform(0, 1, size=inputs["beta"].shape) ** 4
    inputs["g"] *= 10 ** rng.uniform(-2, 1, size=inputs["g"].shape)


def _zero_beta(inputs, rng):
    inputs["beta"][:, ::2] = 0.0


def _decay(value, every=slice(None)):
    def rank_one(inputs, rng):
        inputs["g"][:, every] = value

    def selective(inputs, rng):
        inputs["A"][:] = -np.exp(0.1 * rng.normal(size=inputs["A"].shape))
        inputs["dt"][:, every] = -value

    return rank_one, selective


def _zero_state(inputs, rng):
    inputs["initial_state"] = np.zeros_like(inputs["initial_state"])


REGIMES: dict[str, Regime] = {
    "random": Regime(_untouched, _untouched),
    "zero_initial_state": Regime(_zero_state, _zero_state),
    "outputs_only": Regime(_untouched, _untouched, state_weight=0.0),
    "final_state_only": Regime(_untouched, _untouched, output_weight=0.0),
    "correlated_keys": Regime(_correlated_keys),
    "repeated_key": Regime(_repeated_key),
    "huge_keys": Regime(_keys_of_norm(100.0)),
    "tiny_keys": Regime(_keys_of_norm(1e-6)),
    "zero_keys": Regime(_zero_keys),
    "mixed_magnitudes": Regime(_mixed_magnitudes),
    "zero_beta": Regime(_zero_beta),
    "no_decay": Regime(*_decay(0.0)),
    "strong_decay_everywhere": Regime(*_decay(-2.0)),
    "strong_decay_every_fifth": Regime(*_decay(-8.0, slice(0, None, 5))),
    "reset_tokens": Regime(*_decay(-30.0, slice(3, None, 11))),
    "reset_inside_chunk": Regime(*_decay(-25.0, slice(7, 9))),
    "packed": Regime(_untouched, _untouched, packed=True),
    "packed_correlated_keys": Regime(_correlated_keys, packed=True),
    "packed_strong_decay": Regime(*_decay(-2.0), packed=True),
    "packed_final_state_only": Regime(_untouched, _untouched, packed=True, output_weight=0.0),
}


def regimes_of(case):
    """Names of the regimes that apply to a case."""
    selective = "x" in case.arguments
    return [name for name, regime in REGIMES.items() if not (selective and regime.selective is None)]


def segment_ids(shape):
    """Documents of lengths 5, 11, 21 (an edge on a chunk's edge), then of 1, 1, 10, ... with an id that recurs."""
    first = np.repeat([0, 1, 2], [5, 11, max(shape.T - 16, 0)])[: shape.T]
    second = np.repeat([7, 2, 7, 5, 2], [1, 1, 10, 13, max(shape.T - 25, 0)])[: shape.T]
    return np.stack([first, second])[: shape.B].astype(np.int32)


def _generator(*key):
    return np.random.default_rng(zlib.crc32(repr(key).encode()))  # the same numbers in every process


def _rank_one_inputs(case, edit, shape, rng):
    T, B, H, HV, K, V, _ = shape
    inputs = {
        "q": rng.normal(size=(B, T, H, K)),
        "k": rng.normal(size=(B, T, H, K)) / np.sqrt(K),
        "v": rng.normal(size=(B, T, HV, V)),
        "beta": rng.uniform(0.05, 1.0, size=(B, T, HV)),
        "g": -rng.uniform(0.0, 0.5, size=(B, T, HV)),
        "initial_state": rng.normal(size=(B, HV, K, V)),
    }
    edit(inputs, rng)
    if case.bounded_keys:
        inputs["k"] /= np.maximum(np.linalg.norm(inputs["k"], axis=-1, keepdims=True), 1.0)
    if case.features:
        inputs["q"], inputs["k"] = np.abs(inputs["q"]), np.abs(inputs["k"])
    state = inputs.pop("initial_state")
    if case.cell == "linear_attention":
        state = (state, np.abs(state[..., 0]))
    return {name: inputs[name] for name in case.arguments} | {"initial_state": state}


def _selective_inputs(edit, shape, rng):
    T, B, *_, N, D, _ = shape
    inputs = {
        "x": rng.normal(size=(B, T, D)),
        "dt": np.exp(rng.uniform(-3, 0, size=(B, T, D))),
        "A": -np.exp(rng.normal(size=(D, N))),
        "B": rng.normal(size=(B, T, N)),
        "C": rng.normal(size=(B, T, N)),
        "initial_state": rng.normal(size=(B, D, N)),
    }
    edit(inputs, rng)
    return inputs


def draw(case, regime_name, shape) -> dict[str, Any]:
    """Inputs of a case in a regime, initial state included, as a dict of float64 arrays."""
    regime, rng = REGIMES[regime_name], _generator(case.arguments, regime_name, shape)
    if "x" in case.arguments:
        return _selective_inputs(regime.selective or _untouched, shape, rng)
    return _rank_one_inputs(case, regime.rank_one, shape, rng)


def draw_weights(case, regime_name, shape):
    """Random weights of the outputs and of the final state in the loss."""
    regime, rng = REGIMES[regime_name], _generator("weights", shape)
    T, B, _, HV, K, V, _ = shape
    if "x" in case.arguments:
        outputs, state = rng.normal(size=(B, T, V)), rng.normal(size=(B, V, K))
    else:
        outputs, state = rng.normal(size=(B, T, HV, V)), rng.normal(size=(B, HV, K, V))
    state = regime.state_weight * state
    if case.cell == "linear_attention":
        state = (state, state[..., 0])
    return regime.output_weight * outputs, state
