# %% [markdown]
# # 3 · Duality: a recurrence is a masked attention
#
# Linear attention can be read in two ways: as a recurrence over a matrix, or as attention without softmax. Both compute
# the same numbers, at different cost. Katharopoulos et al. (arXiv 2006.16236) saw this for plain linear attention; Dao
# & Gu (Mamba-2, arXiv 2405.21060) call it *state space duality* and extend it to decay. This chapter looks at the
# attention matrices of the cells: at their mask, their rank, what erasing adds to them, and what normalisation changes.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from eflax import cells

jax.config.update("jax_enable_x64", True)  # equations are checked to twelve digits


def same(x, y):
    """Equal up to rounding in float64."""
    return np.allclose(x, y, rtol=1e-10, atol=1e-12)


rng = np.random.default_rng(0)
length, key_dim, value_dim = 24, 4, 5
q, k = (jnp.asarray(rng.normal(size=(length, key_dim))) for _ in range(2))
v = jnp.asarray(rng.normal(size=(length, value_dim)))
beta = jnp.asarray(rng.uniform(0.1, 0.9, length))
g = jnp.asarray(-rng.uniform(0.0, 0.5, length))
causal = jnp.tri(length)  # 1 on and below the diagonal


def outputs(cell, *inputs, **options):
    """Outputs [T, V] of a cell for one sequence and one head; cells have axes for both."""
    o, _ = cell(*(x[None, :, None] for x in inputs), **options)
    return o[0, :, 0]


# %% [markdown]
# ## Linear attention
#
# The recurrence $S_i = S_{i-1} + k_i v_i^\top$, $o_i = S_i^\top q_i$ unrolls to
#
# $$ o_i = \sum_{j \le i} (q_i^\top k_j)\, v_j , \qquad\text{or}\qquad O = (Q K^\top \odot M)\, V $$
#
# with the causal mask $M$. Left stands $O(T K V)$ work in $T$ steps, right $O(T^2 (K + V))$ work in one.

# %%
recurrent = outputs(cells.linear_attention, q, k, v, normalize=False, form="recurrent")
assert same(recurrent, (q @ k.T * causal) @ v)
assert same(recurrent, outputs(cells.linear_attention, q, k, v, normalize=False, form="parallel"))

# %% [markdown]
# There is a simple way to *see* the attention matrix of any cell that is linear in its values: give it the identity as
# values. Row $i$ of the output is then what token $i$ takes from every token.


# %%
def attention(cell, *inputs, **options):
    """The matrix A with O = A V, for T tokens without an initial state."""
    return outputs(cell, *inputs[:2], jnp.eye(len(inputs[0])), *inputs[2:], form="parallel", **options)


assert same(attention(cells.linear_attention, q, k, normalize=False), q @ k.T * causal)

# %% [markdown]
# ## SSD: decay is in the mask
#
# With a scalar decay, $S_i = e^{g_i} S_{i-1} + k_i v_i^\top$, what token $j$ wrote has faded by the product of all
# decays after it. The mask of ones becomes a mask of decays,
#
# $$ O = (L \odot Q K^\top)\, V, \qquad L_{ij} = e^{g_{j+1} + \dots + g_i} \;\; (i \ge j), \qquad
#    L_{ij} = 0 \;\; (i < j) . $$
#
# $L$ has a structure: it is *1-semiseparable*, every block of it below the diagonal has rank 1. A stretch of tokens
# acts on all later ones through one number. Multiplied by the scores, whose rank is $K$, such a block has rank $K$ at
# most: this *is* the statement that all later tokens know of earlier ones is a state of $K$ rows.

# %%
cumulative = jnp.cumsum(g)
L = jnp.exp(jnp.where(causal > 0, cumulative[:, None] - cumulative[None], -jnp.inf))
assert same(outputs(cells.ssd, q, k, v, g, form="recurrent"), (L * (q @ k.T)) @ v)
assert same(attention(cells.ssd, q, k, g), L * (q @ k.T))

for cut in (6, 12, 18):
    assert np.linalg.matrix_rank(L[cut:, :cut]) == 1
    assert np.linalg.matrix_rank((L * (q @ k.T))[cut:, :cut]) == key_dim

# %% [markdown]
# Softmax attention has no such bound, and this is the whole difference. Its memory is the list of all keys and values.

