"""A grid of learning rates, weight decays and seeds, trained and scored as one program (MAD)."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PyTree

from eflax.data.mad import Batch
from eflax.training import TrainState, adamw, initial_state, make_train_step
from eflax.training.members import guarded_step, select, summarize
from eflax.training.step import decay_mask
from experiments.mad_models import MadModel, loss_function

LEAST_LR = 1e-6  # at the end of the cosine

type Optimizer = Callable[[Array, Array], optax.GradientTransformation]


class Grid(NamedTuple):
    """Trainings that differ in learning rate, weight decay and seed alone, along a leading axis of every leaf.

    A member stands still once it has diverged, or is over: its score was so good that nothing is left to learn, or it
    was found to have diverged. What has its least perplexity is kept.
    """

    lr: Array
    weight_decay: Array
    train: TrainState
    best: PyTree
    perplexity: Array  # of `best`, on the examples that select; inf before there are any
    accuracy: Array  # macro, likewise
    best_step: Array
    step: Array
    diverged: Array  # the step after which something would not be finite, see `guarded_step`; 0 where there was none
    over: Array  # only a validation sets it

    @property
    def params(self) -> PyTree:
        """The parameters in training."""
        return self.train.params


class Member(NamedTuple):
    """What distinguishes one training of a grid."""

    lr: float
    weight_decay: float
    seed: int


def optimizer(
    schedule: str, steps: int, decay_all: bool, lr: Array | float, weight_decay: Array | float
) -> optax.GradientTransformation:
    """Return AdamW with PyTorch's defaults and without clipping.

    Args:
        schedule: "constant", or "cosine": half a cosine from lr to 1e-6, over so many steps.
        steps: of the training.
        decay_all: decay every parameter, and not only matrices.
        lr: the learning rate.
        weight_decay: multiplied by the learning rate of the step.
    """
    shape = optax.schedules.cosine_decay_schedule(1.0, steps)

    def rate(count: Any) -> Any:
        return lr if schedule == "constant" else LEAST_LR + (lr - LEAST_LR) * shape(count)

    decayed = None if decay_all else decay_mask
    return adamw(rate, weight_decay=weight_decay, clip_norm=math.inf, decayed=decayed)


def start(build: Callable[[Array], MadModel], members: Sequence[Member], update: Optimizer) -> Grid:
    """Return the grid before the first step; `build` maps a seed to a model, and must bear a traced one."""
    first = update(jnp.float32(0), jnp.float32(0))
    seeds = list(dict.fromkeys(member.seed for member in members))
    places = np.asarray([seeds.index(member.seed) for member in members])

    @jax.jit
    def make(seeds: Array, lr: Array, weight_decay: Array) -> Grid:
        of_seeds = jax.vmap(lambda seed: initial_state(build(seed), first))(seeds)
        train, zeros = jax.tree.map(lambda leaf: leaf[places], of_seeds), jnp.zeros(len(members), jnp.int32)
        return Grid(
            lr=lr,
            weight_decay=weight_decay,
            train=train,
            best=jax.tree.map(jnp.copy, train.params),
            perplexity=jnp.full(len(members), jnp.inf, jnp.float32),
            accuracy=jnp.zeros(len(members), jnp.float32),
            best_step=zeros,
            step=jnp.copy(zeros),  # buffers of their own, as the step gives all of them away
            diverged=jnp.copy(zeros),
            over=jnp.zeros(len(members), bool),
        )

    lrs, decays = (np.asarray([x[n] for x in members], np.float32) for n in range(2))
    return make(jnp.asarray(seeds, jnp.uint32), jnp.asarray(lrs), jnp.asarray(decays))


def make_step(
    model: MadModel, update: Optimizer, together: int | None = None
) -> Callable[[Grid, Batch | dict[str, Array], dict[str, Array]], tuple[Grid, dict[str, Array]]]:
    """Return the jitted step of all members, (grid, rows and their weight [S, B], examples) -> (grid, metrics).

    A seed has its own rows; members are in the order of seeds, then again for the next learning rate. Of the metrics,
    "loss" and "accuracy" are means over the members that still run, "grad_norm" is their largest, and "running" their
    number. A member that diverges keeps the parameters it had, and the others go on.

    Args:
        model: gives the structure; it may be abstract.
        update: maps a learning rate and a weight decay to the optimizer.
        together: members that are computed side by side; None: all of them. Those of which none runs any more cost
            nothing.
    """

    def advance(examples: dict[str, Array], given: tuple[Grid, dict[str, Array]]) -> Any:
        member, rows = given
        batch = {key: x[rows["rows"]] for key, x in examples.items()}
        batch["weight"] *= rows["weight"][:, None]
        step = make_train_step(model, update(member.lr, member.weight_decay), loss_function)
        running, count = ~member.over & (member.diverged == 0), member.step + 1
        train, metrics, taken = guarded_step(step, member.train, batch, running)
        diverged = jnp.where(running & ~taken, count, member.diverged)
        return member._replace(train=train, step=count, diverged=diverged), (metrics, taken)

    def advance_group(examples: dict[str, Array], given: tuple[Grid, dict[str, Array]]) -> Any:
        each, (group, _) = jax.vmap(partial(advance, examples)), given
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(each, given)[1])
        runs = jnp.any(~group.over & (group.diverged == 0))
        return jax.lax.cond(
            runs, each, lambda given: (given[0]._replace(step=given[0].step + 1), nothing), given
        )

    def step(grid: Grid, rows: dict[str, Array], examples: dict[str, Array]) -> tuple[Grid, dict[str, Array]]:
        members = grid.lr.shape[0]
        tiled = {key: jnp.tile(x, (members // x.shape[0], 1)) for key, x in rows.items()}
        grid, (metrics, taken) = in_groups(partial(advance_group, examples), (grid, tiled), together)
        return grid, summarize(metrics, taken)

    return jax.jit(step, donate_argnums=0)


def in_groups(function: Callable[[Any], Any], members: PyTree, together: int | None) -> Any:
    """Return the function of all members, which is given so many at a time; None: all."""
    count = jax.tree.leaves(members)[0].shape[0]
    size = min(together or count, count)
    whole = count - count % size
    groups = jax.tree.map(lambda x: x[:whole].reshape(-1, size, *x.shape[1:]), members)
    done = jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), jax.lax.map(function, groups))
    if whole == count:
        return done
    rest = function(jax.tree.map(lambda x: x[whole:], members))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), done, rest)


def make_score(model: MadModel, together: int | None = None) -> Callable[..., dict[str, Array]]:
    """Return the jitted function (params, rest, parts) -> scores [members]; `parts` are those of `cut`.

    "accuracy" is the benchmark's: the macro accuracy of each batch, averaged over batches; "micro" is the share of
    right answers in all. "perplexity", exp(mean loss of a batch), is averaged likewise.
    """
    graph = nnx.graphdef(model)

    def score(parts: dict[str, Array], given: tuple[PyTree, PyTree]) -> dict[str, Array]:
        network = nnx.merge(graph, *given)
        each = jax.lax.map(lambda part: batch_scores(network(part["tokens"]), part), parts)
        share = parts["size"] / parts["size"].sum()
        macro = {key: (each[key] * share).sum() for key in ("accuracy", "perplexity")}
        return macro | {"micro": each["hits"].sum() / each["answers"].sum()}

    def scores(params: PyTree, rest: PyTree, parts: dict[str, Array]) -> dict[str, Array]:
        return in_groups(jax.vmap(partial(score, parts)), (params, rest), together)

    return jax.jit(scores)


def batch_scores(logits: Float[Array, "B T V"], batch: dict[str, Array]) -> dict[str, Float[Array, ""]]:
    """Return the macro "accuracy", the "perplexity", and the numbers of "hits" and "answers" of a batch."""
    targets, answered = batch["targets"], batch["weight"] > 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    answers = answered.sum(dtype=jnp.float32)
    guess = jnp.argmax(logits, -1).astype(jnp.int32)
    right = (guess == targets) & jnp.isfinite(logits).all(-1)
    return {
        "accuracy": macro_accuracy(guess, targets, answered, right, logits.shape[-1]),
        "perplexity": jnp.exp(jnp.where(answered, losses, 0).sum() / answers),
        "hits": (answered & right).sum(dtype=jnp.float32),
        "answers": answers,
    }


def macro_accuracy(
    guess: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    answered: Bool[Array, "B T"],
    right: Bool[Array, "B T"],
    classes: int,
) -> Float[Array, ""]:
    """Return the mean recall of the classes that occur, as torchmetrics has it.

    A class that is guessed but never right to guess has the recall 0; one that is neither guessed nor asked for does
    not count.
    """

    def count(ids: Array, counted: Array) -> Array:
        return jnp.zeros(classes, jnp.float32).at[ids.ravel()].add(counted.ravel().astype(jnp.float32))

    hits, asked, guessed = (
        count(targets, answered & right),
        count(targets, answered),
        count(guess, answered),
    )
    occurs = (asked + guessed > 0).astype(jnp.float32)
    return (occurs * hits / jnp.maximum(asked, 1)).sum() / occurs.sum()


def cut(examples: Batch, batch_size: int) -> dict[str, Array]:
    """Return examples [N, T] as batches [N / B, B, T], with the "size" of each; the last is filled up at weight 0."""
    count = len(examples["tokens"])
    batches = -(-count // batch_size)
    sizes = np.minimum(batch_size, count - batch_size * np.arange(batches))
    fill = ((0, batches * batch_size - count), (0, 0))
    parts = {key: np.pad(x, fill).reshape(batches, batch_size, -1) for key, x in examples.items()}
    return {key: jnp.asarray(x) for key, x in parts.items()} | {"size": jnp.asarray(sizes, jnp.float32)}


@partial(jax.jit, donate_argnums=0, static_argnames="enough")
def keep_best(grid: Grid, scores: dict[str, Array], enough: float) -> Grid:
    """Return the grid with the present parameters as the best of those members whose perplexity is a new least.

    A member is over once its accuracy exceeds `enough`, and when it has diverged.
    """
    runs = ~grid.over & (grid.diverged == 0)
    better = runs & (scores["perplexity"] < grid.perplexity)
    kept = {"perplexity": scores["perplexity"], "accuracy": scores["accuracy"], "best_step": grid.step}
    old = {key: getattr(grid, key) for key in kept}
    chosen = jax.vmap(select)(better, kept | {"best": grid.train.params}, old | {"best": grid.best})
    over = grid.over | (grid.diverged > 0) | (scores["accuracy"] > enough)
    return grid._replace(**chosen, over=over)
