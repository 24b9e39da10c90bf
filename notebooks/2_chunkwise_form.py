# %% [markdown]
# # 2 · The chunkwise form: a recurrence as matrix products
#
# Chapter 1 ended with the update of EFLA and of the delta rule,
# $S \leftarrow (I - \alpha k k^\top) S + \alpha k v^\top$. Evaluated as it stands, it needs one small step per token,
# $T$ of them in a row, and a modern machine idles. This chapter cuts the sequence into chunks of $C$ tokens and turns
# all that happens inside a chunk into matrix products; only $T / C$ steps from chunk to chunk remain. The idea is that
# of Bischof & Van Loan (1987), who wrote products of Householder reflections in "WY" form; Yang et al. (DeltaNet, arXiv
# 2406.06484) brought it to sequence models, and the EFLA paper (arXiv 2512.12602) uses it with $\alpha$ in the place of
# $\beta$.
#
# Tokens are numbered $1 \dots C$ within a chunk. $K$, $Q$ and $V$ are the matrices whose rows are the keys, queries and
# values of a chunk.

# %%
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.scipy.linalg import solve_triangular

from eflax import cells
from eflax.cells import affine
from eflax.cells.numerics import unit_lower_inverse

jax.config.update("jax_enable_x64", True)  # equations are checked to twelve digits


def same(x, y):
    """Equal up to rounding in float64."""
    return np.allclose(x, y, rtol=1e-9, atol=1e-11)


rng = np.random.default_rng(0)
length, key_dim, value_dim = 37, 8, 6
q, k = (jnp.asarray(rng.normal(size=(length, key_dim))) for _ in range(2))
v = jnp.asarray(rng.normal(size=(length, value_dim)))
beta = jnp.asarray(rng.uniform(0.1, 0.9, length))
start = jnp.asarray(rng.normal(size=(key_dim, value_dim)))  # S⁰, the state that enters


def evaluate(cell, *inputs, state=start, **options):
    """Outputs [T, V] and final state of a cell for one sequence and one head; cells have axes for both."""
    o, final = cell(*(x[None, :, None] for x in inputs), initial_state=state[None, None], **options)
    return o[0, :, 0], final[0, 0]


expected, expected_state = evaluate(cells.efla, q, k, v, beta, form="recurrent")

# %% [markdown]
# ## Products and sums
#
# A token is an affine map of the state. Composing the maps of the tokens $1 \dots r$ gives another,
#
# $$ S^r = P^r S^0 + H^r, \qquad
#    P^r = \prod_{t=r}^{1} (I - \alpha_t k_t k_t^\top), \qquad
#    H^r = \sum_{t=1}^{r} \Bigl[\prod_{s=r}^{t+1} (I - \alpha_s k_s k_s^\top)\Bigr] \alpha_t k_t v_t^\top , $$
#
# with later tokens on the left. Everything in this chapter is about writing $P^r$ and $H^r$ well. As $K \times K$
# matrices, one after the other, they cost $O(K^3)$ per token, which is worse than the recurrence:

# %%
alpha = jnp.asarray(cells.efla.coefficients(k, beta).erase)


def token_map(t):
    """S ↦ (I − α k kᵀ) S + α k vᵀ as a dense map."""
    written = alpha[t] * k[t]
    return affine.Dense(jnp.eye(key_dim) - jnp.outer(written, k[t]), jnp.outer(written, v[t]))


prefix = [token_map(0)]  # (P^r, H^r)
for t in range(1, length):
    composed = affine.compose(token_map(t), prefix[-1])
    assert isinstance(composed, affine.Dense)
    prefix.append(composed)

states = [affine.apply(each, start) for each in prefix]
assert same(states[-1], expected_state)
assert same(jnp.stack([S.T @ each for S, each in zip(states, q, strict=True)]), expected)

