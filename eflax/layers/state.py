"""What a token mixer carries from call to call, and how documents are told apart.

A document is a run of equal segment ids. A mixer numbers the documents of a call relative to the one that its
state was in the middle of, which has the number 0; this one rule serves the restart of the recurrence, the
window of the convolution and the mask of the attention, inside a call and across calls.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class MixerState(NamedTuple):
    """The state of a recurrent mixer after a token; start from ``layer.init_state(batch_size)``.

    It belongs to the document of that token, ``segment``: a call whose first segment id differs starts a new
    document from zero, one with the same id, or without segment ids, continues it.
    """

    recurrent: Array | tuple[Array, ...]  # the state of the cell, float32
    tail: Any  # Array [B, W, channels]: the last inputs of the short convolution; None without one
    segment: Array  # [B] int32


def check_call(
    x: Float[Array, "B T D"], width: int, segment: Array | None, segment_ids: Int[Array, "..."] | None
) -> None:
    """Raise ValueError where the arguments of a mixer do not fit it or each other."""
    if x.ndim != 3 or x.shape[-1] != width:
        raise ValueError(f"x: expected shape [B, T, {width}] with the width of the layer, got {x.shape}")
    batch_size = x.shape[0]
    if segment is not None and segment.shape[0] != batch_size:
        raise ValueError(
            f"state: made for batch size {segment.shape[0]}, but x has batch size {batch_size}; "
            f"start from layer.init_state({batch_size})"
        )
    if segment_ids is not None and not jnp.issubdtype(jnp.asarray(segment_ids).dtype, jnp.integer):
        raise TypeError(f"segment_ids: expected integers, one id a token of x, got {segment_ids.dtype}")
    if segment_ids is not None and segment_ids.shape != x.shape[:2]:
        raise ValueError(
            f"segment_ids: expected shape {x.shape[:2]}, one id a token of x, got {segment_ids.shape}"
        )


def check_divides(name: str, value: int, by_name: str, by: int) -> int:
    """Return value // by, or raise ValueError where it leaves a rest."""
    if by < 1 or value % by:
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
