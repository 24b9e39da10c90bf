"""The loss, the optimizer and the jitted train step that all trainers share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from eflax.layers import no_weight_decay

type Metrics = dict[str, jax.Array]
type LossFunction = Callable[[Any, PyTree], tuple[jax.Array, Metrics]]
type TrainStep = Callable[["TrainState", PyTree], tuple["TrainState", Metrics]]


class TrainState(NamedTuple):
    """All that a train step changes: `params` by gradient, `rest` (other variables of the model) as it is."""

    params: PyTree
    rest: PyTree
    opt_state: PyTree


def adamw(
    learning_rate: float | Float[Array, ""] | optax.Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float | Float[Array, ""] = 0.01,
    clip_norm: float = 1.0,
    decayed: Callable[[PyTree], PyTree] | None = None,
) -> optax.GradientTransformation:
    """Return AdamW behind clipping by the global gradient norm; the defaults are PyTorch's.

    Args:
        learning_rate: a constant, or a schedule over steps.
        b1: decay of the mean of the gradients, as in Adam (Kingma & Ba, arXiv 1412.6980).
        b2: decay of the mean of their squares.
        eps: added outside the root.
        weight_decay: decoupled, multiplied by the learning rate (Loshchilov & Hutter, arXiv 1711.05101).
        clip_norm: gradients of a larger global norm are scaled down to it.
        decayed: maps the parameters to a tree of booleans, True where weight decay applies; None decays all.
    """
    adam = optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(clip_norm), adam)


def decay_mask(params: PyTree) -> PyTree:
    """Return which parameters decay: all but norm scales, biases, A_log, dt_bias and D, see `no_weight_decay`."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not no_weight_decay(path), params)


def cross_entropy(
    logits: Float[Array, "*B K"], labels: Int[Array, "*B"], weight: Float[Array, "*B"]
) -> tuple[Float[Array, ""], Metrics]:
    """Return the weighted mean of −log softmax(logits)[label], in nats and float32, and the accuracy.

    Rows of weight 0 (padding) count for nothing, so a padded batch has the loss and gradient of its real
    rows.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    correct = (jnp.argmax(logits, -1) == labels).astype(jnp.float32)
    total = weight.sum()
    return (losses * weight).sum() / total, {"accuracy": (correct * weight).sum() / total}


def initial_state(model: nnx.Module, optimizer: optax.GradientTransformation) -> TrainState:
    """Return the state from which `model` is trained; the model itself is not changed by that."""
    _, params, rest = nnx.split(model, nnx.Param, ...)
    # A train step gives the buffers of its state away, so they must not be the model's.
    return jax.tree.map(jnp.copy, TrainState(params, rest, optimizer.init(params)))


def make_train_step(
    model: nnx.Module,
    optimizer: optax.GradientTransformation,
    loss_function: LossFunction,
    *,
    accumulate: int = 1,
    shardings: TrainState | None = None,
    learning_rate: optax.Schedule | None = None,
) -> TrainStep:
    """Return the jitted step of training `model`, or another model of the same structure.

    The step maps (state, batch) to (state, metrics): it donates the state it is given, and its metrics are
    scalars: "loss", "grad_norm" (before clipping), and what the loss function adds.

    Args:
        model: an NNX module; its `nnx.Param`s are trained. Only its structure is used.
        optimizer: gives the updates.
        loss_function: maps (model, batch) to (scalar loss, dict of scalar metrics).
        accumulate: a step averages the gradients of so many smaller batches, one after the other, each weighted by
            its metric "tokens". The arrays of a batch then have a leading axis of this size. The metrics are averaged
            in the same way, but for "tokens", which is summed.
        shardings: where each leaf of the state lies on a mesh; None leaves it to JAX.
        learning_rate: the optimizer's schedule, whose value is then the metric "lr".
    """
    graph = nnx.graphdef(model)

    def loss_of(params: PyTree, rest: PyTree, batch: PyTree) -> tuple[jax.Array, Metrics]:
        loss, metrics = loss_function(nnx.merge(graph, params, rest), batch)
        return loss, {"loss": loss, **metrics}

    gradient = jax.grad(loss_of, has_aux=True)

    def train_step(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        if accumulate == 1:
            grads, metrics = gradient(state.params, state.rest, batch)
        else:
            grads, metrics = _weighted_mean(lambda part: gradient(state.params, state.rest, part), batch)
        metrics = {"loss": metrics.pop("loss"), "grad_norm": optax.tree.norm(grads), **metrics}
        with jax.numpy_dtype_promotion("standard"):  # optax calculates with counts, which are integers
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            if learning_rate is not None:
                metrics["lr"] = jnp.float32(learning_rate(_schedule_count(state.opt_state)))
        return TrainState(params, state.rest, opt_state), metrics

    return jax.jit(
        train_step, donate_argnums=0, out_shardings=None if shardings is None else (shardings, None)
    )


def _schedule_count(opt_state: PyTree) -> Array:
    """Return at which step of its schedule an optimizer is."""

    def is_schedule(x: Any) -> bool:
        return isinstance(x, optax.ScaleByScheduleState)

    return next(filter(is_schedule, jax.tree.leaves(opt_state, is_leaf=is_schedule))).count


def _weighted_mean(
    gradient: Callable[[PyTree], tuple[PyTree, Metrics]], batch: PyTree
) -> tuple[PyTree, Metrics]:
    """Return the means of gradients and metrics over the leading axis of a batch, weighted by the metric "tokens"."""

    def add(carry: PyTree, part: PyTree) -> tuple[PyTree, None]:
        total, sums = carry
        result = gradient(part)
        tokens = result[1]["tokens"]
        sums = jax.tree.map(lambda s, x: s + tokens.astype(x.dtype) * x, sums, result)
        return (total + tokens, sums), None

    shapes = jax.eval_shape(gradient, jax.tree.map(lambda x: x[0], batch))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (total, sums), _ = jax.lax.scan(add, (jnp.zeros_like(zeros[1]["tokens"]), zeros), batch)
    grads, metrics = jax.tree.map(lambda s: s / jnp.maximum(total, 1).astype(s.dtype), sums)
    return grads, {**metrics, "tokens": total}
