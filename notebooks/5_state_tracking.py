# %% [markdown]
# # 5 · State tracking: what a transition can count
#
# Is the number of ones so far odd? Which of five cups holds the ball after these swaps? Such questions ask for a
# *state* that every token changes, and that no later token can reconstruct by looking back at a few places. A
# recurrence seems made for it, yet most linear recurrences fail at the first of these questions, on sequences longer
# than they were trained on. The reason is the spectrum of their transitions. This chapter follows Grazzi et al.
# (*Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues*, arXiv 2411.12537) and Siems et al.
# (DeltaProduct, arXiv 2502.10297), with the cells of `eflax` as the example.

# %%
from itertools import combinations, permutations

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.scipy.linalg import expm

from eflax import cells

jax.config.update("jax_enable_x64", True)  # equations are checked to twelve digits


def same(x, y):
    """Equal up to rounding in float64."""
    return np.allclose(x, y, rtol=1e-10, atol=1e-10)


def track(cell, keys, beta, start, query):
    """Read S_tᵀ q after each token when nothing is written: keys [B, T, K], beta [B, T] → [B, T, V]."""
    batch, tokens, _ = keys.shape
    values = jnp.zeros((batch, tokens, 1, start.shape[1]), start.dtype)
    queries = jnp.broadcast_to(query, keys.shape)[:, :, None]
    state = jnp.broadcast_to(start, (batch, 1, *start.shape))
    o, _ = cell(queries, keys[:, :, None], values, beta[:, :, None], initial_state=state, form="recurrent")
    return o[:, :, 0]


rng = np.random.default_rng(0)

# %% [markdown]
# ## Parity, and why eigenvalues in (0, 1] cannot count it
#
# Parity has a one-line solution: start with $s = 1$, multiply by $-1$ at each one and by $1$ at each zero. The sign of
# $s$ is the answer, after any number of tokens. So a transition with eigenvalue $-1$ suffices.
#
# Now let all eigenvalues lie in $(0, 1]$, as in Mamba, Gated DeltaNet with $\beta \le 1$, or EFLA with its
# $e^{-\beta\lambda}$. Feed nothing but ones. Then every token applies the same map $S \mapsto A S + c$, and
#
# $$ S_{t+1} - S_t = A\, (S_t - S_{t-1}) = A^t (S_1 - S_0) . $$
#
# Along each eigenvector the difference shrinks or stays, and never turns its sign; as the state cannot grow without
# bound in a memory that should last, it converges. But the answer alternates for ever. At some $t$ two successive
# states differ by less than the machine can tell, and odd and even are the same. No readout, however deep, undoes that.
# (A triangular transition with positive diagonal fails in the same way: Grazzi et al., theorem 1.)

# %%
tokens = 60
ones = jnp.ones((1, tokens, 1))
unit = jnp.eye(1)
eigenvalues = {"EFLA, 0.82": (cells.efla, 0.2), "delta rule, −0.9": (cells.delta_rule, 1.9)}
eigenvalues["delta rule, −1: a mirror"] = (cells.delta_rule, 2.0)
traces = {
    name: np.asarray(track(cell, ones, jnp.full((1, tokens), beta), unit, jnp.ones(1)))[0, :, 0]
    for name, (cell, beta) in eigenvalues.items()
}
powers = np.arange(1, tokens + 1)
for trace, mu in zip(traces.values(), (np.exp(-0.2), -0.9, -1.0), strict=True):
    assert same(trace, mu**powers)

# The same for a memory that is written to as well, with a random key and value.
key, value = (jnp.broadcast_to(jnp.asarray(rng.normal(size=4)), (1, 400, 1, 4)) for _ in range(2))
start = jnp.asarray(rng.normal(size=(1, 1, 4, 4)))
o, _ = cells.efla(key, key, value, jnp.full((1, 400, 1), 0.05), initial_state=start, form="recurrent")
steps = jnp.linalg.norm(jnp.diff(jnp.asarray(o)[0, :, 0], axis=0), axis=1)
assert same(steps[1:] / steps[:-1], jnp.exp(-0.05 * jnp.sum(key[0, 0, 0] ** 2)))

