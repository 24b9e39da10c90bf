"""The command experiments.language_model: train, stop, resume, what it writes, what it refuses."""

import csv
import json
import math
import os
import re
import shutil
import signal
import struct

import jax
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from eflax.data.tokenizers import ByteTokenizer
from eflax.training import Checkpoints
from experiments import command, language_model, language_model_train
from experiments.language_model_generate import Stream, continuation

SIZES = ["--length", "16", "--batch-tokens", "64", "--tokens", "384", "--warmup-tokens", "64"]
QUICK = [
    *SIZES,
    "--layer",
    "transformer",
    "--num-layers",
    "2",
    "--log-every",
    "2",
    "--checkpoint-every",
    "2",
    "--validate-every",
    "3",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for name, seed in (("train", 0), ("check", 1)):
        letters = np.random.default_rng(seed).choice(list("abcdef "), (30, 40))
        lines = (json.dumps({"text": "".join(row)}) for row in letters)
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def arguments(text, *more):
    data = ["--data", str(text / "train.jsonl"), "--validation", str(text / "check.jsonl")]
    return [*data, "--cache", str(text / "cache"), *more]


def train(text, out, *more):
    return language_model.main(["train", *arguments(text, *QUICK, "--out", str(out)), *more])


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    assert train(text, out) == 0
    return out


def records(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def checksums(out):
    """Those of every leaf of the last state."""
    return json.loads((out / "checkpoints" / "model" / "6" / "meta" / "metadata").read_text())["crc32"]


def scalars(folder, name):
    """The values of a scalar by step in event files: frames of length, checksum, protocol buffer, checksum."""
    found = {}
    for file in sorted(folder.iterdir()):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])  # type: ignore
            for value in event.summary.value:
                if value.tag == name:
                    found[event.step] = value.simple_value
            at += length + 16
    return found


def losses(out):
    return [(record["step"], record["loss"]) for record in records(out) if "loss" in record]


@pytest.mark.newest_jax
def test_a_run_logs_every_step_validates_and_keeps_the_best(run):
    assert [step for step, _ in losses(run)] == [1, 2, 3, 4, 5, 6]
    assert losses(run)[-1][1] < losses(run)[0][1]
    rates = [record["lr"] for record in records(run) if "lr" in record]
    assert rates[0] == pytest.approx(3e-4) and rates[1] == pytest.approx(3e-3)  # a warm-up of one step
    assert sorted(rates[1:], reverse=True) == rates[1:] and rates[-1] < 1e-3
    found = [record for record in records(run) if "validation" in record]
    assert [record["step"] for record in found] == [3, 6]
    assert found[0]["validation"] == "check.jsonl"
    best = Checkpoints(run / "checkpoints" / "model-best")
    means = {record["step"]: record["mean_nll"] for record in records(run) if "mean_nll" in record}
    assert best.latest_step() == min(means, key=lambda step: means[step])
    best.close()


def test_a_stopped_and_a_killed_run_end_as_one_that_was_not(run, text, tmp_path, monkeypatch, capsys):
    out, calls, place = tmp_path / "run", [], language_model_train.place_batch

    def place_and_stop(*args):
        calls.append(args)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return place(*args)

    monkeypatch.setattr(language_model_train, "place_batch", place_and_stop)
    assert train(text, out, "--tensorboard") == 128 + signal.SIGTERM
    assert max(step for step, _ in losses(out)) == 3
    # A kill leaves what was on disk: metrics beyond the last checkpoint, and half a line.
    shutil.rmtree(out / "checkpoints" / "model" / "3")
    with (out / "metrics.jsonl").open("a") as stream:
        stream.write('{"run": "mod')
    assert language_model.main(["--resume", str(out), "--cache", str(text / "cache")]) == 0
    assert re.search(r"^step 6: loss \d\.\d+ on check\.jsonl$", capsys.readouterr().out, re.MULTILINE)
    assert losses(out) == losses(run)
    assert scalars(out / "events", "model/loss") == pytest.approx(dict(losses(run)))
    assert [*scalars(out / "events", "model/check.jsonl/nll")] == [3, 6]
    assert checksums(out) == checksums(run)


def test_dry_run_tells_and_writes_nothing(text, tmp_path, capsys):
    assert train(text, tmp_path / "run", "--dry-run") == 0
    said = capsys.readouterr().out
    assert "435,072 parameters, 6 steps of 4 sequences of 16 tokens" in said and "memory of a device" in said
    assert not (tmp_path / "run").exists()