# %%
softmax = jax.nn.softmax(jnp.where(causal > 0, q @ k.T, -jnp.inf), axis=-1)
half = length // 2
values = {
    "ssd": jnp.linalg.svd((L * (q @ k.T))[half:, :half], compute_uv=False),
    "efla": jnp.linalg.svd(attention(cells.efla, q, k, beta)[half:, :half], compute_uv=False),
    "softmax": jnp.linalg.svd(softmax[half:, :half], compute_uv=False),
}
assert (
    values["ssd"][key_dim] < 1e-12 and values["efla"][key_dim] < 1e-12 and values["softmax"][key_dim] > 1e-6
)

figure, ax = plt.subplots(figsize=(6, 3.2))
for name, each in values.items():
    ax.semilogy(np.arange(1, half + 1), np.maximum(each / each[0], 1e-17), "o-", label=name)
ax.axvline(key_dim, color="0.7", lw=0.8)
ax.set(
    xlabel="index of the singular value (K = 4)",
    ylabel="relative to the first",
    title="What later tokens know of earlier ones has rank K, but for softmax",
)
ax.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Erasing: a triangular solve between scores and values
#
# The delta rule and EFLA erase before they write: token $i$ does not add $v_i$ but
# $d_i = \alpha_i (v_i - S_{i-1}^\top k_i)$, what is new about it. With $S_{i-1} = \sum_{j<i} k_j d_j^\top$ the rows
# $d_i$ solve a triangular system (chapter 2), and
#
# $$ O = (Q K^\top \odot M)\, D, \qquad D = \underbrace{(I + \operatorname{StrictTril}(\operatorname{diag}(\alpha) K
#    K^\top))^{-1} \operatorname{diag}(\alpha)}_{T}\, V . $$
#
# The attention matrix is $(Q K^\top \odot M)\, T$. It is no longer a product of mask and scores, entry by entry: how
# much $i$ takes from $j$ depends on all tokens in between, namely on whether they have overwritten what $j$ wrote.

# %%
alpha = jnp.asarray(cells.efla.coefficients(k, beta).erase)
T = jnp.linalg.inv(jnp.eye(length) + jnp.tril(alpha[:, None] * (k @ k.T), -1)) @ jnp.diag(alpha)
assert same(attention(cells.efla, q, k, beta), (q @ k.T * causal) @ T)

# Sixteen tokens with four keys in turn, each seen four times, and each token asks for its own key.
turns = jnp.tile(jnp.eye(4), (4, 1))
ones, fade = jnp.full(16, 3.0), jnp.full(16, -0.25)
pictures = {
    "linear attention: adds": attention(cells.linear_attention, turns, turns, normalize=False),
    "normalised: averages": attention(cells.linear_attention, turns, turns, eps=0.0),
    "SSD: fades": attention(cells.ssd, turns, turns, fade),
    "EFLA, β = 3: overwrites": attention(cells.efla, turns, turns, ones),
}
last = {name: np.asarray(picture[-1, 3::4]) for name, picture in pictures.items()}  # the fourth key's tokens
assert same(last["linear attention: adds"], np.ones(4)) and same(
    last["normalised: averages"], np.full(4, 0.25)
)
assert same(last["SSD: fades"], np.exp(-0.25 * 4 * np.arange(3, -1, -1)))
assert same(last["EFLA, β = 3: overwrites"], (1 - np.exp(-3)) * np.exp(-3.0 * np.arange(3, -1, -1)))

figure, axes = plt.subplots(1, 4, figsize=(10, 2.9), sharey=True)
for ax, (name, picture) in zip(axes, pictures.items(), strict=True):
    ax.imshow(picture, vmin=0, vmax=1)
    ax.set(title=name, xlabel="token j")
axes[0].set(ylabel="token i")
figure.suptitle("Of four writes to one key: the sum, the mean, the sum faded by age, the last")
figure.colorbar(axes[0].images[0], ax=axes, label="weight of j in the output of i", fraction=0.012)
plt.show()

# %% [markdown]
# ## What normalisation changes
#
# Softmax attention divides by the sum of its weights, and so did linear attention at first: with features $q, k \ge 0$
#
# $$ o_i = \frac{S_i^\top q_i}{z_i^\top q_i + \varepsilon}, \qquad z_i = \sum_{j \le i} k_j . $$
#
# **It is one more column.** $z$ is what the state would hold for a value that is always 1. So the normalised cell is
# the plain one with values $[v, 1]$, and its state is the pair $(S, z)$.

# %%
positive_q, positive_k = jnp.exp(q), jnp.exp(k)
normalised = outputs(cells.linear_attention, positive_q, positive_k, v, eps=0.0)
widened = jnp.concatenate([v, jnp.ones((length, 1))], axis=1)
both = outputs(cells.linear_attention, positive_q, positive_k, widened, normalize=False)
assert same(normalised, both[:, :-1] / both[:, -1:])

