"""A run that is stopped or killed, at any point, and resumed ends bit-equal to one that was not."""

import json
import os
import signal

import numpy as np
import tiny_run
from processes import ROOT, end_when, launch

from eflax.training import RunFolder

SCRIPT = str(ROOT / "tests" / "tiny_run.py")


def steps_logged(out):
    log = out / "metrics.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def losses(out):
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in records]


def check_stop(out, code, output, stop):
    """The signal was told once, and the run saved the very step where it stopped."""
    assert code == 128 + stop, output
    assert output.count(f"{stop.name}: finishing the step, then saving") == 1
    assert (out / "checkpoints" / "tiny" / str(steps_logged(out))).is_dir()


def writing_a_checkpoint(out):
    return steps_logged(out) >= 20 and any((out / "checkpoints").glob("tiny/*tmp*"))


def test_killed_and_stopped_and_resumed(tmp_path, monkeypatch, capsys):
    """Ended before the first step, killed within a checkpoint, told to stop by either signal, run to its end.

    Two of these in processes of their own, whose start takes longer than all the steps.
    """
    out, whole = tmp_path / "run", tmp_path / "whole"
    resume = (SCRIPT, str(out), "--resume")
    RunFolder(out, {"steps": tiny_run.STEPS}).close()
    end_when(launch(*resume), lambda: writing_a_checkpoint(out), signal.SIGKILL)
    with (out / "metrics.jsonl").open("a") as stream:
        stream.write('{"run": "tiny", "st')  # a line that a kill cut short

    goal = steps_logged(out) + 5
    code, output = end_when(launch(*resume), lambda: steps_logged(out) >= goal, signal.SIGTERM)
    check_stop(out, code, output, signal.SIGTERM)

    last, stops, append = steps_logged(out) + 5, [], RunFolder.append

    def append_and_stop(folder, records):
        append(folder, records)
        if steps_logged(out) >= last and not stops:
            stops.append(os.kill(os.getpid(), signal.SIGINT))

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append", append_and_stop)
        code = tiny_run.main(out, resume=True)
    check_stop(out, code, capsys.readouterr().err, signal.SIGINT)
    assert tiny_run.main(out, resume=True) == 0

    assert tiny_run.main(whole, resume=False) == 0
    with np.load(out / "final.npz") as mine, np.load(whole / "final.npz") as expected:
        assert list(mine) == list(expected)
        for name in expected:
            np.testing.assert_array_equal(mine[name], expected[name])
    assert losses(out) == losses(whole)  # every step once, none lost