# %% [markdown]
# ## WY: the product is the identity minus a low rank
#
# Each factor is the identity minus a matrix of rank 1 whose columns lie along its key. So the product of $r$ factors is
# the identity minus a sum of $r$ such matrices, and $H^r$ is a sum of the same kind:
#
# $$ P^r = I - \sum_{i \le r} k_i w_i^\top, \qquad H^r = \sum_{i \le r} k_i u_i^\top . $$
#
# Insert this in $P^r = (I - \alpha_r k_r k_r^\top) P^{r-1}$ and
# $H^r = (I - \alpha_r k_r k_r^\top) H^{r-1} + \alpha_r k_r v_r^\top$ and compare what stands behind $k_r$:
#
# $$ w_r = \alpha_r \Bigl( k_r - \sum_{i<r} (k_r^\top k_i)\, w_i \Bigr), \qquad
#    u_r = \alpha_r \Bigl( v_r - \sum_{i<r} (k_r^\top k_i)\, u_i \Bigr) . $$
#
# No $K \times K$ matrix is left: a chunk is described by two vectors per token.

# %%
keys, values, gains = map(np.asarray, (k, v, alpha))
w, u = np.zeros_like(keys), np.zeros_like(values)
for r in range(length):
    overlap = keys[:r] @ keys[r]
    w[r] = gains[r] * (keys[r] - overlap @ w[:r])
    u[r] = gains[r] * (values[r] - overlap @ u[:r])

for r in (0, 1, 5, length - 1):
    P, H = np.eye(key_dim) - keys[: r + 1].T @ w[: r + 1], keys[: r + 1].T @ u[: r + 1]
    assert same(P, prefix[r].matrix) and same(H, prefix[r].offset)

# %% [markdown]
# ## UT: all tokens at once
#
# The two recursions are forward substitution in a triangular system. Moving the sums to the left, with $L$ the part of
# $\operatorname{diag}(\alpha) K K^\top$ strictly below the diagonal,
#
# $$ (I + L)\, W = \operatorname{diag}(\alpha) K, \qquad (I + L)\, U = \operatorname{diag}(\alpha) V, \qquad
#    T = (I + L)^{-1} \operatorname{diag}(\alpha), \quad W = T K, \quad U = T V . $$
#
# (This is the UT transform of Joffrin et al., 2006.) The diagonal may stand on either side of the Gram matrix:
# $\operatorname{diag}(\alpha)\,(I + \operatorname{StrictTril}(K K^\top \operatorname{diag}(\alpha)))^{-1}$ is the same
# $T$, as $D (I + N D)^{-1} = (I + D N)^{-1} D$.

# %%
gram = k @ k.T
identity = jnp.eye(length)
T = jnp.linalg.inv(identity + jnp.tril(alpha[:, None] * gram, -1)) @ jnp.diag(alpha)
assert same(T @ k, w) and same(T @ v, u)
assert same(T, jnp.diag(alpha) @ jnp.linalg.inv(identity + jnp.tril(gram * alpha[None], -1)))

# %% [markdown]
# ## A chunk in six products
#
# With $D = U - W S^0$, the rows that the chunk really writes, state and outputs are
#
# $$ S^C = S^0 + K^\top D, \qquad O = Q S^0 + (Q K^\top \odot M)\, D , $$
#
# where $M$ is 1 on and below the diagonal (token $r$ reads the state after its own update). Starting each chunk from
# the state that the last one left gives the whole sequence, for any chunk size. The chunk size changes the cost, not
# the result:


# %%
@jax.jit
def chunk(state, q, k, v, alpha):
    """One chunk of tokens: the state after it, and its outputs."""
    lower = jnp.tril(alpha[:, None] * (k @ k.T), -1)
    right = alpha[:, None] * jnp.concatenate([k, v], axis=1)
    w, u = jnp.split(solve_triangular(lower, right, lower=True, unit_diagonal=True), [k.shape[1]], axis=1)
    rows = u - w @ state
    return state + k.T @ rows, q @ state + jnp.tril(q @ k.T) @ rows


