"""Small helpers for Pallas Mosaic GPU device code: tiled buffers, vectors, and matrix products."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import Unsupported

try:
    from jax._src.pallas.mpmd import _mpmd_map as mpmd_map
except ImportError:
    mpmd_map = None

WGMMA = plgpu.Layout.WGMMA
LARGEST_AXIS = 65_535  # blocks of a launch, along all axes but one
TILE = 64  # rows of a warpgroup's accumulator
APPROXIMATE = plgpu.CompilerParams(approx_math=True)  # exp by the machine's own, to 2 units in the last place
# Besides, no barrier stands around each store and before each load by TMA. The kernel's own barriers must then part
# what one thread of a warpgroup reads from what another writes to the same place, in either order.
UNGUARDED = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)


def run_kernel(body: Callable[..., None], *inputs: Array, name: str, **options: Any) -> Any:
    """Launch a kernel, of 32-bit numbers also where JAX has 64-bit types: indices and counts are int32."""
    for axis, size in zip(options["grid_names"][:-1], options["grid"][:-1], strict=True):
        if size > LARGEST_AXIS:
            raise Unsupported(
                f"the kernel {name} would need {size:,} blocks along its axis {axis!r}, and CUDA allows "
                f"{LARGEST_AXIS:,} on all axes but the last: cut the longest axis of the inputs, or name another form"
            )
    return plgpu.kernel(_in_32_bits(body), kernel_name=name, **options)(*inputs)


def run_kernel_in_place(
    body: Callable[..., None],
    *inputs: Array,
    name: str,
    out_type: tuple[jax.ShapeDtypeStruct, ...],
    mesh: plgpu.Mesh,
    **options: Any,
) -> Any:
    """Launch a kernel whose first output takes the memory of its first input, where nothing else needs that.

    The body has a reference to each, since they can yet be two pieces of memory: inside a scan over layers XLA lets a
    kernel read from one stack and write to another. One reference for both, as `jax.new_ref` gives it, is to what is
    read, and the result is lost. Without JAX's function that takes both, a state that is donated is copied.
    """
    body = _in_32_bits(body)
    if mpmd_map is None:
        return pl.kernel(body, out_type, mesh=mesh, name=name, **options)(*inputs)
    return mpmd_map([(mesh, body)], out_type, input_output_aliases={0: 0}, name=name, **options)(*inputs)


def _in_32_bits(body: Callable[..., None]) -> Callable[..., None]:
    def traced(*refs: Any) -> None:  # again under vmap
        with jax.enable_x64(False):
            body(*refs)

    return traced


def tiled(*shape: int, dtype: Any) -> Any:
    """A shared-memory buffer that TMA writes and wgmma reads."""
    swizzle = plgpu.find_swizzle(shape[-1] * jnp.dtype(dtype).itemsize * 8)
    tile = (8, swizzle // jnp.dtype(dtype).itemsize)
    # pyright takes the two classes for abstract ones.
    transforms = (plgpu.TilingTransform(tile), plgpu.SwizzleTransform(swizzle))  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def columns(ref: Any, rows: int = TILE) -> Array:
    """The vector in `ref` as every row of a matrix: one value a column."""
    return lax.broadcast_in_dim(plgpu.load(ref, layout=WGMMA.reduce(0)), (rows, ref.shape[-1]), [1])


def rows(ref: Any, columns: int = TILE) -> Array:
    """The vector in `ref` as every column of a matrix: one value a row."""
    return lax.broadcast_in_dim(plgpu.load(ref, layout=WGMMA.reduce(1)), (ref.shape[-1], columns), [0])


def index(axis: int, shape: tuple[int, int] = (TILE, TILE)) -> Array:
    """Row numbers (axis 0) or column numbers (axis 1)."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)


def zeros(*shape: int) -> Array:
    """Zeros as an accumulator holds them."""
    return plgpu.layout_cast(jnp.full(shape, 0, jnp.float32), WGMMA)


def load_transposed(ref: Any) -> Array:
    """The transpose of a float32 matrix in global memory, in registers."""
    x = plgpu.load(ref.transpose((1, 0)), layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=False)
    return plgpu.layout_cast(x, WGMMA)


def store_transposed(ref: Any, x: Array) -> None:
    """Put the transpose of x, float32, into global memory."""
    ref.transpose((1, 0))[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)


class Zero:
    """A number that is 0, which the compiler cannot know: an address with it in is computed where it is used.

    Otherwise the addresses of a long loop's body, many as they are, are all computed before the loop, and spill.
    """

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        memory[...] = jnp.zeros((128,), memory.dtype)
        plgpu.commit_smem()

    def get(self) -> Array:
        """Read it."""
        return self.memory[0].astype(jnp.int32)


class MatrixUnit:
    """Products on the tensor cores, with the left factor in registers or in shared memory.

    `staging` is None on a GPU. The interpreter knows neither left factors in registers nor accumulators that start
    from a value, so there it is a dict from a left factor's number of columns to a buffer through which it goes.
    """

    def __init__(self, staging: dict[int, Any] | None) -> None:
        self.staging = staging

    def _left(self, x: Any) -> Any:
        if self.staging is None or not isinstance(x, jax.Array):
            return x
        buffer = self.staging[x.shape[1]]
        buffer[...] = x
        plgpu.commit_smem()
        return buffer

    def product(self, shape: tuple[int, int], *factors: tuple[Any, Any]) -> Array:
        """The sum of the products x @ y, in float32."""

        def body(accumulator):
            for x, y in factors:
                plgpu.wgmma(accumulator, self._left(x), y)
            return accumulator[...]

        return pl.run_scoped(body, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))

    def add(self, start: Array, *factors: tuple[Any, Any]) -> Array:
        """`start` plus the sum of the products x @ y."""
        return self.sums((start, *factors))[0][0]

    def sums(self, *terms: Any, meanwhile: Callable[[], Any] = lambda: None) -> tuple[list[Array], Any]:
        """For each (start, (x, y), ...) what `add` returns, and what `meanwhile` returns.

        All products are on their way before `meanwhile` is called, and awaited after it.
        """
        if self.staging is not None:
            return [start + self.product(start.shape, *factors) for start, *factors in terms], meanwhile()

        def body(*accumulators):
            for accumulator, (start, *factors) in zip(accumulators, terms, strict=True):
                accumulator[...] = start
                for x, y in factors:
                    plgpu.wgmma(accumulator, x, y)
            made = meanwhile()
            return [accumulator[...] for accumulator in accumulators], made

        return pl.run_scoped(
            body, *(plgpu.WGMMAAccumulatorRef(start.shape, jnp.float32) for start, *_ in terms)
        )
