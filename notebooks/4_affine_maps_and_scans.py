# %% [markdown]
# # 4 · Affine maps and scans: one object for tokens, chunks and devices
#
# Chapters 2 and 3 evaluated the same recurrence in several ways. Behind all of them is one algebraic fact: what a token
# does to the state is an **affine map** $S \mapsto A S + c$, and so is what a whole stretch of tokens does. This
# chapter looks at these maps as objects (`eflax.cells.affine`), at what composing them costs, and at the three places
# where they are composed: between tokens, between chunks, and between devices. It ends with a model that has no such
# object, the Recurrent Looped Transformer.

# %%
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from eflax import cells
from eflax.cells import affine
from eflax.models import RLT, RLTConfig

jax.config.update("jax_enable_x64", True)  # equations are checked to twelve digits
jax.config.update("jax_num_cpu_devices", 4)  # four devices for the last section, on any machine


def same(x, y):
    """Two trees of arrays, equal up to rounding in float64."""
    close = jax.tree.map(lambda a, b: np.allclose(a, b, rtol=1e-9, atol=1e-11), x, y)
    return all(jax.tree.leaves(close))


rng = np.random.default_rng(0)
K, V = 6, 5


def draw(*shape):
    return jnp.asarray(rng.normal(size=shape) / 2)


# %% [markdown]
# ## A monoid
#
# Apply $(A_1, c_1)$, then $(A_2, c_2)$:
#
# $$ A_2 (A_1 S + c_1) + c_2 = (A_2 A_1)\, S + (A_2 c_1 + c_2), \qquad
#    (A_2, c_2) \circ (A_1, c_1) = (A_2 A_1,\; A_2 c_1 + c_2) . $$
#
# The result is again such a pair; $(I, 0)$ changes nothing; and composition is associative, as that of functions always
# is. A set with these properties is a *monoid*, and it is all that is needed to compose a sequence in any bracketing,
# in parallel too. (Blelloch, 1990, built parallel algorithms on it; Martin & Cundy, arXiv 1709.04057, brought it to
# linear recurrent networks.)

# %%
KINDS: dict[str, Callable[[], affine.AffineMap]] = {
    "Additive": lambda: affine.Additive(draw(K, V)),
    "Scalar": lambda: affine.Scalar(draw(), draw(K, V)),
    "Diagonal": lambda: affine.Diagonal(draw(K), draw(K, V)),
    "LowRank": lambda: affine.LowRank(draw(), draw(K, 1), draw(K, 1), draw(K, V)),
    "Dense": lambda: affine.Dense(draw(K, K), draw(K, V)),
}
S = draw(K, V)
for make in KINDS.values():
    first, second, third = make(), make(), make()
    one_by_one = affine.apply(third, affine.apply(second, affine.apply(first, S)))
    left = affine.compose(affine.compose(third, second), first)
    right = affine.compose(third, affine.compose(second, first))
    assert same(affine.apply(left, S), one_by_one) and same(affine.apply(right, S), one_by_one)
    neutral = affine.identity(type(first), S)
    assert same(affine.apply(affine.compose(first, neutral), S), affine.apply(first, S))

# %% [markdown]
# ## Structure is cost
#
# What differs between cells is the structure of $A$, and whether composition keeps it:
#
# | kind | $A$ | cells | composing two |
# |---|---|---|---|
# | `Additive` | $I$ | linear attention | $KV$ |
# | `Scalar` | $\rho I$ | SSD (Mamba-2) | $KV$ |
# | `Diagonal` | $\operatorname{diag}(d)$ | selective SSM (Mamba) | $KV$ |
# | `LowRank` | $\rho I - X Y^\top$ | DeltaNet, EFLA and their gated forms | ranks add up |
# | `Dense` | any matrix | any linear recurrence | $K^2 (K + V)$ |
#
# The first three are closed: a stretch of a thousand tokens is no larger than one token. The product of $n$ rank-1
# edits has rank $n$, however (chapter 2: that is what $W$ and $K$ are). Kept as factors, the summary grows by $2K$
# numbers a token; written out, it has $K^2$ numbers for good. So factors are right for up to $K/2$ tokens, and a dense
# matrix beyond: low rank inside a chunk, dense between chunks.


