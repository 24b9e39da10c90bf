"""TPU: a few tokens of the recurrence at once, the state read once and written once, in place.

A program has the states of some heads in fast memory. Token after token, on the vector units and in float32,

    S ← e^g S,   r = w v − a Sᵀ k,   S ← S + k rᵀ,   o = scale · Sᵀ q.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# Entries of the states of a program, in float32: 1 MiB, four times for reading ahead and writing back.
LARGEST = 2**18


def choose_heads(heads: int, rows: int, columns: int) -> int:
    """Heads of a program: as many as fit, and divide all; 0 if not even one does."""
    return max(
        (n for n in range(1, heads + 1) if heads % n == 0 and n * rows * columns <= LARGEST), default=0
    )


def decode(
    state: Array,
    q: Array,
    k: Array,
    v: Array,
    erase: Array | None,
    write: Array | None,
    log_decay: Array | None,
    scale: float,
    interpret: Any,
) -> tuple[Array, Array]:
    """Return the new state and o [B, T, HV, V] in v's dtype.

    Args:
        state: [B, HV, K, V] float32. The result takes its memory, where it is not used afterwards.
        q: [B, T, H, K], T small.
        k: like q.
        v: [B, T, HV, V].
        erase: a [B, T, HV] float32; None is 0.
        write: w, like a; None is 1.
        log_decay: g, like a; None is 0.
        scale: of the queries.
        interpret: of `pl.pallas_call`.
    """
    batch, heads, rows, columns = state.shape
    tokens, group = v.shape[1], heads // k.shape[2]

    def by_head(x: Array) -> Array:
        return jnp.moveaxis(x.astype(jnp.float32), 2, 1)  # [B, HV, T, ...]; small beside the state

    def gate(x: Array | None, of: float) -> Array:
        return jnp.full((batch, heads, tokens, 1), of) if x is None else by_head(x)[..., None]

    # What multiplies rows of the state stands along K, what multiplies columns along V.
    queries, keys = (jnp.repeat(by_head(x), group, axis=1) for x in (q, k))
    along_rows = jnp.concatenate([queries * scale, keys, keys * gate(erase, 0.0)], axis=2)
    decay = jnp.broadcast_to(jnp.exp(gate(log_decay, 0.0)), (batch, heads, tokens, columns))
    along_columns = jnp.concatenate([by_head(v) * gate(write, 1.0), decay], axis=2)
    mine = choose_heads(heads, rows, columns)

    def block(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, mine, *shape), lambda b, h: (b, h, 0, 0))

    def body(entering, by_row, by_column, state, o):
        for head in range(mine):
            s, column = entering[head], jnp.transpose(by_row[head])  # [K, V] and [K, 3T]
            for t in range(tokens):
                query, key, erasing = (column[:, i * tokens + t : i * tokens + t + 1] for i in range(3))
                row = by_column[head, t : t + 1]
                if log_decay is not None:
                    s = s * by_column[head, tokens + t : tokens + t + 1]
                if erase is not None:
                    row = row - jnp.sum(s * erasing, axis=0, keepdims=True)
                s = s + key * row
                o[head, t : t + 1] = jnp.sum(s * query, axis=0, keepdims=True)
            state[head] = s

    state, o = pl.pallas_call(
        body,
        grid=(batch, heads // mine),
        in_specs=[block(rows, columns), block(3 * tokens, rows), block(2 * tokens, columns)],
        out_specs=[block(rows, columns), block(tokens, columns)],
        out_shape=[
            jax.ShapeDtypeStruct(state.shape, jnp.float32),
            jax.ShapeDtypeStruct((batch, heads, tokens, columns), jnp.float32),
        ],
        input_output_aliases={0: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret or False,
        name="rank_one_decode_tpu",
    )(state, along_rows, along_columns)
    return state, jnp.moveaxis(o, 1, 2).astype(v.dtype)
