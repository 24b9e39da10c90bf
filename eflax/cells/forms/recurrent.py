"""Token by token, as the equation is written: O(T) steps, and the reference for every other form."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from eflax.cells.forms.edits import Edits, edit_state, read_state


def recurrent(
    edits: Edits, initial_state: Array, *, chunk_size: int, precision: lax.Precision
) -> tuple[Array | None, Array]:
    """`lax.scan` over the tokens. `chunk_size` plays no role; states are never rounded below float32."""
    del chunk_size

    def step(state: Array, edit: Edits):
        state = edit_state(state, edit)
        return state, None if edit.q is None else read_state(state, edit.q, precision)

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), edits)
    final_state, o = lax.scan(step, initial_state, tokens)
    return None if o is None else jnp.moveaxis(o, 0, 1), final_state
