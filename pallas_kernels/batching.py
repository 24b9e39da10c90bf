"""What vmap does to a kernel."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def over_batch(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays (or None) with a batch axis in front, for which vmap's new axis is more of the batch."""
    run = jax.custom_batching.custom_vmap(kernel)

    @run.def_vmap
    def _(size, batched, *arrays):
        def joined(x: Array, has_axis: bool) -> Array:
            x = x if has_axis else jnp.broadcast_to(x[None], (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        results = run(*jax.tree.map(joined, arrays, tuple(batched)))
        return jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), results), (True,) * len(results)

    return run
