"""A run that is stopped or killed, at any point, and resumed ends bit-equal to one that was not."""

import json
import signal

import numpy as np
import tiny_run
from processes import ROOT, end_when, finish, launch

SCRIPT = str(ROOT / "tests" / "tiny_run.py")


def steps_logged(out):
    log = out / "metrics.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def losses(out):
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in records]


def writing_a_checkpoint(out):
    return steps_logged(out) >= 20 and any((out / "checkpoints").glob("tiny/*tmp*"))


def test_killed_and_stopped_and_resumed(tmp_path):
    """Killed before the first step, then within a checkpoint; told to stop by either signal; run to its end."""
    out, whole = tmp_path / "run", tmp_path / "whole"
    resume = (SCRIPT, str(out), "--resume")
    end_when(launch(SCRIPT, str(out)), lambda: (out / "config.json").exists(), signal.SIGKILL)
    end_when(launch(*resume), lambda: writing_a_checkpoint(out), signal.SIGKILL)
    with (out / "metrics.jsonl").open("a") as stream:
        stream.write('{"run": "tiny", "st')  # a line that a kill cut short
    for stop in (signal.SIGTERM, signal.SIGINT):
        goal = steps_logged(out) + 5
        code, output = end_when(launch(*resume), lambda goal=goal: steps_logged(out) >= goal, stop)
        assert code == 128 + stop, output
        assert output.count(f"{stop.name}: finishing the step, then saving") == 1
        assert (
            out / "checkpoints" / "tiny" / str(steps_logged(out))
        ).is_dir()  # of the very step where it stopped
    code, output = finish(launch(*resume))
    assert code == 0, output

    assert tiny_run.main(whole, resume=False) == 0
    with np.load(out / "final.npz") as mine, np.load(whole / "final.npz") as expected:
        assert list(mine) == list(expected)
        for name in expected:
            np.testing.assert_array_equal(mine[name], expected[name])
    assert losses(out) == losses(whole)  # every step once, none lost
