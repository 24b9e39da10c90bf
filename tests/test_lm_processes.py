"""Two processes train a language model, are killed, and one process goes on with another mesh."""

import json
import signal
import socket

import numpy as np
from processes import end_when, finish, launch

from eflax.training import Checkpoints
from experiments import language_model

SIZES = ["--length", "8", "--batch-tokens", "64", "--warmup-tokens", "64", "--tokens", "512", "--seed", "3"]
EVERY = ["--log-every", "1", "--checkpoint-every", "2", "--validate-every", "4", "--accumulate", "2"]
COMMAND = ("-m", "experiments.language_model")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def losses(out):
    log = out / "metrics.jsonl"
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return {record["step"]: record["loss"] for record in map(json.loads, lines) if "loss" in record}


def last_leaves(out):
    checkpoints = Checkpoints(out / "checkpoints" / "model")
    step = checkpoints.latest_step()
    found = checkpoints._manager.restore(step)["state"]
    checkpoints.close()
    return step, found


def test_two_processes_are_killed_and_one_goes_on(tmp_path):
    letters = np.random.default_rng(0).choice(list("abcdef "), (30, 40))
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": "".join(row)}) for row in letters))
    text = str(tmp_path / "text.jsonl")
    data = ["--data", text, "--validation", text, "--cache", str(tmp_path / "cache")]
    options = ["train", *data, "--layer", "transformer", *SIZES, *EVERY]
    out, whole = tmp_path / "run", tmp_path / "whole"

    port = free_port()
    group = ["--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--out", str(out), "--fsdp", "2"]
    first, second = (
        launch(*COMMAND, *options, *group, "--process", str(index), devices=2) for index in range(2)
    )
    try:
        end_when(first, lambda: len(losses(out)) >= 5, signal.SIGKILL)
    finally:
        second.kill()
        print(finish(second)[1])
    begun = losses(out)

    resumed = launch(
        *COMMAND, "--resume", str(out), "--cache", str(tmp_path / "cache"), "--tensor", "2", devices=2
    )
    code, output = finish(resumed)
    assert code == 0, output
    assert language_model.main([*options, "--out", str(whole)]) == 0
    assert [*losses(out)] == [*losses(whole)] == [*range(1, 9)]
    for step, loss in losses(whole).items():
        np.testing.assert_allclose([losses(out)[step], begun.get(step, loss)], loss, rtol=1e-4)