# %%
def numbers(mapping: affine.AffineMap) -> int:
    """How many numbers a map is stored in."""
    return sum(x.size for x in jax.tree.leaves(mapping))


token = KINDS["LowRank"]()
stretches = {1: token}
for n in (1, 2, 4, 8, 16):
    stretches[2 * n] = affine.compose(stretches[n], stretches[n])
for n, stretch in stretches.items():
    assert numbers(stretch) == 1 + 2 * K * n + K * V
    assert numbers(affine.to_dense(stretch)) == K * K + K * V
for kind in ("Additive", "Scalar", "Diagonal", "Dense"):
    assert numbers(affine.compose(KINDS[kind](), KINDS[kind]())) == numbers(KINDS[kind]())

wide = 64  # for the figure, K = V = 64
tokens = 2 ** np.arange(0, 9)
figure, ax = plt.subplots(figsize=(6, 3.4))
ax.loglog(tokens, 1 + 2 * wide * tokens + wide**2, "o-", label="low rank")
ax.loglog(tokens, np.full(9, 2 * wide**2), label="dense")
ax.loglog(tokens, np.full(9, wide + wide**2), label="diagonal")
ax.axvline(wide / 2, color="0.7", lw=0.8)
ax.set(
    xlabel="tokens in the summary",
    ylabel="numbers (K = V = 64)",
    title="Factors are smaller up to K / 2 tokens",
)
ax.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Between tokens: the parallel scan
#
# All prefixes of a sequence of maps, in $O(\log T)$ steps in a row instead of $T$: compose neighbours, recurse on the
# half as many, fill in the rest. `affine.prefix_states` is `jax.lax.associative_scan` with `compose`, and
# `form="associative"` is this for any cell. The catch is what each composition costs: for the closed kinds the scan
# does about twice the work of the recurrence; for DeltaNet and EFLA it multiplies $K \times K$ matrices where the
# recurrence needs one product with a vector.

# %%
length = 32
k, v, q = draw(length, K), draw(length, V), draw(length, K)
beta, g = jnp.asarray(rng.uniform(0.5, 2, length)), jnp.asarray(-rng.uniform(0, 0.5, length))


def batched(*arrays, copies=1):
    """Arrays of one sequence and head with axes [B, T, H, ...], repeated `copies` times along B."""
    return [jnp.repeat(x[None, :, None], copies, axis=0) for x in arrays]


alpha = jnp.asarray(cells.efla.coefficients(k, beta).erase)
maps = affine.Dense(
    jnp.eye(K) - alpha[:, None, None] * k[:, :, None] * k[:, None],
    alpha[:, None, None] * k[:, :, None] * v[:, None],
)
states = jax.jit(affine.prefix_states, static_argnames="axis")(maps, S, axis=0)
o, final = map(
    jnp.asarray, cells.efla(*batched(q, k, v, beta), initial_state=S[None, None], form="recurrent")
)
expected = o[0, :, 0]
assert same(jnp.einsum("tkv,tk->tv", states, q), expected) and same(states[-1], final[0, 0])


def scan_cost(tokens: int) -> tuple[int, int]:
    """Steps in a row, and compositions in all, of a parallel scan."""
    sizes = []

    def combine(a, b):
        if len(a):
            sizes.append(len(a))
        return a + b

    jax.eval_shape(lambda x: jax.lax.associative_scan(combine, x), np.ones(tokens))
    return len(sizes), sum(sizes)


