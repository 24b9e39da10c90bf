"""The cross-entropy of a language model, in chunks of tokens: logits of [B, T, V] are never stored."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from eflax.cells.checks import check_count
from eflax.training.step import Metrics


def chunked_cross_entropy(
    hidden: Float[Array, "B T D"],
    readout: Float[Array, "D V"],
    targets: Int[Array, "B T"],
    weight: Float[Array, "B T"],
    *,
    chunk_size: int = 128,
    z_loss: float = 0.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return Σ weight · (nll + z_loss · lse²) and Σ weight · nll, float32, in nats.

    lse is the logarithm of the softmax's denominator and nll = lse − logit[target]. Where gradients are asked for,
    they are computed along with the loss, chunk by chunk, and kept in the size of `hidden` and `readout`; the logits of
    one chunk are all that is ever stored. Products are in the dtype of `hidden`, sums in float32.

    Args:
        hidden: what the read-out is applied to.
        readout: the matrix of the logits; its gradient is summed in float32.
        targets: the ids to predict; those of weight 0 may be anything.
        weight: of each token, 0 for padding.
        chunk_size: tokens of each sequence whose logits are computed at once.
        z_loss: pulls the denominators to 1 (PaLM, arXiv 2204.02311, uses 1e-4).

    The second result has no gradient: it is for reports.
    """
    check_count("chunk_size", chunk_size)
    size = min(chunk_size, max(hidden.shape[1], 1))
    sums: Any = _sums(hidden, readout, targets, weight.astype(jnp.float32), size, z_loss)
    objective, nll = sums
    return objective, lax.stop_gradient(nll)


def language_model_loss(
    model: Any, batch: dict[str, Array], *, chunk_size: int = 128, z_loss: float = 0.0
) -> tuple[Float[Array, ""], Metrics]:
    """Return the mean loss of a batch over its valid tokens, with "nll" (without z-loss) and their number "tokens".

    Args:
        model: a `LanguageModel`.
        batch: "tokens", "targets" [B, T] int32, "weight" [B, T] float32, and, optionally, "segment_ids" [B, T].
        chunk_size: see `chunked_cross_entropy`.
        z_loss: see `chunked_cross_entropy`.
    """
    hidden, _ = model.hidden(batch["tokens"], segment_ids=batch.get("segment_ids"))
    objective, nll = chunked_cross_entropy(
        hidden, model.readout(), batch["targets"], batch["weight"], chunk_size=chunk_size, z_loss=z_loss
    )
    tokens = batch["weight"].sum()
    count = jnp.maximum(tokens, 1)
    return objective / count, {"nll": nll / count, "tokens": tokens}


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _sums(hidden, readout, targets, weight, size, z_loss):
    weights = readout.astype(hidden.dtype)

    def add(sums, chunk):
        _, parts = _chunk(weights, z_loss, *chunk)
        return jax.tree.map(jnp.add, sums, parts), None

    zero = jnp.zeros((), jnp.float32)
    sums, _ = lax.scan(add, (zero, zero), _cut(size, hidden, targets, weight))
    return sums


def _sums_forward(hidden, readout, targets, weight, size, z_loss):
    """The sums, and the gradients of the first for hidden (in its dtype) and readout (float32)."""
    weights = readout.astype(hidden.dtype)

    def add(carry, chunk):
        sums, d_readout = carry
        d_logits, parts = _chunk(weights, z_loss, *chunk)
        d_logits = d_logits.astype(hidden.dtype)
        d_readout += jnp.einsum("btd,btv->dv", chunk[0], d_logits, preferred_element_type=jnp.float32)
        d_hidden = jnp.einsum("btv,dv->btd", d_logits, weights)
        return (jax.tree.map(jnp.add, sums, parts), d_readout), d_hidden

    zero = jnp.zeros((), jnp.float32)
    start = (zero, zero), jnp.zeros(readout.shape, jnp.float32)
    (sums, d_readout), d_hidden = lax.scan(add, start, _cut(size, hidden, targets, weight))
    d_hidden = jnp.moveaxis(d_hidden, 0, 1).reshape(hidden.shape[0], -1, hidden.shape[2])
    return sums, (d_hidden[:, : hidden.shape[1]], d_readout.astype(readout.dtype))


def _sums_backward(size, z_loss, gradients, cotangents):
    del size, z_loss
    d_hidden, d_readout = gradients
    g, _ = cotangents  # of the objective; that of nll is zero, see `chunked_cross_entropy`
    return d_hidden * g.astype(d_hidden.dtype), d_readout * g.astype(d_readout.dtype), None, None


_sums.defvjp(_sums_forward, _sums_backward)


def _cut(size: int, *arrays: Array) -> tuple[Array, ...]:
    """Cut [B, T, …] into chunks [N, B, size, …]; what pads the last one has weight 0."""

    def cut(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    return tuple(cut(x) for x in arrays)


def _chunk(readout, z_loss, hidden, targets, weight):
    """Return the gradient of the objective for the logits of a chunk, and its part of the two sums."""
    logits = jnp.einsum("btd,dv->btv", hidden, readout, preferred_element_type=jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1)
    # A comparison instead of an index: it fuses, and it needs no exchange where the vocabulary lies on several devices.
    is_target = lax.broadcasted_iota(jnp.int32, logits.shape, 2) == targets[..., None]
    nll = lse - jnp.where(is_target, logits, 0).sum(-1)
    z = z_loss * lse
    probabilities = jnp.exp(logits - lse[..., None])
    d_logits = ((1 + 2 * z) * weight)[..., None] * probabilities - jnp.where(is_target, weight[..., None], 0)
    # A token of weight 0 counts for nothing, even where its loss is not finite.
    used = weight != 0
    total = jnp.where(used, (nll + z * lse) * weight, 0).sum()
    return jnp.where(used[..., None], d_logits, 0), (total, jnp.where(used, nll * weight, 0).sum())
