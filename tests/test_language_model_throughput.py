"""The table of training steps: ours, and a peer's beside it whose failure costs nothing."""

import csv
import re
import sys
from dataclasses import replace

import jax.numpy as jnp
import pytest
from flax import nnx

from eflax.models import LanguageModel, named_config
from eflax.training.flops import count_parameters
from experiments import language_model_peers, language_model_throughput
from experiments.language_model_throughput import Flags, Row, main

MODEL, SHAPE = "deltanet-tiny", "2x16"
FOUND = {"warm_up": 9.0, "seconds": 0.25, "peak_bytes": 2**30, "loss": 5.5, "versions": "fla 0.6.0"}


def table(flags):
    assert main(flags) == 0
    with flags.out.open() as stream:
        return [{key: value for key, value in row.items() if value} for row in csv.DictReader(stream)]


def test_ours_is_measured_and_a_missing_peer_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(language_model_peers, "NEEDED", ("json", "no_such_library"))
    flags = Flags(
        model=(MODEL,), shape=(SHAPE,), remat=("none",), steps=1, form="recurrent", out=tmp_path / "t.csv"
    )
    ours, theirs = table(flags)
    assert float(ours["ms"]) > 0 and "peer" not in ours and float(ours["loss"]) > 0
    assert int(ours["tokens_per_s"]) == pytest.approx(32e3 / float(ours["ms"]), rel=0.01)
    assert (theirs["peer"], theirs["note"]) == ("fla", "not run: no_such_library not installed")
    assert "not run: no_such_library not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"shape": ("2by16",)}, "error: --shape 2by16: must be SEQUENCESxTOKENS"),
        ({"model": ("efla-huge",)}, "efla-huge"),
        ({"form": "cuda"}, "error: form='cuda' does not exist"),
    ],
)
def test_flags_that_cannot_be_used_are_refused(flags, told, capsys):
    assert main(replace(Flags(model=(MODEL,), shape=(SHAPE,)), **flags)) == 2
    assert told in capsys.readouterr().err


def test_a_form_that_cannot_serve_is_listed_with_its_reason(tmp_path):
    flags = Flags(model=(MODEL,), shape=(SHAPE,), form="pallas_gpu", peer=(), out=tmp_path / "t.csv")
    (row,) = table(flags)
    assert "form='pallas_gpu' cannot serve: the kernels need a Hopper GPU" in row["note"] and "ms" not in row


@pytest.fixture
def measured_before(monkeypatch):
    """Ours took a tenth of a second, and what a peer needs is there."""
    monkeypatch.setattr(language_model_peers, "NEEDED", ())
    monkeypatch.setattr(
        language_model_throughput,
        "measure",
        lambda name, shape, remat, flags: Row(name, "", shape, remat, tokens_per_s=320),
    )


def answer(parameters):
    """A process that answers with these parameters if the request is what it must be."""
    lines = (
        "import json, sys",
        "print('a warning')",
        "request = json.load(open(sys.argv[1]))",
        "assert (request['batch_size'], request['length'], request['steps']) == (2, 16, 20)",
        "assert request['config']['model_type'] == 'delta_net'",
        f"json.dump({FOUND} | {{'parameters': {parameters}}}, open(sys.argv[2], 'w'))",
    )
    return "\n".join(lines)


def test_a_peer_is_beside_ours(measured_before, tmp_path, monkeypatch):
    model = nnx.eval_shape(lambda: LanguageModel(named_config(MODEL), dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    count = count_parameters(model)
    monkeypatch.setattr(language_model_peers, "COMMAND", (sys.executable, "-c", answer(count)))
    flags = Flags(model=(MODEL,), shape=(SHAPE,), out=tmp_path / "t.csv")
    ours, theirs = table(flags)
    expected = {"peer": "fla", "weights": "bfloat16", "remat": "none", "ms": "250.0", "tokens_per_s": "128"}
    expected |= {"ours_over_theirs": "2.5", "compile_s": "9.0", "peak_GiB_of_process": "1.0", "loss": "5.5"}
    assert expected.items() <= theirs.items() and theirs["versions"] == "fla 0.6.0"
    assert ours["tokens_per_s"] == "320" and ours["weights"] == "float32"


@pytest.mark.parametrize(
    ("code", "model", "limit", "note"),
    [
        (answer(1), MODEL, 60.0, r"not run: it has 1 parameters there and \d"),
        ("print(1)\nraise ValueError('no GPU')", MODEL, 60.0, "not run: exit code 1: ValueError: no GPU"),
        ("pass", MODEL, 60.0, "not run: exit code 0: it said nothing"),
        ("import time\ntime.sleep(60)", MODEL, 0.2, "not run: stopped after 0.2 s, see --peer-limit"),
        ("", "efla-tiny", 60.0, "not run: a model of the layers efla has no counterpart"),
    ],
)
def test_a_peer_that_fails_costs_nothing(measured_before, tmp_path, monkeypatch, code, model, limit, note):
    monkeypatch.setattr(language_model_peers, "COMMAND", (sys.executable, "-c", code))
    ours, theirs = table(Flags(model=(model,), shape=(SHAPE,), peer_limit=limit, out=tmp_path / "t.csv"))
    assert ours["tokens_per_s"] == "320" and theirs["peer"] == "fla" and "ms" not in theirs
    assert re.match(note, theirs["note"])
