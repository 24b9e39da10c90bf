"""Checkpoints of flash-linear-attention: outputs against its definitions, bytes kept both ways, what is refused."""

import json
from dataclasses import replace

import fla_models
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from eflax.convert import ConversionError, export_folder, import_folder, load_model, save_model
from eflax.convert.__main__ import main
from eflax.convert.configs import read_config, write_config
from eflax.convert.exchange import abstract_model
from eflax.convert.folders import read_source
from eflax.convert.tensors import write_tensors
from eflax.layers import DeltaNet, LinearAttention
from eflax.models import LanguageModelConfig
from eflax.models.configs import BlockConfig
from eflax.training import Checkpoints, RunFolder, adamw, initial_state
from eflax.training.step import decay_mask
from experiments import language_model

TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6])


@nnx.jit
def forward(model, tokens):
    return model.logits(model.hidden(tokens)[0])


def error(found, reference):
    return np.sqrt(np.mean((found - reference) ** 2) / np.mean(reference**2))


def read(folder):
    """All tensors of a folder."""
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


@pytest.mark.parametrize("kind", fla_models.CONFIGS)
def test_an_imported_model_computes_what_it_did_and_comes_back_bit_for_bit(kind, tmp_path):
    dtype = jnp.bfloat16 if kind in ("mamba2", "transformer") else np.float32
    tensors, values = fla_models.random_tensors(kind, dtype), fla_models.config(kind)
    source = fla_models.write(tmp_path / "theirs", values, tensors, files=3 if kind == "delta_net" else 1)
    import_folder(source, tmp_path / "ours")
    model = load_model(tmp_path / "ours", dtype="float32")
    found = forward(model, jnp.asarray(TOKENS[None], jnp.int32))[0]
    assert error(np.asarray(found), fla_models.logits(kind, tensors, TOKENS)) < 1e-5

    name = jnp.dtype(dtype).name
    half = sum(tensor.nbytes for tensor in tensors.values()) // 2
    export_folder(tmp_path / "ours", tmp_path / "back", dtype=name, max_bytes=half)
    back = read(tmp_path / "back")
    assert back.keys() == tensors.keys()
    for tensor, before in tensors.items():
        assert back[tensor].dtype == before.dtype and back[tensor].tobytes() == before.tobytes(), tensor
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    changed = {key for key in values if key in written and written[key] != values[key]}
    assert not changed and written["dtype"] == name
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys() and len(set(index["weight_map"].values())) > 1


def own_model(head_epsilon=1e-6, **changes):
    """A hybrid of ours with tied embeddings; its parameters are drawn without compiling their initialisers."""
    options = (("num_heads", 2), ("norm_epsilon", head_epsilon))
    pattern = tuple(BlockConfig("deltanet", options, 12) for _ in range(2))
    pattern = (*pattern, BlockConfig("transformer", (("num_heads", 2),), 12))
    config = LanguageModelConfig(vocab_size=258, width=8, num_layers=3, pattern=pattern, tied=True)
    model, _ = abstract_model(replace(config, **changes))
    rng = np.random.default_rng(0)
    values = [
        (path, leaf.replace(jnp.asarray(0.3 * rng.normal(size=leaf.shape), leaf.dtype)))
        for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
    ]
    nnx.update(model, nnx.from_flat_state(values))
    return model


def leaves(model):
    return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def test_a_model_of_ours_comes_back_bit_for_bit(tmp_path):
    model = own_model()
    save_model(model, tmp_path / "first", tokenizer="bytes")
    export_folder(tmp_path / "first", tmp_path / "theirs")
    values = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert values["attn"]["layers"] == [2] and (values["bos_token_id"], values["eos_token_id"]) == (256, 257)
    import_folder(tmp_path / "theirs", tmp_path / "again", tokenizer="bytes")
    before, after = leaves(model), leaves(load_model(tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(before[path].tobytes() == after[path].tobytes() for path in before)


def test_the_tokenizer_of_a_folder_travels(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<s>": 0, "</s>": 1, "a": 2, "b": 3}
    save_model(own_model(), tmp_path / "first")
    export_folder(tmp_path / "first", tmp_path / "theirs")
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="b")).save(
        str(tmp_path / "theirs" / "tokenizer.json")
    )
    import_folder(tmp_path / "theirs", tmp_path / "ours")
    assert read_source(tmp_path / "ours").tokenizer == str(tmp_path / "ours" / "tokenizer.json")
    export_folder(tmp_path / "ours", tmp_path / "back")
    copies = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("theirs", "ours", "back")]
    assert copies[0] == copies[1] == copies[2]


