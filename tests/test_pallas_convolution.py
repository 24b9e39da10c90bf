"""The kernels of the short convolution without a GPU: interpreted, against float64; their choice and lowering."""

from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import kernels
import numpy as np
import pytest
from budgets import BUDGETS, assert_close
from flax import nnx

from eflax.layers import DeltaNet, ShortConvolution
from pallas_kernels.device import is_hopper
from pallas_kernels.short_convolution import formula, gpu

NORMAL = np.random.default_rng(0).standard_normal


class Case(NamedTuple):
    """One line of the table; the shape is (B, T, D)."""

    dtype: str
    taps: int
    shape: tuple[int, int, int]
    segments: int
    packed: bool = False
    bias: bool = True
    parts: tuple[int, ...] = ()


# Every dtype; one and more blocks of channels, of both sizes; the shortest and the longest kernel.
TABLE = [
    Case("float32", 4, (2, 32, 256), segments=2, packed=True),
    Case("bfloat16", 4, (1, 96, 384), segments=3, bias=False, parts=(128, 256)),
    Case("bfloat16", 2, (1, 48, 256), segments=1, packed=True),
    Case("float16", 8, (1, 16, 128), segments=1),
]


def reference(x, tail, kernel, bias, dy, documents):
    """y and the gradients, in float64, by the definition: output by output, tap by tap."""
    window = len(kernel) - 1
    inputs, numbers = np.concatenate([tail, x], 1), np.pad(documents, ((0, 0), (window, 0)))
    sees = [
        (numbers[:, i : i + x.shape[1]] == documents)[..., None] for i in range(window + 1)
    ]  # the tail is of document 0
    taps = [np.where(see, inputs[:, i : i + x.shape[1]], 0) for i, see in enumerate(sees)]
    p = sum(weight * tap for weight, tap in zip(kernel, taps, strict=True)) + bias
    share = 1 / (1 + np.exp(-p))
    dp = dy * share * (1 + p * (1 - share))
    dinputs = np.zeros_like(inputs)
    for i, see in enumerate(sees):
        dinputs[:, i : i + x.shape[1]] += np.where(see, dp, 0) * kernel[i]
    dkernel = np.stack([(dp * tap).sum((0, 1)) for tap in taps])
    return p * share, dinputs[:, window:], dinputs[:, :window], dkernel, dp.sum((0, 1))


@pytest.mark.parametrize("case", TABLE, ids=lambda case: "-".join(map(str, case)))
def test_kernels_agree_with_float64(case):
    """Packed: documents begin on and about the edges of chunks and segments, and a NaN does not leave its own."""
    batch, time, width = case.shape
    window = case.taps - 1
    x, tail, dy = (jnp.asarray(NORMAL((batch, n, width)), case.dtype) for n in (time, window, time))
    if case.packed:
        x = x.at[0, 7, 3].set(jnp.nan)
    starts = np.isin(np.arange(time), (7, 8, 16, 18, 31) if case.packed else ())
    documents = np.tile(np.cumsum(starts), (batch, 1))
    layer = ShortConvolution(width, case.taps, use_bias=case.bias, parts=case.parts, rngs=nnx.Rngs(0))
    if layer.bias is not None:
        layer.bias[...] = jnp.asarray(NORMAL(width), jnp.float32)
    definition, parameters = nnx.split(layer)

    @jax.jit
    def run(dy, *inputs):
        def convolve(x, tail, parameters):
            layer = nnx.merge(definition, parameters)
            return layer(x, tail, jnp.asarray(documents, jnp.int32) if case.packed else None)[0]

        y, back = jax.vjp(convolve, *inputs)
        return y, *back(dy)

    with kernels.interpreted(), mock.patch.object(gpu, "choose_segments", lambda *sizes: case.segments):
        *found, gradients = jax.block_until_ready(run(dy, x, tail, parameters))
    found += [gradients["kernel"][...], gradients["bias"][...] if case.bias else 0.0]
    bias = layer.bias[...] if layer.bias is not None else np.zeros(width)
    exact = reference(
        *(np.asarray(z, np.float64) for z in (x, tail, layer.kernel[...], bias, dy)), documents=documents
    )
    for name, one, other in zip(("y", "dx", "dtail", "dkernel", "dbias"), found, exact, strict=True):
        if name != "dbias" or case.bias:
            one = np.asarray(one, np.float64)
            np.testing.assert_array_equal(np.isnan(one), np.isnan(other), name)
            budget = BUDGETS[case.dtype].forward if name == "y" else BUDGETS[case.dtype].backward
            assert_close(np.nan_to_num(one), np.nan_to_num(other), budget, name)
    assert {z.dtype for z in found[:3]} == {jnp.dtype(case.dtype)}


