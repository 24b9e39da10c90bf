"""What the convolution's kernels share: the plan of a call."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

CHUNK = 16  # tokens that are loaded at once
UNROLL = 4  # tokens of a loop's body: of more, registers run short where documents are packed
WARPGROUP = 128  # threads, each of which has its own channels
MULTIPROCESSORS = 132  # of an H100 SXM or H200


@dataclass(frozen=True)
class Plan:
    """Sizes of one call; all static."""

    taps: int
    parts: tuple[int, ...]  # widths of the arrays into which y and its gradient are cut
    channels: int  # of a block, a multiple of 128 that divides them
    chunks: int  # of a segment
    segments: int  # of a sequence, which are worked on side by side
    interpret: Any = None
    stages: int = 1  # chunks in flight

    def staged(self, stages: int) -> "Plan":
        """The plan of a kernel with so many chunks in flight."""
        return dataclasses.replace(self, stages=stages)

    @property
    def window(self) -> int:
        """Tokens before its own that an output sees."""
        return self.taps - 1

    @property
    def unroll(self) -> int:
        """Tokens of a loop's body."""
        return UNROLL if self.interpret is None else 1  # the interpreter only compiles longer

    @property
    def layout(self) -> Any:
        """One number a channel in registers: neighbouring channels in a thread."""
        return plgpu.Layout.WG_STRIDED((self.channels,), vec_size=self.channels // WARPGROUP)

    def load(self, ref: Any) -> Float[Array, "channels"]:
        """One number a channel from memory, in float32."""
        return plgpu.load(ref, layout=self.layout).astype(jnp.float32)

    def zeros(self) -> Float[Array, "channels"]:
        """0 for each channel."""
        return plgpu.layout_cast(jnp.zeros(self.channels, jnp.float32), self.layout)