lengths = 2 ** np.arange(2, 13)
depth, work = np.array([scan_cost(int(n)) for n in lengths]).T
assert (depth == 2 * np.log2(lengths) - 1).all() and (work < 2 * lengths).all()

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
left.loglog(lengths, lengths, label="recurrence")
left.loglog(lengths, depth, "o-", label="parallel scan")
left.set(xlabel="tokens T", ylabel="steps in a row", title="A scan is 2 log₂ T − 1 deep")
left.legend()
widths = 2 ** np.arange(2, 9)
recurrence = 6 * widths**2  # operations of a token with K = V: look up, write, read
composition = 4 * widths**3  # of two dense maps
right.loglog(widths, 2 * composition / recurrence, "o-", label="dense maps (EFLA)")
right.loglog(widths, np.full(7, 2), "o-", label="diagonal maps (Mamba)")
right.set(
    xlabel="K = V",
    ylabel="work / work of the recurrence",
    title="It multiplies the work, by K where the maps are dense",
)
right.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Between chunks
#
# A chunk is a map like any other. We need not even know how a cell computes: as the final state is affine in the
# initial one, two runs tell all. From zero the chunk returns $c$; from the identity, without values, it returns $A$.

# %%
CELLS: dict[Any, tuple[jax.Array, ...]] = {
    cells.linear_attention: (),
    cells.ssd: (g,),
    cells.delta_rule: (beta,),
    cells.gated_delta_rule: (beta, g),
    cells.efla: (beta,),
    cells.gated_efla: (beta, g),
}
for cell, gates in CELLS.items():
    # From three states in one batch, of which the last is the mean of the others.
    empty = cell.init_state(2, 1, K, V, dtype=jnp.float64)
    ends = jax.tree.map(lambda x: draw(*x.shape), empty)
    three = jax.tree.map(lambda x: jnp.concatenate([x, x.mean(axis=0, keepdims=True)]), ends)
    _, after = cell(*batched(q, k, v, *gates, copies=3), initial_state=three, form="recurrent")
    jax.tree.map(lambda x: np.testing.assert_allclose(x[2], x[:2].mean(axis=0), atol=1e-10), after)


def summary(k, v, beta):
    """What a stretch of tokens does to the state of EFLA, as a dense map."""
    keys, values, gates = batched(k, v, beta)
    _, offset = cells.efla(None, keys, values, gates, form="chunkwise")
    no_values = jnp.zeros((*keys.shape[:-1], K))
    start = jnp.eye(K)[None, None]
    _, matrix = cells.efla(None, keys, no_values, gates, initial_state=start, form="chunkwise")
    return affine.Dense(matrix[0, 0], offset[0, 0])


pieces = [summary(*(x[i : i + 8] for x in (k, v, beta))) for i in range(0, length, 8)]
stacked = jax.tree.map(lambda *x: jnp.stack(x), *pieces)
before, last = affine.scan_states(stacked, S, axis=0)
assert same(before[0], S) and same(before[1:], states[7:-1:8]) and same(last, states[-1])
assert same(affine.apply(affine.compose(pieces[1], pieces[0]), S), states[15])

# %% [markdown]
# ## Between devices
#
# A sequence that is too long for one device is cut into pieces, one for each. Every device summarises its own piece in
# parallel, all exchange their summaries, each composes those before it and starts from the state it finds. What travels
# is $K (K + V)$ numbers per head, however long the pieces are. Nothing in it is new:


# %%
def piece(q, k, v, beta, start):
    """Run on each device with its own quarter of the tokens."""
    everyone = jax.lax.all_gather(summary(k, v, beta), "pieces")
    start = jax.lax.pcast(start, "pieces", to="varying")  # each device goes on from it differently
    before, _ = affine.scan_states(everyone, start, axis=0)
    state = before[jax.lax.axis_index("pieces")]
    o, _ = cells.efla(*batched(q, k, v, beta), initial_state=state[None, None], form="chunkwise")
    return jnp.asarray(o)[0, :, 0]


mesh = jax.sharding.Mesh(jax.devices("cpu")[:4], ("pieces",))
split, whole = PartitionSpec("pieces"), PartitionSpec()
together = jax.shard_map(piece, mesh=mesh, in_specs=(split, split, split, split, whole), out_specs=split)
assert same(jax.jit(together)(q, k, v, beta, S), expected)

