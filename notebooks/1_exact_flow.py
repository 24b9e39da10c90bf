# %% [markdown]
# # 1 · Exact flow: from the delta rule to EFLA
#
# A recurrent layer reads a sequence of keys, values and queries and keeps a matrix $S$, its memory, that maps a key to
# a value. DeltaNet changes this memory by one gradient step per token. **Exact Flow Linear Attention** (EFLA, Lei et
# al., arXiv 2512.12602) follows the gradient all the way instead: it solves the differential equation of which that
# step is the crudest approximation. This chapter derives the closed form. Each equation is followed by code that checks
# it against `eflax.cells`, the same functions that the models are made of.
#
# Notation: $k \in \mathbb{R}^K$ is a key, $v \in \mathbb{R}^V$ a value, $S \in \mathbb{R}^{K \times V}$ the memory,
# which answers a query by $o = S^\top q$; $\beta > 0$ is a step size and $\lambda = \lVert k \rVert^2$.

# %%
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.scipy.linalg import expm

from eflax import cells

jax.config.update("jax_enable_x64", True)  # equations are checked to twelve digits


def same(x, y):
    """Equal up to rounding in float64."""
    return np.allclose(x, y, rtol=1e-10, atol=1e-12)


@partial(jax.jit, static_argnums=0, static_argnames=("order", "variant"))
def step(cell, S, k, v, *gates, **options):
    """One token of a cell, for one sequence and one head: cells take batches, with axes [B, H] in front."""
    arrays = [jnp.asarray(x)[None, None] for x in (S, jnp.zeros_like(k), k, v, *gates)]
    state, _ = cell.step(*arrays, **options)
    return state[0, 0]


rng = np.random.default_rng(0)
K, V = 4, 3
S = jnp.asarray(rng.normal(size=(K, V)))
k = jnp.asarray(rng.normal(size=K))
v = jnp.asarray(rng.normal(size=V))
beta = 0.3
lam = k @ k
erase_direction = jnp.outer(k, k)  # A below

# %% [markdown]
# ## The delta rule is a gradient step
#
# How well does the memory answer $k$ with $v$? Measure it by
#
# $$ L(S) = \tfrac12 \lVert S^\top k - v \rVert^2, \qquad
#    \nabla L(S) = k (S^\top k - v)^\top = k k^\top S - k v^\top . $$
#
# One step of gradient descent with step size $\beta$ is the delta rule of Widrow and Hoff (1960), which Schlag et al.
# (arXiv 2102.11174) and Yang et al. (DeltaNet, arXiv 2406.06484) put into sequence models:
#
# $$ S \leftarrow S - \beta \nabla L(S) = (I - \beta k k^\top) S + \beta k v^\top . $$

# %%
gradient = jax.grad(lambda S: 0.5 * jnp.sum((S.T @ k - v) ** 2))(S)
assert same(gradient, erase_direction @ S - jnp.outer(k, v))
assert same(step(cells.delta_rule, S, k, v, beta), S - beta * gradient)

# %% [markdown]
# ## The smallest example
#
# Let everything be a number. The key 1 comes twice, first with the value 1, then with the value 3. What should the
# memory answer to the key 1?
#
# - **Linear attention** adds: $1 + 3 = 4$, an answer that nobody gave.
# - **Normalised** linear attention divides by the sum of the keys and answers the mean, 2.
# - **The delta rule** with $\beta = 1$ first forgets the old value and answers 3, the newest.
#
# The step size decides how much of the old value survives. For another $\beta$ the delta rule answers
# $(1 - \beta)\beta + 3\beta$, which overshoots: at $\beta = 1.5$ it says 3.75, more than any value that it saw. The
# flow, which we are about to derive, answers $(e^{-\beta} + 3)(1 - e^{-\beta})$: for every $\beta$ below 3, and in the
# limit exactly 3.

# %%
keys = jnp.ones((1, 2, 1, 1))  # [B, T, H, K]
values = jnp.array([1.0, 3.0]).reshape(1, 2, 1, 1)


def answer(cell, *gates, **options):
    """What a memory that read both tokens answers to the key 1."""
    o, _ = cell(keys, keys, values, *gates, form="recurrent", **options)
    return float(o[0, -1, 0, 0])


def gate(beta):
    return jnp.full((1, 2, 1), beta)


assert answer(cells.linear_attention, normalize=False) == 4
assert same(answer(cells.linear_attention, normalize=True, eps=0.0), 2)
assert answer(cells.delta_rule, gate(1.0)) == 3

