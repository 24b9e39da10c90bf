"""EFLA in a plain Flax Linen model: a phone book that is written and looked up in context.

Each token is an entry, a name and a number; a name that comes again has moved, and its newest number counts. The last
token asks for a name. The model has to write, overwrite and look up within one sequence, for numbers that are drawn
anew for each. `eflax.linen` has whole layers as Linen modules; here `cells.efla` stands between Linen's own.
Run: `python examples/linen_model.py`
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from eflax import cells

NAMES, NUMBERS, ENTRIES, STEPS, BATCH = 6, 10, 10, 200, 32


class PhoneBook(nn.Module):
    """Maps names and numbers [B, T] to logits [B, NUMBERS] of the number that the last name has."""

    width: int = 32

    @nn.compact
    def __call__(self, names, numbers):
        """Read the entries; the number of the last token is NUMBERS, "unknown"."""
        name = nn.Embed(NAMES, self.width)(names)
        number = nn.Embed(NUMBERS + 1, self.width)(numbers)
        x = name + number
        q, k, v = (nn.Dense(self.width, use_bias=False)(x)[:, :, None] for _ in range(3))  # one head
        beta = nn.softplus(nn.Dense(1)(x))  # [B, T, 1]
        _, memory = cells.efla(None, k, v, beta)  # [B, 1, width, width] after the last token
        o = cells.efla.read(memory, q[:, -1])
        return nn.Dense(NUMBERS)(nn.LayerNorm()(o[:, 0]))


def entries(key, count):
    """Draw phone books: names, numbers and the answers."""
    name_key, number_key, asked_key = jax.random.split(key, 3)
    names = jax.random.randint(name_key, (count, ENTRIES), 0, NAMES)
    numbers = jax.random.randint(number_key, (count, ENTRIES), 0, NUMBERS)
    place = jax.random.randint(asked_key, (count, 1), 0, ENTRIES)
    asked = jnp.take_along_axis(names, place, axis=1)
    newest = ENTRIES - 1 - jnp.argmax((names == asked)[:, ::-1], axis=1)
    answers = jnp.take_along_axis(numbers, newest[:, None], axis=1)[:, 0]
    unknown = jnp.full((count, 1), NUMBERS)
    return jnp.concatenate([names, asked], axis=1), jnp.concatenate([numbers, unknown], axis=1), answers


def main() -> float:
    """Train, print and return the accuracy on new phone books."""
    model, optimizer = PhoneBook(), optax.adam(1e-2)

    def logits(variables: Any, names, numbers):
        return jnp.asarray(model.apply(variables, names, numbers))

    def loss(variables, names, numbers, answers):
        predicted = logits(variables, names, numbers)
        return optax.softmax_cross_entropy_with_integer_labels(predicted, answers).mean()

    @jax.jit
    def train(key):
        variables = model.init(key, *entries(key, 1)[:2])

        def step(carry, key):
            variables, state = carry
            value, gradient = jax.value_and_grad(loss)(variables, *entries(key, BATCH))
            changes, state = optimizer.update(gradient, state)
            return (optax.apply_updates(variables, changes), state), value

        carry = (variables, optimizer.init(variables))
        (variables, _), losses = jax.lax.scan(step, carry, jax.random.split(key, STEPS))
        names, numbers, answers = entries(jax.random.key(1), 512)
        return losses, jnp.mean(logits(variables, names, numbers).argmax(axis=1) == answers)

    losses, accuracy = train(jax.random.key(0))
    print(f"loss {losses[0]:.2f} → {losses[-1]:.2f}; {accuracy:.0%} of the numbers are right (by chance 10%)")
    return float(accuracy)


if __name__ == "__main__":
    main()
