"""The selective state-space model of Mamba (Gu, Dao 2023, arXiv 2312.00752)."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

from eflax.cells import affine, checks, shapes
from eflax.cells.forms import pallas, restarts
from eflax.cells.numerics import on_device, state_dtype, vary_like
from pallas_kernels.selective_scan import gpu, tpu

Channels = Float[Array, "B T D"]
Projections = Float[Array, "B T N"]
State = Float[Array, "B D N"]


class Tokens(NamedTuple):
    """The inputs of a stretch of tokens (or of one, without the T axis), in the state's dtype."""

    x: Float[Array, "B T D"]
    dt: Float[Array, "B T D"]
    B: Float[Array, "B T N"]
    C: Float[Array, "B T N"] | None
    restart: Bool[Array, "B T"] | None

    def maps(self, A: Float[Array, "D N"]) -> affine.Diagonal:
        """Each token's map on the state, with each channel's N entries as a K × 1 matrix."""
        A = jnp.maximum(A, jnp.finfo(A.dtype).min)  # A = −∞ and dt = 0, as in padding, are no decay, not NaN
        ones = (1,) * (self.dt.ndim - 1)
        decay = jnp.exp(self.dt[..., None] * A.reshape(*ones, *A.shape))
        if self.restart is not None:
            decay = jnp.where(self.restart[..., None, None], 0, decay)
        return affine.Diagonal(decay, ((self.dt * self.x)[..., None] * self.B[..., None, :])[..., None])


KERNELS = {
    kernels.form: kernels
    for kernels in (
        pallas.Kernels("pallas_gpu", gpu.check, gpu.selective_scan),
        pallas.Kernels("pallas_tpu", tpu.check, tpu.selective_scan),
    )
}


class SelectiveSSM:
    """h ← e^{dt A} ⊙ h + (dt x) Bᵀ, y = h C: a diagonal recurrence on D channels with N state entries each.

    A ≤ 0 is a parameter; dt > 0, B and C depend on the token. A is discretised by zero-order hold and B by the
    simpler dt·B, as in the paper's code. The skip D·x and the gates belong to the layer.
    """

    name = "selective_ssm"
    arguments = ("x", "dt", "A", "B", "C")
    forms = ("recurrent", "associative", "chunkwise", *KERNELS)

    def __repr__(self) -> str:
        return f"eflax.cells.{self.name}({', '.join(self.arguments)})"

    def __call__(
        self,
        x: Channels,
        dt: Channels,
        A: Float[Array, "D N"],
        B: Projections,
        C: Projections | None,
        initial_state: State | None = None,
        segment_ids: shapes.SegmentIds | None = None,
        form: str | None = None,
        chunk_size: int = 64,
    ) -> tuple[Channels | None, State]:
        """Outputs y [B, T, D] in x's dtype and the final state [B, D, N] in float32 (float64 for such inputs).

        C = None reads nothing out (y is None). Other arguments and errors: see `eflax.cells`. Memory: `associative`
        holds [B, T, D, N]; `chunkwise` holds one chunk of that and, for the backward pass, one state per chunk;
        `pallas_gpu` one state per 16 tokens, `pallas_tpu` one per 64.
        """
        axes = checks.Axes()
        axes.bind("x", x, "B T D")
        axes.bind("dt", dt, "B T D")
        _check_projections(axes, A, B, C, "B T", "")
        axes.bind_segment_ids(segment_ids)
        if initial_state is not None:
            axes.bind("initial_state", initial_state, "B D N")
        checks.check_count("chunk_size", chunk_size)
        x, dt, A, B, C, initial_state = on_device(x, dt, A, B, C, initial_state)
        form = self._choose_form(form, x, dt, A, B, C, initial_state)
        kernels = pallas.Context.of(1.0) if form in KERNELS else None
        return _run(x, dt, A, B, C, initial_state, segment_ids, form, chunk_size, kernels)

    def _choose_form(self, form: str | None, x: Array, *others: Array | None) -> str:
        """The form that was asked for, or the fastest one that serves."""
        if form in KERNELS:
            KERNELS[form].check(x, *others)
        chosen = checks.choose_form(self.name, form, self.forms, x.shape[1])
        if form is None and chosen == "chunkwise":
            return pallas.serving(KERNELS, x, *others) or chosen
        return chosen

    def step(
        self,
        state: State,
        x_t: Float[Array, "B D"],
        dt_t: Float[Array, "B D"],
        A: Float[Array, "D N"],
        B_t: Float[Array, "B N"],
        C_t: Float[Array, "B N"],
    ) -> tuple[State, Float[Array, "B D"]]:
        """One token: the new state and y_t [B, D] in x's dtype."""
        axes = checks.Axes()
        axes.bind("x_t", x_t, "B D")
        axes.bind("dt_t", dt_t, "B D")
        _check_projections(axes, A, B_t, C_t, "B", "_t")
        axes.bind("state", state, "B D N")
        state, x_t, dt_t, A, B_t, C_t = on_device(state, x_t, dt_t, A, B_t, C_t)
        dtype = state_dtype(x_t, dt_t, A, B_t, C_t, state)
        token = Tokens(x_t.astype(dtype), dt_t.astype(dtype), B_t.astype(dtype), C=None, restart=None)
        state = _advance(state.astype(dtype), token, A.astype(dtype))
        return state, self.read(state, C_t).astype(x_t.dtype)

    def read(self, state: State, C_t: Float[Array, "B N"]) -> Float[Array, "B D"]:
        """The read-out h C of one token in float32 or float64. [B, D, N], [B, N] → [B, D]."""
        axes = checks.Axes()
        axes.bind("state", state, "B D N")
        axes.bind("C_t", C_t, "B N")
        state, C_t = on_device(state, C_t)
        dtype = state_dtype(state, C_t)
        return _read(state.astype(dtype), C_t.astype(dtype))

    def init_state(
        self, batch_size: int, width: int, state_dim: int, dtype: jnp.dtype = jnp.float32
    ) -> State:
        """The empty state: zeros [B, D, N]."""
        return jnp.zeros((batch_size, width, state_dim), dtype)


