"""Calls of the decode, scan and convolution kernels to compile: which, the function, and its arguments' shapes."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.rank_one.decode_sm90 import choose_tile, decode
from pallas_kernels.selective_scan import backward_sm90, forward_sm90, layout
from pallas_kernels.selective_scan import gpu as selective_scan
from pallas_kernels.selective_scan.stream_sm90 import PADDED
from pallas_kernels.short_convolution import backward_sm90 as convolution_backward
from pallas_kernels.short_convolution import forward_sm90 as convolution_forward
from pallas_kernels.short_convolution import gpu as short_convolution

BATCH, TIME, HEADS, WIDTH = 8, 4096, 16, 2048
Key = tuple[str, int, int, str]  # kernel, K, V, features


def decode_launches() -> Iterator[tuple[Key, Callable, tuple]]:
    """The kernel for a few tokens, with all its gates."""
    for (key_dim, value_dim), tokens in itertools.product([(64, 64), (128, 128), (256, 256)], (1, 8)):
        k, v = (jax.ShapeDtypeStruct((BATCH, tokens, HEADS, n), jnp.bfloat16) for n in (key_dim, value_dim))
        gate = jax.ShapeDtypeStruct((BATCH, tokens, HEADS), jnp.float32)
        state = jax.ShapeDtypeStruct((BATCH, HEADS, key_dim, value_dim), jnp.float32)
        tile: Any = choose_tile(key_dim, value_dim)
        function = partial(decode, tile=tile, scale=1.0, interpret=None)
        features = f"erases decays {tokens} tokens"
        yield ("decode", key_dim, value_dim, features), function, (state, k, k, v, gate, gate, gate)


def scan_launches() -> Iterator[tuple[Key, Callable, tuple]]:
    """The kernels of the selective scan; the table has N for K, and the channels of a block for V."""
    for entries, packed in ((8, False), (16, False), (16, True), (32, False), (64, False)):

        def full(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        x: Any = jax.ShapeDtypeStruct((BATCH, TIME, WIDTH), jnp.bfloat16)
        plan = selective_scan.make_plan(x, entries, packed=packed, reads=True)
        cut = full(BATCH, TIME, PADDED) if packed else None
        tokens = (x, x, full(WIDTH, entries), *[full(BATCH, TIME, entries)] * 2, cut)
        state, states = full(BATCH, WIDTH, entries), full(BATCH, TIME // layout.CHUNK, WIDTH, entries)
        sizes = entries, plan.channels, "packed" if packed else ""
        kept = partial(forward_sm90.forward, plan=plan, residuals=True)
        back = partial(backward_sm90.backward, plan=plan.for_gradients())
        yield ("scan_forward", *sizes), partial(forward_sm90.forward, plan=plan), (*tokens, state)
        yield ("scan_forward_residuals", *sizes), kept, (*tokens, state)
        yield ("scan_backward", *sizes), back, (*tokens, x, states, state)


def convolution_launches() -> Iterator[tuple[Key, Callable, tuple]]:
    """The kernels of the short convolution; the table has the taps for K, and the channels of a block for V."""
    parts = WIDTH // 4, WIDTH // 4, WIDTH // 2
    for dtype, taps, packed in itertools.chain(
        itertools.product([jnp.bfloat16], [4, 8], [False, True]), [(jnp.float32, 4, True)]
    ):

        def full(*shape: int, dtype: Any = jnp.float32) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype)

        x, kernel = full(BATCH, TIME, WIDTH, dtype=dtype), full(taps, WIDTH)
        plan = short_convolution.make_plan(x, kernel, parts, 1)
        ahead = plan.staged(short_convolution.FORWARD_STAGES)
        plan = plan.staged(short_convolution.BACKWARD_STAGES)
        before, after = (full(BATCH, taps - 1, WIDTH, dtype=dtype) for dtype in (dtype, jnp.float32))
        past = full(BATCH, TIME, 4, dtype=jnp.int32) if packed else None
        key = taps, plan.channels, f"{jnp.dtype(dtype).name}{' packed' * packed}"
        inputs = x, before, full(taps + 1, WIDTH), past
        dy = [full(BATCH, TIME, part, dtype=dtype) for part in parts]
        forward = partial(convolution_forward.forward, plan=ahead)
        backward = partial(convolution_backward.backward, plan=plan)
        yield ("convolution_forward", *key), forward, inputs
        yield ("convolution_backward", *key), backward, (*inputs, dy, after)
