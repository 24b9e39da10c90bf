"""What the scan kernels share: how threads divide the states of a block, and the plan of a call."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

MULTIPROCESSORS = 132  # of an H100 SXM or H200
VECTOR = 4  # float32 numbers that a thread loads at once
WARPS, LANES = 4, 32  # of a warpgroup
WARPGROUP = WARPS * LANES  # threads
CHUNK = 16  # tokens between two states that the forward kernel keeps


@dataclass(frozen=True)
class Plan:
    """Sizes and features of one call; all static.

    A block's 128 threads divide the states of its channels: a thread has `entries` of the N entries of each of
    `groups` channels, and threads side by side have the other entries. A group is `width` channels. The state of a
    block is a list of groups [width, N].
    """

    chunks: int
    state_dim: int  # N, a power of 2
    packed: bool = False
    reads: bool = True  # outputs are asked for
    weighted: bool = True  # dt x is written, not x
    entries: int = 8
    groups: int = 1
    segments: int = 1  # of a sequence, which stand beside each other on the batch axis
    stages: int = 2  # chunks in flight
    interpret: Any = None

    @property
    def unroll(self) -> int:
        """Tokens of a loop's body."""
        return 4 if self.interpret is None else 1  # the interpreter only compiles longer

    def for_gradients(self) -> "Plan":
        """The same channels for the backward kernel, which sums over groups, and needs more registers an entry."""
        return dataclasses.replace(self, entries=self.entries // 2, groups=self.groups * 2)

    @property
    def width(self) -> int:
        """Channels of a group."""
        return WARPGROUP * self.entries // self.state_dim

    @property
    def channels(self) -> int:
        """Channels of a block."""
        return self.width * self.groups

    @property
    def layout(self) -> Any:
        """The layout of a group's states [width, N] in registers.

        Lanes that load side by side have neighbouring entries, so that no two of them meet in a bank.
        """
        across = self.state_dim // self.entries
        rows = LANES // across
        tiles = ((self.width, self.state_dim), (rows, self.state_dim), (rows, VECTOR * across), (1, VECTOR))
        tiled = mgpu.TiledLayout(plgpu.Tiling(tiles), (-8,), (-4, -3), -1, _check_canonical=False)
        tiled = tiled.canonicalize()
        return plgpu.Layout.TILED(tiled.tiling, tiled.warp_dims, tiled.lane_dims, tiled.vector_dim)

    def group(self, i: int) -> Any:
        """Which of a block's channels are in a group."""
        return pl.ds(i * self.width, self.width)

    def load_states(self, ref: Any) -> list[Array]:
        """The states of a block's channels from memory [channels, N]."""
        return [
            plgpu.load(ref.at[self.group(i)], layout=self.layout, optimized=False) for i in range(self.groups)
        ]

    def store_states(self, ref: Any, states: list[Array]) -> None:
        """Write the states of a block's channels."""
        for i, state in enumerate(states):
            ref.at[self.group(i)][...] = state

    def load_channels(self, ref: Any) -> list[Array]:
        """One number a channel from memory [channels], each group by itself, in float32."""
        return [
            plgpu.load(ref.at[self.group(i)], layout=self.layout.reduce(1)).astype(jnp.float32)
            for i in range(self.groups)
        ]

    def store_channels(self, ref: Any, values: list[Array]) -> None:
        """Write one number a channel."""
        for i, value in enumerate(values):
            ref.at[self.group(i)][...] = value.astype(ref.dtype)

    def load_entries(self, ref: Any) -> Array:
        """One number an entry from memory [N], the same for all channels of a group."""
        return self._broadcast(plgpu.load(ref, layout=self.layout.reduce(0)), 1)

    def spread(self, values: list[Array]) -> list[Array]:
        """The same number for all entries of a channel."""
        return [self._broadcast(x, 0) for x in values]

    def zeros(self) -> list[Array]:
        """States of zeros."""
        shape = (self.width, self.state_dim)
        return [plgpu.layout_cast(jnp.full(shape, 0, jnp.float32), self.layout) for _ in range(self.groups)]

    def over_entries(self, x: Array) -> Array:
        """The sums over the entries of each channel."""
        return plgpu.layout_cast(jnp.sum(x, 1), self.layout.reduce(1))

    def _broadcast(self, x: Array, axis: int) -> Array:
        # The layout is said wherever it can be: searching for it takes Mosaic GPU minutes.
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (self.width, self.state_dim), [axis]), self.layout)
