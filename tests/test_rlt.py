"""The Recurrent Looped Transformer: its exact sizes, and every claim about its transition, against NumPy in float64."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eflax import cells
from eflax.models import RLT, RLTConfig

SMALL = {"vocab_size": 11, "width": 16, "num_heads": 2, "window": 3, "mlp_width": 12}
LENGTH = 7  # no multiple of an interval
VARIANTS = {
    "RLT-1": RLTConfig(encoder_layers=1, decoder_layers=1, **SMALL),
    "RLT-2": RLTConfig(encoder_layers=1, decoder_layers=2, feedback_interval=3, **SMALL),
    "RLT-0": RLTConfig(encoder_layers=1, decoder_layers=1, feedback_interval=None, **SMALL),
    "RLT-1 n+0": RLTConfig(encoder_layers=2, decoder_layers=0, **SMALL),
    "GPT": RLTConfig.gpt(2, **SMALL),
}
COUNTS = [
    (RLTConfig.gpt(8), 25_314_304),
    (RLTConfig(encoder_layers=8, decoder_layers=0), 26_102_272),
    (RLTConfig(encoder_layers=7, decoder_layers=1), 27_152_128),
    (RLTConfig(encoder_layers=6, decoder_layers=2), 27_677_056),
    (RLTConfig(encoder_layers=5, decoder_layers=3), 28_201_984),
    (RLTConfig(), 28_726_912),
    (RLTConfig(feedback_interval=4), 28_726_912),
    (RLTConfig(feedback_interval=None), 28_726_912 - 787_968),
    (RLTConfig.gpt(16), 50_486_272),
    (RLTConfig(encoder_layers=8, decoder_layers=8), 55_998_592),
]


def make(config, seed=0):
    """A model whose gains and biases are not at their trivial start, so that each is seen to be used."""
    model = RLT(config, rngs=nnx.Rngs(seed))
    rng = np.random.default_rng(seed)
    state = nnx.state(model, nnx.Param)
    nnx.update(
        model, jax.tree.map(lambda x: x + jnp.float32(0.2) * rng.normal(size=x.shape).astype("f"), state)
    )
    return model


def some_tokens(batch=2, length=LENGTH):
    return jnp.asarray(np.random.default_rng(1).integers(0, 11, (batch, length)).astype(np.int32))


@pytest.mark.parametrize(("config", "count"), COUNTS)
def test_parameter_counts(config, count):
    state = nnx.state(nnx.eval_shape(lambda: RLT(config, rngs=nnx.Rngs(0))), nnx.Param)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == count


class Judge:
    """The architecture as the paper states it, one position at a time, in NumPy and float64."""

    def __init__(self, model):
        self.c = model.config
        self.seen: list[Any] = []
        self.p: Any = nnx.to_pure_dict(nnx.state(model, nnx.Param))

    def norm(self, p, x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * np.float64(p["scale"])

    def heads(self, p, part, x, t):
        """The head vectors of one part of a projection, rotated to position t and normalised."""
        c = self.c
        kernel = np.asarray(p["projection"]["kernel"], np.float64)[:, part * c.width : (part + 1) * c.width]
        y = (x @ kernel).reshape(c.num_heads, -1)
        return y, y.shape[-1] // 2, t

    def turned(self, y, half, t):
        angle = t * 10_000.0 ** (-np.arange(half) / half)
        a, b = y[:, :half], y[:, half:]
        turned = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
        return np.concatenate(turned, -1)

    def q(self, p, x, t):
        return self.norm(p["q_norm"], self.turned(*self.heads(p, 0, x, t)))

    def kv(self, p, part, x, t):
        k = self.norm(p["k_norm"], self.turned(*self.heads(p, part, x, t)))
        return k, self.heads(p, part + 1, x, t)[0]

    def read(self, q, past):
        keys, values = (np.stack(x, 1) for x in zip(*past, strict=True))  # [H, S, K]
        scores = np.einsum("hk,hsk->hs", q, keys) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("hs,hsk->hk", weights / weights.sum(-1, keepdims=True), values).ravel()

    def attention(self, p, x, t, past, window):
        y = self.norm(p["norm"], x)
        past.append(self.kv(p["heads"], 1, y, t))
        return x + self.read(self.q(p["heads"], y, t), past[-window:]) @ np.float64(p["out"]["kernel"])

    def mlp(self, p, x):
        gate, up = np.split(self.norm(p["norm"], x) @ np.float64(p["projection"]["kernel"]), 2)
        return x + (gate / (1 + np.exp(-gate)) * up) @ np.float64(p["out"]["kernel"])

    def states(self, tokens):
        """The register and the decoder's window before each position."""
        self.seen = []
        self.logits(tokens)
        return self.seen

    def logits(self, tokens, held=None):
        """The logits; `held` replaces what `states` returns at some positions."""
        c, p, decoder = self.c, self.p, self.p.get("decoder")
        encoder_past, window_past = ([[] for _ in range(n)] for n in (c.encoder_layers, c.decoder_layers))
        memory, table, outputs = [], np.float64(p["embedding"]), []
        register = np.float64(decoder["merge"]["start"]) if c.feedback_interval else None
        for t, token in enumerate(tokens):
            if t in (held or {}):
                register, window_past = deepcopy(held[t])
            self.seen.append((register, deepcopy(window_past)))
            z = table[token]
            for i in range(c.encoder_layers):
                block = p["encoder"][i]
                z = self.mlp(block["mlp"], self.attention(block["attention"], z, t, encoder_past[i], 10**6))
            if c.decoder_layers:
                memory.append(
                    self.kv(decoder["memory"]["heads"], 0, self.norm(decoder["memory"]["norm"], z), t)
                )
            if register is not None:
                merge = decoder["merge"]
                r = self.norm(merge["norm"], register) @ np.float64(merge["feedback"]["kernel"])
                gate = z @ np.float64(merge["gate"]["kernel"]) + np.float64(merge["gate"]["bias"])
                z = z + c.alpha / (1 + np.exp(-gate - r[: c.width])) * r[c.width :]
            for i in range(c.decoder_layers):
                block = decoder["blocks"][i]
                z = self.attention(block["attention"], z, t, window_past[i], c.window)
                q = self.q(block["cross"]["heads"], self.norm(block["cross"]["norm"], z), t)
                z = z + self.read(q, memory) @ np.float64(block["cross"]["out"]["kernel"])
                z = self.mlp(block["mlp"], z)
            if register is not None and (t + 1) % c.feedback_interval == 0:
                register = z
            outputs.append(1024 / c.width * self.norm(p["norm"], z) @ table.T)
        return np.stack(outputs)


