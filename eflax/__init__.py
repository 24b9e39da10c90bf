"""Exact Flow Linear Attention and its relatives in JAX.

`eflax.cells` has the recurrences as pure functions, `eflax.layers` the Flax NNX modules around them,
`eflax.models` what is built of the layers.
"""

__version__ = "0.1.0"
