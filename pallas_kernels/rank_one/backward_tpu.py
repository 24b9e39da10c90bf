"""Backward kernel for TPUs: the chunks of several heads from the last to the first, the states' gradients in memory.

With Γ the decays between tokens, e = e^c, x = e^{c_C − c}, r = a e, S the state that enters a chunk and dS′ the
gradient of the one that leaves it (tiles_tpu.StackGates, gates.py):

    A = a (K Kᵀ ∘ Γ)            P = Q Kᵀ ∘ Γ          D = (I + A)⁻¹ (w V − r K S)
    O = scale (e Q S + P D)      S′ = e_C S + Kᵀ x D
    dD = scale Pᵀ dO + x K dS′   dR = (I + A)⁻ᵀ dD     dA = −dR Dᵀ           dP = scale dO Dᵀ
"""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.rank_one.layout import CHUNK, Gates
from pallas_kernels.rank_one.tiles_tpu import LANES, NT, TN, Plan, Stack, pack, part, spread, stack
from pallas_kernels.rank_one.walk_tpu import GateGradients, walk


class Gradients(NamedTuple):
    """What the backward kernel writes; those of keys and queries once for each program, to be added up."""

    k: Array  # [B, T, programs·keys·K] float32 if programs share key heads
    v: Array  # [B, T, HV·V]
    gates: Array  # [B, HV, N, 3, C] float32, of GateGradients
    initial_state: Array  # [B, HV, K, V] float32
    q: Array | None = None


def backward(
    q: Array | None,
    k: Array,
    v: Array,
    do: Array | None,
    rows: Array,
    gates: Array,
    inverse: Array | None,
    states: Array,
    dstate: Array,
    plan: Plan,
) -> Gradients:
    """Gradients of all inputs, from those of the outputs `do` and of the final state, [B, HV, K, V] float32."""
    given = {
        "q": ("keys", q),
        "k": ("keys", k),
        "v": ("values", v),
        "do": ("values", do),
        "rows": ("values", rows),
        "gates": ("gates", gates),
        "inverse": ("inverse", inverse),
        "states": ("states", states),
        "leaving": ("state", dstate),
    }
    inputs = tuple((name, kind) for name, (kind, x) in given.items() if x is not None)
    shared = plan.programs * plan.keys > plan.key_heads
    outputs = [("dk", "key_gradients", jnp.float32 if shared else plan.dtype), ("dv", "values", plan.dtype)]
    outputs += [("dgates", "gate_gradients", jnp.float32), ("dinitial_state", "state", jnp.float32)]
    if plan.reads:
        outputs.append(("dq", *outputs[0][1:]))
    arrays = {name: x for name, (_, x) in given.items()}
    name = "rank_one_backward_tpu"
    found = walk(_kernel, plan, name, inputs, tuple(outputs), arrays, backward=True)
    return Gradients(**{name[1:]: x for name, x in found.items()})


def _kernel(plan: Plan, refs: dict[str, Any], dstate: Any) -> None:
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        dstate[...] = refs["leaving"][...]

    dkeys: dict[int, tuple[Array | None, Array]] = {}
    for heads in plan.stacks:
        s = Backward(plan, heads, refs, dstate)
        dq, dk = s.keys()
        plan.put(refs["dv"], heads, s.dright * s.gates.column(Gates.WRITE))
        s.write_gates(refs["dgates"])
        s.write_states(dstate)
        for i, head in enumerate(heads):
            key = plan.key_of(head)
            mine = None if dq is None else part(dq, i), part(dk, i)
            if key in dkeys:  # value heads of one key head
                mine = cast(Any, jax.tree.map(jnp.add, mine, dkeys[key]))
            dkeys[key] = mine
    for key, (dq, dk) in dkeys.items():
        columns = pl.ds(key * plan.key_dim, plan.key_dim)
        refs["dk"][:, columns] = dk.astype(refs["dk"].dtype)
        if dq is not None:
            refs["dq"][:, columns] = dq.astype(refs["dq"].dtype)

    @pl.when(step == plan.chunks - 1)
    def _():
        refs["dinitial_state"][...] = dstate[...]