steps = np.linspace(0.0, 3.0, 31)
delta = np.array([answer(cells.delta_rule, gate(b)) for b in steps])
flow = np.array([answer(cells.efla, gate(b)) for b in steps])
assert same(delta, (1 - steps) * steps + 3 * steps)
assert same(flow, (np.exp(-steps) + 3) * (1 - np.exp(-steps))) and flow.max() < 3

figure, ax = plt.subplots(figsize=(6, 3.4))
ax.plot(steps, delta, label="delta rule: one Euler step")
ax.plot(steps, flow, label="EFLA: the exact flow")
for level, name in ((4, "added"), (3, "newest value"), (2, "mean")):
    ax.axhline(level, color="0.7", lw=0.8, zorder=0)
    ax.text(3.03, level, name, va="center", color="0.4")
ax.set(
    xlabel="step size β",
    ylabel="answer to the key 1",
    title="A long Euler step overshoots, the flow does not",
)
ax.legend(loc="lower right")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## The differential equation
#
# Gradient descent with ever smaller steps becomes the gradient flow. Hold the token's $k$ and $v$ fixed (a zero-order
# hold), write $A = k k^\top$ and $b = k v^\top$, and let the memory follow
#
# $$ \frac{dS}{d\tau} = -A S + b, \qquad 0 \le \tau \le \beta . $$
#
# The delta rule is a single explicit Euler step of length $\beta$. Better integrators of the same equation are the
# Runge-Kutta methods; since the equation is linear with constant coefficients, a method of order $n$ (with $n$ stages,
# $n \le 4$) is the Taylor series of the solution cut after $n$ terms. `cells.efla` has them as `order=n`.


# %%
def velocity(S):
    return jnp.outer(k, v) - erase_direction @ S


def euler(S, h):
    return S + h * velocity(S)


def heun(S, h):  # order 2
    first = velocity(S)
    return S + h / 2 * (first + velocity(S + h * first))


def classical(S, h):  # order 4, the method of Kutta (1901)
    a = velocity(S)
    b = velocity(S + h / 2 * a)
    c = velocity(S + h / 2 * b)
    d = velocity(S + h * c)
    return S + h / 6 * (a + 2 * b + 2 * c + d)


METHODS = {1: euler, 2: heun, 4: classical}
for order, method in METHODS.items():
    assert same(step(cells.efla, S, k, v, beta, order=order), method(S, beta))
assert same(step(cells.efla, S, k, v, beta, order=1), step(cells.delta_rule, S, k, v, beta))

# %% [markdown]
# How far is each from the solution? A method of order $n$ has a local error of $O(\beta^{n+1})$: its line in a log-log
# plot has the slope $n + 1$. And $m$ Euler steps of length $\beta / m$ come to the solution only as $1/m$, each of them
# as expensive as the one exact step to come.

# %%
lengths = np.geomspace(1e-3, 1e-1, 9)
errors = {
    order: np.array([jnp.linalg.norm(method(S, h) - step(cells.efla, S, k, v, h)) for h in lengths])
    for order, method in METHODS.items()
}
for order, error in errors.items():
    clean = error > 1e-13  # below it is rounding
    slope = np.polyfit(np.log(lengths[clean]), np.log(error[clean]), 1)[0]
    assert abs(slope - (order + 1)) < 0.1, (order, slope)

counts = np.array([1, 2, 4, 8, 16, 32, 64])
substeps = []
for m in counts:
    T = S
    for _ in range(m):
        T = euler(T, beta / m)
    substeps.append(float(jnp.linalg.norm(T - step(cells.efla, S, k, v, beta))))
assert abs(np.polyfit(np.log(counts[3:]), np.log(substeps[3:]), 1)[0] + 1) < 0.05

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
for order, error in errors.items():
    left.loglog(lengths, np.maximum(error, 1e-17), "o-", label=f"order {order}: slope {order + 1}")
