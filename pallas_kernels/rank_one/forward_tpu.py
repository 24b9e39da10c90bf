"""Forward kernel for TPUs: programs walk the chunks of several heads, their states in fast memory."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.rank_one.inverse_tpu import inverses
from pallas_kernels.rank_one.layout import CHUNK, Gates
from pallas_kernels.rank_one.tiles_tpu import NT, TN, Plan, Stack, pack, part, spread, stack
from pallas_kernels.rank_one.walk_tpu import walk


class Results(NamedTuple):
    """What the forward kernel writes; the last three, for the backward pass, only if asked for."""

    final_state: Array  # [B, HV, K, V] float32
    o: Array | None = None  # [B, T, HV·V]
    states: Array | None = None  # entering each chunk, [B, N, HV, K, V]
    inverse: Array | None = None  # (I + A)⁻¹ of each chunk, heads side by side: [B, N, C, HV·C]
    rows: Array | None = None  # D: what each token adds to the state along its key, [B, T, HV·V]


def forward(
    q: Array | None,
    k: Array,
    v: Array,
    gates: Array,
    state: Array,
    plan: Plan,
    *,
    residuals: bool = False,
) -> Results:
    """Outputs and final state.

    Args:
        q, k: [B, T, H·K], T whole chunks.
        v: [B, T, HV·V].
        gates: [B, HV, N, rows, C] float32, of `gates.gate_rows`.
        state: entering, [B, HV, K, V] float32.
        plan: of the call.
        residuals: also return what the backward pass needs.
    """
    inputs = {"k": "keys", "v": "values", "gates": "gates", "entering": "state"}
    outputs = [("final_state", "state", jnp.float32)]
    if plan.reads:
        inputs["q"] = "keys"
        outputs.append(("o", "values", plan.dtype))
    if residuals:
        outputs += [("states", "states", plan.dtype), ("rows", "values", plan.dtype)]
        if plan.erases:
            outputs.append(("inverse", "inverse", plan.dtype))
    arrays = {"q": q, "k": k, "v": v, "gates": gates, "entering": state}
    name = "rank_one_forward_tpu"
    return Results(**walk(_kernel, plan, name, tuple(inputs.items()), tuple(outputs), arrays))


def _kernel(plan: Plan, refs: dict[str, Any], state: Any) -> None:
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        state[...] = refs["entering"][...]

    stacks = [Stack(plan, heads, refs) for heads in plan.stacks]
    lower, reads = zip(*(_matrices(s) for s in stacks), strict=True)
    inverse = inverses(lower, plan.dtype == jnp.float32) if plan.erases else lower
    for s, x, y in zip(stacks, inverse, reads, strict=True):
        _write(s, x, y, state, refs)

    @pl.when(step == plan.chunks - 1)
    def _():
        refs["final_state"][...] = state[...]


def _matrices(s: Stack) -> tuple[Array | None, Array | None]:
    """A, and the weights P of reads within the chunk; packed."""
    strictly, diagonal = s.gates.decays()
    if not s.plan.erases:
        return None, None if s.q is None else pack(s.plan.product(s.q, s.k, NT)) * diagonal
    keys, queries = s.similarities()
    lower = keys * strictly * s.gates.along_rows(Gates.ERASE)
    return lower, None if queries is None else queries * diagonal


def _write(s: Stack, inverse: Array | None, reads: Array | None, state: Any, out: dict[str, Any]) -> None:
    """Add the chunk to the state, and read it."""
    plan, gates = s.plan, s.gates
    entering = [state[head].astype(plan.dtype) for head in s.heads]
    # The state is read by keys, for what to erase, and by queries.
    readers = [x for x in (s.k if plan.erases else None, s.q) if x is not None]
    found = [plan.product(stack([part(x, i) for x in readers]), S) for i, S in enumerate(entering) if readers]
    rows = s.v.astype(jnp.float32) * gates.column(Gates.WRITE)
    if inverse is not None:
        inverse = inverse.astype(plan.dtype)
        by_keys = stack([x[:CHUNK] for x in found])
        rows = plan.product(spread(inverse), rows - gates.column(Gates.READ) * by_keys)
    if reads is not None:
        by_queries = stack([x[-CHUNK:] for x in found])
        within = plan.product(spread(reads.astype(plan.dtype)), rows)
        o = (by_queries * gates.column(Gates.ENTRY) + within) * plan.scale
        plan.put(out["o"], s.heads, o)
    leaving = rows * gates.column(Gates.EXIT) if plan.decays else rows
    for i, head in enumerate(s.heads):
        kept = state[head] * gates.left(i) if plan.decays else state[head]
        state[head] = kept + plan.product(part(s.k, i), part(leaving, i), TN)
    if "states" in out:  # for the backward pass
        for head, S in zip(s.heads, entering, strict=True):
            out["states"][head] = S
        plan.put(out["rows"], s.heads, rows)
    if "inverse" in out and inverse is not None:
        out["inverse"][:, pl.ds(s.heads[0] * CHUNK, len(s.heads) * CHUNK)] = inverse
