"""What the cells of the linear-attention and DeltaNet family share: everything but their coefficients."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from eflax.cells import checks, shapes
from eflax.cells.forms import (
    EDIT_FORMS,
    Coefficients,
    Edits,
    edit_state,
    pallas,
    read_state,
    restarts,
)
from eflax.cells.forms.pallas import DECODE_KERNELS, EDIT_KERNELS
from eflax.cells.numerics import matmul_precision, on_device, state_dtype, vary_like

DECAY = "g is a log-decay and must be <= 0, so that e^g is in (0, 1]"


class RankOneCell[State]:
    """A cell of S ← e^g (I − a k kᵀ) S + w k vᵀ, o = Sᵀ (scale · q).

    A subclass names its gates and maps them to (a, w, g); its `__call__` and `step` only spell out the signature.
    """

    name: str
    gates: tuple[str, ...] = ()
    forms = (*EDIT_FORMS, *EDIT_KERNELS)
    # (k, *gates, **options) → (erase, write, log-decay) of each token, from arrays in the state's dtype.
    coefficients: Callable[..., Coefficients]

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of the array arguments, in order."""
        return ("q", "k", "v", *self.gates)

    def __repr__(self) -> str:
        return f"eflax.cells.{self.name}({', '.join(self.arguments)})"

    def init_state(
        self, batch_size: int, num_heads: int, key_dim: int, value_dim: int, dtype: DTypeLike = jnp.float32
    ) -> State:
        """The empty memory: zeros [B, HV, K, V]."""
        columns = self._values(jnp.zeros(value_dim, dtype)).shape[-1]
        return self._from_matrix(jnp.zeros((batch_size, num_heads, key_dim, columns), dtype))

    def read(self, state: State, q_t: shapes.TokenQuery, scale: shapes.Scale = 1.0) -> shapes.TokenValue:
        """The read-out Sᵀ (scale · q) of one token in float32 or float64. [B, HV, K, V], [B, H, K] → [B, HV, V]."""
        return self._read(state, q_t, scale)

    # What a cell that stores or reads more than the matrix S overrides (linear attention: its normaliser).

    def _check_state(self, axes: checks.Axes, name: str, state) -> None:
        axes.bind(name, state, "B HV K V")

    def _to_matrix(self, state: State) -> Array:
        return cast(Array, state)

    def _from_matrix(self, matrix: Array) -> State:
        return cast(State, matrix)

    def _values(self, v: Array) -> Array:
        return v

    def _stored(self, v: Array) -> Any:
        """What has the shape and dtype of `_values(v)`, which kernels get."""
        return v

    def _answer(self, o: Array, **options) -> Array:
        del options
        return o

    def _check_options(self, scale) -> None:
        """Takes scale and the cell's own options, as given by the caller or absent."""
        checks.check_scale(scale)

    # The three entry points behind the subclasses' signatures.

    def _evaluate(self, q, k, v, gates, scale, initial_state, segment_ids, form, chunk_size, **options):
        """Check everything, then run the chosen form as one compiled function."""
        axes = self._check_inputs(q, k, v, gates, "B T", "")
        axes.bind_segment_ids(segment_ids)
        if initial_state is not None:
            self._check_state(axes, "initial_state", initial_state)
        checks.check_count("chunk_size", chunk_size)
        self._check_options(scale, **options)
        q, k, v, gates, initial_state = on_device(q, k, v, gates, initial_state)
        state = () if initial_state is None else jax.tree.leaves(initial_state)
        form = self._choose_form(form, q, k, v, *gates, *state, **options)
        options = tuple(options.items())
        kernels = pallas.Context.of(scale) if form in EDIT_KERNELS else None
        return _run(
            self, q, k, v, gates, scale, initial_state, segment_ids, form, chunk_size, options, kernels
        )

    def _choose_form(self, form, q, k, v, *others, **options):
        """The form that was asked for, or the fastest one that serves."""
        del options
        inputs = (q, k, self._stored(v), *others)
        decode = {name: found for name, found in DECODE_KERNELS.items() if form in (None, name)}
        few = pallas.serving(decode, k.shape[1], *inputs)
        if few is not None:
            return few
        if form in EDIT_KERNELS:
            EDIT_KERNELS[form].check(*inputs)
        chosen = checks.choose_form(self.name, form, self.forms, k.shape[1])
        if form is None and chosen == "chunkwise":
            return pallas.serving(EDIT_KERNELS, *inputs) or chosen
        return chosen

    def _step(self, state, q_t, k_t, v_t, gates_t, scale, **options) -> Any:
        axes = self._check_inputs(q_t, k_t, v_t, gates_t, "B", "_t")
        self._check_state(axes, "state", state)
        self._check_options(scale, **options)
        state, q_t, k_t, v_t, gates_t = on_device(state, q_t, k_t, v_t, gates_t)
        inputs = (q_t, k_t, self._stored(v_t), *gates_t, *jax.tree.leaves(state))
        form = pallas.serving(DECODE_KERNELS, 1, *inputs)
        if form is not None:
            q, k, v, *gates = (x[:, None] for x in (q_t, k_t, v_t, *gates_t))
            context, options = pallas.Context.of(scale), tuple(options.items())
            o, state = _run(self, q, k, v, tuple(gates), scale, state, None, form, 1, options, context)
            return state, o[:, 0]
        matrix = self._to_matrix(state)
        dtype = state_dtype(q_t, k_t, v_t, *gates_t, matrix)
        edit = _edits(self, None, k_t, v_t, gates_t, scale, None, dtype, options)
        state = self._from_matrix(edit_state(matrix.astype(dtype), edit))
        return state, self._read(state, q_t, scale, **options).astype(v_t.dtype)

    def _read(self, state, q_t, scale, **options):
        axes = checks.Axes()
        self._check_state(axes, "state", state)
        axes.bind("q_t", q_t, "B H K")
        axes.group_heads()
        self._check_options(scale, **options)
        state, q_t = on_device(state, q_t)
        matrix = self._to_matrix(state)
        dtype = state_dtype(q_t, matrix)
        q_t = _share_heads(q_t.astype(dtype) * _scalar(scale, dtype), axes.size["HV"])
        return self._answer(read_state(matrix.astype(dtype), q_t, lax.Precision.HIGHEST), **options)

    def _check_inputs(self, q, k, v, gates, leading: str, suffix: str) -> checks.Axes:
        axes = checks.Axes()
        axes.bind(f"k{suffix}", k, f"{leading} H K")
        if q is not None:
            axes.bind(f"q{suffix}", q, f"{leading} H K")
        axes.bind(f"v{suffix}", v, f"{leading} HV V")
        axes.group_heads()
        for name, x in zip(self.gates, gates, strict=True):
            axes.bind(f"{name}{suffix}", x, f"{leading} HV")
            if name == "g":
                checks.check_not_positive(f"g{suffix}", x, DECAY)
        return axes