def test_a_run_can_be_evaluated_and_asked_for_text(run, text, capsys, tmp_path):
    wanted = [
        "--data",
        str(text / "check.jsonl"),
        "--length",
        "64",
        "--limit",
        "2",
        "--out",
        str(tmp_path / "x.json"),
    ]
    assert language_model.main(["eval", str(run), "--best", *wanted]) == 2
    assert "--length 64: the states of softmax attention hold max_length=16" in capsys.readouterr().err
    assert language_model.main(["eval", str(run), *wanted, "--length", "16"]) == 0
    saved = json.loads((tmp_path / "x.json").read_text())
    assert (saved["run"], saved["best"], saved["limit"]) == (str(run), False, 2)
    found = saved["results"][str(text / "check.jsonl")]
    assert (found["documents"], found["tokens"]) == (2, 80) and "check.jsonl" in capsys.readouterr().out
    (tmp_path / "blank.jsonl").write_text("\n")
    for flags, message in (
        (["--data", str(tmp_path / "blank.jsonl"), "--length", "16"], "blank.jsonl: has no text"),
        (["--data", "x.txt", "--limit", "0"], "--limit 0: must be at least 1"),
    ):
        assert language_model.main(["eval", str(run), *flags]) == 2
        assert message in capsys.readouterr().err
    assert language_model.main(["eval", str(run)]) == 2
    assert "nothing to evaluate on" in capsys.readouterr().err
    prompts = ["--prompt", "abc", "de", "--max-tokens", "3"]
    assert language_model.main(["generate", str(run), *prompts, "--max-length", "8"]) == 0
    said = capsys.readouterr().out
    assert "abc" in said and "tokens/s" in said
    for flags, message in (
        (["--top-p", "2"], "--top-p 2.0 must lie in"),
        (
            ["--max-tokens", "30"],
            "hold --max-length 16; ask for fewer, or build the model with a larger --max-length",
        ),
    ):
        assert language_model.main(["generate", str(run), *flags]) == 2
        assert message in capsys.readouterr().err
    assert language_model.main(["generate", str(run), "--prompt", "a\udcff"]) == 2
    assert "--prompt: is not UTF-8" in capsys.readouterr().err
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(run / "config.json", bare)
    for flags, message in (
        (
            [],
            f"{bare}/checkpoints/model holds no checkpoint yet: the training in {bare} saved nothing; train on",
        ),
        (
            ["--best"],
            f"model-best holds no parameters of the lowest validation loss of {bare}; leave --best out",
        ),
    ):
        assert language_model.main(["generate", str(bare), *flags]) == 2
        assert message in capsys.readouterr().err
    config = bare / "config.json"
    config.write_text(config.read_text().replace('"bytes-1"', '"bytes-0"'))
    assert language_model.main(["generate", str(bare)]) == 2
    assert f"the tokenizer bytes is not the one that {bare} was trained with" in capsys.readouterr().err
    assert language_model.main(["eval", str(tmp_path / "nowhere"), *wanted[:-2]]) == 2
    assert "nowhere: no such folder, so no run" in capsys.readouterr().err