selective_ssm = SelectiveSSM()


def _check_projections(axes: checks.Axes, A, B, C, leading: str, suffix: str) -> None:
    axes.bind("A", A, "D N")
    checks.check_not_positive("A", A, "it must be <= 0, so that e^{dt A} is a decay")
    axes.bind(f"B{suffix}", B, f"{leading} N")
    if C is not None:
        axes.bind(f"C{suffix}", C, f"{leading} N")


@partial(jax.jit, static_argnames=("form", "chunk_size", "kernels"))
def _run(x, dt, A, B, C, initial_state, segment_ids, form, chunk_size, kernels):
    del kernels  # of kernels, what they were compiled for
    dtype = state_dtype(x, dt, A, B, C, initial_state)
    if initial_state is None:
        initial_state = jnp.zeros((x.shape[0], *A.shape), dtype)
    state = vary_like(initial_state.astype(dtype), x, dt, A, B, C, segment_ids)
    if x.shape[1] == 0:
        return None if C is None else x, state
    restart = None if segment_ids is None else restarts(segment_ids)
    if form in KERNELS:
        tokens, shared, own = ("batch", None, "heads"), ("batch",), ("batch", "heads")
        cuts = (tokens, tokens, ("heads",), shared, shared, shared, own)
        run = pallas.on_mesh(KERNELS[form].evaluate, x.shape[0], x.shape[2], cuts, (tokens, own))
        return run(x, dt, A, B, C, restart, state)
    x_dtype = x.dtype
    x, dt, A, B, C = jax.tree.map(lambda z: z.astype(dtype), (x, dt, A, B, C))
    tokens = Tokens(x, dt, B, C, restart)
    if form == "associative":
        state, y = _scan_block(state, tokens, A)
    else:
        size = 1 if form == "recurrent" else min(chunk_size, x.shape[1])
        state, y = _scan_blocks(state, tokens, A, size)
    return None if y is None else y.astype(x_dtype), state


def _advance(state: Array, token: Tokens, A: Array) -> Array:
    """One token of the recurrence."""
    if token.restart is not None:
        state = jnp.where(token.restart[:, None, None], 0, state)
    return affine.apply(token._replace(restart=None).maps(A), state[..., None])[..., 0]


def _scan_block(state: Array, tokens: Tokens, A: Array) -> tuple[Array, Array | None]:
    """A stretch of tokens at once, by a parallel scan over their maps."""
    states = affine.prefix_states(tokens.maps(A), state[..., None], axis=1)[..., 0]
    return states[:, -1], None if tokens.C is None else _read(states, tokens.C)


def _scan_blocks(state: Array, tokens: Tokens, A: Array, size: int) -> tuple[Array, Array | None]:
    """Chunk after chunk; the backward pass recomputes each chunk from the state that enters it.

    Tail tokens are padded with zeros: dt = 0 neither decays nor writes.
    """
    time = tokens.x.shape[1]

    def cut(z: Array) -> Array:
        z = jnp.pad(z, [(0, 0), (0, -time % size)] + [(0, 0)] * (z.ndim - 2))
        return jnp.moveaxis(z.reshape(z.shape[0], z.shape[1] // size, size, *z.shape[2:]), 1, 0)

    def join(z: Array) -> Array:
        z = jnp.moveaxis(z, 0, 1)
        return z.reshape(z.shape[0], z.shape[1] * z.shape[2], z.shape[3])[:, :time]

    @jax.checkpoint
    def chunk(state: Array, block: Tokens):
        if size == 1:
            state = _advance(state, jax.tree.map(lambda z: z[:, 0], block), A)
            return state, None if block.C is None else _read(state, block.C[:, 0])[:, None]
        return _scan_block(state, block, A)

    state, y = lax.scan(chunk, state, jax.tree.map(cut, tokens))
    return state, None if y is None else join(y)


def _read(state: Array, C: Array) -> Array:
    """h C: [..., D, N], [..., N] → [..., D]."""
    return jnp.einsum("...dn,...n->...d", state, C, precision=lax.Precision.HIGHEST)
