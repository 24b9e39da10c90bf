"""Mosaic GPU, Hopper: T = (I + StrictTril(diag(a) (K Kᵀ ⊙ Γ)))⁻¹ of every chunk, all chunks at once."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import UNGUARDED, MatrixUnit, Zero, columns, index, rows, run_kernel, tiled
from pallas_kernels.rank_one.layout import CHUNK, MULTIPROCESSORS, Gates, Plan

BLOCK = 16  # rows of a block on the diagonal: the inner size of one wgmma


def solve(k: Array, gates: Array, plan: Plan) -> tuple[Array, Array | None]:
    """Return T [B, HV, N, C, C], 16-bit like k; and, for segments, the growth [B, HV, N, C] of every token.

    The growth of a token is log max(1, |1 − aλ|), float32: by how much its edit I − a k kᵀ can lengthen a vector.

    Args:
        k: [B, T, H, K], 16-bit.
        gates: [B, HV, N, rows, C], float32; see `layout.Gates`.
        plan: sizes and features of this call.

    The inverse is built by doubling the blocks of its diagonal, T ← T − T L T for the blocks that join: the stable
    way, as each block is inverted exactly once. Inside, keys count as if they had length 1, T' = diag(n) T diag(1/n):
    every entry of T' is at most aλ, and float16, 8 times finer than bfloat16, can hold it.
    """
    batch, _, heads, width = k.shape
    group, chunks = plan.value_heads // heads, plan.chunks
    total = batch * plan.value_heads * chunks
    # Warpgroups of a block, each with a chunk of its own, so that one works while another waits.
    workers = 4 if width <= 128 else 3
    blocks = min(MULTIPROCESSORS, pl.cdiv(total, workers))

    def body(k_g, gates_g, t_g, *rest):
        *growth_g, shared = rest
        wg = lax.axis_index("wg")
        first = lax.axis_index("block") * workers + wg
        zero = Zero(shared["zero"].at[wg])

        def place(i: Array) -> tuple[Array, Array, Array]:
            item = first + i * (blocks * workers)
            return item // (plan.value_heads * chunks), item // chunks % plan.value_heads, item % chunks

        def load(i: Array, s: dict[str, Any]) -> None:
            b, h, n = place(i)
            plgpu.copy_gmem_to_smem(k_g.at[b, pl.ds(n * CHUNK, CHUNK), h // group], s["k"], s["ready"])
            plgpu.copy_gmem_to_smem(gates_g.at[b, h, n], s["gates"], s["ready"])

        count = pl.cdiv(total - first, blocks * workers)
        pl.when(count > 0)(lambda: load(jnp.int32(0), jax.tree.map(lambda x: x.at[wg], shared)))

        @pl.loop(0, count)
        def _(i):
            turn = wg + zero.get()
            s = jax.tree.map(lambda x: x.at[turn], shared)
            unit = MatrixUnit(s.get("staging"))
            plgpu.barrier_wait(s["ready"])
            near, growth = _lower(s, plan, unit)
            plgpu.commit_smem()  # every thread is done with k and gates
            pl.when(i + 1 < count)(lambda: load(i + 1, s))
            inverse = jnp.concatenate(_invert(s, near, unit), 1)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if growth_g:
                s["growth"][...] = growth
            s["out"][...] = (inverse * rows(s["inverse_length"]) * columns(s["length"])).astype(plan.dtype)
            plgpu.commit_smem()
            b, h, n = place(i)
            plgpu.copy_smem_to_gmem(s["out"], t_g.at[b, h, n])
            for out in growth_g:
                plgpu.copy_smem_to_gmem(s["growth"], out.at[b, h, n])

        plgpu.wait_smem_to_gmem(0)

    compact = tiled(workers, CHUNK, BLOCK, dtype=jnp.float16)
    wide = tiled(workers, CHUNK, 2 * BLOCK, dtype=jnp.float16)
    vector = plgpu.SMEM((workers, CHUNK), jnp.float32)
    scratch = {
        "zero": plgpu.SMEM((workers, 128), jnp.int32),
        "k": tiled(workers, CHUNK, width, dtype=plan.dtype),
        "gates": plgpu.SMEM((workers, plan.gate_rows, CHUNK), jnp.float32),
        "ready": plgpu.Barrier(num_arrivals=2, num_barriers=workers),
        "near": compact,
        "before": compact,
        "far": wide,
        # One is written while the other is read.
        "inverse": tiled(workers, 2, CHUNK, BLOCK, dtype=jnp.float16),
        "half": wide,
        "out": tiled(workers, CHUNK, CHUNK, dtype=plan.dtype),
        "length": vector,
        "inverse_length": vector,
        "inverse_length_again": vector,  # one to read along rows, one along columns
    }
    tokens = (batch, plan.value_heads, chunks, CHUNK)
    outputs = [jax.ShapeDtypeStruct((*tokens, CHUNK), plan.dtype)]
    if plan.segments > 1:
        outputs.append(jax.ShapeDtypeStruct(tokens, jnp.float32))
        scratch["growth"] = vector
    if plan.interpret:
        scratch["staging"] = {
            size: tiled(workers, CHUNK, size, dtype=jnp.float16) for size in (CHUNK, 2 * BLOCK)
        }
    inverse, *growth = run_kernel(
        lambda *refs: pl.run_scoped(partial(body, *refs), scratch, collective_axes="wg"),
        k,
        gates,
        name="rank_one_solve",
        out_type=outputs,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=workers,
        thread_name="wg",
        interpret=plan.interpret,
        compiler_params=UNGUARDED,
    )
    return inverse, growth[0] if growth else None


def _lower(s: dict[str, Any], plan: Plan, unit: MatrixUnit) -> tuple[Array, Array]:
    """Put L', its keys of length 1, and the lengths into shared memory; returns L' near the diagonal, and growths."""
    row, column = index(0), index(1)
    gram = unit.product((CHUNK, CHUNK), (s["k"], s["k"].transpose((1, 0))))
    square = jnp.sum(jnp.where(row == column, gram, 0.0), 1)
    square = jnp.where(square == 0.0, 1.0, square)
    inverse_length = lax.rsqrt(square)
    s["inverse_length"][...] = inverse_length
    s["inverse_length_again"][...] = inverse_length
    s["length"][...] = square * inverse_length
    erase = plgpu.load(s["gates"].at[Gates.ERASE], layout=plgpu.Layout.WGMMA.reduce(1))
    plgpu.commit_smem()
    factor = erase * square * inverse_length
    lower = gram * lax.broadcast_in_dim(factor, gram.shape, [0]) * columns(s["inverse_length_again"])
    lower = plan.decayed(lower, s["gates"], diagonal=False)
    panels = [lower[:, i * BLOCK : (i + 1) * BLOCK] for i in range(CHUNK // BLOCK)]
    block = index(0, (CHUNK, BLOCK)) // BLOCK
    near = panels[3]
    for i in range(3):
        near = jnp.where(block == i, panels[i], near)
    s["near"][...] = near.astype(jnp.float16)
    s["before"][...] = (_block(panels[0], 1) + _block(panels[2], 3)).astype(jnp.float16)
    s["far"][...] = lower[:, : 2 * BLOCK].astype(jnp.float16)
    return near, jnp.log(jnp.maximum(jnp.abs(1.0 - erase * square), 1.0))


def _block(x: Array, block: int) -> Array:
    """x [C, 16] where its rows belong to this block of 16, else 0."""
    return jnp.where(index(0, (CHUNK, BLOCK)) // BLOCK == block, x, jnp.zeros((), x.dtype))


def _spread(x: Array, shift: int = 0) -> Array:
    """A compact matrix in full: the 16 columns of a row stand under its own block, or `shift` blocks before it."""
    block = index(0, (CHUNK, BLOCK)) // BLOCK
    # A product, as a choice between 16-bit numbers would unpack and pack them.
    kept = [jnp.where(block == i + shift, 1.0, 0.0).astype(x.dtype) for i in range(CHUNK // BLOCK)]
    return jnp.concatenate([x * factor for factor in kept], 1)


def _invert(s: dict[str, Any], near: Array, unit: MatrixUnit) -> list[Array]:
    """T' of the whole chunk as four panels of 16 columns, from L'.

    A block-diagonal matrix of four 16 × 16 blocks is held compactly, [C, 16]: row r has the columns of its own block.
    """
    compact, half = (CHUNK, BLOCK), jnp.float16
    row, column = index(0, compact) % BLOCK, index(1, compact)
    inverse = jnp.where(row == column, 1.0, 0.0) - jnp.where(row // 2 == column // 2, near, 0.0)
    for level in (1, 2, 3):
        # Blocks of 2^level are inverted; those that lie between the two blocks of a pair come next.
        place = s["inverse"].at[level % 2]
        place[...] = inverse.astype(half)
        plgpu.commit_smem()
        left = unit.product(compact, (_spread(inverse.astype(half)), s["near"]))
        left = jnp.where((row ^ column) >> level == 1, left, 0.0).astype(half)
        inverse = inverse - unit.product(compact, (_spread(left), place))
    place = s["inverse"].at[0]
    place[...] = inverse.astype(half)
    plgpu.commit_smem()
    # The blocks (1, 0) and (3, 2), compact too: a row has the columns of the block before its own.
    left = unit.product(compact, (_spread(inverse.astype(half)), s["before"])).astype(half)
    between = unit.product(compact, (_spread(left, shift=1), place))
    panels = [_block(inverse, i) for i in range(CHUNK // BLOCK)]
    panels = [panels[0] - _block(between, 1), panels[1], panels[2] - _block(between, 3), panels[3]]
    s["half"][...] = jnp.concatenate(panels[:2], 1).astype(half)
    plgpu.commit_smem()
    # The lower left quarter; the rows above it come out as 0.
    upper, lower = pl.ds(0, 2 * BLOCK), pl.ds(2 * BLOCK, 2 * BLOCK)
    left = unit.product((CHUNK, 2 * BLOCK), (jnp.concatenate(panels[2:], 1).astype(half), s["far"].at[lower]))
    quarter = unit.product((CHUNK, 2 * BLOCK), (left.astype(half), s["half"].at[upper]))
    return [panels[0] - quarter[:, :BLOCK], panels[1] - quarter[:, BLOCK:], *panels[2:]]