def stepped(model, tokens):
    """The logits by composing F, token by token."""
    e, memory, _ = model.encode(tokens, jnp.int32(0))
    positions = jnp.arange(LENGTH, dtype=jnp.int32)

    def step(state, t):
        return model.transition(state, e[:, t], memory, t)

    _, s = jax.lax.scan(step, model.init_state(len(tokens)), positions)
    return model.read(s.swapaxes(0, 1))


def in_pieces(model, tokens):
    """The logits by a prefill and single tokens, in a cache with room to spare."""
    extend = jax.jit(lambda params, piece, cache: nnx.merge(graph, params).extend(piece, cache))
    graph, params = nnx.split(model)
    cache, pieces = model.init_cache(len(tokens), LENGTH + 2), []
    for piece in (tokens[:, :4], *(tokens[:, t : t + 1] for t in range(4, LENGTH))):
        logits, cache = extend(params, piece, cache)
        pieces.append(logits)
    return jnp.concatenate(pieces, 1)


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("RLT-1", (RLT.__call__,)),
        ("RLT-2", (RLT.__call__, stepped, in_pieces)),
        ("RLT-0", (in_pieces,)),
        ("RLT-1 n+0", (RLT.__call__,)),
        ("GPT", (RLT.__call__,)),
    ],
)
def test_every_way_to_evaluate_is_the_paper(name, ways):
    """Training, the composed transitions, and generation, against the judge."""
    model, tokens = make(VARIANTS[name]), some_tokens()
    graph, params = nnx.split(model)
    expected = np.stack([Judge(model).logits(row) for row in np.asarray(tokens)])
    compiled = [way for way in ways if way is not in_pieces]
    results = jax.jit(lambda params: [way(nnx.merge(graph, params), tokens) for way in compiled])(params)
    results += [way(model, tokens) for way in ways if way is in_pieces]
    for logits in results:
        np.testing.assert_allclose(logits, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("options", [{}, {"remat": True, "unroll": 2}], ids=["plain", "remat"])
def test_gradient_of_every_parameter_by_differences(options):
    """Through all of H, encoder and memory, with H held where the gradient through it is cut."""
    model = make(RLTConfig(encoder_layers=1, decoder_layers=1, feedback_interval=3, **SMALL))
    graph, params = nnx.split(model)
    rng, row = np.random.default_rng(2), np.asarray(some_tokens()[0])
    weights = rng.normal(size=(LENGTH, 11)).astype("f")

    def loss(params):
        return (weights * nnx.merge(graph, params)(jnp.asarray(row)[None], truncate=6, **options)[0]).sum()

    found = nnx.to_pure_dict(jax.jit(jax.grad(loss))(params))
    judge = Judge(model)
    held = judge.states(row)[6]
    leaves, tree = jax.tree.flatten(judge.p)
    for index, (path, gradient) in enumerate(jax.tree_util.tree_leaves_with_path(found)):
        direction = rng.normal(size=leaves[index].shape)
        losses = []
        for sign in (1, -1):
            moved = np.asarray(leaves[index], np.float64) + sign * 1e-5 * direction
            judge.p = jax.tree.unflatten(tree, [*leaves[:index], moved, *leaves[index + 1 :]])
            losses.append((weights * judge.logits(row, {6: held})).sum())
        expected, scale = (losses[0] - losses[1]) / 2e-5, np.linalg.norm(gradient)
        assert scale > 0 and abs((gradient * direction).sum() - expected) < 2e-3 * scale, path


def test_one_vmap_trains_several_seeds():
    models = [make(RLTConfig(encoder_layers=1, decoder_layers=1, **SMALL), seed) for seed in (0, 1)]
    graph, _ = nnx.split(models[0])
    stacked = jax.tree.map(lambda *x: np.stack(x), *(nnx.state(model) for model in models))
    logits = jax.jit(jax.vmap(lambda params: nnx.merge(graph, params)(some_tokens())))(stacked)
    for rows, model in zip(logits, models, strict=True):
        np.testing.assert_allclose(rows[0], Judge(model).logits(np.asarray(some_tokens()[0])), atol=2e-4)


def test_state_has_one_size():
    model = make(VARIANTS["RLT-1"])
    sizes = set()
    for length in (1, 2, 7):
        tokens = some_tokens(length=length)
        after = jax.eval_shape(lambda x: model.extend(x, model.init_cache(2, 9)), tokens)[1].decoder
        sizes.add(sum(leaf.size for leaf in jax.tree.leaves(after)))
    # The register, and keys and values of W - 1 = 2 positions, for two sequences.
    assert sizes == {2 * 16 + 2 * 2 * 2 * 16}


@pytest.mark.parametrize(("name", "stages"), [("RLT-1", 7), ("RLT-2", 3 * 2), ("RLT-0", 1), ("GPT", 0)])
def test_sequential_stages(name, stages):
    model = make(VARIANTS[name])
    scans = [
        equation.params["length"]
        for equation in jax.make_jaxpr(lambda x: model(x))(some_tokens()).eqns
        if equation.primitive.name == "scan"
    ]
    assert model.sequential_stages(LENGTH) == stages == sum(scans or [1]) * model.config.decoder_layers


def test_an_interval_is_another_model_where_a_chunk_is_none():
    model, (row, _) = make(VARIANTS["RLT-1"]), np.asarray(some_tokens())
    one, three = Judge(model), Judge(model)
    three.c = replace(three.c, feedback_interval=3)
    difference = np.abs(one.logits(row) - three.logits(row)).max(1)
    assert difference[0] == 0 and difference[1] > 1e-3  # token 1 reads s_star in RLT-2, s_0 in RLT-1
    q, k, v = np.random.default_rng(3).normal(size=(3, 1, LENGTH, 1, 4)).astype("f")
    arguments = [jnp.asarray(x) for x in (q, k, v, -np.ones((1, LENGTH, 1), "f"))]
    one, three = (cells.ssd(*arguments, form="chunkwise", chunk_size=size)[0] for size in (1, 3))
    assert one is not None and three is not None
    np.testing.assert_allclose(one, three, atol=1e-6)


def test_generation_is_greedy():
    model, tokens = make(RLTConfig(encoder_layers=1, decoder_layers=0, **SMALL)), some_tokens()
    generated = jax.jit(lambda x: model.generate(x, 3))(tokens)
    logits = jax.jit(lambda x: model(x))(jnp.concatenate([tokens, generated], 1))
    np.testing.assert_array_equal(generated, logits[:, -4:-1].argmax(-1))


BAD_SIZES = {
    "window": ({"window": 0}, "window is 0"),
    "interval": ({"feedback_interval": 0}, "feedback_interval is 0"),
    "no encoder": ({"encoder_layers": 0}, "encoder_layers is 0"),
    "negative decoder": ({"decoder_layers": -1}, "decoder_layers is -1"),
    "heads": ({"num_heads": 3}, "width=512 is not divisible by num_heads=3"),
    "odd heads": ({"width": 20, "num_heads": 4}, "odd"),
    "mlp": ({"mlp_width": 0}, "mlp_width is 0"),
}


@pytest.mark.parametrize("case", BAD_SIZES)
def test_bad_sizes(case):
    sizes, message = BAD_SIZES[case]
    with pytest.raises(ValueError, match=message):
        RLTConfig(**sizes)


def test_bad_calls(without_shape_checks):
    model, tokens = make(VARIANTS["RLT-2"]), some_tokens()
    gpt = make(RLTConfig.gpt(1, **SMALL))
    with pytest.raises(ValueError, match="truncate=4 is not divisible by feedback_interval=3"):
        model(tokens, truncate=4)
    with pytest.raises(ValueError, match="truncate=3: without feedback"):
        gpt(tokens, truncate=3)
    with pytest.raises(ValueError, match="ids from 0 to 11; vocab_size=11 allows 0 to 10"):
        model(tokens.at[0, 0].set(11).at[0, 1].set(0))
    with pytest.raises(ValueError, match="T ≥ 1"):
        model(tokens[:, :0])
    full = gpt.init_cache(2, 1)._replace(length=jnp.int32(1))
    with pytest.raises(ValueError, match="1 in the cache and 1 more exceed its max_length=1"):
        gpt.extend(tokens[:, :1], full)
    extend = jax.jit(lambda x, cache: gpt.extend(x, cache)[0])
    assert np.isnan(extend(tokens[:, :1], full)).all()
    assert np.isnan(extend(jnp.full((2, 1), 11, jnp.int32), gpt.init_cache(2, 1))).all()
