"""A run that is stopped or killed, at any point, and resumed ends bit-equal to one that was not."""

import json
import signal

import numpy as np
import pytest
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


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    code, output = finish(launch(SCRIPT, str(out)))
    assert code == 0, output
    return out


def assert_same_end(out, whole_run):
    with np.load(out / "final.npz") as mine, np.load(whole_run / "final.npz") as expected:
        assert list(mine) == list(expected)
        for name in expected:
            np.testing.assert_array_equal(mine[name], expected[name])
    assert losses(out) == losses(whole_run)  # every step once, none lost


def test_kill_at_arbitrary_points(tmp_path, whole_run):
    out = tmp_path / "run"
    end_when(launch(SCRIPT, str(out)), lambda: (out / "config.json").exists(), signal.SIGKILL)
    end_when(launch(SCRIPT, str(out), "--resume"), lambda: steps_logged(out) >= 8, signal.SIGKILL)
    end_when(launch(SCRIPT, str(out), "--resume"), lambda: writing_a_checkpoint(out), signal.SIGKILL)
    with (out / "metrics.jsonl").open("a") as stream:
        stream.write('{"run": "tiny", "st')  # a line that a kill cut short
    code, output = finish(launch(SCRIPT, str(out), "--resume"))
    assert code == 0, output
    assert_same_end(out, whole_run)


def test_stop_by_signal_saves_and_resumes(tmp_path, whole_run):
    out = tmp_path / "run"
    code, output = end_when(launch(SCRIPT, str(out)), lambda: steps_logged(out) >= 5, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM, output
    assert output.count("SIGTERM: finishing the step, then saving") == 1
    saved = steps_logged(out)
    assert (out / "checkpoints" / "tiny" / str(saved)).is_dir()  # at the very step where it stopped
    resumed = launch(SCRIPT, str(out), "--resume")
    code, output = end_when(resumed, lambda: steps_logged(out) >= saved + 5, signal.SIGINT)
    assert code == 128 + signal.SIGINT, output
    code, output = finish(launch(SCRIPT, str(out), "--resume"))
    assert code == 0, output
    assert_same_end(out, whole_run)