left.set(
    xlabel="step size β",
    ylabel="error of one step",
    title="Order n: local error β to the n + 1",
    ylim=(1e-17, 1),
)
left.legend()
right.loglog(counts, substeps, "o-")
right.set(xlabel="Euler steps m in one token", ylabel="error", title="Small Euler steps converge as 1/m only")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## The rank-1 collapse
#
# The solution of a linear equation with constant coefficients is
#
# $$ S(\beta) = e^{-\beta A} S + \int_0^\beta e^{-(\beta - \tau) A}\, b \, d\tau . $$
#
# A matrix exponential per token would be far too expensive, were it not for the shape of $A$. A matrix of rank 1 is its
# own square up to a factor, $A^2 = k (k^\top k) k^\top = \lambda A$, and so $A^n = \lambda^{n-1} A$. The series of the
# exponential collapses:
#
# $$ e^{-\beta A} = I + \sum_{n \ge 1} \frac{(-\beta)^n}{n!} \lambda^{n-1} A
#    = I - \alpha k k^\top, \qquad \alpha = \frac{1 - e^{-\beta\lambda}}{\lambda} . $$

# %%
A, b = erase_direction, jnp.outer(k, v)
alpha = -jnp.expm1(-beta * lam) / lam
assert same(A @ A, lam * A) and same(A @ A @ A @ A, lam**3 * A)
assert same(expm(-beta * A), jnp.eye(K) - alpha * A)

# %% [markdown]
# The integral collapses in the same way: $b$ points along $k$, $A b = \lambda b$, and therefore
# $e^{-s A} b = e^{-\lambda s} b$ and
#
# $$ \int_0^\beta e^{-s A} b \, ds = \frac{1 - e^{-\beta\lambda}}{\lambda}\, b = \alpha\, k v^\top . $$
#
# The code checks it with a trick of Van Loan (1978): the integral stands in the corner of one larger exponential,
#
# $$ \exp \left( \beta \begin{pmatrix} -A & b \\ 0 & 0 \end{pmatrix} \right)
#    = \begin{pmatrix} e^{-\beta A} & \int_0^\beta e^{-sA} b \, ds \\ 0 & I \end{pmatrix} . $$


# %%
def exact(generator, b, S, time):
    """The state after dS/dτ = −generator S + b, by a matrix exponential."""
    size, width = b.shape
    block = jnp.block([[-generator, b], [jnp.zeros((width, size + width))]])
    block = expm(time * block)
    return block[:size, :size] @ S + block[:size, size:]


assert same(exact(A, b, jnp.zeros_like(S), beta), alpha * b)

# %% [markdown]
# Both together are the **EFLA update**,
#
# $$ \boxed{\; S \leftarrow (I - \alpha k k^\top) S + \alpha k v^\top, \qquad
#    \alpha = \frac{1 - e^{-\beta\lambda}}{\lambda} \;} $$
#
# the delta rule with another gate. All that makes DeltaNet fast (chapter 2) therefore serves EFLA too.

# %%
assert same(step(cells.efla, S, k, v, beta), exact(A, b, S, beta))
assert same(step(cells.efla, S, k, v, beta), step(cells.delta_rule, S, k, v, alpha))

# %% [markdown]
# ## What α does
#
# With $\varphi(x) = (1 - e^{-x}) / x$ we have $\alpha = \beta\, \varphi(\beta\lambda)$. Three consequences:
#
# - **Short keys**: $\beta\lambda \to 0$ gives $\alpha \to \beta$, the delta rule. **Long keys**:
#   $\alpha \to 1/\lambda$, and the update becomes the projection onto $\{S : S^\top k = v\}$, which is the step of
#   Kaczmarz (1937) and of normalised least mean squares.
# - **Relaxation**: what the memory answers to the same key moves exponentially to the value,
#   $S'^\top k = e^{-\beta\lambda} S^\top k + (1 - e^{-\beta\lambda})\, v$.
# - **Self-limiting writes**: the matrix that is written has the norm $\alpha \lVert k \rVert \lVert v \rVert$, and with
#   $x = \beta\lambda$ we have $\alpha \lVert k \rVert = \sqrt\beta\,(1 - e^{-x})/\sqrt{x}$: it is largest at
#   $x \approx 1.2564$ and falls for longer keys like $1/\lVert k \rVert$. The delta rule writes
#   $\beta \lVert k \rVert$, in proportion.

# %%
after = step(cells.efla, S, k, v, beta)
x = beta * lam
assert same(after.T @ k, jnp.exp(-x) * (S.T @ k) + (1 - jnp.exp(-x)) * v)


def gain(k, beta):
    """α of keys [..., K] and step sizes [...], as the library computes it."""
    return cells.efla.coefficients(jnp.asarray(k), jnp.asarray(beta)).erase