@partial(jax.jit, static_argnums=(0, 8, 9, 10, 11))
def _run(cell, q, k, v, gates, scale, initial_state, segment_ids, form, chunk_size, options, kernels):
    """Compiled as a whole, so that direct calls compile once per shape and never retrace a scan."""
    start = initial_state
    if start is None:
        start = cell.init_state(k.shape[0], v.shape[2], k.shape[3], v.shape[3])
    matrix = cell._to_matrix(start)
    dtype = state_dtype(q, k, v, *gates, matrix)
    matrix = vary_like(matrix.astype(dtype), q, k, v, *gates, segment_ids)
    restart = None if segment_ids is None else restarts(segment_ids)
    if k.shape[1] == 0:
        return None if q is None else v, cell._from_matrix(matrix)
    if form in EDIT_KERNELS:
        scale = scale if kernels.scale is None else kernels.scale
        state = None if initial_state is None else matrix  # zeros need not be read
        o, matrix = _run_kernels(cell, q, k, v, gates, scale, restart, state, dtype, form, dict(options))
    else:
        edits = _edits(cell, q, k, v, gates, scale, restart, dtype, dict(options))
        precision = matmul_precision(q, k, v)
        o, matrix = EDIT_FORMS[form](edits, matrix, chunk_size=chunk_size, precision=precision)
    o = None if o is None else cell._answer(o, **dict(options)).astype(v.dtype)
    return o, cell._from_matrix(matrix)


def _run_kernels(cell, q, k, v, gates, scale, restart, state, dtype, form, options):
    """The kernels take q, k and v as they are given, and share key heads themselves."""
    wide = _share_heads(k.astype(dtype), v.shape[2])
    coefficients = cell.coefficients(wide, *(x.astype(dtype) for x in gates), **options)
    few = DECODE_KERNELS[form].refusal(k.shape[1], q, k, cell._stored(v), *gates, state) is None
    kernels = (DECODE_KERNELS if few else EDIT_KERNELS)[form]
    return pallas.evaluate(kernels, q, k, cell._values(v), coefficients, restart, state, scale)


def _edits(cell, q, k, v, gates, scale, restart, dtype, options) -> Edits:
    """Inputs in the state's dtype; coefficients from the same rounded keys that the recurrence uses."""
    heads = v.shape[-2]
    k = _share_heads(k.astype(dtype), heads)
    if q is not None:
        q = _share_heads(q.astype(dtype) * _scalar(scale, dtype), heads)
    erase, write, log_decay = cell.coefficients(k, *(x.astype(dtype) for x in gates), **options)
    return Edits(q, k, cell._values(v.astype(dtype)), erase, write, log_decay, restart)


def _share_heads(x: Array, heads: int) -> Array:
    """Repeat each key head for its group of value heads; in the state's dtype, so that gradients sum in it."""
    group = heads // x.shape[-2]
    return x if group == 1 else jnp.repeat(x, group, axis=-2)


def _scalar(scale: shapes.Scale, dtype: jnp.dtype) -> Array:
    return jnp.asarray(scale).astype(dtype)