class Backward(Stack):
    """One chunk of a stack of heads; begins with dD, dR and the gradients of the matrices A and P."""

    def __init__(self, plan: Plan, heads: range, refs: dict[str, Any], dstate: Any):
        super().__init__(plan, heads, refs)
        gates = self.gates
        self.rows = plan.value_rows(refs["rows"], heads)
        self.do = plan.value_rows(refs["do"], heads) if plan.reads else None
        self.entering = [refs["states"][head] for head in heads]
        self.dleaving = [dstate[head] for head in heads]
        strictly, diagonal = gates.decays()
        met = stack([plan.product(part(self.k, i), dS) for i, dS in enumerate(self.dleaving)])
        drows = met * gates.column(Gates.EXIT) if plan.decays else met
        # How the loss changes with each token's decay until the chunk's end.
        self.exit = _sum_columns(self.rows.astype(jnp.float32) * drows)
        similar, queries = self.similarities() if plan.erases else (None, None)
        # Gradients of K Kᵀ and Q Kᵀ, and matrices ∘ their gradients: how the loss changes with decays in the chunk.
        self.dsimilar = self.dqueries = self.derase = None
        self.flow = jnp.zeros(diagonal.shape, jnp.float32)
        if self.q is not None and self.do is not None:
            queries = pack(plan.product(self.q, self.k, NT)) if queries is None else queries
            reads = queries * diagonal
            drows += plan.product(spread(reads.astype(plan.dtype)), self.do, TN) * plan.scale
            dreads = pack(plan.product(self.do, self.rows, NT)) * plan.scale
            self.dqueries = dreads * diagonal
            self.flow += dreads * reads
        self.dright = drows
        if similar is not None:
            inverse = refs["inverse"][:, pl.ds(heads[0] * CHUNK, len(heads) * CHUNK)]
            self.dright = plan.product(spread(inverse), drows, TN)
            dlower = -pack(plan.product(self.dright, self.rows, NT)) * strictly
            erase = gates.along_rows(Gates.ERASE)
            self.derase = sum_rows(dlower * similar)
            self.flow += dlower * similar * erase
            self.dsimilar = dlower * erase

    def keys(self) -> tuple[Array | None, Array]:
        """dq and dk, rows of the stack in float32; with them go gradients of the gates."""
        plan, gates = self.plan, self.gates
        gradients = [self.dright.astype(plan.dtype)] if plan.erases else []
        gradients += [] if self.do is None else [self.do]
        # Gradients of keys and queries that met the entering state.
        outer = [
            plan.product(stack([part(x, i) for x in gradients]), S, NT)
            for i, S in enumerate(self.entering)
            if gradients
        ]
        dk = stack([plan.product(part(self.rows, i), dS, NT) for i, dS in enumerate(self.dleaving)])
        if plan.decays:
            dk = dk * gates.column(Gates.EXIT)
        dq = None
        self.dsum = sum_rows(self.flow) - self.exit
        matrices, right = [], []
        if self.dsimilar is not None and self.derase is not None:
            erased = stack([x[:CHUNK] for x in outer])
            dk -= gates.column(Gates.READ) * erased
            found = _sum_columns(self.k.astype(jnp.float32) * erased)
            self.derase -= found * gates.column(Gates.ENTRY)
            self.dsum -= found * gates.column(Gates.READ)
            matrices.append(spread(self.dsimilar.astype(plan.dtype)))
            right.append(self.k)
        if self.dqueries is not None and self.q is not None:
            dq = stack([x[-CHUNK:] for x in outer]) * (gates.column(Gates.ENTRY) * plan.scale)
            self.dsum += _sum_columns(self.q.astype(jnp.float32) * dq)
            matrices.append(spread(self.dqueries.astype(plan.dtype)))
            right.append(self.q)
        if matrices:
            size = self.k.shape[0]
            found = plan.product(stack(matrices), self.k)
            dk += plan.product(stack(matrices), stack(right), TN)
            dk = dk + found[:size] if plan.erases else dk
            dq = dq + found[-size:] if dq is not None else None
        return dq, dk

    def write_gates(self, dgates: Any) -> None:
        """Gradients of the gates, from columns to rows."""
        plan = self.plan
        columns = {GateGradients.SUM: self.dsum}
        columns[GateGradients.WRITE] = _sum_columns(self.v.astype(jnp.float32) * self.dright)
        if self.derase is not None:
            columns[GateGradients.ERASE] = self.derase
        table = jnp.zeros((self.k.shape[0], LANES), jnp.float32)
        lane = lax.broadcasted_iota(jnp.int32, table.shape, 1)
        for place, column in columns.items():
            table = jnp.where(lane == place, column, table)
        found = jnp.transpose(table)[: len(GateGradients)]
        of_sum = lax.broadcasted_iota(jnp.int32, found.shape, 0) == GateGradients.SUM
        found = jnp.where(of_sum, found - jnp.sum(self.flow, axis=0, keepdims=True), found)
        for i, head in enumerate(self.heads):
            mine = found[:, i * CHUNK : (i + 1) * CHUNK]
            if plan.decays:
                kept = jnp.sum(self.entering[i].astype(jnp.float32) * self.dleaving[i], keepdims=True)
                total = jnp.sum(part(self.exit, i), axis=0, keepdims=True) + self.gates.left(i) * kept
                last = lax.broadcasted_iota(jnp.int32, mine.shape, 1) == CHUNK - 1
                mine = jnp.where(last & of_sum[:, :CHUNK], mine + total, mine)
            dgates[head] = mine

    def write_states(self, dstate: Any) -> None:
        """The gradients of the states that entered the chunk."""
        plan, gates = self.plan, self.gates
        left, right = [], []
        if plan.erases:
            left.append(self.k)
            right.append(self.dright * -gates.column(Gates.READ))
        if self.q is not None and self.do is not None:
            left.append(self.q)
            right.append(self.do.astype(jnp.float32) * (gates.column(Gates.ENTRY) * plan.scale))
        for i, head in enumerate(self.heads):
            found = self.dleaving[i] * gates.left(i) if plan.decays else self.dleaving[i]
            if left:
                read, gradient = (stack([part(x, i) for x in side]) for side in (left, right))
                found = found + plan.product(read, gradient, TN)
            dstate[head] = found


def _sum_columns(x: Array) -> Array:
    return jnp.sum(x, axis=1, keepdims=True)


def sum_rows(x: Array) -> Array:
    """Sums along the rows of packed matrices, [S·C, 1]."""
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    first = range(0, x.shape[1], CHUNK)
    return stack([_sum_columns(jnp.where((a <= lane) & (lane < a + CHUNK), x, 0.0)) for a in first])
