"""A causal language model over any token mixer: embedding, residual blocks, norm, read-out."""

from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from eflax.cells.forms.pallas import RESIDUALS
from eflax.layers import LAYERS, Block, RMSNorm
from eflax.models.configs import BlockConfig, LanguageModelConfig

type Remat = Literal["none", "kernels", "products", "block"]
REMAT: tuple[str, ...] = get_args(Remat.__value__)


class LanguageModel(nnx.Module):
    """Predict each next token: logits = readout(norm(blocks(embedding[tokens]))).

    The blocks of the pattern are repeated by one compiled loop over their stacked parameters, so that compiling takes
    as long for 48 layers as for one. Embedding and read-out start N(0, 0.09 / D): logits then have a standard
    deviation of 0.3, and the first loss lies 0.05 above ln V.

    Args:
        config: the shape, see `named_config`.
        dtype: of matrix products and of the residual stream. Norms, gates, states and logits are float32.
        param_dtype: of the parameters; those that need it are float32 always.
        form: the form of every recurrent cell, None for the fastest that serves.
        chunk_size: tokens in a chunk, for the chunkwise forms.
        max_length: tokens that a state holds where a layer is softmax attention; no other layer has a limit.
        remat: what the backward pass computes again: "none", everything but the matrix products with parameters and the
            results of kernels of the cells ("kernels"), but these products ("products"), or all of a block but its
            input ("block"). From fast to small.
        unroll: blocks of the loop that are compiled side by side; more is faster to run and slower to compile.
        rngs: the source of initial parameters.
    """

    def __init__(
        self,
        config: LanguageModelConfig,
        *,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        form: str | None = None,
        chunk_size: int = 64,
        max_length: int = 2048,
        remat: Remat = "none",
        unroll: int = 1,
        rngs: nnx.Rngs,
    ):
        if remat not in REMAT:
            raise ValueError(f"remat={remat!r} is unknown; there are {', '.join(REMAT)}")
        self.config, self.dtype, self.remat, self.unroll = config, dtype, remat, unroll
        self.max_length = max_length
        initial = jax.nn.initializers.normal(0.3 * config.width**-0.5)
        self.embedding = nnx.Param(initial(rngs.params(), (config.vocab_size, config.width), param_dtype))
        if not config.tied:
            self.head = nnx.Param(initial(rngs.params(), (config.width, config.vocab_size), param_dtype))
        options = {"dtype": dtype, "param_dtype": param_dtype}
        recurrent = options | {"form": form, "chunk_size": chunk_size}
        attention = options | {"max_length": max_length}

        def stack(block: BlockConfig) -> Block:
            types = attention if block.layer == "transformer" else recurrent

            @nnx.split_rngs(splits=config.repeats)
            @nnx.vmap(axis_size=config.repeats)
            def make(rngs):
                mixer = LAYERS[block.layer](config.width, **dict(block.options), **types, rngs=rngs)
                mlp: dict[str, Any] = {"mlp_width": block.mlp_width, "param_dtype": param_dtype}
                return Block(mixer, norm_epsilon=config.norm_epsilon, **mlp, rngs=rngs)

            return make(rngs)

        self.blocks = nnx.List([stack(block) for block in config.pattern])
        self.norm = RMSNorm(config.width, config.norm_epsilon, rngs=rngs)

    def init_state(self, batch_size: int) -> tuple[Any, ...]:
        """Return the state before the first token, zeros: one a block of the pattern, stacked over its repeats."""

        def state(block: Block) -> Any:
            graph, values = nnx.split(block)
            first = jax.eval_shape(
                lambda: nnx.merge(graph, jax.tree.map(lambda p: p[0], values)).init_state(batch_size)
            )
            return jax.tree.map(lambda s: jnp.zeros((self.config.repeats, *s.shape), s.dtype), first)

        return tuple(state(block) for block in self.blocks)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        state: tuple[Any, ...] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T V"], tuple[Any, ...]]:
        """Return float32 logits of the next tokens, and the state after the last token.

        Args:
            tokens: ids below ``vocab_size``. An id outside gives NaN where it is not known before compiling.
            state: what an earlier call returned, to continue from there; None starts from zero.
            segment_ids: the document of each token; nothing passes from one to the next. None: one document.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        self.check_tokens(tokens)
        before = self.init_state(tokens.shape[0]) if state is None else state
        h, after = self.hidden(tokens, before, segment_ids)
        return self.logits(h), cast(tuple[Any, ...], after)

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        state: tuple[Any, ...] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple[Any, ...] | None]:
        """Return what the read-out is applied to, in the compute dtype; without a state, none is returned either."""
        x = jnp.take(self.embedding[...], tokens, axis=0, mode="fill").astype(self.dtype)
        graphs, parameters = zip(*(nnx.split(block) for block in self.blocks), strict=True)

        def blocks(x, parameters, states):
            after = []
            for graph, values, before in zip(graphs, parameters, states or [None] * len(graphs), strict=True):
                x, last = nnx.merge(graph, values)(x, before, segment_ids)
                after.append(last)
            return x, None if states is None else tuple(after)

        blocks = self.rematerialized(blocks)
        if state is not None:
            self.check_state(state)
            state = tuple(state)
            one = jax.tree.map(lambda all_: all_[0], (parameters, state))
            state = jax.tree.map(_as_type_of, state, jax.eval_shape(blocks, x, *one)[1])

        def repeat(carry, parameters):
            # The stacked states are carried, and each repeat changes its part in place: as an input and an output of
            # the loop they would be two stacks, and one more copy.
            i, x, states = carry
            before = jax.tree.map(lambda all_: jax.lax.dynamic_index_in_dim(all_, i, keepdims=False), states)
            x, after = blocks(x, parameters, before)
            states = jax.tree.map(
                lambda all_, new: jax.lax.dynamic_update_index_in_dim(all_, new, i, 0), states, after
            )
            return (i + 1, x, states), None

        (_, x, state), _ = jax.lax.scan(repeat, (jnp.int32(0), x, state), parameters, unroll=self.unroll)
        return self.norm(x), state

    def check_state(self, state: tuple[Any, ...]) -> None:
        """Raise ValueError unless a state has a part for each block of the pattern, stacked over its repeats."""
        count, repeats = len(self.blocks), self.config.repeats
        if len(state) != count or not all(jax.tree.leaves(part) for part in state):
            raise ValueError(
                f"state: has no {count} parts, one a block of the pattern; start from model.init_state(batch_size)"
            )
        depths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(state)}
        if depths != {(repeats,)}:
            found = ", ".join(str(depth[0]) if depth else "none" for depth in sorted(depths))
            raise ValueError(
                f"state: is stacked over {found} repeats of the pattern, and the model has {repeats}; "
                "start from model.init_state(batch_size)"
            )

    def rematerialized(self, function: Any) -> Any:
        """Return ``function`` with what its backward pass computes again, as ``remat`` says."""
        if self.remat == "none":
            return function
        policies = jax.checkpoint_policies
        products = policies.dots_with_no_batch_dims_saveable
        kernels = policies.save_from_both_policies(products, policies.save_only_these_names(*RESIDUALS))
        policy = {"kernels": kernels, "products": products, "block": None}[self.remat]
        # In a loop nothing can be merged with the forward pass, so no barrier against that is needed.
        return jax.checkpoint(function, policy=policy, prevent_cse=self.unroll > 1)

    def readout(self) -> Float[Array, "D V"]:
        """Return the matrix that maps hidden states to logits, in the dtype of the parameters."""
        return self.embedding[...].T if self.config.tied else self.head[...]

    def logits(self, h: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Return the float32 logits of hidden states."""
        return jnp.matmul(h, self.readout().astype(h.dtype), preferred_element_type=jnp.float32)

    def check_tokens(self, tokens: Int[Array, "B T"]) -> None:
        """Raise ValueError for an id outside the vocabulary, where ids are known."""
        if isinstance(tokens, Tracer) or tokens.size == 0:
            return
        ids = np.asarray(tokens)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(
                f"tokens: ids from {low} to {high} where vocab_size={self.config.vocab_size}; "
                "use the tokenizer that the model was made for"
            )


def _as_type_of(x: Any, like: jax.ShapeDtypeStruct) -> Array:
    """x in the dtype of `like`, and varying over the same axes of a mesh, so that a loop can carry it."""
    x = jnp.asarray(x).astype(like.dtype)
    wanted = like.manual_axis_type
    missing = (frozenset() if wanted is None else wanted.varying) - jax.typeof(x).mat.varying
    return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x
