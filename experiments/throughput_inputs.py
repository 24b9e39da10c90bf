"""Inputs and tasks of the throughput benchmark, for every cell from its argument names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from eflax.cells import CELLS
from eflax.models.classifier import UNIT_KEYS

SEGMENT = 256  # tokens between the states that the reference keeps for its backward pass


@dataclass(frozen=True)
class Shape:
    """Sizes of a case: sequences, tokens, heads (key and value heads alike), key and value width."""

    batch: int
    time: int
    heads: int
    key_dim: int
    value_dim: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.time}x{self.heads}x{self.key_dim}x{self.value_dim}"


def parse_shape(text: str) -> Shape:
    """Read BxTxHxK or BxTxHxKxV. Raises ValueError."""
    try:
        sizes = [int(part) for part in text.split("x")]
    except ValueError:
        sizes = []
    if len(sizes) == 4:
        sizes.append(sizes[-1])
    if len(sizes) != 5 or min(sizes) < 1:
        raise ValueError(
            f"--shape {text}: must be BxTxHxK or BxTxHxKxV with positive numbers, as 8x4096x16x128"
        )
    return Shape(*sizes)


def make_inputs(name: str, shape: Shape, dtype: jnp.dtype, seed: int) -> dict[str, Array]:
    """Random inputs of a cell by argument name; arrays of tokens in `dtype`, gates in float32."""
    b, t, h, k, v = shape.batch, shape.time, shape.heads, shape.key_dim, shape.value_dim
    key = iter(jax.random.split(jax.random.key(seed), 8))

    def normal(*sizes: int) -> Array:
        return jax.random.normal(next(key), sizes)

    if name == "selective_ssm":
        values = {
            "x": normal(b, t, h * v),
            "dt": jax.nn.softplus(normal(b, t, h * v) - 3),
            "A": -jnp.exp(normal(h * v, k)),
            "B": normal(b, t, k),
            "C": normal(b, t, k),
        }
        return {name: x if name == "A" else x.astype(dtype) for name, x in values.items()}
    q, keys = normal(b, t, h, k), normal(b, t, h, k)
    norms = jnp.linalg.norm(keys, axis=-1, keepdims=True)
    if name == "linear_attention":
        q, keys = jax.nn.elu(q) + 1, jax.nn.elu(keys) + 1  # positive features
    else:
        q = q / jnp.linalg.norm(q, axis=-1, keepdims=True)
        keys = keys / norms if name in UNIT_KEYS else keys / k**0.5
    values = {
        "q": q.astype(dtype),
        "k": keys.astype(dtype),
        "v": normal(b, t, h, v).astype(dtype),
        "beta": jax.nn.sigmoid(normal(b, t, h)),
        "g": -jax.nn.softplus(normal(b, t, h) - 3),
    }
    return {argument: values[argument] for argument in CELLS[name].arguments}


def task_function(name: str, task: str, form: str, chunk_size: int) -> Callable[..., PyTree]:
    """What a task computes from inputs and weights: outputs, or gradients of weighted outputs, final state or both."""

    def evaluate(inputs: dict[str, Array]) -> tuple[Array, PyTree]:
        cell: Any = CELLS[name]
        return cell(**inputs, form=form, chunk_size=chunk_size)

    return _by_task(task, evaluate)


def reference_function(name: str, task: str, shape: Shape) -> Callable[..., PyTree]:
    """The same by the recurrent form, keeping one state per SEGMENT tokens for the backward pass."""
    length = next(n for n in range(min(SEGMENT, shape.time), 0, -1) if shape.time % n == 0)

    def cut(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, length, *x.shape[2:]), 1, 0)

    cell: Any = CELLS[name]

    def evaluate(inputs: dict[str, Array]) -> tuple[Array, PyTree]:
        fixed = {argument: x for argument, x in inputs.items() if argument == "A"}
        tokens = {argument: cut(x) for argument, x in inputs.items() if argument != "A"}

        @jax.checkpoint
        def segment(state: PyTree, block: dict[str, Array]) -> tuple[PyTree, Array]:
            o, state = cell(**block, **fixed, initial_state=state, form="recurrent")
            return state, o

        state, o = lax.scan(segment, _zero_state(cell, inputs), tokens)
        return jnp.moveaxis(o, 0, 1).reshape(o.shape[1], shape.time, *o.shape[3:]), state

    return _by_task(task, evaluate)


def _zero_state(cell: Any, inputs: dict[str, Array]) -> PyTree:
    empty = {argument: x if argument == "A" else x[:, :0] for argument, x in inputs.items()}
    return cell(**empty)[1]


def make_weights(name: str, task: str, inputs: dict[str, Array], seed: int) -> PyTree:
    """Random weights of what a task takes gradients of, in its shapes and dtypes; nothing for outputs alone."""
    if task == "forward":
        return ()
    cell: Any = CELLS[name]
    weighted = _weighted(task, jax.eval_shape(lambda inputs: cell(**inputs), inputs))
    leaves, tree = jax.tree.flatten(weighted)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    normal = (jax.random.normal(key, x.shape).astype(x.dtype) for key, x in zip(keys, leaves, strict=True))
    return jax.tree.unflatten(tree, normal)


def _by_task(task: str, evaluate: Callable[[dict[str, Array]], tuple[Any, PyTree]]) -> Callable[..., PyTree]:
    if task == "forward":
        return lambda inputs, weights: evaluate(inputs)[0]

    def gradients(inputs: dict[str, Array], weights: PyTree) -> dict[str, Array]:
        weighted, transpose = jax.vjp(lambda inputs: _weighted(task, evaluate(inputs)), inputs)
        return transpose(jax.tree.map(lambda w, x: w.astype(x.dtype), weights, weighted))[0]

    return gradients


def _weighted(task: str, results: tuple[Any, PyTree]) -> PyTree:
    return {"gradient": results[0], "state-gradient": results[1], "full-gradient": results}[task]
