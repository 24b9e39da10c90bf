"""Calls of the GPU kernels, to compile or to time: which, the function, and its arguments' shapes."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.rank_one.backward_chunks_sm90 import backward_chunks, gate_rows
from pallas_kernels.rank_one.backward_sm90 import backward
from pallas_kernels.rank_one.backward_states_sm90 import backward_states
from pallas_kernels.rank_one.chunk_roles_sm90 import Parts
from pallas_kernels.rank_one.decode_sm90 import choose_tile, decode
from pallas_kernels.rank_one.forward_sm90 import forward
from pallas_kernels.rank_one.gates_sm90 import gate_gradients, put_gates
from pallas_kernels.rank_one.gpu import make_plan
from pallas_kernels.rank_one.layout import CHUNK, Plan
from pallas_kernels.rank_one.passage_sm90 import pass_segments
from pallas_kernels.rank_one.segments import square_plan
from pallas_kernels.rank_one.solve_sm90 import solve
from pallas_kernels.selective_scan import backward_sm90, forward_sm90, layout
from pallas_kernels.selective_scan import gpu as selective_scan
from pallas_kernels.selective_scan.stream_sm90 import PADDED
from pallas_kernels.short_convolution import backward_sm90 as convolution_backward
from pallas_kernels.short_convolution import forward_sm90 as convolution_forward
from pallas_kernels.short_convolution import gpu as short_convolution

BATCH, TIME, HEADS, WIDTH = 8, 4096, 16, 2048  # enough for all multiprocessors
Key = tuple[str, int, int, str]  # of a `Kernel`
SIZES = {
    (64, 64): ("erases",),
    (128, 128): ("decays", "erases decays", "erases decays packed"),
    (256, 256): ("erases decays packed",),
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Which kernel a row of a table is about."""

    kernel: str
    key_dim: int
    value_dim: int
    features: str

    @property
    def key(self) -> Key:
        """What tells kernels apart."""
        return self.kernel, self.key_dim, self.value_dim, self.features


def all_launches() -> Iterator[tuple[Key, Callable, tuple]]:
    """All kernels."""
    solved = set()
    for (key_dim, value_dim), variants in SIZES.items():
        for features in variants:
            for name, function, arguments in rank_one_launches(key_dim, value_dim, features):
                if name == "solve":  # it knows nothing of values
                    if (key_dim, features) in solved:
                        continue
                    solved.add((key_dim, features))
                yield (name, key_dim, value_dim, features), function, arguments
    yield from decode_launches()
    yield from scan_launches()
    yield from convolution_launches()


def rank_one_launches(key_dim: int, value_dim: int, features: str) -> Iterator[tuple[str, Callable, tuple]]:
    """The kernels of one call of the family of rank-one edits, forward and backward, by name."""

    def half(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def full(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    k, v, gate = (half(BATCH, TIME, HEADS, n) for n in (key_dim, value_dim, 1))
    given: Any = {name: gate if name in features else None for name in ("erases", "decays", "packed")}
    plan = make_plan(k, k, v, given["erases"], given["decays"], given["packed"], key_dim**-0.5)
    per_chunk = (BATCH, HEADS, TIME // CHUNK)
    gates = full(*per_chunk, plan.gate_rows, CHUNK)
    inverse = half(*per_chunk, CHUNK, CHUNK) if plan.erases else None
    state, states = full(BATCH, HEADS, key_dim, value_dim), half(*per_chunk, value_dim, key_dim)
    token, restart = full(BATCH, TIME, HEADS), jax.ShapeDtypeStruct((BATCH, TIME), jnp.bool_)
    erase, decay = token if plan.erases else None, token if "decays" in features else None
    restart = restart if plan.packed else None
    yield "gates", partial(put_gates, plan=plan), (erase, token, decay, restart)
    if plan.erases:
        yield "solve", partial(solve, plan=plan), (k, gates)
    inputs = (k, k, v, inverse, gates, state)
    yield "forward", partial(forward, plan=plan.staged()), inputs
    yield "forward_residuals", partial(forward, plan=plan.staged(residuals=True), residuals=True), inputs
    yield (
        "backward_states",
        partial(backward_states, plan=plan.staged(residuals=True)),
        (k, k, v, inverse, gates, state),
    )
    if plan.packed:  # what long sequences of few heads take besides; the other features cost no more
        staged = plan.staged()
        moved = square_plan(staged)
        skip = jax.ShapeDtypeStruct((BATCH, HEADS), jnp.int32)

        def run(function: Callable, plan: Plan, **options: Any) -> Callable:
            return lambda skip, *arguments: function(*arguments, plan, skip=skip, **options)

        yield "segment_solve", partial(solve, plan=dataclasses.replace(plan, segments=2)), (k, gates)
        yield "segment_states", run(forward, staged), (skip, None, k, v, inverse, gates, None)
        yield "segment_transitions", run(forward, moved), (skip, None, k, None, inverse, gates, None)
        passed = run(backward_states, staged, residuals=False)
        yield "segment_gradients", passed, (skip, k, k, v, inverse, gates, None)
        if not plan.wide:
            segments = BATCH // 2  # of two sequences
            moves, first = full(BATCH, HEADS, key_dim, key_dim), full(2, HEADS, key_dim, value_dim)
            yield (
                "segment_passage",
                partial(pass_segments, plan=dataclasses.replace(plan, segments=segments)),
                (moves, skip, state, first),
            )
    yield "backward_chunks", partial(backward_chunks, plan=plan), (k, k, v, v, v, v, states, states, gates)
    dgates = full(*per_chunk, len(Parts), CHUNK)
    yield "gate_gradients", partial(gate_gradients, rows=gate_rows(plan), plan=plan), (dgates, decay, restart)
    if plan.joint:
        yield "backward", partial(backward, plan=plan), (k, k, v, v, v, states, inverse, gates, state)


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
