"""The throughput benchmark: what it measures is checked first, and what it cannot use it refuses."""

import csv
import json
import os
import signal

import jax.numpy as jnp
import numpy as np
import pytest

from eflax.cells import CELLS
from experiments import throughput, throughput_inputs, throughput_peers


def run(tmp_path, *flags):
    code = throughput.main([*flags, "--repeats", "1", "--peer", "--out", str(tmp_path / "run")])
    with (tmp_path / "run" / "throughput.csv").open() as stream:
        return code, list(csv.DictReader(stream))


def test_a_row_for_each_form_and_task(tmp_path):
    flags = (
        "--cell",
        "ssd",
        "--form",
        "recurrent",
        "chunkwise",
        "--shape",
        "2x20x1x4x3",
        "--chunk-size",
        "8",
    )
    tasks = ("forward", "state-gradient", "full-gradient")
    code, rows = run(tmp_path, *flags, "--task", *tasks)
    assert code == 0
    assert [(row["form"], row["task"]) for row in rows] == [
        (form, task) for task in tasks for form in ("recurrent", "chunkwise")
    ]
    for row in rows:
        assert float(row["error"]) <= 1e-4
        assert float(row["ms"]) > 0
        assert float(row["tokens_per_s"]) == pytest.approx(40 / float(row["ms"]) * 1e3)


def test_a_wrong_result_is_not_timed(tmp_path, monkeypatch):
    right = throughput.reference_results

    def shifted(*arguments):
        return right(*arguments) + 1.0

    monkeypatch.setattr(throughput, "reference_results", shifted)
    code, (row,) = run(
        tmp_path, "--cell", "ssd", "--form", "recurrent", "--shape", "1x9x1x4", "--task", "forward"
    )
    assert code == 1
    assert row["note"].startswith("WRONG") and not row["ms"]


def test_what_needs_too_much_memory_is_listed_and_not_run(tmp_path):
    flags = ("--cell", "ssd", "--form", "recurrent", "--shape", "1x64x1x16", "--task", "gradient")
    code, (row,) = run(tmp_path, *flags, "--memory-limit", "1e-6")
    assert code == 0
    assert row["note"].startswith("not run") and not row["ms"]


def test_a_form_that_cannot_serve_is_listed_with_its_reason(tmp_path):
    """Asked for or not: it is no error, and the other forms are measured."""
    flags = ("--cell", "ssd", "--form", "pallas_gpu", "recurrent", "--shape", "1x9x1x4", "--task", "forward")
    code, (kernels, recurrent) = run(tmp_path, *flags)
    assert code == 0
    assert kernels["note"].startswith("not run: form='pallas_gpu' cannot serve") and not kernels["ms"]
    assert float(recurrent["ms"]) > 0


def test_peers_are_named_with_their_versions(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(throughput, "measurements", lambda *_: iter(()))
    monkeypatch.setitem(throughput_peers.PACKAGES, "fla", ("numpy", "no-such-package"))
    assert throughput.main(["--peer", "fla", "--out", str(tmp_path / "run")]) == 0
    versions = {"numpy": np.__version__, "no-such-package": "not installed"}
    assert json.loads((tmp_path / "run" / "config.json").read_text())["config"]["peer_versions"] == versions
    assert f"For peers: numpy {np.__version__}, no-such-package not installed" in capsys.readouterr().out


def test_a_stop_keeps_the_rows_so_far(tmp_path, monkeypatch, capsys):
    def stopped(name, form, shape, task, *_):
        os.kill(os.getpid(), signal.SIGINT)
        return throughput.Row(name, form, str(shape), task, "float32")

    monkeypatch.setattr(throughput, "measure", stopped)
    code, (row,) = run(tmp_path, "--shape", "1x9x1x4")
    assert code == 130 and row["form"] == "recurrent"
    printed = capsys.readouterr().out
    assert f"Rows: 18; results in {tmp_path / 'run'}" in printed and f"config: {tmp_path / 'run'}" in printed


@pytest.mark.parametrize("name", CELLS)
def test_inputs_exist_for_every_cell(name):
    inputs = throughput_inputs.make_inputs(
        name, throughput_inputs.parse_shape("2x5x1x4x3"), jnp.dtype("bfloat16"), 0
    )
    assert tuple(inputs) == CELLS[name].arguments


def test_a_folder_that_cannot_be_made_is_named(capsys):
    assert throughput.main(["--out", "x" * 5000]) == 2
    assert "File name too long" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--cell", "nope"), "--cell nope"),
        (("--cell", "selective_ssm", "--form", "parallel"), "--form parallel"),
        (("--shape", "3x4"), "--shape 3x4"),
        (("--shape", "0x4x1x1"), "--shape 0x4x1x1"),
        (("--repeats", "0"), "--repeats 0"),
        (("--cell",), "--cell: give at least one of linear_attention, "),
        (("--task",), "--task: give at least one of forward, "),
        (("--memory-limit", "-1"), "--memory-limit -1.0: must be positive"),
        (("--memory-limit", "nan"), "--memory-limit nan: must be positive"),
        (("--seed", "-1"), "--seed -1: must not be negative"),
        (("--seed", "4294967296"), "--seed 4294967296"),
    ],
)
def test_flags_that_cannot_be_used_are_refused(tmp_path, capsys, flags, named):
    assert throughput.main([*flags, "--out", str(tmp_path / "run")]) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
