"""The decoder of the Recurrent Looped Transformer: the state H, and the loop over it."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eflax.layers.state import check_divides
from eflax.models.rlt_arrays import KeyValues, Rotary, Sizes, empty_slots
from eflax.models.rlt_parts import KEEP_PRODUCTS, DecoderBlock, Memory, Merge


class DecoderState(NamedTuple):
    """H, of one size for any number of tokens; slots of the window that are not filled yet are never seen."""

    register: Array | None  # [B, D]: the output s after the last complete interval; None in RLT-0
    window: tuple[KeyValues, ...]  # of each layer, the last W - 1 positions


class Step(NamedTuple):
    """What a chunk of C positions brings with it that no register changes."""

    e: Array  # [B, C, D]
    gate: Array  # [B, C, D]: W_g's half of e
    rotary: Rotary
    positions: Array  # [C]


class Decoder(nnx.Module):
    """Merge, decoder blocks and the projections of their memory; see `eflax.models.rlt`.

    Args:
        sizes: of the parts.
        layers: decoder blocks; without one there is no memory.
        window: W.
        alpha: of the merge.
        feedback_interval: None makes no merge.
        rngs: the source of initial parameters.
    """

    def __init__(
        self,
        sizes: Sizes,
        layers: int,
        *,
        window: int,
        alpha: float,
        feedback_interval: int | None,
        rngs: nnx.Rngs,
    ):
        self.sizes, self.window, self.interval = sizes, window, feedback_interval
        self.merge = None if feedback_interval is None else Merge(sizes, alpha, rngs=rngs)
        self.memory = Memory(sizes, rngs=rngs) if layers else None
        self.blocks = nnx.List([DecoderBlock(sizes, rngs=rngs) for _ in range(layers)])

    def init_state(self, batch_size: int) -> DecoderState:
        """Return H before the first token."""
        register = None if self.merge is None else self.merge.init_register(batch_size)
        slots = empty_slots(batch_size, self.window - 1, self.sizes)
        return DecoderState(register, (slots,) * len(self.blocks))

    def __call__(
        self,
        state: DecoderState,
        e: Float[Array, "B T D"],
        memory: KeyValues | None,
        start: Int[Array, ""],
        *,
        chunk: int | None = None,
        truncate: int | None = None,
        remat: bool = False,
        unroll: int = 1,
    ) -> tuple[Float[Array, "B T D"], DecoderState]:
        """Return the outputs s of the positions from ``start`` on, and H after them.

        Args:
            state: H before them.
            e: outputs of the encoder.
            memory: keys and values of positions from 0 on, at least up to the last of e.
            start: the first position; without ``chunk``, a multiple of the feedback interval.
            chunk: positions decoded together, 1 or, by default, the feedback interval. Where T leaves an incomplete
                one at the end, H after it is right for chunk=1 alone.
            truncate, remat, unroll: see `RLT`.
        """
        length, weights = e.shape[1], [block.mlp.weights() for block in self.blocks]
        if self.interval is None or self.merge is None:
            if truncate is not None:
                raise ValueError(f"truncate={truncate}: without feedback there are no steps to cut between")
            positions = start + jnp.arange(length, dtype=jnp.int32)
            s, window = self.run(
                weights, state.window, e, memory, Rotary.of(positions, self.sizes), positions
            )
            return s, DecoderState(None, window)
        if truncate is not None:
            check_divides("truncate", truncate, "feedback_interval", self.interval)
        chunk = self.interval if chunk is None else chunk
        # No position sees one after it, so none of the sequence sees those that fill the last chunk.
        e = jnp.pad(e, ((0, 0), (0, -length % chunk), (0, 0)))
        positions = start + jnp.arange(e.shape[1], dtype=jnp.int32)

        def cut(x: Array, axis: int) -> Array:
            shape = (*x.shape[:axis], -1, chunk, *x.shape[axis + 1 :])
            return jnp.moveaxis(x.reshape(shape), axis, 0)

        rotary = Rotary(*(cut(x, 0) for x in Rotary.of(positions, self.sizes)))
        steps = Step(cut(e, 1), cut(self.merge.gate(e), 1), rotary, cut(positions, 0))
        body = partial(self.step, weights, memory, truncate)
        # In a loop nothing can be merged with the forward pass, so no barrier against that is needed.
        body = jax.checkpoint(body, policy=None if remat else KEEP_PRODUCTS, prevent_cse=False)
        state, s = jax.lax.scan(body, state, steps, unroll=unroll)
        return jnp.moveaxis(s, 0, 1).reshape(e.shape)[:, :length], state

    def step(
        self,
        weights: list[Any],
        memory: KeyValues | None,
        truncate: int | None,
        state: DecoderState,
        step: Step,
    ) -> tuple[DecoderState, Float[Array, "B C D"]]:
        """Advance H by one chunk."""
        assert self.merge is not None and self.interval is not None
        if truncate is not None:
            here = (step.positions[0] % truncate == 0) & (step.positions[0] > 0)  # s_star is learned
            state = jax.tree.map(lambda x: jnp.where(here, jax.lax.stop_gradient(x), x), state)
        before = state.register
        assert before is not None
        u = self.merge(step.e, step.gate, before)
        s, window = self.run(weights, state.window, u, memory, step.rotary, step.positions)
        register = s[:, -1]
        if s.shape[1] != self.interval:
            register = jnp.where((step.positions[-1] + 1) % self.interval == 0, register, before)
        return DecoderState(register, window), s

    def run(
        self,
        weights: list[Any],
        window: tuple[KeyValues, ...],
        z: Float[Array, "B C D"],
        memory: KeyValues | None,
        rotary: Rotary,
        positions: Int[Array, "C"],
    ) -> tuple[Float[Array, "B C D"], tuple[KeyValues, ...]]:
        """Return the blocks' outputs of positions that follow each other, and the window after them."""
        count, kept = positions.shape[0], self.window - 1
        slots = positions[0] - kept + jnp.arange(kept + count, dtype=jnp.int32)
        distance = positions[:, None] - slots[None]
        near = (distance >= 0) & (distance < self.window) & (slots >= 0)[None]
        after = []
        for block, mlp, past in zip(self.blocks, weights, window, strict=True):
            q, new = block.attention.project(z, rotary)
            filled = jax.tree.map(lambda old, x: jnp.concatenate([old, x], axis=2), past, new)
            z = block.attention(z, q, filled, near)
            assert memory is not None
            known = positions[:, None] >= jnp.arange(memory.keys.shape[2], dtype=jnp.int32)[None]
            z = block.mlp(block.cross(z, memory, rotary, known), mlp)
            after.append(jax.tree.map(lambda x: x[:, :, count:], filled))
        return z, tuple(after)