assert same(gain(1e-4 * k, beta), beta * (1 - 0.5 * beta * 1e-8 * lam))
assert same(gain(1e4 * k, beta), 1 / (1e8 * lam))
projected = step(cells.efla, S, 1e4 * k, v, beta)
assert same(projected.T @ (1e4 * k), v)

norms = np.geomspace(0.05, 30, 400)
written = np.asarray(gain(norms[:, None], np.ones(400))) * norms
peak = norms[written.argmax()] ** 2
assert abs(peak - 1.2564) < 0.05 and abs(written.max() - 0.6382) < 1e-4

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
left.semilogx(norms**2, gain(norms[:, None], np.ones(400)), label="α, EFLA")
left.semilogx(norms**2, np.ones(400), label="β, delta rule")
left.semilogx(norms**2, np.minimum(1 / norms**2, 2), "--", color="0.6", label="1/λ, projection")
left.set(xlabel="βλ", ylabel="gate / β", title="α goes from the delta rule to the projection", ylim=(0, 1.3))
left.legend()
right.loglog(norms, written, label="EFLA")
right.loglog(norms, norms, label="delta rule")
right.set(
    xlabel="length of the key (β = 1)", ylabel="norm of what is written", title="EFLA limits its own writes"
)
right.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# ### Computing α
#
# The formula as it stands loses all digits for small $x$: in float32, $1 - e^{-x}$ is 0 below $x = 6 \cdot 10^{-8}$.
# `expm1` repairs the value, and a series the derivatives, which are
#
# $$ \frac{\partial\alpha}{\partial\beta} = e^{-x}, \qquad
#    \frac{\partial\alpha}{\partial\lambda} = -\beta^2\, \frac{1 - (1 + x) e^{-x}}{x^2} . $$

# %%
size = np.geomspace(1e-9, 1e2, 300)
truth = -np.expm1(-size) / size
key32 = jnp.sqrt(jnp.asarray(size, jnp.float32))[:, None]
rounded = np.asarray(key32[:, 0] * key32[:, 0], np.float64)  # λ of the rounded key
ours = np.asarray(cells.efla.coefficients(key32, jnp.ones(300, jnp.float32)).erase, np.float64)
x32 = size.astype(np.float32)
naive = np.abs((1 - np.exp(-x32)) / x32 / truth - 1)
careful = np.abs(ours / (-np.expm1(-rounded) / rounded) - 1)
assert careful.max() < 4e-7 and naive[size < 1e-8].min() == 1

slopes = jax.grad(lambda beta, k: gain(k, beta), argnums=(0, 1))(beta, k)
assert same(slopes[0], jnp.exp(-x))
assert same(slopes[1], -(beta**2) * (1 - (1 + x) * jnp.exp(-x)) / x**2 * 2 * k)

figure, ax = plt.subplots(figsize=(6, 3.4))
ax.loglog(size, np.maximum(naive, 1e-9), label="(1 − exp(−x)) / x")
ax.loglog(size, np.maximum(careful, 1e-9), label="eflax")
ax.set(
    xlabel="x = βλ", ylabel="relative error in float32", title="The formula as written fails for short keys"
)
ax.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Stability
#
# The transition $I - \alpha k k^\top$ leaves every direction but $k$ alone. Its eigenvalues are 1, $K - 1$ times, and
# $1 - \alpha\lambda = e^{-\beta\lambda} \in (0, 1]$. Whatever the key and the step size, EFLA never expands its memory.
# Runge-Kutta methods replace $e^{z}$, $z = -\beta\lambda$, by its Taylor polynomial $R_n(z)$, and are stable only where
# $|R_n(z)| \le 1$: on the negative real axis down to $-2$, $-2$, $-2.513$ and $-2.785$ for $n = 1, 2, 3, 4$ (Hairer &
# Wanner, *Solving Ordinary Differential Equations II*, section IV.2). The delta rule is the first of these: it diverges
# where $\beta\lambda > 2$, and this is why DeltaNet must normalise its keys.


# %%
def transition(key, beta, **options):
    """What one token multiplies the memory with: the update of the identity when nothing is written."""
    return step(cells.efla, jnp.eye(K), key, jnp.zeros(K), beta, **options)


spectrum = jnp.linalg.eigvalsh(transition(k, beta))
assert same(spectrum, jnp.array([jnp.exp(-x), 1, 1, 1]))


def polynomial(z, order):
    """R_n(z), the first terms of the exponential series."""
    return sum(z**n / float(jax.scipy.special.factorial(n)) for n in range(order + 1))