figure, ax = plt.subplots(figsize=(7, 3.2))
for name, trace in traces.items():
    ax.plot(powers, trace, ".-", lw=0.7, label=name)
ax.set(
    xlabel="ones so far",
    ylabel="state",
    title="Only the eigenvalue −1 still knows odd from even after 60 ones",
)
ax.set_ylim(-1.15, 1.6)
ax.legend(loc="upper right", ncol=3, fontsize=8)
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Why no exact flow can mirror
#
# EFLA's transition is $e^{-\beta k k^\top}$, and there is a general obstacle to any exact flow of a real equation
# $\dot S = G S$:
#
# $$ \det e^{G} = e^{\operatorname{tr} G} > 0 . $$
#
# A flow moves continuously from the identity and cannot pass through a singular matrix, so it never reaches the mirror
# image. The delta rule is *not* a flow but an Euler step, and its very error is what helps here: for $\beta\lambda = 2$
# it oversteps exactly to the other side,
#
# $$ I - 2 \hat k \hat k^\top, \qquad \det = -1, $$
#
# the Householder reflection. This is why `DeltaNet(..., allow_negative_eigenvalues=True)` lets $\beta$ go up to 2, and
# why `EFLA` has no such option. With one spare dimension a flow can do it: it rotates by $\pi$ in the plane of $\hat k$
# and a spare axis, which turns both round, $\operatorname{diag}(-1, -1)$ with determinant 1. But a transition of EFLA
# is no rotation.


# %%
def mirror(k):
    """I − 2 k̂ k̂ᵀ: what the delta rule multiplies with for a unit key and β = 2."""
    unit_key = k / jnp.linalg.norm(k)
    state = jnp.eye(len(k))[None, None]
    zeros = jnp.zeros((1, 1, len(k)))
    after, _ = cells.delta_rule.step(state, zeros, unit_key[None, None], zeros, jnp.full((1, 1), 2.0))
    return after[0, 0]


for _ in range(5):
    G = jnp.asarray(rng.normal(size=(5, 5)))
    assert same(jnp.linalg.det(expm(G)), jnp.exp(jnp.trace(G))) and jnp.linalg.det(expm(G)) > 0

k = jnp.asarray(rng.normal(size=5))
assert same(jnp.linalg.det(mirror(k)), -1) and same(mirror(k) @ mirror(k), jnp.eye(5))
assert same(mirror(k) @ k, -k)

lifted = jnp.append(k / jnp.linalg.norm(k), 0.0)  # in six dimensions, the last one is spare
spare = jnp.eye(6)[5]
turn = expm(jnp.pi * (jnp.outer(spare, lifted) - jnp.outer(lifted, spare)))
assert same(turn[:5, :5], mirror(k)) and same(turn[5, 5], -1)

# %% [markdown]
# ## Swaps
#
# To swap the entries $i$ and $j$ of a vector is a reflection, too: at the plane between the two axes, with
# $k = (e_i - e_j) / \sqrt 2$. So one delta-rule step per token follows a shell game of any length. Start from
# $S_0 = I$, write nothing, and $S_t$ is the permutation so far. We read it with $q = (1, 2, 3, 4, 5)$: the order of
# what comes out says where each entry went.

# %%
swaps = list(combinations(range(5), 2))
swap_keys = np.zeros((10, 5))
for n, (i, j) in enumerate(swaps):
    swap_keys[n, [i, j]] = np.array([1, -1]) / np.sqrt(2)
    swapped = np.eye(5)
    swapped[[i, j]] = swapped[[j, i]]
    assert same(mirror(jnp.asarray(swap_keys[n])), swapped)

games, turns = 64, 512
choice = rng.integers(0, 10, (games, turns))
order = np.tile(np.arange(5), (games, 1))
answers = np.zeros((games, turns, 5), int)  # (S_tᵀ q)_i = q[answers_i]
for t in range(turns):
    table = np.tile(np.arange(5), (10, 1))
    for n, (i, j) in enumerate(swaps):
        table[n, [i, j]] = j, i
    order = np.take_along_axis(table[choice[:, t]], order, axis=1)
    answers[:, t] = order


