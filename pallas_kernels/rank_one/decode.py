"""A few tokens of the recurrence on a Hopper GPU or a TPU, in one launch: arguments and gradients."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

from pallas_kernels.batching import over_batch
from pallas_kernels.device import Unsupported, check_hopper, check_tpu, interpretation
from pallas_kernels.rank_one import decode_sm90, decode_tpu

LONGEST = 8  # tokens, above which the kernels that work in chunks take less time
DTYPES = {"gpu": (jnp.bfloat16, jnp.float16, jnp.float32), "tpu": (jnp.bfloat16, jnp.float32)}


def check(tokens: int, q: Any, k: Any, v: Any, *others: Any, platform: str = "gpu") -> None:
    """Raise `Unsupported` if the kernel cannot serve so many tokens here; q, k and v may be of one, without T."""
    {"gpu": check_hopper, "tpu": check_tpu}[platform]()
    if jax.typeof(k).mat.varying:
        raise Unsupported("inside jax.shard_map the kernels need check_vma=False")
    if q is None:
        raise Unsupported("q is None; the decode kernel always reads out")
    if not 0 < tokens <= LONGEST:
        raise Unsupported(f"there are {tokens} tokens; the decode kernel takes 1 to {LONGEST}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in DTYPES[platform]:
            names = ", ".join(jnp.dtype(dtype).name for dtype in DTYPES[platform])
            raise Unsupported(f"{name} is {x.dtype}; the decode kernel reads {names}")
    if any(x is not None and x.dtype == jnp.float64 for x in others):
        raise Unsupported("a gate or the state is float64; the kernels keep the state in float32")
    rows, columns = k.shape[-1], v.shape[-1]
    fits = (
        decode_sm90.choose_tile(rows, columns)
        if platform == "gpu"
        else decode_tpu.choose_heads(1, rows, columns)
    )
    if 0 in (*k.shape, *v.shape) or not fits:
        raise Unsupported(f"the decode kernel has no tile for states of {rows} × {columns} entries")


def decode_tokens(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    erase: Float[Array, "B T HV"] | None,
    write: Float[Array, "B T HV"] | None,
    log_decay: Float[Array, "B T HV"] | None,
    restart: Bool[Array, "B T"] | None,
    state: Float[Array, "B HV K V"] | None,
    *,
    scale: float = 1.0,
    platform: str = "gpu",
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    """Evaluate the recurrence of `rank_one` for 1 to 8 tokens; differentiable once.

    The arguments are those of `rank_one`, but q, k and v may be float32, too, and have different dtypes. Where `state`
    is not used afterwards, as under `jax.jit(..., donate_argnums=...)`, the new state takes its memory.

    Raises:
        Unsupported: not this platform ("gpu", Hopper, or "tpu"), or dtypes and sizes that its kernel does not have.
    """
    check(k.shape[1], q, k, v, erase, write, log_decay, state, platform=platform)
    if state is None:
        state = jnp.zeros((*v.shape[::2], k.shape[3], v.shape[3]), jnp.float32)
    if restart is not None:
        decay = jnp.zeros(v.shape[:3], jnp.float32) if log_decay is None else log_decay
        log_decay = jnp.where(restart[..., None], -jnp.inf, decay)
    return _evaluate(platform, scale, interpretation(platform), q, k, v, erase, write, log_decay, state)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _evaluate(platform, scale, interpret, *arrays):
    return _kernel(platform, scale, interpret)(*arrays)


def _evaluate_forward(platform, scale, interpret, *arrays):
    return _kernel(platform, scale, interpret)(*arrays), arrays


def _evaluate_backward(platform, scale, interpret, arrays, cotangents):
    del platform, interpret
    _, transpose = jax.vjp(partial(_written_out, scale), *arrays)
    return transpose(cotangents)


_evaluate.defvjp(_evaluate_forward, _evaluate_backward)


def _kernel(platform: str, scale: float, interpret: Any) -> Any:
    """The kernel, which under vmap takes the new axis for more of the batch."""

    def run(*arrays):
        *inputs, state = arrays
        if platform == "tpu":
            state, o = decode_tpu.decode(state, *inputs, scale=scale, interpret=interpret)
            return o, state
        tile = decode_sm90.choose_tile(*state.shape[2:])
        assert tile is not None
        state, o = decode_sm90.decode(state, *inputs, tile=tile, scale=scale, interpret=interpret)
        return o, state

    return over_batch(run)


def _written_out(scale, q, k, v, erase, write, log_decay, state):
    """The same in plain XLA, token by token, for the gradient."""
    outputs, heads = [], v.shape[2]
    product = partial(jnp.einsum, "bhkv,bhk->bhv", precision=lax.Precision.HIGHEST)
    q, k = (jnp.repeat(x.astype(jnp.float32), heads // x.shape[2], 2) for x in (q, k))
    for t in range(v.shape[1]):
        row = v[:, t].astype(jnp.float32)
        if write is not None:
            row *= write[:, t, :, None]
        if log_decay is not None:
            state *= jnp.exp(log_decay[:, t])[..., None, None]
        if erase is not None:
            row -= erase[:, t, :, None] * product(state, k[:, t])
        state += k[:, t, :, :, None] * row[:, :, None, :]
        outputs.append((product(state, q[:, t]) * scale).astype(v.dtype))
    return jnp.stack(outputs, 1), state
