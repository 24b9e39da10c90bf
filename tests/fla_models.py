"""Small models of flash-linear-attention 0.6.0: their files, from its naming alone, and their logits in NumPy."""

import json

import numpy as np

WIDTH, VOCABULARY, INNER = 8, 11, 16
COMMON = {"hidden_size": WIDTH, "vocab_size": VOCABULARY, "num_hidden_layers": 2, "norm_eps": 1e-5}
# What their save_pretrained writes, without keys at their defaults.
CONFIGS = {
    "delta_net": {"num_heads": 2, "expand_v": 2.0, "intermediate_size": INNER, "qk_norm": "l2"},
    "gated_deltanet": {
        "num_heads": 1,
        "num_v_heads": 2,
        "head_dim": 3,
        "intermediate_size": INNER,
        "allow_neg_eigval": True,
    },
    "linear_attn": {"num_heads": 2, "intermediate_size": INNER, "feature_map": "elementwise_product"},
    "mamba2": {"head_dim": 4, "state_size": 3, "dt_limit": [0.0, {"__float__": "Infinity"}], "num_heads": 4},
    "transformer": {
        "num_heads": 2,
        "num_kv_heads": 1,
        "intermediate_size": INNER,
        "tie_word_embeddings": True,
        "window_size": 3,
    },
}
FEATURE_MAPS = {
    f"feature_map_{x}.layer{n}.{kind}": shape
    for x in "qk"
    for n in (1, 2)
    for kind, shape in (("weight", (4, 4)), ("bias", (4,)))
}
MIXERS = {  # of a mixer, where names without a dot are those of modules, but for BARE: their tensor is the weight
    "delta_net": {
        "q_proj": (8, 8),
        "k_proj": (8, 8),
        "v_proj": (16, 8),
        "b_proj": (2, 8),
        "q_conv1d": (8, 1, 4),
        "k_conv1d": (8, 1, 4),
        "v_conv1d": (16, 1, 4),
        "o_norm": (8,),
        "o_proj": (8, 16),
    },
    "gated_deltanet": {
        "A_log": (2,),
        "dt_bias": (2,),
        "q_proj": (3, 8),
        "k_proj": (3, 8),
        "v_proj": (12, 8),
        "a_proj": (2, 8),
        "b_proj": (2, 8),
        "g_proj": (12, 8),
        "q_conv1d": (3, 1, 4),
        "k_conv1d": (3, 1, 4),
        "v_conv1d": (12, 1, 4),
        "o_norm": (6,),
        "o_proj": (8, 12),
    },
    "linear_attn": {name: (8, 8) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    | FEATURE_MAPS
    | {"norm": (4,)},
    "mamba2": {
        "A_log": (4,),
        "D": (4,),
        "dt_bias": (4,),
        "in_proj": (42, 8),
        "conv1d.weight": (22, 1, 4),
        "conv1d.bias": (22,),
        "norm": (16,),
        "out_proj": (8, 16),
    },
    "transformer": {"q_proj": (8, 8), "k_proj": (4, 8), "v_proj": (4, 8), "o_proj": (8, 8)},
}
BARE = ("A_log", "D", "dt_bias")


def shapes(kind):
    """The names and shapes of all tensors of a model."""
    found = {}
    mamba, tied = kind == "mamba2", CONFIGS[kind].get("tie_word_embeddings", False)
    top = "backbone" if mamba else "model"
    for layer in range(COMMON["num_hidden_layers"]):
        at = f"{top}.layers.{layer}"
        for name, shape in MIXERS[kind].items():
            whole = name if name in BARE or "." in name else f"{name}.weight"
            found[f"{at}.{'mixer' if mamba else 'attn'}.{whole}"] = shape
        if mamba:
            found[f"{at}.norm.weight"] = (WIDTH,)
            continue
        found |= {f"{at}.{name}_norm.weight": (WIDTH,) for name in ("attn", "mlp")}
        found |= {f"{at}.mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
        found[f"{at}.mlp.down_proj.weight"] = (WIDTH, INNER)
    found[f"{top}.embeddings.weight"] = (VOCABULARY, WIDTH)
    found[f"{top}.norm{'_f' if mamba else ''}.weight"] = (WIDTH,)
    return found | ({} if tied else {"lm_head.weight": (VOCABULARY, WIDTH)})


def random_tensors(kind, dtype=np.float32):
    rng = np.random.default_rng(0)
    return {name: (0.5 * rng.normal(size=shape)).astype(dtype) for name, shape in shapes(kind).items()}


def config(kind):
    return {"model_type": kind, **COMMON, **CONFIGS[kind]}


def write(folder, values, tensors, files=1):
    """Write a folder as transformers does, in one file or several."""
    from safetensors.numpy import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for part in range(files):
        names, file = list(tensors)[part::files], f"model-{part + 1:05d}-of-{files:05d}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


# The definitions, in float64, one sequence, token by token.


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.log1p(np.exp(x))


def rms_norm(x, weight, epsilon=COMMON["norm_eps"]):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + epsilon) * weight


def convolution(x, weight, bias=0.0):
    taps = weight.shape[-1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    windows = np.stack([padded[t : t + taps] for t in range(len(x))])  # [T, taps, D]
    return silu(np.einsum("twd,dw->td", windows, weight[:, 0]) + bias)


def heads(x, width):
    return x.reshape(len(x), -1, width)


def unit(x):
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def delta(q, k, v, beta, g):
    """The gated delta rule; a key head serves neighbouring value heads."""
    share = v.shape[1] // q.shape[1]
    q, k = (np.repeat(x, share, axis=1) for x in (q, k))
    o, state = np.zeros_like(v), np.zeros((v.shape[1], q.shape[-1], v.shape[-1]))
    for t in range(len(q)):
        state = state * np.exp(g[t])[:, None, None]
        error = v[t] - np.einsum("hkv,hk->hv", state, k[t])
        state = state + np.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
        o[t] = np.einsum("hkv,hk->hv", state, q[t]) * q.shape[-1] ** -0.5
    return o


def delta_net(x, w):
    q, k, v = (convolution(x @ w[f"{p}_proj.weight"].T, w[f"{p}_conv1d.weight"]) for p in "qkv")
    beta = sigmoid(x @ w["b_proj.weight"].T)
    o = delta(unit(heads(q, 4)), unit(heads(k, 4)), heads(v, 8), beta, np.zeros_like(beta))
    return rms_norm(o, w["o_norm.weight"]).reshape(len(x), -1) @ w["o_proj.weight"].T


def gated_deltanet(x, w):
    q, k, v = (convolution(x @ w[f"{p}_proj.weight"].T, w[f"{p}_conv1d.weight"]) for p in "qkv")
    beta = 2 * sigmoid(x @ w["b_proj.weight"].T)
    g = -np.exp(w["A_log"]) * softplus(x @ w["a_proj.weight"].T + w["dt_bias"])
    o = delta(unit(heads(q, 3)), unit(heads(k, 3)), heads(v, 6), beta, g)
    o = rms_norm(o, w["o_norm.weight"]) * silu(heads(x @ w["g_proj.weight"].T, 6))
    return o.reshape(len(x), -1) @ w["o_proj.weight"].T


def linear_attn(x, w):
    def features(name):
        y = heads(x @ w[f"{name}_proj.weight"].T, 4)
        first, second = (
            y @ w[f"feature_map_{name}.layer{n}.weight"].T + w[f"feature_map_{name}.layer{n}.bias"]
            for n in (1, 2)
        )
        return first * second

    scores = np.einsum("thk,shk->hts", features("q"), features("k")) * 4**-0.5
    o = np.einsum("hts,shv->thv", np.tril(scores), heads(x @ w["v_proj.weight"].T, 4))
    return rms_norm(o, w["norm.weight"]).reshape(len(x), -1) @ w["o_proj.weight"].T


def mamba2(x, w):
    z, channels, dt = np.split(x @ w["in_proj.weight"].T, (16, 38), axis=-1)
    u, b, c = np.split(convolution(channels, w["conv1d.weight"], w["conv1d.bias"]), (16, 19), axis=-1)
    dt, u = softplus(dt + w["dt_bias"]), heads(u, 4)
    state, y = np.zeros((4, 4, 3)), np.zeros_like(u)
    for t in range(len(x)):
        decay = np.exp(-np.exp(w["A_log"]) * dt[t])[:, None, None]
        state = decay * state + np.einsum("h,hp,n->hpn", dt[t], u[t], b[t])
        y[t] = state @ c[t] + w["D"][:, None] * u[t]
    return rms_norm(y.reshape(len(x), -1) * silu(z), w["norm.weight"]) @ w["out_proj.weight"].T


def transformer(x, w):
    q, k, v = (heads(x @ w[f"{p}_proj.weight"].T, 4) for p in "qkv")
    angles = np.arange(len(x))[:, None, None] * 10_000.0 ** (-np.arange(2) / 2)

    def turn(y):
        a, b = y[..., :2], y[..., 2:]
        parts = [a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)]
        return np.concatenate(parts, -1)

    scores = np.einsum("thk,sk->hts", turn(q), turn(k)[:, 0]) * 4**-0.5
    distance = np.arange(len(x))[:, None] - np.arange(len(x))
    weights = np.where((distance >= 0) & (distance < 3), np.exp(scores), 0)
    o = np.einsum("hts,sv->thv", weights / weights.sum(-1, keepdims=True), v[:, 0])
    return o.reshape(len(x), -1) @ w["o_proj.weight"].T


def logits(kind, tensors, tokens):
    """The logits [T, V] of one sequence."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    mixer = {f.__name__: f for f in (delta_net, gated_deltanet, linear_attn, mamba2, transformer)}[kind]
    top, norm, inner = ("backbone", "norm", "mixer") if kind == "mamba2" else ("model", "attn_norm", "attn")
    x = w[f"{top}.embeddings.weight"][tokens]
    for layer in range(COMMON["num_hidden_layers"]):
        at = f"{top}.layers.{layer}."
        own = {name.removeprefix(at): tensor for name, tensor in w.items() if name.startswith(at)}
        mixed = {name.removeprefix(f"{inner}."): y for name, y in own.items() if name.startswith(f"{inner}.")}
        x = x + mixer(rms_norm(x, own[f"{norm}.weight"]), mixed)
        if kind != "mamba2":
            h = rms_norm(x, own["mlp_norm.weight"])
            h = silu(h @ own["mlp.gate_proj.weight"].T) * (h @ own["mlp.up_proj.weight"].T)
            x = x + h @ own["mlp.down_proj.weight"].T
    x = rms_norm(x, w[f"{top}.norm_f.weight" if kind == "mamba2" else f"{top}.norm.weight"])
    return x @ w.get("lm_head.weight", w[f"{top}.embeddings.weight"]).T
