"""Affine maps S ↦ A S + c on states: what a token, or a whole segment of tokens, does to the state.

Composing two of them gives a third, and composition is associative. So the same objects serve the scan over
tokens (`prefix_states`), the pass from chunk to chunk (`scan_states`) and a pass between devices. What differs
is the structure of A, and with it the cost of composing:

| kind | A | composing costs |
|---|---|---|
| `Additive` | I | O(KV) |
| `Scalar` | decay · I | O(KV) |
| `Diagonal` | diag(decay) | O(KV) |
| `LowRank` | decay · I − left rightᵀ | the ranks add |
| `Dense` | any K × K matrix | O(K³) |

Leading axes `...` are batch axes. A map of a simpler kind can be composed with one of a richer kind.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import register_dataclass
from jaxtyping import Float

HIGHEST = lax.Precision.HIGHEST  # states and their summaries are never rounded to fast matmul formats


@register_dataclass
@dataclass(frozen=True)
class Additive:
    """S ↦ S + offset."""

    offset: Float[Array, "... K V"]


@register_dataclass
@dataclass(frozen=True)
class Scalar:
    """S ↦ decay · S + offset."""

    decay: Float[Array, "..."]
    offset: Float[Array, "... K V"]


@register_dataclass
@dataclass(frozen=True)
class Diagonal:
    """S ↦ diag(decay) S + offset."""

    decay: Float[Array, "... K"]
    offset: Float[Array, "... K V"]


@register_dataclass
@dataclass(frozen=True)
class LowRank:
    """S ↦ decay · S − left (rightᵀ S) + offset. A rank of 0 is a `Scalar`."""

    decay: Float[Array, "..."]
    left: Float[Array, "... K R"]
    right: Float[Array, "... K R"]
    offset: Float[Array, "... K V"]


@register_dataclass
@dataclass(frozen=True)
class Dense:
    """S ↦ matrix S + offset."""

    matrix: Float[Array, "... K K"]
    offset: Float[Array, "... K V"]


AffineMap = Additive | Scalar | Diagonal | LowRank | Dense


def apply(affine: AffineMap, state: Float[Array, "... K V"]) -> Float[Array, "... K V"]:
    """A · state + c."""
    return transform(affine, state) + affine.offset


def transform(affine: AffineMap, state: Float[Array, "... K V"]) -> Float[Array, "... K V"]:
    """A · state: the linear part alone."""
    match affine:
        case Additive():
            return state
        case Scalar(decay=decay):
            return decay[..., None, None] * state
        case Diagonal(decay=decay):
            return decay[..., None] * state
        case LowRank(decay=decay, left=left, right=right):
            return decay[..., None, None] * state - _matmul(left, _matmul(_transpose(right), state))
        case Dense(matrix=matrix):
            return _matmul(matrix, state)


def compose(second: AffineMap, first: AffineMap) -> AffineMap:
    """The map that applies `first`, then `second`: A = A₂ A₁, c = A₂ c₁ + c₂.

    Maps of different kinds are first converted to the simplest kind that holds both.
    """
    kind = _common_kind(type(second), type(first))
    second, first = convert(second, kind), convert(first, kind)
    offset = apply(second, first.offset)
    match second, first:
        case Additive(), Additive():
            return Additive(offset)
        case Scalar(), Scalar():
            return Scalar(second.decay * first.decay, offset)
        case Diagonal(), Diagonal():
            return Diagonal(second.decay * first.decay, offset)
        case LowRank(), LowRank():
            # (ρ₂ − X₂Y₂ᵀ)(ρ₁ − X₁Y₁ᵀ) = ρ₂ρ₁ − X₂ (ρ₁Y₂)ᵀ − [(ρ₂ − X₂Y₂ᵀ) X₁] Y₁ᵀ
            left = jnp.concatenate([second.left, transform(second, first.left)], axis=-1)
            right = jnp.concatenate([first.decay[..., None, None] * second.right, first.right], axis=-1)
            return LowRank(second.decay * first.decay, left, right, offset)
        case Dense(), Dense():
            return Dense(_matmul(second.matrix, first.matrix), offset)
    raise AssertionError("convert() returned another kind than it was asked for")


def identity(kind: type[AffineMap], state: Float[Array, "... K V"]) -> AffineMap:
    """The map of the given kind that leaves every state of this shape and dtype as it is."""
    return convert(Additive(jnp.zeros_like(state)), kind)


def to_dense(affine: AffineMap) -> Dense:
    """The same map with its A written out as a K × K matrix."""
    size, dtype = affine.offset.shape[-2], affine.offset.dtype
    eye = jnp.broadcast_to(jnp.eye(size, dtype=dtype), (*affine.offset.shape[:-1], size))
    return Dense(transform(affine, eye), affine.offset)


def convert(affine: AffineMap, kind: type[AffineMap]) -> AffineMap:
    """The same map as a richer kind. Raises TypeError where the kind cannot hold it."""
    if isinstance(affine, kind):
        return affine
    if kind is Dense:
        return to_dense(affine)
    offset = affine.offset
    ones = jnp.ones(offset.shape[:-2], offset.dtype)
    decay = affine.decay if isinstance(affine, Scalar) else ones
    if kind is Scalar and isinstance(affine, Additive):
        return Scalar(decay, offset)
    if kind is Diagonal and isinstance(affine, Additive | Scalar):
        return Diagonal(jnp.broadcast_to(decay[..., None], offset.shape[:-1]), offset)
    if kind is LowRank and isinstance(affine, Additive | Scalar):
        factors = jnp.zeros((*offset.shape[:-1], 0), offset.dtype)
        return LowRank(decay, factors, factors, offset)
    raise TypeError(
        f"a map of kind {type(affine).__name__} cannot be written as {kind.__name__}; use to_dense"
    )


def prefix_states(maps: AffineMap, initial_state: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """The states after each of the maps stacked along `axis`, by a parallel (associative) scan.

    Not for `LowRank`, whose rank would grow. O(T log T) compositions at most, O(log T) deep.
    """
    composed = lax.associative_scan(lambda first, second: compose(second, first), maps, axis=axis)
    return apply(composed, jnp.expand_dims(initial_state, axis))


def scan_states(
    maps: AffineMap, initial_state: Float[Array, "..."], axis: int
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """The states *before* each of the maps stacked along `axis`, and the one after the last, one by one."""

    def step(state, affine):
        return apply(affine, state), state

    stacked = jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), maps)
    final_state, before = lax.scan(step, initial_state, stacked)
    return jnp.moveaxis(before, 0, axis), final_state


def _common_kind(a: type[AffineMap], b: type[AffineMap]) -> type[AffineMap]:
    order = (Additive, Scalar, Diagonal, LowRank, Dense)
    if {a, b} == {Diagonal, LowRank}:
        return Dense
    return max(a, b, key=order.index)


def _matmul(x: Array, y: Array) -> Array:
    return jnp.matmul(x, y, precision=HIGHEST)


def _transpose(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)
