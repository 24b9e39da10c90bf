"""What a token mixer carries from call to call, and how documents are told apart.

A document is a run of equal segment ids. A mixer numbers the documents of a call relative to the one that its
state was in the middle of, which has the number 0; this one rule serves the restart of the recurrence, the
window of the convolution and the mask of the attention, inside a call and across calls.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from eflax.cells.checks import Axes, check_count


class MixerState(NamedTuple):
    """The state of a recurrent mixer after a token; start from ``layer.init_state(batch_size)``.

    It belongs to the document of that token, ``segment``: a call whose first segment id differs starts a new
    document from zero, one with the same id, or without segment ids, continues it.
    """

    recurrent: Array | tuple[Array, ...]  # the state of the cell, float32
    tail: Any  # Array [B, W, channels]: the last inputs of the short convolution; None without one
    segment: Array  # [B] int32


def check_call(
    layer: Any, x: Float[Array, "B T D"], state: Any, segment_ids: Int[Array, "..."] | None
) -> None:
    """Raise TypeError or ValueError where the arguments of a mixer do not fit it or each other."""
    axes = Axes()
    axes.bind_shape("the width of the layer", (layer.width,), "D")
    axes.bind("x", x, "B T D")
    axes.bind_segment_ids(segment_ids)
    if state is None:
        return
    batch_size = x.shape[0]
    fitting = jax.eval_shape(lambda: layer.init_state(batch_size))
    source = f"layer.init_state({batch_size})"
    if type(state) is not type(fitting):
        raise TypeError(
            f"state must be a {type(fitting).__name__} from {source} or an earlier call of the layer, "
            f"not {type(state).__name__}"
        )
    shapes, needed = (jax.tree.map(np.shape, s) for s in (state, fitting))
    if shapes != needed:
        raise ValueError(f"state has the shapes {shapes}; layer and x need {needed}, as from {source}")


def check_counts(**sizes: int) -> None:
    """Raise ValueError, naming it, for a size that is not an integer of at least 1."""
    for name, value in sizes.items():
        check_count(name, value)


def check_divides(name: str, value: int, by_name: str, by: int) -> int:
    """Return value // by, or raise ValueError where they are no sizes or leave a rest."""
    check_count(name, value)
    check_count(by_name, by)
    if value % by:
        raise ValueError(f"{name}={value} is not divisible by {by_name}={by}")
    return value // by


def number_documents(
    segment: Int[Array, "B"], segment_ids: Int[Array, "B T"] | None
) -> tuple[Int[Array, "B T"] | None, Int[Array, "B"]]:
    """Number the documents of a call of T ≥ 1 tokens.

    Args:
        segment: the segment id of the last token before the call.
        segment_ids: the ids of the call, or None where every token continues the document of ``segment``.

    Returns:
        The document of each token, from 0, which is the one that the state was in the middle of, up by one at
        each change of the id; None for all zeros. And the segment id of the last token.
    """
    if segment_ids is None:
        return None, segment
    ids = segment_ids.astype(jnp.int32)
    before = jnp.concatenate([segment[:, None], ids[:, :-1]], axis=1)
    return jnp.cumsum(ids != before, axis=1, dtype=jnp.int32), ids[:, -1]


def restart[State](state: State, documents: Int[Array, "B T"] | None) -> State:
    """Return the initial state of the first token's document: ``state``, or zeros where a new one starts."""
    if documents is None:
        return state
    continues = documents[:, 0] == 0
    return jax.tree.map(lambda s: jnp.where(continues.reshape(-1, *(1,) * (s.ndim - 1)), s, 0), state)