def follow(beta):
    """Which fraction of the games is right after each turn, in float32, when every step is β."""
    keys = jnp.asarray(swap_keys[choice], jnp.float32)
    query = jnp.arange(1.0, 6.0, dtype=jnp.float32)
    gates = jnp.full((games, turns), beta, jnp.float32)
    o = track(cells.delta_rule, keys, gates, jnp.eye(5, dtype=jnp.float32), query)
    # Of all 120 permutations the one nearest to o sorts alike (the rearrangement inequality).
    return (np.argsort(np.argsort(o, axis=-1), axis=-1) == answers).all(axis=-1).mean(axis=0)


right = {slack: follow(2.0 - slack) for slack in (0.0, 0.01, 0.03, 0.1, 1.0)}
assert (right[0.0] == 1).all() and right[0.01][255] > 0.99 and right[0.1][511] < 0.5 and right[1.0][31] < 0.05

figure, ax = plt.subplots(figsize=(7, 3.4))
for slack, share in right.items():
    ax.plot(np.arange(1, turns + 1), 100 * share, label=f"eigenvalue {slack - 1:.2f}")
ax.axhline(100 / 120, color="0.7", lw=0.8)
ax.set(
    xlabel="swaps",
    ylabel="right permutations, %",
    xscale="log",
    title="How close to −1 the eigenvalue is decides how long it lasts",
)
ax.legend(fontsize=8)
figure.tight_layout()
plt.show()

# %% [markdown]
# The mirror itself makes no error in five hundred swaps, even in float32. But a layer must *learn* the eigenvalue, and
# the number of tokens over which it can be trusted grows only as it comes close to $-1$. At $\beta = 1$, the largest
# step of the usual DeltaNet, a "swap" averages the two entries instead, and all is lost at once.
#
# ## More mirrors
#
# A general permutation of five is not one mirror. By the theorem of Cartan and Dieudonné, an orthogonal map of
# $\mathbb{R}^n$ is a product of at most $n$ reflections; for a permutation it takes $n$ minus the number of its cycles,
# which is the rank of $P - I$ (one reflection changes this rank by at most 1). DeltaProduct therefore takes several
# delta-rule steps per token.


# %%
def reflections(permutation):
    """A permutation as swaps (i, j), applied from left to right: one less than its length for each cycle."""
    left, found = list(permutation), []
    for i in range(len(left)):
        while left[i] != i:
            j = left[i]
            left[i], left[j] = left[j], left[i]
            found.append((i, j))
    return found


needed = np.zeros(5, int)
for permutation in permutations(range(5)):
    P = np.eye(5)[list(permutation)]
    product = np.eye(5)
    for i, j in reflections(permutation):
        product[[i, j]] = product[[j, i]]
    assert same(product, P) or same(product.T, P)
    assert len(reflections(permutation)) == np.linalg.matrix_rank(P - np.eye(5))
    needed[len(reflections(permutation))] += 1
assert needed.tolist() == [1, 10, 35, 50, 24]

figure, ax = plt.subplots(figsize=(5, 2.8))
ax.bar(np.arange(5), needed)
ax.bar_label(ax.containers[0])  # pyright: ignore[reportArgumentType]
ax.set(
    xlabel="mirrors",
    ylabel="permutations",
    title="Of five, most often three mirrors, never more than four",
    ylim=(0, 58),
)
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Counting modulo three
#
# To count modulo 3, one needs a transition of order 3, and no real number but 1 has $\mu^3 = 1$. Eigenvalues must be
# complex: a rotation by $120°$. Two mirrors make one, by twice the angle between them. So two delta-rule steps per
# token count modulo any number. (The other way is a complex eigenvalue outright: a complex step size $\beta + i\omega$
# in EFLA's equation has $\mu = e^{-(\beta + i\omega)\lambda}$, any point of the unit disc.)

# %%
angle = jnp.pi / 3
pair = jnp.array([[1.0, 0.0], [jnp.cos(angle), jnp.sin(angle)]])
both = mirror(pair[1]) @ mirror(pair[0])
assert same(jnp.linalg.matrix_power(both, 3), jnp.eye(2)) and not same(both, jnp.eye(2))
assert same(jnp.sort(jnp.angle(jnp.linalg.eigvals(both))), jnp.array([-2, 2]) * jnp.pi / 3)

