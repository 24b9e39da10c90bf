"""EFLA in pure JAX, without Flax: a classifier that reads handwritten digits row by row.

`cells.efla` is a function on arrays. Here the parameters are a dict, the optimizer is one line, and the memory after
the last of 28 rows of pixels tells the digit. Run: `python examples/pure_jax.py`
"""

import jax
import jax.numpy as jnp

from eflax import cells
from eflax.data import load_images

WIDTH, STEPS, BATCH, RATE = 24, 150, 64, 0.3


@jax.jit
def init(key):
    """Draw the parameters: an embedding of rows and their places, maps to k, v and β, and one to ten logits."""
    sizes = {"rows": (28, WIDTH), "places": (28, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH)}
    sizes |= {"beta": (WIDTH, 1), "out": (WIDTH * WIDTH, 10)}
    keys = jax.random.split(key, len(sizes))
    return {
        name: jax.random.normal(each, shape) / jnp.sqrt(shape[0])
        for each, (name, shape) in zip(keys, sizes.items(), strict=True)
    }


@jax.jit
def logits(params, images):
    """Map images [B, 28, 28] with pixels from 0 to 1 to logits [B, 10]."""
    x = jnp.tanh(images @ params["rows"] + 5 * params["places"])
    k, v = ((x @ params[name])[:, :, None] for name in "kv")  # [batch, time, one head, width]
    beta = jax.nn.sigmoid(x @ params["beta"])
    _, state = cells.efla(
        None, k, v, beta
    )  # no query: nothing but the memory [batch, 1, width, width] at the end
    return state.reshape(len(images), -1) @ params["out"]


@jax.jit
def train(params, images, labels):
    """Return the parameters after gradient descent over batches [steps, B, ...], and the losses."""

    def loss(params, images, labels):
        chosen = jax.nn.one_hot(labels, 10)
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits(params, images)) * chosen, axis=1))

    def step(params, batch):
        value, gradient = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - RATE * g, params, gradient), value

    return jax.lax.scan(step, params, (images, labels))


def main() -> float:
    """Train, print and return the accuracy on test images."""
    data = load_images("mnist-small")  # ships with the package
    choice = jax.random.randint(jax.random.key(0), (STEPS, BATCH), 0, len(data.y_train))
    params, losses = train(
        init(jax.random.key(1)), jnp.asarray(data.x_train)[choice] / 255.0, data.y_train[choice]
    )
    accuracy = float(jnp.mean(logits(params, data.x_test / 255.0).argmax(axis=1) == data.y_test))
    print(f"loss {losses[0]:.2f} → {losses[-1]:.2f}; {accuracy:.0%} of the test digits are right")
    return accuracy


if __name__ == "__main__":
    main()
