"""The one recurrence behind the whole linear-attention and DeltaNet family, as data.

    S ← e^g (I − a k kᵀ) S + w k vᵀ,      o = Sᵀ q

A cell says what its inputs mean as (erase a, write w, log-decay g); every form below evaluates just this.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int


class Coefficients(NamedTuple):
    """Per token and value head; None stands for the constant that makes the factor disappear."""

    erase: Float[Array, "..."] | None = None  # a = 0: nothing is erased, and no triangular solve is needed
    write: Float[Array, "..."] | None = None  # w = 1
    log_decay: Float[Array, "..."] | None = None  # g = 0


class Edits(NamedTuple):
    """Edits of a sequence, or of one token (no T axis), in the state's dtype; one key head per value head, q scaled."""

    q: Float[Array, "B *T H K"] | None  # None: nothing is read out
    k: Float[Array, "B *T H K"]
    v: Float[Array, "B *T H V"]
    erase: Float[Array, "B *T H"] | None
    write: Float[Array, "B *T H"] | None
    log_decay: Float[Array, "B *T H"] | None
    restart: Bool[Array, "B *T"] | None  # True where a new document begins and the state is zeroed first

    @property
    def written(self) -> Float[Array, "B *T H V"]:
        """w v: the value rows as they are added along the key."""
        return self.v if self.write is None else self.write[..., None] * self.v


def restarts(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """True where the segment id changes. The first token continues the initial state."""
    before = jnp.concatenate([segment_ids[:, :1], segment_ids[:, :-1]], axis=1)
    return segment_ids != before


def edit_state(state: Array, edit: Edits) -> Array:
    """One token of the recurrence, on arrays without the time axis: [B, H, K, V] → [B, H, K, V]."""
    if edit.restart is not None:
        state = jnp.where(edit.restart[:, None, None, None], 0, state)
    if edit.log_decay is not None:
        state = jnp.exp(edit.log_decay)[..., None, None] * state
    row = edit.written
    if edit.erase is not None:
        row = row - edit.erase[..., None] * read_state(state, edit.k, lax.Precision.HIGHEST)
    return state + edit.k[..., :, None] * row[..., None, :]


def read_state(state: Array, q: Array, precision: lax.Precision) -> Array:
    """Sᵀ q: [..., K, V], [..., K] → [..., V]."""
    return jnp.einsum("...kv,...k->...v", state, q, precision=precision)
