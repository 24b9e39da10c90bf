"""Mosaic GPU, Hopper: a few tokens of the recurrence at once, the state read once and written once.

A block has some columns of one head's state in the registers of its 128 threads. Token after token,

    S ← e^g S,   r = w v − a Sᵀ k,   S ← S + k rᵀ,   o = scale · Sᵀ q.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic

COLUMNS = (128, 64, 32, 16)  # of a block
LARGEST = 8192  # entries of a block's state: 64 in each thread's registers
VECTOR = 4  # float32 numbers that a thread loads at once
WARPS, LANES = 4, 32
# Layouts are said here, not searched for; and threads share nothing but through shuffles, so need no barriers.
PARAMETERS = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
)


@dataclass(frozen=True)
class Tile:
    """The part of a state that a block has."""

    rows: int  # K
    columns: int

    @property
    def layout(self) -> Any:
        """Of [K, columns] in registers: a warp has a quarter of the columns, so that sums over rows stay inside."""
        across = self.columns // (WARPS * VECTOR)
        down = LANES // across
        tiles = ((down, self.columns), (down, self.columns // WARPS), (1, VECTOR))
        tiled = mgpu.TiledLayout(plgpu.Tiling(tiles), (-5,), (-4, -3), -1, _check_canonical=False)
        tiled = tiled.canonicalize()
        return plgpu.Layout.TILED(tiled.tiling, tiled.warp_dims, tiled.lane_dims, tiled.vector_dim)

    def load(self, ref: Any, axis: int) -> Array:
        """A vector along the rows (axis 0) or the columns (axis 1), for every entry of the tile, in float32."""
        return self.spread(plgpu.load(ref, layout=self.layout.reduce(1 - axis), optimized=False), axis)

    def spread(self, x: Array, axis: int) -> Array:
        """The same of a vector in registers."""
        x = lax.broadcast_in_dim(x.astype(jnp.float32), (self.rows, self.columns), [axis])
        return plgpu.layout_cast(x, self.layout)

    def over_rows(self, x: Array) -> Array:
        """The sum of each column."""
        return plgpu.layout_cast(jnp.sum(x, 0), self.layout.reduce(0))


def choose_tile(rows: int, columns: int) -> Tile | None:
    """The widest tile of a state [rows, columns]; None if there is none."""
    for width in COLUMNS:
        down = LANES * WARPS * VECTOR // width
        if columns % width == 0 and rows % down == 0 and rows * width <= LARGEST:
            return Tile(rows, width)
    return None


def decode(
    state: Array,
    q: Array,
    k: Array,
    v: Array,
    erase: Array | None,
    write: Array | None,
    log_decay: Array | None,
    tile: Tile,
    scale: float,
    interpret: Any,
) -> tuple[Array, Array]:
    """Return the new state and o [B, T, HV, V] in v's dtype.

    Args:
        state: [B, HV, K, V] float32. The result takes its memory, where it is not used afterwards.
        q: [B, T, H, K], T small.
        k: like q.
        v: [B, T, HV, V].
        erase: a [B, T, HV] float32; None is 0.
        write: w, like a; None is 1.
        log_decay: g, like a; None is 0.
        tile: from `choose_tile`.
        scale: of the queries.
        interpret: of `plgpu.kernel`.
    """
    batch, heads, _, columns = state.shape
    group = heads // k.shape[2]
    inputs = {"state": state, "q": q, "k": k, "v": v, "erase": erase, "write": write, "decay": log_decay}
    inputs = {name: x for name, x in inputs.items() if x is not None}

    def body(*refs):
        given = dict(zip(inputs, refs, strict=False))
        after, o = refs[len(inputs) :]
        h, b = lax.axis_index("h"), lax.axis_index("b")
        mine = pl.ds(lax.axis_index("j") * tile.columns, tile.columns)
        s = plgpu.load(given["state"].at[b, h, :, mine], layout=tile.layout, optimized=False)
        for t in range(v.shape[1]):
            gates = {name: given[name][b, t, h] for name in ("erase", "write", "decay") if name in given}
            row = plgpu.load(given["v"].at[b, t, h, mine], layout=tile.layout.reduce(0), optimized=False)
            row = row.astype(jnp.float32)
            if "write" in gates:
                row *= gates["write"]
            if "decay" in gates:
                s *= jnp.exp(gates["decay"])
            key, query = (tile.load(given[name].at[b, t, h // group], 0) for name in ("k", "q"))
            if "erase" in gates:
                row -= gates["erase"] * tile.over_rows(s * key)
            s += key * tile.spread(row, 1)
            read = tile.over_rows(s * query)
            o.at[b, t, h, mine][...] = (read * scale).astype(o.dtype)
        after.at[b, h, :, mine][...] = s

    return mosaic.run_kernel_in_place(
        body,
        *inputs.values(),
        name="rank_one_decode",
        out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (state, v)),
        mesh=plgpu.Mesh(grid=(columns // tile.columns, heads, batch), grid_names=("j", "h", "b")),
        compiler_params=PARAMETERS,
        interpret=interpret or False,
    )
