"""The perturbation families, and the evaluation that uses them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eflax.evaluation import FAMILIES, count_correct
from eflax.evaluation.perturbations import add_noise, drop_pixels, scale_intensity

KEY = jax.random.key(42)
PIXELS = jax.random.uniform(jax.random.key(0), (100, 784), jnp.float32)


def test_grids_are_the_papers():
    grids = {name: family.strengths for name, family in FAMILIES.items()}
    tenths = (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
    assert grids == {"scale": (1, 2, 3, 4, 5, 6, 7, 8, 9, 10), "noise": tenths, "dropout": tenths}


@pytest.mark.parametrize("name", FAMILIES)
def test_first_strength_is_the_clean_image(name):
    family = FAMILIES[name]
    np.testing.assert_array_equal(family.apply(PIXELS, family.strengths[0], KEY), PIXELS)


def test_scale():
    np.testing.assert_array_equal(scale_intensity(PIXELS, 7.0, KEY), PIXELS * 7)


def test_noise_is_gaussian_and_not_clipped():
    noise = add_noise(PIXELS, 0.5, KEY) - PIXELS
    assert abs(noise.mean()) < 0.01 and abs(noise.std() - 0.5) < 0.01
    assert add_noise(PIXELS, 0.5, KEY).min() < 0 and add_noise(PIXELS, 0.5, KEY).max() > 1


def test_dropout_does_not_rescale():
    dropped = drop_pixels(PIXELS, 0.3, KEY)
    gone = dropped == 0
    assert abs(gone.mean() - 0.3) < 0.01
    np.testing.assert_array_equal(dropped, jnp.where(gone, 0, PIXELS))
    assert not drop_pixels(PIXELS, 1.0, KEY).any()


def predict_dark(pixels):
    """Class 1 where the mean pixel exceeds 1/2: sensitive to every family."""
    score = pixels.mean(-1) - 0.5
    return jnp.stack([-score, score], -1)


@pytest.fixture(scope="module")
def test_set():
    images = np.random.default_rng(0).integers(0, 256, (53, 784)).astype(np.uint8)
    return images, (images.mean(-1) > 127.5).astype(np.int32)


def test_evaluation_does_not_depend_on_batches_or_history(test_set):
    images, labels = test_set
    for family, index in [("scale", 0), ("noise", 7), ("dropout", 4)]:
        counts = [
            count_correct(predict_dark, images, labels, family, index, size) for size in (53, 10, 7, 1000)
        ]
        assert len(set(counts)) == 1
    assert count_correct(predict_dark, images, labels, "scale", 0) == 53
    assert count_correct(predict_dark, images, labels, "scale", 4) == (labels == 1).sum()
    assert count_correct(predict_dark, images, labels, "dropout", 10) == (labels == 0).sum()


def test_logits_that_are_not_finite_are_wrong(test_set):
    images, labels = test_set
    nan = count_correct(lambda x: predict_dark(x) * jnp.nan, images, labels, "scale", 0)
    one = count_correct(lambda x: predict_dark(x).at[0, 0].set(jnp.inf), images, labels, "scale", 0)
    assert (nan, one) == (0, 52)


def test_one_compilation_serves_all_strengths(test_set):
    images, labels = test_set
    traced = []

    @jax.jit
    def predict(pixels):
        traced.append(pixels.shape)
        return predict_dark(pixels)

    for index in range(10):
        count_correct(predict, images, labels, "noise", index, 10)
        count_correct(predict, images, labels, "scale", index, 10)
    assert traced == [(10, 784)]