def test_two_epsilons_become_one_by_a_larger_residual_stream(tmp_path):
    # As a training leaves it: parameters beside the state of an optimizer. A stream of small size lets epsilon count.
    model = own_model(1e-4, norm_epsilon=1e-2)
    plan = {"dtype": "float32", "length": 16, "tokenizer": "bytes"}
    save_model(model, tmp_path / "copy")  # for the configuration as JSON has it
    config = json.loads((tmp_path / "copy" / "config.json").read_text())["config"]["plan"]["config"]
    with RunFolder(tmp_path / "run", {"experiment": "language_model", "plan": plan | {"config": config}}):
        checkpoints = Checkpoints(tmp_path / "run" / "checkpoints" / "model")
        checkpoints.save(7, initial_state(model, adamw(lambda step: 0.0, decayed=decay_mask)))
        checkpoints.close()
    summary = export_folder(tmp_path / "run", tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "ours")
    again = load_model(tmp_path / "ours")
    assert again.config.norm_epsilon == 1e-4 and summary.stream_scale == pytest.approx(0.1)
    tokens = jnp.asarray(TOKENS[None], jnp.int32)
    assert error(*map(np.asarray, (forward(again, tokens), forward(model, tokens)))) < 1e-5


def test_command_and_text_from_an_imported_model(tmp_path, capsys):
    model = own_model(num_layers=1, pattern=(BlockConfig("transformer", (("num_heads", 2),), 12),))
    save_model(model, tmp_path / "first")
    assert main(["export", str(tmp_path / "first"), str(tmp_path / "theirs"), "--dtype", "bfloat16"]) == 0
    bare, out = str(tmp_path / "bare"), str(tmp_path / "out")
    assert main(["import", str(tmp_path / "theirs"), bare]) == 0
    assert "There is no tokenizer" in capsys.readouterr().out
    assert language_model.main(["generate", bare]) == 2
    assert "has no tokenizer; convert the model again with --tokenizer" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "theirs"), out, "--tokenizer", "none.model"]) == 2
    assert "'none.model' is neither bytes, mistral-v1 nor an existing file" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "theirs"), out, "--tokenizer", "bytes", "--dtype", "float32"]) == 0
    assert language_model.main(["generate", out, "--max-tokens", "2", "--temperature", "0"]) == 0
    assert "2 tokens in" in capsys.readouterr().out
    assert main(["import", str(tmp_path / "theirs"), out]) == 2
    assert "is in use; give a new folder" in capsys.readouterr().err


def without(tensors, name):
    del tensors[name]