# %% [markdown]
# ## The Recurrent Looped Transformer has none
#
# RLT (arXiv 2610.07591; chapter 6) carries the output of a whole decoder from token to token,
# $H_t = F(H_{t-1}; e_t, M, t)$. Between the old state and the new one stand norms, a softmax and SwiGLU, and $F$ is not
# affine. The test is the one above: is the image of the mean of two states the mean of their images?

# %%
model = RLT(
    RLTConfig(vocab_size=8, width=16, num_heads=2, encoder_layers=1, decoder_layers=1, window=4, alpha=1.0),
    rngs=nnx.Rngs(0),
)
for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    if leaf.ndim == 2 and path[0] != "embedding":
        leaf.set_value(4 * leaf.get_value())  # as after training; at the start all parts are small


@jax.jit
def transition(s):
    """The next register of RLT, as a function of the last, all else the same."""
    e, memory, _ = model.encode(jnp.array([[1, 2, 3]], jnp.int32), jnp.int32(0))
    initial = model.init_state(1)
    return model.transition(initial._replace(register=s), e[:, 0], memory, jnp.int32(0))[1]


def defect(function, a, b):
    """How far the image of the mean is from the mean of the images, relative to their distance."""
    mean = function((a + b) / 2)
    ends = function(a), function(b)
    return float(jnp.linalg.norm(mean - (ends[0] + ends[1]) / 2) / jnp.linalg.norm(ends[0] - ends[1]))


a, b = (jnp.asarray(rng.normal(size=(1, 16)), jnp.float32) for _ in range(2))
flow = defect(lambda S: affine.apply(pieces[0], S), draw(K, V), draw(K, V))
looped = defect(transition, a, b)
print(f"distance from affine: EFLA {flow:.0e}, RLT {looped:.2f}")
assert flow < 1e-12 and looped > 0.05

# %% [markdown]
# Why does it matter? Because the composition of maps that are not affine has no summary of bounded size. The smallest
# example is the tent map $s \mapsto |2s - 1|$, which two ReLU units compute: one token folds the line once, $n$ tokens
# fold it into $2^n$ pieces. An affine map remains two numbers.

# %%
line = np.linspace(0, 1, 2**13 + 1)
folded, counts = line, []
for _ in range(10):
    folded = np.abs(2 * folded - 1)
    turns = np.diff(np.sign(np.diff(folded)))
    counts.append(1 + np.count_nonzero(turns))
assert counts == [2**n for n in range(1, 11)]

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
for n, style in ((1, "-"), (2, "-"), (4, "-")):
    picture = line
    for _ in range(n):
        picture = np.abs(2 * picture - 1)
    left.plot(line, picture, style, label=f"{n} tokens")
left.set(xlabel="state before", ylabel="state after", title="Each token folds the line once more")
left.legend(loc="upper right", fontsize=8)
right.semilogy(np.arange(1, 11), counts, "o-", label="tent map: pieces")
right.semilogy(np.arange(1, 11), np.full(10, 2), label="affine map: numbers")
right.set(
    xlabel="tokens composed", ylabel="size of the summary", title="Without affinity the summary explodes"
)
right.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# So RLT-1 must be stepped, token after token, and cannot be cut between devices along time. This is also its strength:
# each token passes through a full decoder *after* the one before it, so that depth grows with the sequence (chapter 6).
# RLT-2, which feeds back every $B$ tokens only, is another model, not another way to evaluate RLT-1.
#
# ## What to remember
#
# - The summary of any stretch of tokens is one affine map; composing is associative, and this is what makes these
#   recurrences parallel.
# - The structure of $A$ decides the cost. Rank-1 edits are best kept as factors up to $K/2$ tokens, and dense beyond.
# - The same object passes between tokens, chunks and devices. A recurrence that is not affine has no such object.
#
# Next: `5_state_tracking`, what such maps can and cannot count.