def launches(function, *arguments):
    """Which kernels a function launches on a Hopper GPU, by its jaxpr."""
    with kernels.h200():
        text = str(jax.make_jaxpr(function)(*arguments))
    return {name for name in ("short_convolution", "rank_one") if name in text}


@pytest.mark.parametrize(
    ("time", "width", "taps", "dtype", "served"),
    [
        (16, 128, 4, "bfloat16", True),
        (48, 384, 2, "float32", True),
        (15, 128, 4, "bfloat16", False),
        (16, 64, 4, "bfloat16", False),
        (16, 128, 1, "bfloat16", False),
        (16, 128, 9, "float16", False),
    ],
)
def test_kernels_are_chosen_where_they_serve(time, width, taps, dtype, served):
    layer = ShortConvolution(width, taps, rngs=nnx.Rngs(0))
    x, tail = (jnp.zeros((2, n, width), dtype) for n in (time, taps - 1))
    assert launches(layer, x, tail) == ({"short_convolution"} if served else set())
    assert launches(lambda *inputs: layer(*inputs, kernels=False), x, tail) == set()
    of_this_machine = "short_convolution" in str(jax.make_jaxpr(layer)(x, tail))
    assert of_this_machine == (served and is_hopper())


def test_a_form_without_kernels_convolves_without_them():
    """So that it can be differentiated at will."""
    x = jnp.zeros((1, 16, 128), jnp.bfloat16)
    for form, expected in ((None, {"short_convolution", "rank_one"}), ("chunkwise", set())):
        layer = DeltaNet(128, 2, form=form, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        assert launches(lambda x, layer=layer: layer(x)[0], x) == expected


@pytest.mark.parametrize(("width", "served"), [(256, True), (128, False)])
def test_devices_convolve_their_own_sequences_and_channels(width, served):
    """Lowered for four, forward and backward, to the end of Mosaic GPU's own passes; 64 channels are too few."""
    layer = ShortConvolution(width, use_bias=True, rngs=nnx.Rngs(0))
    x, tail, documents = (
        jnp.zeros((2, 32, width), jnp.bfloat16),
        jnp.zeros((2, 3, width)),
        jnp.zeros((2, 32), int),
    )

    def loss(layer, x):
        return jnp.sum(layer(x, tail, documents)[0].astype(jnp.float32))

    with kernels.h200(data=2, tensor=2):
        traced = jax.jit(nnx.value_and_grad(loss)).trace(layer, x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "manual_computation" in text and text.count("@mosaic_gpu_v2") == 2 * served


def test_members_of_a_grid_share_a_launch():
    """vmap over the parameters, interpreted."""
    width = 128
    x, tail = jnp.asarray(NORMAL((2, 1, 16, width)), jnp.float32), jnp.zeros((2, 1, 3, width))
    kernel = jnp.asarray(NORMAL((2, 4, width)), jnp.float32)

    def slopes(evaluate):
        def loss(x, tail, kernel):
            return jnp.sum(jnp.sin(evaluate(x, tail, kernel, None, None)))

        return jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1, 2))))(x, tail, kernel)

    with kernels.interpreted():
        found = jax.block_until_ready(slopes(gpu.short_convolution))
    assert_close(found, slopes(formula.convolve), BUDGETS["float32"].backward)


@pytest.mark.parametrize(
    ("blocks", "time", "segments"), [(192, 2048, 4), (64, 2048, 8), (64, 272, 1), (8, 512, 4)]
)
def test_segments_are_cut_where_channels_do_not_fill_the_card(blocks, time, segments):
    assert gpu.choose_segments(blocks, time) == segments