Q = "model.layers.0.attn.q_proj.weight"
REFUSED = {  # kind, change of config.json, change of the tensors, message
    "kind": (
        "delta_net",
        {"model_type": "rwkv7"},
        None,
        r"'model_type' is 'rwkv7' and must be one of delta_net",
    ),
    "gate": ("delta_net", {"use_gate": True}, None, "'use_gate' is True: DeltaNet has no output gate"),
    "sum norm": ("delta_net", {"qk_norm": "sum"}, None, "'qk_norm' is 'sum'"),
    "unknown option": (
        "delta_net",
        {"attnres_block_size": 4},
        None,
        "'attnres_block_size' is 4, .* --ignore",
    ),
    "size": ("delta_net", {"num_heads": "2"}, None, "'num_heads' is '2' and must be a positive whole number"),
    "epsilon": ("delta_net", {"norm_eps": -1}, None, "'norm_eps' is -1.0 and must be a positive number"),
    "part of an entry": ("delta_net", {"expand_k": 0.3}, None, "'expand_k' is 0.3: .* are no whole number"),
    "hybrid": ("delta_net", {"attn": {"layers": [5], "num_heads": 2}}, None, "'attn' has the layer 5"),
    "no layer count": ("delta_net", {"num_hidden_layers": None}, None, "'num_hidden_layers' is missing"),
    "groups": ("mamba2", {"n_groups": 2}, None, "'n_groups' is 2: each group is normalised on its own"),
    "bounded step": ("mamba2", {"dt_limit": [0.0, 0.1]}, None, r"'dt_limit' is \[0.0, 0.1\]"),
    "heads": ("mamba2", {"num_heads": 3}, None, "'num_heads' is 3: 'head_dim' and 'expand' make 4"),
    "features": ("linear_attn", {"feature_map": "dpfp"}, None, "'feature_map' is 'dpfp'"),
    "shared keys": ("linear_attn", {"num_kv_heads": 1}, None, "'num_kv_heads' is 1"),
    "missing": ("delta_net", {}, lambda t: without(t, Q), rf"missing: {Q} \[8, 8\]"),
    "not known": ("delta_net", {}, lambda t: t.update(x=np.ones(3, "f4")), r"not known: x \[3\]"),
    "shape": ("delta_net", {"vocab_size": 12}, None, r"lm_head.weight \[11, 8\], not \[12, 8\]"),
    "type": ("delta_net", {}, lambda t: t.update({Q: np.ones((8, 8))}), rf"{Q} \[8, 8\] is F64"),
    "untied": (
        "transformer",
        {},
        lambda t: t.update({"lm_head.weight": np.ones((11, 8), "f4")}),
        r"lm_head.weight \[11, 8\] is not model.embeddings.weight",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_by_name(case, tmp_path):
    kind, options, change, message = REFUSED[case]
    tensors = fla_models.random_tensors(kind)
    if change is not None:
        change(tensors)
    source = fla_models.write(tmp_path / "theirs", fla_models.config(kind) | options, tensors)
    with pytest.raises(ConversionError, match=message):
        import_folder(source, tmp_path / "ours")
    assert {path.name for path in tmp_path.iterdir()} == {"theirs"}


def test_harmless_and_ignored_options_are_let_through(tmp_path):
    more = {"norm_first": True, "pretraining_tp": None, "fuse_norm": False, "use_l2warp": True}
    values = fla_models.config("transformer") | more
    tensors = fla_models.random_tensors("transformer")
    tensors["lm_head.weight"] = tensors["model.embeddings.weight"]
    source = fla_models.write(tmp_path / "theirs", values, tensors)
    with pytest.raises(ConversionError, match="'norm_first' is True"):
        import_folder(source, tmp_path / "ours")
    import_folder(source, tmp_path / "ours", ignored=["norm_first"])


def test_mamba2_of_transformers_is_the_same_under_other_names():
    theirs = fla_models.config("mamba2")
    renamed = {"norm_eps": "layer_norm_epsilon", "dt_limit": "time_step_limit"}
    others = {renamed.get(key, key): value for key, value in theirs.items()} | {"time_step_rank": 4}
    assert read_config(others) == read_config(theirs)
    with pytest.raises(ConversionError, match="are one number under two names, and differ"):
        read_config(theirs | {"layer_norm_epsilon": 1e-3})


def damaged(tmp_path, how):
    tensors = fla_models.random_tensors("delta_net")
    source = fla_models.write(tmp_path / "theirs", fla_models.config("delta_net"), tensors, files=2)
    file = source / "model-00001-of-00002.safetensors"
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-7])
    elif how == "gone":
        file.unlink()
    elif how == "stale index":
        index = source / "model.safetensors.index.json"
        index.write_text(index.read_text().replace(Q, "other"))
    elif how == "two":
        (source / "model.safetensors").write_bytes(file.read_bytes())
    else:
        (source / "config.json").write_text("[1")
    return source