count = 3000
keys = jnp.tile(pair, (count, 1))[None]
o = track(cells.delta_rule, keys, jnp.full((1, 2 * count), 2.0), jnp.eye(2), jnp.array([1.0, 0.0]))[0, 1::2]
assert same(o[2::3], jnp.tile(jnp.array([1.0, 0.0]), (count // 3, 1)))  # back where it was, 1000 times
assert jnp.linalg.norm(o[0] - o[1]) > 1

# %% [markdown]
# ## Can it be learned?
#
# That a cell *can* represent parity does not mean that training finds it. In this smallest case it does. One state
# entry, one step size for each of the symbols 0 and 1, the running parity of eight random bits as targets
# $(-1)^{\text{ones so far}}$. The delta rule learns $\beta = 2\sigma(z)$, and EFLA any $\beta = e^{z} > 0$.

# %%
GATES = {
    "delta rule, β in (0, 2)": (cells.delta_rule, lambda z: 2 * jax.nn.sigmoid(z)),
    "EFLA": (cells.efla, jnp.exp),
}


def signs(z, bits, cell, gate):
    """The state after each bit."""
    keys = jnp.ones((*bits.shape, 1))
    return track(cell, keys, gate(z)[bits], jnp.eye(1), jnp.ones(1))[:, :, 0]


def parity(bits):
    return 1.0 - 2.0 * (bits.cumsum(axis=1) % 2)


def learn(cell, gate, steps=150):
    """The logits z of both symbols after training, and the losses on the way."""
    bits = jnp.asarray(rng.integers(0, 2, (steps, 64, 8)))
    optimizer = optax.adam(0.1)

    def loss(z, bits):
        return jnp.mean((signs(z, bits, cell, gate) - parity(bits)) ** 2)

    def update(carry, bits):
        z, state = carry
        value, gradient = jax.value_and_grad(loss)(z, bits)
        changes, state = optimizer.update(gradient, state)
        return (z + changes, state), value

    start = jnp.zeros(2)
    (z, _), losses = jax.lax.scan(update, (start, optimizer.init(start)), bits)
    return z, losses


figure, (left, right_side) = plt.subplots(1, 2, figsize=(9, 3.2))
long_bits = jnp.asarray(rng.integers(0, 2, (256, 64)))
for name, (cell, gate) in GATES.items():
    z, losses = learn(cell, gate)
    read = signs(z, long_bits, cell, gate)
    accuracy = np.asarray((jnp.where(read > 0, 1.0, -1.0) == parity(long_bits)).mean(axis=0))
    print(f"{name}: β(0) = {gate(z)[0]:.3f}, β(1) = {gate(z)[1]:.3f}, accuracy at 64 bits {accuracy[-1]:.0%}")
    assert (accuracy == 1).all() if cell is cells.delta_rule else accuracy[8:].max() < 0.65
    left.plot(losses, label=name)
    right_side.plot(np.arange(1, 65), 100 * accuracy, label=name)
left.set(
    xlabel="training step",
    ylabel="mean squared error",
    title="The delta rule finds the mirror",
    ylim=(0, 1.2),
)
left.legend(fontsize=8)
right_side.axvline(8, color="0.7", lw=0.8)
right_side.set(
    xlabel="bits (trained on 8)",
    ylabel="right answers, %",
    title="and counts on; EFLA guesses",
    ylim=(40, 103),
)
figure.tight_layout()
plt.show()

# %% [markdown]
# For whole models, `python -m experiments.state_tracking` trains any stack of layers on parity, modular arithmetic,
# swaps and all of $S_5$, and measures them on longer sequences.
#
# ## What to remember
#
# - Transitions with eigenvalues in $(0, 1]$ forget odd from even. This includes every exact flow of a real equation in
#   its own dimension, and so EFLA: what makes it stable (chapter 1) keeps it from counting.
# - One reflection per token does parity and swaps, two do rotations, and $n - 1$ any permutation of $n$.
# - How long a learned counter lasts depends on how near its eigenvalues come to the unit circle.
#
# Next: `6_rlt`, a recurrence that is not linear at all.
