"""The three perturbation families of the EFLA paper's robustness experiment, on raw pixels in [0, 1].

Each is a pure function of (pixels, strength, key); the result is not clipped to [0, 1].
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

type Strength = float | Float[Array, ""]


def scale_intensity(
    pixels: Float[Array, "*S"], strength: Strength, key: Key[Array, ""]
) -> Float[Array, "*S"]:
    """Return the pixels times `strength`; 1 is the clean image. `key` is not used."""
    del key
    return pixels * strength


def add_noise(pixels: Float[Array, "*S"], strength: Strength, key: Key[Array, ""]) -> Float[Array, "*S"]:
    """Return the pixels plus Gaussian noise of standard deviation `strength`; 0 is the clean image."""
    return pixels + strength * jax.random.normal(key, pixels.shape, pixels.dtype)


def drop_pixels(pixels: Float[Array, "*S"], strength: Strength, key: Key[Array, ""]) -> Float[Array, "*S"]:
    """Return the pixels, each set to 0 with probability `strength`, the others as they are (no 1/(1-p))."""
    kept = jax.random.uniform(key, pixels.shape, pixels.dtype) >= strength
    return jnp.where(kept, pixels, jnp.zeros_like(pixels))


@dataclass(frozen=True)
class Family:
    """A perturbation and the strengths at which the paper evaluates it.

    Attributes:
        title: for figures.
        axis: what the strength is.
        apply: the perturbation.
        strengths: the grid; its first entry is the clean image.
    """

    title: str
    axis: str
    apply: Callable[[jax.Array, Strength, jax.Array], jax.Array]
    strengths: tuple[float, ...]


TENTHS = tuple(step / 10 for step in range(11))
FAMILIES = {
    "scale": Family("Intensity scale", "scale s", scale_intensity, tuple(float(s) for s in range(1, 11))),
    "noise": Family("Gaussian noise", "standard deviation σ", add_noise, TENTHS),
    "dropout": Family("Pixel dropout", "probability p", drop_pixels, TENTHS),
}