@pytest.mark.parametrize(
    ("how", "message"),
    {
        "cut": "model-00001-of-00002.safetensors cannot be read or is damaged",
        "gone": "model-00001-of-00002.safetensors cannot be read",
        "stale index": "is not in the file but in|is in the file and not in",
        "two": "has both model.safetensors and",
        "config": "config.json cannot be read",
    }.items(),
)
def test_damaged_folders_are_refused(how, message, tmp_path):
    with pytest.raises(ConversionError, match=message):
        import_folder(damaged(tmp_path, how), tmp_path / "ours")


def test_the_wrong_direction_is_named(tmp_path):
    theirs = fla_models.write(tmp_path / "theirs", fla_models.config("transformer"), {})
    save_model(own_model(), tmp_path / "ours")
    with pytest.raises(ConversionError, match="has the layout of Hugging Face; import it"):
        export_folder(theirs, tmp_path / "out")
    with pytest.raises(ConversionError, match="is a folder of ours, which is exported"):
        import_folder(tmp_path / "ours", tmp_path / "out")
    with pytest.raises(ConversionError, match=r"holds no model: there is no config\.json"):
        export_folder(tmp_path, tmp_path / "out")


def test_nothing_half_written_is_left(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left on device")

    model = own_model()
    save_model(model, tmp_path / "ours")
    monkeypatch.setattr("eflax.convert.exchange.write_tensors", full)
    monkeypatch.setattr(Checkpoints, "save", full)
    for write in (
        lambda: save_model(model, tmp_path / "more"),
        lambda: export_folder(tmp_path / "ours", tmp_path / "more"),
    ):
        with pytest.raises(OSError, match="no space left"):
            write()
    assert {path.name for path in tmp_path.iterdir()} == {"ours"}


NO_COUNTERPART = {
    "layer": ((BlockConfig("efla", (("num_heads", 2),), 12),), "layers efla has no counterpart"),
    "value heads": (
        (BlockConfig("deltanet", (("num_heads", 2), ("num_value_heads", 4)), 12),),
        "DeltaNet with num_value_heads",
    ),
    "groups": ((BlockConfig("mamba2", (("num_heads", 4), ("num_groups", 2)), 0),), "num_groups other than 1"),
    "MLP": ((BlockConfig("mamba2", (("num_heads", 4),), 12),), "mlp_width=12: mamba2 has no MLP"),
    "two MLPs": (
        tuple(BlockConfig("transformer", (("num_heads", 2),), mlp) for mlp in (12, 16)),
        r"MLPs of the widths \[12, 16\]",
    ),
    "two options": (
        tuple(BlockConfig("deltanet", (("num_heads", heads),), 12) for heads in (1, 2)),
        "the deltanet layers differ",
    ),
}


@pytest.mark.parametrize("case", NO_COUNTERPART)
def test_models_without_a_counterpart_are_refused(case):
    pattern, message = NO_COUNTERPART[case]
    config = LanguageModelConfig(vocab_size=9, width=8, num_layers=2, pattern=pattern)
    model, _ = abstract_model(config)
    with pytest.raises(ConversionError, match=message):
        write_config(model)


def test_values_that_a_narrow_type_cannot_hold_are_refused(tmp_path):
    make = {"x": np.array([1.0, 1e5, np.inf], np.float32)}.__getitem__
    with pytest.raises(ConversionError, match=r"tensor x has values up to 1e\+05, too large for float16"):
        write_tensors(tmp_path, {"x": (3,)}, make, "float16")


def test_options_of_linear_attention_are_its_own():
    with pytest.raises(ValueError, match=r"feature_map='relu': LinearAttention has \('elu', "):
        LinearAttention(8, 2, feature_map="relu", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"normalize=True: DeltaNet has no such option"):
        DeltaNet(8, 2, normalize=True, rngs=nnx.Rngs(0))
