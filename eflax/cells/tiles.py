"""How a TPU holds arrays of heads."""

from collections.abc import Callable

from jaxtyping import Array, Shaped

from pallas_kernels.device import device_kind

ROWS, LANES = 8, 128  # of a tile


def per_head(
    function: Callable[[Array], Array], x: Shaped[Array, "*axes K"]
) -> Shaped[Array, "*axes"] | Shaped[Array, "*axes K"]:
    """function(x), where function works on the last axis: it sums it, or maps it to one as long.

    A TPU holds arrays in tiles of 8 × 128 of their last two axes: [B, T, H, K] in others than [B, T, H·K], which
    projections make and kernels take, so that XLA copies, in float32 often, before and after a norm of heads. The tiles
    of [B, T, H·K] are those of [B, T/8, H, 8, K]: there, function sees x like this, and nothing is copied.
    """
    if x.ndim != 4 or x.shape[1] % ROWS or x.shape[3] % LANES or not device_kind().startswith("TPU"):
        return function(x)
    batch, time, heads, width = x.shape
    y = function(x.reshape(batch, time // ROWS, ROWS, heads, width).swapaxes(2, 3)).swapaxes(2, 3)
    return y.reshape(batch, time, heads, *y.shape[4:])
