"""The models of the state-tracking experiment by name, their optimizer, and their train step over several seeds."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from eflax.data.algorithmic import VOCABULARY
from eflax.evaluation.length import example_scores
from eflax.layers import LAYERS, no_weight_decay
from eflax.models import RLT, BlockConfig, LanguageModel, LanguageModelConfig, RLTConfig, named_config
from eflax.models.rlt import BASE_WIDTH
from eflax.training import TrainState, adamw, initial_state, make_train_step
from eflax.training.members import guarded_step, select, summarize
from experiments.command import FlagError, Options, split_options

LOOPED = ("rlt1", "rlt2", "rlt0", "gpt")


type Forward = Callable[[Any, Int[Array, "B T"]], Float[Array, "B T V"]]


@dataclass(frozen=True)
class Arm:
    """One model: its family, options of its layers, and its layers in encoder and decoder."""

    family: str
    options: Options
    encoder: int
    decoder: int

    @property
    def name(self) -> str:
        """Return the name in tables, in metrics.jsonl and of the checkpoint folder."""
        depth = f"{self.encoder}+{self.decoder}" if self.family.startswith("rlt") else f"{self.encoder}"
        return (
            ",".join([self.family, *(f"{key}={value}".lower() for key, value in self.options)]) + f"-{depth}"
        )


class Sizes(NamedTuple):
    """What all models of a run share."""

    width: int
    num_heads: int
    interval: int
    window: int


def parse_model(text: str, split: str) -> Arm:
    """Return the model of a name such as "rlt1:5+3", "gpt:8" or "deltanet,allow_negative_eigenvalues=true".

    Raises:
        FlagError: there is no such model, option value or depth.
    """
    named, _, depth = text.partition(":")
    family, options = split_options("--model", named)
    unknown = [name for name in family.split("+") if name not in LAYERS]
    if family not in LOOPED and unknown:
        raise FlagError(
            f"--model {text}: there are {', '.join((*LOOPED, *LAYERS))}, these last also joined by +"
        )
    if options and family in LOOPED:
        raise FlagError(f"--model {text}: {family} has no options; see --interval and --window")
    flag, layers = ("--model", depth) if depth else ("--split", split)
    match = re.fullmatch(r"(\d+)(?:\+(\d+))?", layers)
    if match is None or int(match[1]) < 1:
        raise FlagError(
            f"{flag} {text if depth else split}: layers are E+D with E ≥ 1, as in 5+3, or one number"
        )
    encoder, decoder = int(match[1]), int(match[2] or 0)
    if not family.startswith("rlt"):
        encoder, decoder = encoder + decoder, 0
    return Arm(family, options, encoder, decoder)


def build_model(arm: Arm, sizes: Sizes, seed: int) -> nnx.Module:
    """Return the model at its initial parameters.

    A stack has the blocks that `named_config` gives its layers in the 50m models, which have the same width, but the
    SwiGLU of RLT and a tied read-out of the same vocabulary.
    """
    if arm.family in LOOPED:
        interval = {"rlt1": 1, "rlt2": sizes.interval, "rlt0": None, "gpt": None}[arm.family]
        config = RLTConfig(
            vocab_size=VOCABULARY,
            width=sizes.width,
            num_heads=sizes.num_heads,
            encoder_layers=arm.encoder,
            decoder_layers=arm.decoder,
            window=sizes.window,
            feedback_interval=interval,
        )
        return RLT(config, rngs=nnx.Rngs(seed))
    pattern = []
    for layer in arm.family.split("+"):
        options = dict(named_config(f"{layer}-50m").pattern[0].options) | dict(arm.options)
        pattern.append(BlockConfig(layer, tuple(options.items()), 8 * sizes.width // 3))
    stack = LanguageModelConfig(VOCABULARY, sizes.width, arm.encoder, tuple(pattern), tied=True)
    # A loop over so few layers costs more, to keep what its backward pass needs, than it saves in compiling.
    return LanguageModel(stack, max_length=4100, unroll=arm.encoder, rngs=nnx.Rngs(seed))


def forward(**options: Any) -> Forward:
    """Return the function (model, tokens) -> logits; the options are those of RLT's decoder loop."""

    def logits(model: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        if not isinstance(model, RLT):
            return model.logits(model.hidden(tokens)[0])
        looped = model.config.feedback_interval is not None
        return model(tokens, **(options if looped else {}))

    return logits


def optimizer(lr: float, steps: int, width: int) -> optax.GradientTransformation:
    """Return the paper's AdamW: betas 0.9 and 0.95, weight decay 0.1, clip 1, warm-up of 200 steps, cosine to lr / 20.

    Matrices of the residual stream have 1024 / width times the learning rate, as width-µP of the authors' base code
    has it; norms, biases, embedding and s_star have it as it is, and of these only the embedding decays. That grouping
    is a choice. The warm-up takes a tenth of the steps where they are fewer than 2,000.
    """
    schedule = optax.schedules.warmup_cosine_decay_schedule(0.0, lr, min(200, steps // 10), steps, lr / 20)

    def named(path: Any) -> list[str]:
        return [str(getattr(part, "key", getattr(part, "name", part))) for part in path]

    def decayed(params: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: not no_weight_decay(path) and "start" not in named(path), params
        )

    def multiply(path: Any, update: Array) -> Array:
        names = named(path)
        matrix = "kernel" in names and "convolution" not in names
        return update * (BASE_WIDTH / width) if matrix else update

    groups = optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(multiply, updates))
    # From step 1 on, so that the first step is not lost and the last one has the final rate.
    adam = adamw(lambda count: schedule(count + 1), b2=0.95, weight_decay=0.1, decayed=decayed)
    return optax.chain(adam, groups)


class Selected(NamedTuple):
    """Trainings of several seeds, each leaf with a leading axis of them, and the best parameters of each so far.

    A seed stands still once it has diverged.
    """

    train: TrainState
    best: PyTree
    best_loss: Array  # [seeds], the least validation loss
    best_step: Array  # [seeds] int32, the earliest step that has it
    step: Array  # [seeds] int32
    diverged: (
        Array  # [seeds] int32, the step after which something would not be finite; 0 where there was none
    )

    @property
    def params(self) -> PyTree:
        """The parameters in training."""
        return self.train.params


def start(arm: Arm, sizes: Sizes, seeds: tuple[int, ...], update: optax.GradientTransformation) -> Selected:
    """Return the state before the first step."""
    states = [initial_state(build_model(arm, sizes, seed), update) for seed in seeds]
    train = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    best_loss = jnp.full(len(seeds), jnp.inf, jnp.float32)
    zeros = (
        jnp.zeros(len(seeds), jnp.int32) for _ in range(3)
    )  # buffers of their own: the step gives them away
    return Selected(train, jax.tree.map(jnp.copy, train.params), best_loss, *zeros)


def loss_function(
    logits: Forward, model: Any, batch: dict[str, Array]
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the mean over examples of each one's mean loss, and the accuracy of the last answers."""
    scores = example_scores(logits(model, batch["tokens"]), batch["targets"], batch["weight"])
    return scores["loss"].mean(), {"accuracy": scores["final"].mean()}


def make_step(
    model: nnx.Module, update: optax.GradientTransformation, logits: Forward, seeds: tuple[int, ...]
) -> Callable[[Selected, Any], tuple[Selected, dict[str, Array]]]:
    """Return the jitted train step of all seeds on the same batch; metrics as `summarize` has them.

    Beside them is the loss of each seed, NaN where it has diverged. Such a seed keeps the parameters it had, and the
    others go on.
    """
    one = make_train_step(model, update, partial(loss_function, logits))
    each = jax.vmap(partial(guarded_step, one), in_axes=(0, None, 0))

    def step(state: Selected, batch: dict[str, Array]) -> tuple[Selected, dict[str, Array]]:
        running, count = state.diverged == 0, state.step + 1
        train, metrics, taken = each(state.train, batch, running)
        diverged = jnp.where(running & ~taken, count, state.diverged)
        each_loss = jnp.where(taken, metrics["loss"], jnp.nan)
        losses = {f"loss_seed{seed}": each_loss[n] for n, seed in enumerate(seeds)}
        state = state._replace(train=train, step=count, diverged=diverged)
        return state, summarize(metrics, taken) | losses

    return jax.jit(step, donate_argnums=0)


def make_score(model: nnx.Module, logits: Forward) -> Callable[..., dict[str, Array]]:
    """Return the jitted function (params, rest, batch) -> scores [seeds, B]."""
    graph = nnx.graphdef(model)

    def score(params: PyTree, rest: PyTree, batch: dict[str, Array]) -> dict[str, Array]:
        found = logits(nnx.merge(graph, params, rest), batch["tokens"])
        return example_scores(found, batch["targets"], batch["weight"])

    return jax.jit(jax.vmap(score, in_axes=(0, 0, None)))


@partial(jax.jit, donate_argnums=0)
def keep_best(state: Selected, loss: Float[Array, "S"]) -> Selected:
    """Return the state with the present parameters as the best of those seeds whose validation loss is a new least."""
    better = (loss < state.best_loss) & (state.diverged == 0)
    new, old = (state.train.params, loss, state.step), (state.best, state.best_loss, state.best_step)
    best, losses, steps = jax.vmap(select)(better, new, old)
    return state._replace(best=best, best_loss=losses, best_step=steps)


def num_parameters(params: PyTree, seeds: int) -> int:
    """Return the parameters of one model among those of so many seeds."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params)) // seeds