for size in (1, 8, 16, 64):
    state, outputs = start, []
    for first in range(0, length, size):
        part = slice(first, first + size)
        state, o = chunk(state, q[part], k[part], v[part], alpha[part])
        outputs.append(o)
    assert same(jnp.concatenate(outputs), expected) and same(state, expected_state)

# %% [markdown]
# `form="chunkwise"` is this, for all batches, heads and many chunks at a time; so are, on a GPU, the kernels of
# `form="pallas_gpu"`. As the algorithm only sees the coefficients of erasing and writing, it exists once, for all
# cells.

# %%
for size in (8, 16):
    o, state = evaluate(cells.efla, q, k, v, beta, form="chunkwise", chunk_size=size)
    assert same(o, expected) and same(state, expected_state)

# %% [markdown]
# ### With decay
#
# Gated cells multiply the state by $e^{g_t}$ first. With the cumulative sums $c_r = g_1 + \dots + g_r$ and
# $\Gamma_{ri} = e^{c_r - c_i}$ for $i \le r$, what token $i$ wrote has decayed to $\Gamma_{ri}$ of itself when token
# $r$ looks at it, and what entered the chunk to $e^{c_r}$. Erase $a$ and write $w$ may differ, too:
#
# $$ (I + \operatorname{StrictTril}(\operatorname{diag}(a)\, (K K^\top \odot \Gamma)))\, D
#    = \operatorname{diag}(w) V - \operatorname{diag}(a e^{c}) K S^0 , $$
#
# $$ O = \operatorname{diag}(e^{c})\, Q S^0 + (Q K^\top \odot \Gamma)\, D, \qquad
#    S^C = e^{c_C} S^0 + (\operatorname{diag}(e^{c_C - c}) K)^\top D . $$
#
# A trap: never compute $\Gamma$ as $e^{c_r} \cdot e^{-c_i}$, nor exponentiate above the diagonal. Both overflow under
# strong decay, although all that is needed is at most 1.

# %%
g = jnp.asarray(-rng.uniform(0.0, 2.0, length))
erase, write, log_decay = map(jnp.asarray, cells.gated_efla.coefficients(k, beta, g))
c = jnp.cumsum(log_decay)
distance = jnp.where(jnp.tri(length, dtype=bool), c[:, None] - c[None], -jnp.inf)
decay = jnp.exp(distance)  # Γ, masked before the exponential

lower = jnp.tril(erase[:, None] * gram * decay, -1)
right = write[:, None] * v - (erase * jnp.exp(c))[:, None] * (k @ start)
rows = solve_triangular(lower, right, lower=True, unit_diagonal=True)
gated, gated_state = evaluate(cells.gated_efla, q, k, v, beta, g, form="recurrent")
assert same(jnp.exp(c)[:, None] * (q @ start) + (q @ k.T * decay) @ rows, gated)
assert same(jnp.exp(c[-1]) * start + (jnp.exp(c[-1] - c)[:, None] * k).T @ rows, gated_state)

# %% [markdown]
# ## Why the triangular inverse must be stable
#
# A GPU wants matrix products, and substitution is serial. There is a tempting way out. $L$ is strictly lower
# triangular, so $L^C = 0$, and the Neumann series of the inverse ends. It even factors into $\log_2 C$ products:
#
# $$ (I + L)^{-1} = \sum_{n=0}^{C-1} (-L)^n = (I - L)(I + L^2)(I + L^4)(I + L^8) \cdots $$
#
# In exact arithmetic this is true. In floating point it is a disaster for the keys that real text produces: repeated
# and similar ones. If all keys of a chunk are alike, all entries of $L$ are about $\beta$, and the entries of $L^n$
# grow like $\binom{C}{n} \beta^n$, up to $10^{16}$ for $C = 64$, while those of the inverse are at most 1. The digits
# cancel. (With random keys, on which such code is usually tested, $L$ is small and all seems well.)