def test_runs_can_be_compared(run, tmp_path, capsys):
    def copy(name):
        to = tmp_path / name
        to.mkdir()
        for file in ("config.json", "metrics.jsonl"):
            shutil.copy(run / file, to)
        return to

    first, second = copy("first"), copy("second")
    with (second / "metrics.jsonl").open("a") as stream:
        stream.write('{"run": "mod')  # it still goes on
    found = {"run": "x", "best": False, "limit": None, "results": {"piqa": {"acc,none": 0.5}}}
    (first / "eval.json").write_text(json.dumps(found))
    out = tmp_path / "out"
    assert language_model.main(["compare", str(first), str(second), "--out", str(out)]) == 0
    with (out / "table.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["run"] for row in rows] == ["first", "second"]
    assert [row["evaluation piqa acc"] for row in rows] == ["0.5", ""]
    assert {row["parameters"] for row in rows} == {"435072"} and {row["step"] for row in rows} == {"6 of 6"}
    newest = [record["nll"] for record in records(run) if "validation" in record][-1]
    assert float(rows[0]["perplexity check.jsonl"]) == pytest.approx(math.exp(newest))
    with (out / "curves.csv").open() as stream:
        points = [row for row in csv.DictReader(stream) if row["run"] == "first"]
    curve = [(row["step"], float(row["nll"])) for row in points if row["of"] == "training loss"]
    assert curve == [(str(step), pytest.approx(loss, abs=1e-4)) for step, loss in losses(run)]
    assert [row["step"] for row in points if row["of"] == "check.jsonl"] == ["3", "6"]
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "Not all have the same evaluation" in capsys.readouterr().out
    again = tmp_path / "again"
    shutil.copytree(first, again / "first")
    with (again / "first" / "metrics.jsonl").open("a") as stream:
        stream.write(
            json.dumps({"run": "model", "step": 7, "loss": float("nan"), "nll": float("nan")}) + "\n"
        )
    assert (
        language_model.main(["compare", str(first), str(again / "first"), "--out", str(tmp_path / "2")]) == 0
    )
    assert "again/first" in (tmp_path / "2" / "table.csv").read_text()
    (second / "eval.json").write_text("{}")
    lost = copy("lost")
    (lost / "metrics.jsonl").write_text('{"run": "model", "step": 1, "loss": 2.0}\n')
    for paths, message in (
        ([], "give the folders of the runs to compare"),
        ([first, first], "first is given twice"),
        ([lost], "lost: config.json or metrics.jsonl is damaged (KeyError('nll'))"),
        ([second], "eval.json is damaged or not of eval"),
        ([tmp_path / "nowhere"], "nowhere: no such folder, so no run"),
    ):
        assert language_model.main(["compare", *map(str, paths), "--out", str(tmp_path / "new")]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_an_answer_keeps_the_space_that_it_begins_with(capsys):
    class Words(ByteTokenizer):
        """Like SentencePiece: a space before each word, which is dropped at the start of a text."""

        def decode(self, ids):
            return "".join(" abcd"[i] for i in ids).removeprefix(" ")

    stream = Stream(Words(), "ab", [0, 1, 2])
    for token in (0, 3, 4):
        stream([token])
    assert capsys.readouterr().out == "ab" + continuation(Words(), [0, 1, 2], [0, 3, 4]) == "ab cd"


def test_a_command_told_twice_to_stop_waits_for_no_thread(monkeypatch, capsys):
    def stop():
        raise KeyboardInterrupt

    code = command.run_command("language_model", stop, lambda *_: 0)
    assert code == 130 and "stopped at once" in capsys.readouterr().out
    ends = []
    monkeypatch.setattr(os, "_exit", ends.append)  # unlike sys.exit it leaves threads behind
    for each in (code, 2):
        with pytest.raises(SystemExit):
            command.leave(each)
    assert ends == [130]


def test_too_little_memory_is_told(capsys):
    def fill():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore")

    assert command.run_command("language_model", fill, lambda *_: 0) == 2
    assert "allocating 9 bytes. take smaller batches" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layer", "lstm"], "--layer lstm: there is no such layer"),
        (["--batch-tokens", "40"], "--batch-tokens 40: must be a multiple of --length 16"),
        (["--warmup-tokens", "384"], "no shorter than the training"),
        (["--accumulate", "3"], "cannot be cut into 3 accumulated parts"),
        (["--fsdp", "2"], "needs 2 devices and there are 1"),
        (["--layer", "efla", "--form", "spiral"], "spiral"),
        (["--data", "none.jsonl"], "there is no file none.jsonl"),
        (["--tokenizer", "none.model"], "neither one of bytes"),
        (["--pattern", "efla", "transformer", "mamba"], "--num-layers 2 is no multiple of the 3"),
        (
            ["--pattern", "efla", "lstm"],
            "--pattern 'lstm': there is no such layer; there are linear-attention",
        ),
        (["--weights", "nan"], "a positive one for each of the 1 sources"),
        (["--weight-decay", "nan"], "--weight-decay nan: must be 0 or a positive number"),
        (["--max-tokens", "0"], "--max-tokens 0: must be at least 1"),
        (["--num-layers", "0"], "--num-layers 0: must be at least 1"),
        (["--weights", "1.0", "2.0"], "a positive one for each of the 1 sources"),
        (["--length", "4096", "--batch-tokens", "4096", "--tokens", "81920"], "too few for a window of 4096"),
        (["--process", "0"], "give --coordinator HOST:PORT"),
        (["--coordinator", "host", "--process", "0", "--processes", "2"], "must be auto or HOST:PORT"),
        (["--coordinator", "h:1", "--process", "2", "--processes", "2"], "counts from 0 to below the second"),
        (["--coordinator", "h:99999", "--process", "1", "--processes", "2"], "must be auto or HOST:PORT"),
    ],
)
def test_bad_flags_are_told_before_anything_is_written(text, tmp_path, capsys, flags, message):
    assert train(text, tmp_path / "run", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_another_model_or_other_data_cannot_continue_a_run(run, text, capsys):
    for change, field in (
        (["--layer", "deltanet"], "layer"),
        (["--data", str(text / "check.jsonl")], "data"),
        (["--lr", "0.5"], "lr': the run began with 0.003, and now it is 0.5"),
    ):
        assert language_model.main(["--resume", str(run), "--cache", str(text / "cache"), *change]) == 2
        assert f"resume with another '{field}" in capsys.readouterr().err
    same = ["--lr", "3e-3", "--preset", "tiny"]  # the preset's own
    assert language_model.main(["--resume", str(run), "--cache", str(text / "cache"), *same]) == 0
