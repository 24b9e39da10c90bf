"""The launches of TPU kernels that are compiled for the report: which, with what, and per what they are counted."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.rank_one import backward_tpu, decode_tpu, forward_tpu
from pallas_kernels.rank_one.layout import CHUNK
from pallas_kernels.rank_one.tpu import make_plan
from pallas_kernels.selective_scan import backward_tpu as scan_backward_tpu
from pallas_kernels.selective_scan import forward_tpu as scan_forward_tpu
from pallas_kernels.selective_scan import tpu as scan_tpu
from pallas_kernels.selective_scan.walk_tpu import BLOCK, LANES, SPREAD

BATCH, TIME, HEADS = 4, 8192, 16
DECODED = 64  # sequences
ALL = "erases decays packed"
# Of rank_one: data type, K, V, features.
RANK_ONE = [
    ("bfloat16", 128, 128, ""),
    ("bfloat16", 128, 128, "decays"),
    ("bfloat16", 128, 128, "erases"),
    ("bfloat16", 128, 128, "erases decays"),
    ("bfloat16", 128, 128, ALL),
    ("bfloat16", 64, 64, "erases decays"),
    ("bfloat16", 256, 256, "erases decays"),
    ("float32", 128, 128, ALL),
    ("float32", 64, 128, "erases"),
]
DECODE = [("bfloat16", 128, 128, "erases decays"), ("bfloat16", 256, 256, "erases decays")]
# Data type of x, N, D (of Mamba of 130M and of 340M), features.
SCAN = [
    ("bfloat16", 16, 1536, ""),
    ("bfloat16", 16, 2048, ""),
    ("bfloat16", 16, 2048, "packed"),
    ("float32", 16, 2048, ""),
    ("bfloat16", 64, 2048, ""),
]
PASSES = ("forward", "forward_residuals", "backward")


class Launch(NamedTuple):
    """A function that launches one kernel, and how to count the kernel's instructions."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # shapes
    units: float  # in a step of a program: heads and 64 tokens, or 128 channels and 64 tokens, or heads and tokens
    trips: tuple[int, ...] = ()  # of the loops in a step, in the order of the listing


def kernels() -> Iterator[tuple[str, str, int, int, str]]:
    """Kernel, data type, two sizes (K and V, or N and D) and features of everything that is compiled."""
    for configuration, name in itertools.product(RANK_ONE, PASSES):
        yield name, *configuration
    for configuration in DECODE:
        yield "decode", *configuration
    for configuration, name in itertools.product(SCAN, PASSES):
        yield f"scan_{name}", *configuration


def launch(kernel: str, dtype: str, rows: int, columns: int, features: str) -> Launch:
    """The launch of one of `kernels`."""
    of = _decode if kernel == "decode" else _scan if kernel.startswith("scan_") else _rank_one
    return of(kernel.removeprefix("scan_"), jnp.dtype(dtype), rows, columns, features.split())


def _array(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _rank_one(kernel: str, dtype: Any, key_dim: int, value_dim: int, features: list[str]) -> Launch:
    k, v = (_array(BATCH, TIME, HEADS, width, dtype=dtype) for width in (key_dim, value_dim))
    gate = _array(BATCH, TIME, HEADS)
    erases, decays, packed = (gate if name in features else None for name in ALL.split())
    plan = make_plan(k, k, v, erases, decays, packed, key_dim**-0.5)
    k, v = (_array(BATCH, TIME, HEADS * width, dtype=dtype) for width in (key_dim, value_dim))
    gates = _array(BATCH, HEADS, plan.chunks, plan.gate_rows, CHUNK)
    state = _array(BATCH, HEADS, key_dim, value_dim)
    if kernel != "backward":
        function = partial(forward_tpu.forward, plan=plan, residuals=kernel == "forward_residuals")
        return Launch(function, (k, k, v, gates, state), plan.heads)
    inverse = _array(BATCH, plan.chunks, CHUNK, HEADS * CHUNK, dtype=dtype) if plan.erases else None
    states = _array(BATCH, plan.chunks, HEADS, key_dim, value_dim, dtype=dtype)
    function = partial(backward_tpu.backward, plan=plan)
    return Launch(function, (k, k, v, v, v, gates, inverse, states, state), plan.heads)


def _decode(kernel: str, dtype: Any, key_dim: int, value_dim: int, features: list[str]) -> Launch:
    state = _array(DECODED, HEADS, key_dim, value_dim)
    k, v = (_array(DECODED, 1, HEADS, width, dtype=dtype) for width in (key_dim, value_dim))
    gate = _array(DECODED, 1, HEADS)
    erase, write, decay = (gate if name in features else None for name in ("erases", "erases", "decays"))
    function = partial(decode_tpu.decode, scale=key_dim**-0.5, interpret=None)
    heads = decode_tpu.choose_heads(HEADS, key_dim, value_dim)
    return Launch(function, (state, k, k, v, erase, write, decay), heads)


def _scan(kernel: str, dtype: Any, entries: int, width: int, features: list[str]) -> Launch:
    x = _array(BATCH, TIME, width, dtype=dtype)
    plan = scan_tpu.make_plan(x, entries, packed="packed" in features, reads=True)
    states = (plan.entries, plan.programs * plan.width)
    x, dt = (_array(BATCH, TIME, states[1], dtype=z) for z in (dtype, jnp.float32))
    state = _array(BATCH, *states)
    columns = _array(BATCH, TIME // SPREAD, plan.columns, LANES, dtype=jnp.bfloat16)
    units = plan.tokens / CHUNK * plan.groups * plan.tiles
    spread, blocks = plan.tokens // SPREAD, plan.tokens // BLOCK
    if kernel != "backward":
        residuals = kernel == "forward_residuals"
        function = partial(scan_forward_tpu.forward, plan=plan, residuals=residuals)
        return Launch(function, (x, dt, state, columns, state), units, (spread, plan.groups, blocks))
    kept = _array(BATCH, plan.chunks, *states)
    function = partial(scan_backward_tpu.backward, plan=plan)
    arguments = (x, dt, state, columns, x, kept, state)
    return Launch(function, arguments, units, (spread, plan.groups, blocks, blocks))
