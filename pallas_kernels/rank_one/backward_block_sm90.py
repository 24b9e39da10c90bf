"""Mosaic GPU, Hopper: what the warpgroups of the kernel in `backward_sm90` share: places in shared memory, barriers.

All matrices are held as 64 × 64 tiles, so that results can leave by way of the places of what is no longer needed.
"""

import enum
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import Zero, tiled
from pallas_kernels.rank_one.layout import CHUNK, COLUMNS, Plan
from pallas_kernels.rank_one.stream_sm90 import Refs, matrix_unit

SQUARE = (CHUNK, CHUNK)
WORKERS = HALVES = 2
BOTH = range(HALVES)
Pair = tuple[Array, Array]
SIZE = HALVES * COLUMNS  # of keys and of values
REGISTERS = 216, 72  # of each thread that computes, and that loads; see `Plan.registers`
STAGES = 2  # of q, k, T, P and the gates; all else has one place
# What is loaded together: ahead; when the last chunk's products are done; and when its results have left.
EARLY, MIDDLE, LATE = ("q", "k", "inverse", "gates"), ("do", "rows", "states"), ("v",)
COLUMNS_OF = {"do": 0, "v": 1}  # places in "columns"


class Parts(enum.IntEnum):
    """Rows of the gates' gradient [B, HV, N, rows, C], float32; each once for each worker."""

    ERASE = 0  # da
    WRITE = 1  # dw
    SUM = 2  # dc
    LAST = 3  # of the last dc of the chunk, in parts that only their sum matters


def scratch_buffers(inputs: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The shared memory and barriers of a block, by name; `inputs` are those of the kernel."""
    shapes = {
        "q": (STAGES, HALVES),
        "k": (STAGES, HALVES),
        "inverse": (STAGES,),
        "rows": (HALVES,),
        "states": (HALVES, HALVES),  # of V, of K
    }
    shapes = {name: shape for name, shape in shapes.items() if name in inputs}
    shapes["dstates"] = (HALVES, HALVES)  # then dq and dk
    shapes["columns"] = (2, HALVES)  # dO; v, then dR, then dv
    if "q" in inputs:
        shapes["scores"] = (STAGES,)  # P, then P̄
    if plan.erases:
        shapes["erasures"] = ()  # L̄; a L̄ takes the place of T
    scratch: dict[str, Any] = {name: tiled(*lead, *SQUARE, dtype=plan.dtype) for name, lead in shapes.items()}
    copies = {
        name: 1 if name in ("inverse", "gates") else 4 if name == "states" else HALVES for name in inputs
    }

    def loads(names: tuple[str, ...]) -> int:
        return sum(copies[name] for name in names if name in inputs)

    scratch |= {
        "zero": plgpu.SMEM((WORKERS + 1, 128), jnp.int16),  # with 32 bits all would not fit
        "gates": plgpu.SMEM((STAGES, plan.gate_rows, CHUNK), jnp.float32),
        "dgates": plgpu.SMEM((WORKERS, len(Parts), CHUNK), jnp.float32),
        "loaded": plgpu.Barrier(num_arrivals=loads(EARLY), num_barriers=STAGES),
        "scored": plgpu.Barrier(num_barriers=STAGES),
        "middle_loaded": plgpu.Barrier(num_arrivals=loads(MIDDLE)),
        "middle_consumed": plgpu.Barrier(num_arrivals=WORKERS),
        "late_loaded": plgpu.Barrier(num_arrivals=loads(LATE)),
        "finished": plgpu.Barrier(num_arrivals=WORKERS),
        "stored": plgpu.Barrier(),
        "rows_met": plgpu.Barrier(num_arrivals=WORKERS),
        "scores_met": plgpu.Barrier(num_arrivals=WORKERS),
    }
    if plan.interpret:
        scratch["staging"] = {CHUNK: tiled(WORKERS + 1, *SQUARE, dtype=plan.dtype)}
    return scratch


class Warpgroup:
    """One warpgroup of a block, which has one head of one sequence."""

    def __init__(self, plan: Plan, given: Refs, made: Refs, s: Refs, wg: Any) -> None:
        self.plan, self.given, self.made, self.s = plan, given, made, s
        self.zero, self.unit = Zero(s["zero"].at[wg]), matrix_unit(s, wg)
        self.reads = "q" in given
        self.b, self.h = lax.axis_index("b"), lax.axis_index("h")

    def tokens(self, i: Array) -> Any:
        """The tokens of the i-th chunk from the end."""
        return pl.ds((self.plan.chunks - 1 - i) * CHUNK, CHUNK)

    def tiles(self, i: Array) -> Callable[..., Any]:
        """Where the arrays of chunk i are, by name and indices; addresses are computed anew for each `tiles`."""
        zero = self.zero.get()
        slot = lax.rem(i, STAGES) + zero

        def tile(name: str, *index: Any) -> Any:
            ring = (slot,) if name in (*EARLY, "scores") else ()
            index = (*ring, *(x + zero for x in index))
            return self.s[name].at[index] if index else self.s[name]

        return tile
