"""Mosaic GPU, Hopper: states from segment to segment, S ← M S + E, in float32.

A float32 number is the sum of three bfloat16 ones; of their products on the tensor cores, the three that lie below
float32's own rounding are left out. As in `forward_sm90`, a warpgroup holds 64 columns of S as the rows of Sᵀ.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import WGMMA, Zero, load_transposed, store_transposed, tiled
from pallas_kernels.rank_one.layout import COLUMNS, Plan
from pallas_kernels.rank_one.stream_sm90 import Refs, launch, matrix_unit

PARTS = 3


def pass_segments(
    transitions: Array, hidden: Array, added: Array, state: Array, plan: Plan, *, reverse: bool = False
) -> Array:
    """Return the state at every segment [B · segments, HV, K, V]: the one given, and M S + E of the one before.

    In reverse the one given is at the last segment, and before a segment is Mᵀ S + E.

    Args:
        transitions: M of every segment [B · segments, HV, K, K] float32.
        hidden: how many chunks of a segment do not count for M [B · segments, HV] int32; if all, M is 0 and not read.
        added: E of every segment [B · segments, HV, K, V] float32.
        state: [B, HV, K, V] float32.
        plan: of the call; K is 64 or 128.
        reverse: see above.
    """
    batch, heads, width, depth = state.shape
    count = plan.segments

    def run(given: Refs, made: Refs, s: Refs) -> None:
        b, h = lax.axis_index("b"), lax.axis_index("h")
        mine = pl.ds(lax.axis_index("j") * COLUMNS, COLUMNS)
        unit, zero = matrix_unit(s, lax.axis_index("wg")), Zero(s["zero"])

        def step(i: Array, state: Array) -> Array:
            place = b * count + (count - 1 - i if reverse else i)
            store_transposed(made["states"].at[place, h, :, mine], state)
            moves = given["hidden"][place, h] < plan.chunks
            return lax.cond(moves, partial(move, place), lambda _: add(place), state)

        def add(place: Array) -> Array:
            return load_transposed(given["added"].at[place, h, :, mine])

        def move(place: Array, state: Array) -> Array:
            moves = [s["transitions"].at[n + zero.get()] for n in range(PARTS)]
            for half in range(width // COLUMNS):
                rows = pl.ds(half * COLUMNS, COLUMNS)
                m = plgpu.load(given["transitions"].at[place, h, rows], layout=WGMMA, optimized=False)
                for move, part in zip(moves, _parts(m), strict=True):
                    move.at[rows][...] = part
            plgpu.commit_smem()
            if not reverse:
                moves = [move.transpose((1, 0)) for move in moves]
            after = add(place)
            for n, part in enumerate(_parts(state)):
                after = unit.add(after, *((part, move) for move in moves[: PARTS - n]))
            return after

        state = load_transposed(given["state"].at[b, h, :, mine])
        state = lax.fori_loop(0, count - 1, step, state)
        place = b * count + (0 if reverse else count - 1)
        store_transposed(made["states"].at[place, h, :, mine], state)

    inputs = {"transitions": transitions, "hidden": hidden, "added": added, "state": state}
    outputs = {"states": jax.ShapeDtypeStruct(added.shape, jnp.float32)}
    scratch = {"transitions": tiled(PARTS, width, width, dtype=jnp.bfloat16)}
    scratch["zero"] = plgpu.SMEM((128,), jnp.int32)
    if plan.interpret:
        scratch["staging"] = {width: tiled(1, COLUMNS, width, dtype=jnp.bfloat16)}
    grid = {"j": depth // COLUMNS, "h": heads, "b": batch}
    return launch("rank_one_passage", run, inputs, outputs, scratch, plan, grid, 1)["states"]


def _parts(x: Array) -> Iterator[Array]:
    """Bfloat16 numbers whose sum is x, the largest first."""
    for _ in range(PARTS):
        part = x.astype(jnp.bfloat16)
        x = x - part.astype(jnp.float32)
        yield part
