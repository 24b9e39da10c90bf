"""EFLA in an NNX model of your own: letters in, the next letter out, and text written with a carried state.

`eflax.layers.EFLA` is a ready layer; here `cells.efla` stands in a block of one's own. Training calls the cell on whole
sequences, and writing calls its `step` on one letter after the other: the memory is all that is carried.
Run: `python examples/nnx_model.py`
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from eflax import cells

TEXT = cells.__doc__ or ""  # something to read, a few thousand letters long
LETTERS = sorted(set(TEXT))
WIDTH, HEADS, STEPS, BATCH, LENGTH = 64, 4, 150, 16, 64


class Reader(nnx.Module):
    """An embedding, one EFLA block with a residual connection, and a read-out."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(len(LETTERS), WIDTH, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.project = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.gate = nnx.Linear(WIDTH, HEADS, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, len(LETTERS), rngs=rngs)

    def inputs(self, letters):
        """Return the residual stream, and q, k, v [..., H, K] and β [..., H], of letters [...]."""
        x = self.embed(letters)
        y = self.norm(x)
        q, k, v = jnp.split(self.project(y).reshape(*letters.shape, HEADS, -1), 3, axis=-1)
        return x, q, k, v, jax.nn.sigmoid(self.gate(y))

    def logits(self, x, o):
        """Return the logits of the next letter."""
        return self.head(x + self.out(nnx.gelu(o.reshape(x.shape))))

    def __call__(self, letters):
        """Map letters [B, T] to logits [B, T, L]."""
        x, q, k, v, beta = self.inputs(letters)
        o, _ = cells.efla(q, k, v, beta)
        return self.logits(x, o)

    def step(self, state, letter):
        """Map the memory and one letter [B] to the next memory and logits [B, L]."""
        x, q, k, v, beta = self.inputs(letter)
        state, o = cells.efla.step(state, q, k, v, beta)
        return state, self.logits(x, o)


@nnx.jit
def train(model, optimizer, batches):
    """Take a step on each of the batches [N, B, T + 1]; returns the losses."""

    def loss(model, letters):
        return optax.softmax_cross_entropy_with_integer_labels(model(letters[:, :-1]), letters[:, 1:]).mean()

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def step(carry, letters):
        model, optimizer = carry
        value, gradient = nnx.value_and_grad(loss)(model, letters)
        optimizer.update(model, gradient)
        return carry, value

    return step((model, optimizer), batches)[1]


@nnx.jit(static_argnames="count")
def write(model, first, count):
    """Return the most likely letters after `first`."""

    @nnx.scan(in_axes=(nnx.Carry, None), out_axes=(nnx.Carry, 0), length=count)
    def step(carry, model):
        state, logits = model.step(*carry)
        letter = logits.argmax(axis=-1)
        return (state, letter), letter[0]

    state = cells.efla.init_state(1, HEADS, WIDTH // HEADS, WIDTH // HEADS)
    return step((state, first), model)[1]


def main() -> float:
    """Train, print what the model writes, and return the last loss."""
    letters = np.array([LETTERS.index(letter) for letter in TEXT], np.int32)
    starts = np.random.default_rng(0).integers(0, len(letters) - LENGTH - 1, (STEPS, BATCH, 1))
    model = Reader(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    losses = train(model, optimizer, jnp.asarray(letters[starts + np.arange(LENGTH + 1)]))
    written = write(model, jnp.asarray(letters[:1]), 60)
    print(f"loss {losses[0]:.2f} → {losses[-1]:.2f}; it writes: {''.join(LETTERS[i] for i in written)!r}")
    return float(losses[-1])


if __name__ == "__main__":
    main()