# %%
def neumann(lower):
    """(I + L)⁻¹ by the product above. Do not use it."""
    eye = jnp.eye(lower.shape[-1], dtype=lower.dtype)
    inverse, power = eye - lower, lower @ lower
    for _ in range(5):  # up to L³²
        inverse, power = inverse @ (eye + power), power @ power
    return inverse


def substitution(lower):
    """(I + L)⁻¹ row by row."""
    eye = jnp.eye(lower.shape[-1], dtype=lower.dtype)
    return solve_triangular(lower, eye, lower=True, unit_diagonal=True)


def alike(correlation, size=64, dim=128):
    """L of unit keys whose cosine is about `correlation`, with β = 0.9."""
    common, own = rng.normal(size=dim), rng.normal(size=(size, dim))
    keys = np.sqrt(correlation) * common / np.linalg.norm(common)
    keys = keys + np.sqrt(1 - correlation) * own / np.linalg.norm(own, axis=1, keepdims=True)
    keys = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    return jnp.asarray(np.tril(0.9 * keys @ keys.T, -1))


METHODS = {
    "Neumann product": jax.jit(neumann),
    "substitution": jax.jit(substitution),
    "eflax: blocks of 8, then merged": jax.jit(unit_lower_inverse),
}
correlations = np.array([0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.99, 1.0])
errors = {name: [] for name in METHODS}
for correlation in correlations:
    lower = alike(correlation)
    truth = substitution(lower)  # in float64
    for name, method in METHODS.items():
        error = jnp.abs(method(lower.astype(jnp.float32)) - truth).max() / jnp.abs(truth).max()
        errors[name].append(float(error))

random = alike(0.0)
assert same(neumann(random), substitution(random))  # true in exact arithmetic, and for random keys
assert errors["Neumann product"][0] < 1e-6 and errors["Neumann product"][-1] > 1e6
assert max(errors["eflax: blocks of 8, then merged"] + errors["substitution"]) < 1e-6

power = repeated = alike(1.0)
assert jnp.abs(substitution(repeated)).max() == 1
powers = []
for _ in range(6):
    powers.append(float(jnp.abs(power).max()))
    power = power @ power

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
for name, error in errors.items():
    left.semilogy(correlations, error, "o-", label=name)
left.axhline(1, color="0.7", lw=0.8)
left.set(
    xlabel="cosine of the keys of a chunk",
    ylabel="relative error, float32",
    title="Alike keys break the Neumann product",
)
left.legend(fontsize=8)
right.semilogy(2 ** np.arange(6), powers, "o-", label="of the power Lⁿ")
right.axhline(float(jnp.abs(substitution(repeated)).max()), color="C1", label="of the inverse")
right.set(
    xlabel="n", ylabel="largest entry", title="One key repeated: large terms cancel", xticks=2 ** np.arange(6)
)
right.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# Forward substitution is backward stable: its error is a few roundings, whatever the keys. So is merging inverses of
# diagonal blocks,
#
# $$ \begin{pmatrix} A & 0 \\ L & D \end{pmatrix}^{-1}
#    = \begin{pmatrix} A^{-1} & 0 \\ -D^{-1} L A^{-1} & D^{-1} \end{pmatrix}, $$
#
# which needs as many products as Neumann's. `eflax` substitutes within blocks of 8 tokens and merges them. In the worst
# case, one key repeated 256 times, the chunkwise form in float32 is then as good as the recurrence:

# %%
A, L, D = (np.tril(rng.normal(size=(3, 3))) + 3 * np.eye(3) for _ in range(3))
corner = -np.linalg.inv(D) @ L @ np.linalg.inv(A)
merged = np.block([[np.linalg.inv(A), np.zeros((3, 3))], [corner, np.linalg.inv(D)]])
assert same(merged, np.linalg.inv(np.block([[A, np.zeros((3, 3))], [L, D]])))