LIMITS = {1: 2.0, 2: 2.0, 3: 2.5127, 4: 2.7853}
for order, limit in LIMITS.items():
    for inside, xs in ((True, limit - 1e-3), (False, limit + 1e-3)):
        key = k * jnp.sqrt(xs / x)  # so that βλ = xs
        radius = jnp.abs(jnp.linalg.eigvalsh(transition(key, beta, order=order))).max()
        assert (radius <= 1 + 1e-12) == inside
        assert same(radius, max(1, abs(polynomial(-xs, order))))

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
grid = np.linspace(-4, 1.5, 220)[None] + 1j * np.linspace(-3.2, 3.2, 220)[:, None]
for order, color in zip((1, 2, 3, 4), ("C0", "C1", "C2", "C3"), strict=True):
    left.contour(grid.real, grid.imag, np.abs(polynomial(grid, order)), [1.0], colors=color)
    left.plot([], [], color=color, label=f"order {order}")
left.axvspan(-4, 0, color="C4", alpha=0.12, label="exact flow")
left.set(xlabel="Re z", ylabel="Im z", title="Stable: inside a curve; for the flow, everywhere left")
left.legend(loc="upper right", fontsize=8)
line = np.linspace(0, 4, 200)
for order in (1, 2, 4):
    right.plot(line, polynomial(-line, order), color=f"C{order - 1}", label=f"order {order}")
right.plot(line, np.exp(-line), color="C4", label="exact flow")
right.axhspan(-1, 1, color="0.9", zorder=0)
right.set(
    xlabel="βλ",
    ylabel="eigenvalue along the key",
    title="Only the exact eigenvalue stays in (0, 1]",
    ylim=(-3, 3),
)
right.legend(fontsize=8)
figure.tight_layout()
plt.show()

# %% [markdown]
# In a whole sequence a few long keys are enough. Forty tokens with keys such that $\beta\lambda$ is 3 on average:

# %%
tokens = 40
long_keys = jnp.asarray(rng.normal(size=(tokens, K))) * np.sqrt(3.0 / (K * beta))
none = jnp.zeros((tokens, K))


def sizes(cell, **options):
    """‖S‖₂ after each token, from the identity on, when nothing is written."""

    def body(S, token):
        S = step(cell, S, *token, **options)
        return S, jnp.linalg.norm(S, ord=2)

    return jax.lax.scan(body, jnp.eye(K), (long_keys, none, jnp.full(tokens, beta)))[1]


grown = {"delta rule": sizes(cells.delta_rule)}
grown |= {f"order {n}": sizes(cells.efla, order=n) for n in (2, 4)}
grown["exact flow"] = sizes(cells.efla)
assert grown["delta rule"][-1] > 1e3 and np.all(np.diff(grown["exact flow"]) <= 1e-12)

figure, ax = plt.subplots(figsize=(6, 3.4))
for name, norm in grown.items():
    ax.semilogy(np.arange(1, tokens + 1), norm, label=name)
ax.set(
    xlabel="token",
    ylabel="spectral norm of the memory",
    title="With long keys only the exact flow stays bounded",
)
ax.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# ## What the norm of a key is for
#
# If EFLA is the delta rule with another gate, what is new? Only the way in which the *norm* of the key enters. Divide
# it out, $\hat k = k / \lVert k \rVert$, and EFLA reads
#
# $$ S \leftarrow (I - \gamma \hat k \hat k^\top) S + \gamma \hat k \Bigl(\frac{v}{\lVert k \rVert}\Bigr)^{\!\top},
#    \qquad \gamma = 1 - e^{-\beta\lambda} . $$
#
# With keys of length 1 and $\beta = \operatorname{softplus}(z)$ the gate is
# $1 - e^{-\operatorname{softplus}(z)} = \operatorname{sigmoid}(z)$: then EFLA *is* DeltaNet. So EFLA's layer leaves
# keys as they are. A short key hardly touches the memory, a long one overwrites firmly but cannot overshoot: the norm
# says how firmly to write.

# %%
unit, length = k / jnp.sqrt(lam), jnp.sqrt(lam)
assert same(after, step(cells.delta_rule, S, unit, v / length, -jnp.expm1(-beta * lam)))
z = 0.7
assert same(
    step(cells.efla, S, unit, v, jax.nn.softplus(z)), step(cells.delta_rule, S, unit, v, jax.nn.sigmoid(z))
)