# %% [markdown]
# **The output becomes a weighted mean.** The weights are positive and sum to 1; the output never leaves the range of
# the values, and its size does not depend on the length or on the scale of the keys. Without, the output is a sum that
# grows with every token, and something else has to keep it in bounds: a decay, or erasing, or the norm that the layers
# put behind the cell.

# %%
weights = attention(cells.linear_attention, positive_q, positive_k, eps=0.0)
assert weights.min() >= 0 and same(weights.sum(axis=1), jnp.ones(length))
assert (normalised.max(axis=0) <= v.max(axis=0)).all() and (normalised.min(axis=0) >= v.min(axis=0)).all()
rescaled = outputs(cells.linear_attention, positive_q, 100 * positive_k, v, eps=0.0)
assert same(rescaled, normalised)

tokens = 512
long_q, long_k = (jnp.asarray(rng.uniform(0, 1, size=(tokens, 16))) / 4 for _ in range(2))
long_v = jnp.asarray(1 + rng.normal(size=(tokens, 8)))  # values around 1
long_beta, long_g = jnp.full(tokens, 1.0), jnp.full(tokens, -0.05)
runs = {
    "linear attention": outputs(cells.linear_attention, long_q, long_k, long_v, normalize=False),
    "SSD": outputs(cells.ssd, long_q, long_k, long_v, long_g),
    "EFLA": outputs(cells.efla, long_q, long_k, long_v, long_beta),
    "normalised": outputs(cells.linear_attention, long_q, long_k, long_v),
}
size = {name: np.asarray(jnp.sqrt(jnp.mean(o**2, axis=1))) for name, o in runs.items()}
assert (
    size["linear attention"][-1] > 50 > 10 > size["SSD"].max()
    and max(size["EFLA"][-1], size["normalised"][-1]) < 3
)

figure, ax = plt.subplots(figsize=(6, 3.2))
for name, each in size.items():
    ax.loglog(np.arange(1, tokens + 1), each, label=name)
ax.set(
    xlabel="token",
    ylabel="size of the output",
    title="Adding grows; decay, erasing and division stay bounded",
)
ax.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# **It forgets how sure it is.** A mean over one token and a mean over a thousand look alike; and old tokens weigh as
# much as new ones, so that every new token moves the mean less: the answer to a key that changes its value lags behind
# more and more. Erasing keeps pace. Here a key's value switches from 0 to 1 after $n$ tokens; how many more does the
# memory need until it answers $1/2$?


# %%
def delay(cell, n, *gates, **options):
    """Tokens after the switch until the answer passes 1/2."""
    one = jnp.ones((4 * 64, 1))
    value = (jnp.arange(4 * 64) >= n).astype(float)[:, None]
    answers = outputs(cell, one, one, value, *gates, **options)[:, 0]
    return int(jnp.argmax(answers >= 0.5 - 1e-9)) - n + 1


befores = np.array([1, 4, 16, 64, 128])
lags = {
    "normalised": [delay(cells.linear_attention, n, eps=0.0) for n in befores],
    "EFLA, β = 0.1": [delay(cells.efla, n, jnp.full(256, 0.1)) for n in befores],
}
assert lags["normalised"] == list(befores) and lags["EFLA, β = 0.1"] == [7] * 5  # e^{−0.7} < 1/2

figure, ax = plt.subplots(figsize=(6, 3.2))
for name, each in lags.items():
    ax.loglog(befores, each, "o-", label=name)
ax.set(
    xlabel="tokens before the switch",
    ylabel="tokens until half",
    title="A mean learns ever more slowly, a flow does not",
)
ax.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# **It costs precision.** The denominator may be tiny, where all features of a query are; `eps` bounds the division, and
# features should be strictly positive (`elu(x) + 1`, exponentials). In gated or erasing cells a normaliser is not used:
# $z$ would have to be erased as well, and the weights of the delta rule may be negative, so that their sum says
# nothing.
#
# ## What to remember
#
# - Every cell of the matrix family is an attention matrix: scores, times a mask of decays, times a triangular solve
#   where it erases. `form="parallel"` evaluates it so, `form="recurrent"` from token to token.
# - Its blocks below the diagonal have rank $K$ at most. That is what a state of fixed size means.
# - Normalisation turns sums into means: bounded without decay, but blind to age and amount.
#
# Next: `4_affine_maps_and_scans`, the algebra behind all ways of evaluation.
