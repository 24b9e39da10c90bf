"""Exact Flow Linear Attention and its relatives in JAX.

`eflax.cells` has the recurrences as pure functions, `eflax.layers` the Flax NNX modules around them,
`eflax.linen` the same as Flax Linen modules, `eflax.models` what is built of the layers.
"""

from importlib import import_module

__version__ = "0.1.0"


def __getattr__(name: str):
    """Import the subpackages where they are first used, so that each costs only what it needs."""
    if name in ("cells", "layers", "linen", "models"):
        return import_module(f"eflax.{name}")
    raise AttributeError(f"module 'eflax' has no attribute {name!r}")