# %% [markdown]
# ## The gated variant
#
# Gated DeltaNet (Yang et al., arXiv 2412.06464) lets the memory decay by $\gamma = e^{g} \in (0, 1]$ at each token,
# $S \leftarrow \gamma (I - \beta k k^\top) S + \beta k v^\top$. Written as an Euler step over unit time,
#
# $$ S \leftarrow S - \bigl[(1 - \gamma) I + \gamma\beta k k^\top\bigr] S + \beta k v^\top , $$
#
# it approximates the equation $dS/d\tau = -\bigl[(1 - \gamma) I + \gamma\beta k k^\top\bigr] S + \beta k v^\top$. The
# identity commutes with everything, so the decay factors out of the exponential. With $\delta = 1 - \gamma$ and
# $\rho = \gamma\beta$ the solution is (appendix D of the paper)
#
# $$ S \leftarrow e^{-\delta} (I - a\, k k^\top) S + w\, k v^\top, \qquad
#    a = \rho\, \varphi(\rho\lambda), \qquad w = \beta\, \varphi(\delta + \rho\lambda) . $$
#
# Erase $a$ and write $w$ now differ: what is written decays, too, from the moment on at which it is written.

# %%
g = -0.4
kept = np.exp(g)
generator = (1 - kept) * jnp.eye(K) + kept * beta * A
assert same(step(cells.gated_delta_rule, S, k, v, beta, g), S - generator @ S + beta * b)  # the Euler step
assert same(step(cells.gated_efla, S, k, v, beta, g), exact(generator, beta * b, S, 1.0))
assert same(step(cells.gated_efla, S, k, v, beta, 0.0), step(cells.efla, S, k, v, beta))

# %% [markdown]
# A consequence that is easily missed: as $1 - \gamma \le 1$, this memory keeps at least $1/e$ of itself per token,
# where Gated DeltaNet can forget everything at once. `cells.gated_efla` has two more variants, which are not from the
# paper: `"log_rate"` puts the rate $-g$ into the equation, so that the decay is $e^g$ itself, and `"decay_first"`
# decays the memory before an ungated EFLA step. Note, too, what the published form does as its gate closes: it stops to
# erase along the key, $a \to 0$, but still writes with $w \to (1 - 1/e)\, \beta$.

# %%
log_rate = -g * jnp.eye(K) + beta * A
assert same(step(cells.gated_efla, S, k, v, beta, g, variant="log_rate"), exact(log_rate, beta * b, S, 1.0))
first = step(cells.gated_efla, S, k, v, beta, g, variant="decay_first")
assert same(first, step(cells.efla, kept * S, k, v, beta))

gates = np.linspace(1e-3, 1, 100)
double_keys = jnp.zeros((100, 2)).at[:, 0].set(2.0)  # λ = 4
variants: dict[Any, str] = {"published": "-", "log_rate": "-", "decay_first": "--"}


def coefficients(variant):
    """Erase a, write w and log-decay of β = 1 for each gate."""
    found = cells.gated_efla.coefficients(double_keys, jnp.ones(100), jnp.log(gates), variant=variant)
    return [np.asarray(each) for each in found]


erase, write, log_decay = coefficients("published")
assert np.exp(log_decay).min() > 1 / np.e
assert erase[0] < 2e-3 and abs(write[0] - (1 - 1 / np.e)) < 2e-3

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
for variant, line in variants.items():
    left.plot(gates, np.exp(coefficients(variant)[2]), line, label=variant)
right.plot(gates, erase, label="erase a")
right.plot(gates, write, label="write w")
right.axhline(gain(double_keys[0], 1.0), color="0.7", lw=0.8, label="α, without a gate")
left.axhline(1 / np.e, color="0.7", lw=0.8)
left.set(xlabel="gate e^g", ylabel="kept of the memory", title="As published, 1/e of the memory always stays")
left.legend()
right.set(
    xlabel="gate e^g",
    ylabel="coefficient (β = 1, λ = 4)",
    title="A closed gate stops erasing, but not writing",
)
right.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# ## What to remember
#
# - The delta rule is one Euler step of a linear differential equation. As its matrix has rank 1, the exact solution
#   costs the same: replace $\beta$ by $\alpha = (1 - e^{-\beta\lambda})/\lambda$.
# - The exact step is stable for every key, so keys need no normalisation, and their norm becomes meaningful.
# - With unit keys nothing changes but the name of the gate.
#
# Next: `2_chunkwise_form`, how such a recurrence becomes a few matrix products.