tokens = 256
same_key = jnp.tile(jnp.asarray(rng.normal(size=key_dim)), (tokens, 1))
many = (same_key, same_key, jnp.asarray(rng.normal(size=(tokens, value_dim))), jnp.full(tokens, 0.98))
truth, _ = evaluate(cells.efla, *many, form="recurrent")
single = [x.astype(jnp.float32) for x in many]
o, _ = evaluate(cells.efla, *single, state=start.astype(jnp.float32), form="chunkwise")
error = jnp.sqrt(jnp.mean((o - truth) ** 2) / jnp.mean(truth**2))
print(f"chunkwise, float32, one key repeated: relative error {error:.1e}")
assert error < 1e-5

# %% [markdown]
# ## What a chunk costs
#
# Count two operations per multiply-add of the products in `chunk` above, and $C^2$ per column for the substitution:
#
# | product | operations |
# |---|---|
# | $K K^\top$ and $Q K^\top$ | $4 C^2 K$ |
# | the solve for $W$ and $U$ | $C^2 (K + V)$ |
# | $W S$, $Q S$, $K^\top D$ | $6 C K V$ |
# | $(Q K^\top \odot M) D$ | $2 C^2 V$ |
#
# So a token costs $C (5K + 3V) + 6KV$ operations: a term that grows with the chunk, and the unavoidable one of three
# products with the state, which the recurrence pays as well. With $K = V$ both are equal at $C = 3K/4$. Chunks of 64
# tokens do 1.7 times the work of the recurrence for heads of 128, and 2.3 times for heads of 64, in 64 times fewer
# steps.


# %%
def count_operations(program: Any) -> int:
    """Operations of the matrix products and triangular solves of a traced function."""
    total = 0
    for equation in program.eqns:
        shapes = [x.aval.shape for x in equation.invars]
        if equation.primitive.name == "dot_general":
            ((contracted,), _), _ = equation.params["dimension_numbers"]
            total += 2 * int(np.prod(equation.outvars[0].aval.shape)) * shapes[0][contracted]
        elif equation.primitive.name == "triangular_solve":
            total += shapes[0][-1] * int(np.prod(shapes[1]))
        elif "jaxpr" in equation.params:
            total += count_operations(equation.params["jaxpr"])
    return total


def operations(C, K, V):
    """Of one token, by the table."""
    return C * (5 * K + 3 * V) + 6 * K * V


for C, K_, V_ in ((16, 8, 6), (64, 32, 48)):
    shapes = [jnp.zeros(shape) for shape in ((K_, V_), (C, K_), (C, K_), (C, V_), (C,))]
    assert count_operations(jax.make_jaxpr(chunk)(*shapes)) == C * operations(C, K_, V_)

assert operations(48, 64, 64) == 2 * 6 * 64 * 64
sizes = 2 ** np.arange(0, 11)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
for width in (64, 128):
    left.loglog(sizes, operations(sizes, width, width) / (6 * width * width), "o-", label=f"K = V = {width}")
left.axvline(64, color="0.7", lw=0.8)
left.set(
    xlabel="chunk size C",
    ylabel="work / work of the state alone",
    title="A chunk of 3/4 K tokens doubles the work",
)
left.legend()
right.loglog(sizes, 4096 / sizes, "o-")
right.axvline(64, color="0.7", lw=0.8)
right.set(xlabel="chunk size C", ylabel="steps in a row, T = 4096", title="The number of steps falls as 1/C")
figure.tight_layout()
plt.show()

# %% [markdown]
# What a step costs in time depends on the machine; `python -m experiments.throughput` measures every form on yours.
#
# ## What to remember
#
# - A product of rank-1 edits is the identity minus a low rank: two vectors per token, found by one triangular solve.
# - That solve must be by substitution, whole or in blocks. The Neumann product loses all digits as soon as keys repeat.
# - Chunks of about $K$ tokens double the work of the recurrence, and make it matrix products.
#
# Next: `3_duality`, the same recurrences as masked attention.
