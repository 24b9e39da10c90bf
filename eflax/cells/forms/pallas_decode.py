"""Hopper GPUs: a few tokens of the recurrence in the kernel of `pallas_kernels.rank_one.decode`."""

from jax import Array

from eflax.cells.forms.edits import Coefficients
from pallas_kernels.rank_one import decode


def pallas_decode(
    q: Array,
    k: Array,
    v: Array,
    coefficients: Coefficients,
    restart: Array | None,
    initial_state: Array,
    scale: float | Array,
) -> tuple[Array, Array]:
    """Like the other forms, but of q, k and v as they are given, key heads not repeated."""
    if not isinstance(scale, float):
        q, scale = q.astype(initial_state.dtype) * scale, 1.0
    return decode.decode_tokens(q, k, v, *coefficients, restart, initial_state, scale=scale)
