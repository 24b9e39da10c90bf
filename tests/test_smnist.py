"""The sequential-MNIST experiment: its flags and plans, a small run from end to end, kills and resumes of it."""

import csv
import json
import os
import signal
from dataclasses import fields
from io import StringIO
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from processes import end_when, launch
from rich.console import Console

from eflax.cells import CELLS
from eflax.data.images import ARRAYS, NAMES, load_images
from eflax.evaluation import FAMILIES
from eflax.training import Checkpoints, RunFolder, RunFolderError
from experiments import smnist
from experiments.smnist_config import RECORDS, read_flags, to_config
from experiments.smnist_flags import SWEEP, FlagError, Flags, Plan, make_plan
from experiments.smnist_report import (
    Group,
    colors,
    group_arms,
    robustness_rows,
    smooth,
    summary_row,
    write_report,
)

POINTS = sum(len(family.strengths) for family in FAMILIES.values())


def plan(*args: str) -> Plan:
    return make_plan(smnist.parse_flags(args))


def told(plan: Plan) -> list[tuple[str, float, int]]:
    return [(arm.variant, arm.lr, arm.seed) for arm in plan.arms]


def test_released_protocol():
    released = plan("--preset", "released")
    assert told(released) == [("delta_rule", 1e-3, 43), ("efla", 3e-3, 44)]
    assert (released.dataset, released.steps, released.batch_size, released.eval_limit) == (
        "mnist",
        469,
        128,
        None,
    )
    assert -(-60_000 // released.batch_size) == released.steps  # one epoch, partial batch included
    thrice = [arm.seed for arm in plan("--preset", "released", "--seeds", "3").arms]
    assert thrice == [43, 45, 47, 44, 46, 48]


def test_equal_comparison():
    equal = plan("--preset", "equal-lr", "--seeds", "2")
    assert told(equal) == [(cell, 1e-3, seed) for cell in ("delta_rule", "efla") for seed in (43, 44)]
    assert equal.steps == 469 and equal.batch_size == 128


def test_no_flags_is_an_equal_comparison_on_what_ships():
    quick = plan()
    assert quick.dataset == "mnist-small"
    assert [arm.variant for arm in quick.arms] == ["delta_rule", "efla"]
    assert len({(arm.lr, arm.seed) for arm in quick.arms}) == 1


def test_learning_rates():
    assert told(plan("--lr", "2e-3")) == [("delta_rule", 2e-3, 43), ("efla", 2e-3, 43)]
    assert told(plan("--lr", "delta_rule=1e-3", "efla=3e-3")) == [
        ("delta_rule", 1e-3, 43),
        ("efla", 3e-3, 43),
    ]
    assert told(plan("--lr", "1e-3", "efla:unit=3e-3", "--cell", "efla", "efla:unit")) == [
        ("efla", 1e-3, 43),
        ("efla:unit", 3e-3, 43),
    ]
    sweep = plan("--lr-sweep")
    assert [arm.lr for arm in sweep.arms] == [*SWEEP, *SWEEP] == [1e-4, 3e-4, 1e-3, 3e-3, 1e-2] * 2
    assert len({arm.name for arm in sweep.arms}) == 10


def test_controls():
    controls = plan("--cell", "delta_rule", "delta_rule:raw", "efla", "efla:unit")
    assert [arm.variant for arm in controls.arms] == ["delta_rule", "delta_rule:raw", "efla", "efla:unit"]
    assert [arm.variant for arm in plan("--normalize-keys", "true").arms] == ["delta_rule:unit", "efla:unit"]
    assert [arm.variant for arm in plan("--normalize-keys", "false", "--cell", "efla:unit").arms] == [
        "efla:unit"
    ]


BAD_FLAGS = {
    "unknown cell": (["--cell", "lstm"], "--cell lstm: there are linear_attention"),
    "unknown keys": (["--cell", "efla:fast"], "--cell efla:fast"),
    "cell twice": (["--cell", "efla", "efla"], "each once"),
    "no steps": (["--steps", "0"], "--steps 0: must be at least 1"),
    "no batch": (["--batch-size", "0"], "--batch-size 0"),
    "no seeds": (["--seeds", "0"], "--seeds 0"),
    "negative seed": (["--seed", "-1"], "--seed -1"),
    "negative limit": (["--eval-limit", "-5"], "--eval-limit -5: must not be negative; 0 means all"),
    "lr is no number": (["--lr", "fast"], "--lr fast: must be a positive number"),
    "lr is zero": (["--lr", "0"], "--lr 0: must be a positive number"),
    "lr is infinite": (["--lr", "inf"], "--lr inf"),
    "lr of a stranger": (["--lr", "1e-3", "ssd=1e-3"], "--lr ssd=1e-3: no such cell"),
    "lr twice": (["--lr", "1e-3", "2e-3"], "--lr 1e-3 2e-3: given twice for all cells"),
    "lr of a cell twice": (["--lr", "efla=1", "efla=2", "3"], "given twice for efla"),
    "lr is missing": (["--lr", "efla=1e-3"], "says nothing about delta_rule"),
    "lr and sweep": (["--lr", "1e-3", "--lr-sweep"], "exclude each other"),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_flags(case):
    args, message = BAD_FLAGS[case]
    with pytest.raises(FlagError, match=message):
        plan(*args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--form", "quantum"], "--form quantum: "),
        (["--cell", "selective_ssm", "--form", "parallel"], "--form parallel: "),
        (["--cell", "selective_ssm:unit"], "--cell selective_ssm:unit"),
        (["--dataset", "no-such-file.npz"], "no-such-file.npz' is neither one of"),
        (["--dataset", "x" * 5000], "--dataset: "),
        (["--batch-size", "20000"], "there are only 10000 training images"),
        (["--resume", "no-such-run"], "no such folder"),
        (["--resume", "here", "--out", "there"], "leave --out out"),
    ],
)
def test_what_cannot_run_is_told_before_anything_is_written(args, message, tmp_path, capsys):
    out = tmp_path / "run"
    assert smnist.main([*args] if "--resume" in args else [*args, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_help_describes_every_flag(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        smnist.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for field in fields(Flags):
        flag = f"--{field.name.replace('_', '-')}"
        described = text.split(f"{flag} ", 1)[1] if f"{flag} " in text else text.split(f"{flag},", 1)[1]
        assert len(described.split("│")[0].split()) > 5 or len(described.split("│")[2].split()) > 4, flag
    for name in [*CELLS, *NAMES, "469", "unit", "raw"]:
        assert name in text


def test_config_round_trip(tmp_path):
    flags = smnist.parse_flags(["--cell", "efla", "--lr", "efla=1e-3", "--data-dir", "/data", "--steps", "7"])
    RunFolder(tmp_path, to_config(flags, make_plan(flags), "0")).close()
    assert read_flags(tmp_path) == flags


WRONG_CONFIGS = [
    ("steps", "many", "'steps' is 'many' and must be Optional[int]"),
    ("steps", 0, "--steps 0: must be at least 1"),
    ("seeds", None, "'seeds' is None and must be int"),
    ("lr_sweep", 1, "'lr_sweep' is 1 and must be bool"),
    ("cell", "efla", "'cell' is 'efla' and must be tuple[str, ...]"),
    ("cell", ["lstm"], "--cell lstm: there are "),
    ("lr", [0.1], "'lr' is [0.1] and must be tuple[str, ...]"),
    ("preset", "slow", "'preset' is 'slow' and must be Literal["),
    ("dataset", {}, "'dataset' is {} and must be Optional[str]"),
    ("data_dir", 3, "'data_dir' is 3 and must be pathlib.Path | None"),
]


@pytest.mark.parametrize(("name", "value", "fault"), WRONG_CONFIGS)
def test_resume_names_a_wrong_flag_of_the_config(name, value, fault, tmp_path, capsys):
    config = to_config(Flags(), plan(), "0")
    RunFolder(tmp_path, config | {name: value}).close()
    assert smnist.main(["--resume", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'config.json'}: {fault}" in error and "start a new run with --out" in error


def test_resume_names_a_missing_flag_of_the_config(tmp_path, capsys):
    config = to_config(Flags(), plan(), "0")
    del config["form"]
    RunFolder(tmp_path, config).close()
    assert smnist.main(["--resume", str(tmp_path)]) == 2
    assert "config.json: 'form' is missing and must be str | None; restore" in capsys.readouterr().err


def test_resume_refuses_the_folder_of_another_experiment(tmp_path, capsys):
    RunFolder(tmp_path, {"experiment": "throughput"}).close()
    assert smnist.main(["--resume", str(tmp_path)]) == 2
    assert "config.json: 'experiment' is 'throughput' and must be 'smnist'" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_named(tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(smnist, "check_cells", lambda *_: None)
        flags = ["--dataset", "mnist-small"]
        config = to_config(smnist.parse_flags(flags), plan(*flags), load_images("mnist-small").fingerprint())
        RunFolder(tmp_path, config).close()
        (tmp_path / "metrics.jsonl").mkdir()
        assert smnist.main(["--resume", str(tmp_path)]) == 2
    assert f"Is a directory: '{tmp_path / 'metrics.jsonl'}'" in capsys.readouterr().err


def test_paths_are_meant_from_where_the_run_began(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    flags = smnist.parse_flags(["--dataset", "here.npz", "--data-dir", "cache"])
    assert (flags.dataset, flags.data_dir) == (str(tmp_path / "here.npz"), tmp_path / "cache")
    assert smnist.parse_flags(["--dataset", "mnist"]).dataset == "mnist"


def test_a_stop_before_the_trainings_leaves_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(smnist, "build_model", lambda *_: os.kill(os.getpid(), signal.SIGINT) or jnp.copy)
    assert smnist.main(["--out", str(tmp_path / "run")]) == 130
    captured = capsys.readouterr()
    assert "stopped by SIGINT; no training had begun" in captured.out and "SIGINT: finish" in captured.err
    assert not (tmp_path / "run").exists()


POINT = {"run": "a", "step": 3, "family": "noise", "strength": 0.5, "correct": 5, "count": 10}


@pytest.mark.parametrize(
    "wrong", [{"strength": "0.5"}, {"correct": None}, {"count": 0}, {"family": 1}, {"diverged": 1}]
)
def test_resume_names_a_wrong_field_of_an_evaluation(wrong, tmp_path):
    with RunFolder(tmp_path, {}, layouts=RECORDS) as folder:
        folder.append([POINT])
        assert folder.records() == [POINT]
        folder.append([POINT | wrong])
    with pytest.raises(RunFolderError, match=f"metrics.jsonl, line 2: {next(iter(wrong))!r} is "):
        RunFolder(tmp_path, {}, True, RECORDS)


def test_smoothing_starts_at_the_first_value():
    np.testing.assert_allclose(smooth([1.0, 0.0, 0.0]), [1, 0.85, 0.85**2])


def test_statistics_are_mean_and_sample_deviation():
    group = Group("efla", 1e-3, ("a", "b"), (1, 2))
    records = [
        {"run": run, "family": family, "strength": strength, "correct": correct, "count": 10}
        for run, correct in (("a", 6), ("b", 8))
        for family, spec in FAMILIES.items()
        for strength in spec.strengths
    ]
    rows = robustness_rows(group, records)
    assert len(rows) == POINTS
    assert all(abs(row["accuracy_mean"] - 0.7) < 1e-9 for row in rows)
    assert all(abs(row["accuracy_sd"] - 0.02**0.5) < 1e-9 for row in rows)
    summary = summary_row(group, records)
    assert summary["clean_mean"] == summary["noise_mean"] == pytest.approx(0.7)
    assert summary["final_loss_mean"] is None and summary["diverged"] == 0
    losses = [{"run": run, "step": 1, "loss": loss} for run, loss in (("a", 1.0), ("b", 9.0))]
    summary = summary_row(group, [*records, *losses, {"run": "b", "step": 2, "diverged": "loss is nan"}])
    assert summary["final_loss_mean"] == 1 and summary["diverged"] == 1


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "tiny.npz"
    full = load_images("mnist-small")
    part = {key: getattr(full, key)[: 30 if "train" in key else 6] for key in ARRAYS}
    np.savez(path, **part)
    return path


@pytest.fixture(scope="module")
def small(compiled_once, dataset):
    """Flags of a run that is over in seconds: two batches make an epoch, the second of them partial.

    The form that has no long loops is the fastest here.
    """
    flags = ["--steps", "6", "--batch-size", "16", "--checkpoint-every", "2", "--form", "chunkwise"]
    return ["--dataset", str(dataset), *flags]


@pytest.fixture(scope="module")
def whole_run(small, tmp_path_factory):
    out = tmp_path_factory.mktemp("smnist") / "run"
    assert smnist.main([*small, "--out", str(out)]) == 0
    return out


def records(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def test_a_run_leaves_its_files(whole_run):
    logged = records(whole_run)
    for run in ("delta_rule-lr0.003-seed43", "efla-lr0.003-seed43"):
        mine = [record for record in logged if record["run"] == run]
        assert [record["step"] for record in mine if "loss" in record] == [1, 2, 3, 4, 5, 6]
        assert sum("family" in record for record in mine) == POINTS
        assert Checkpoints(whole_run / "checkpoints" / run).latest_step() == 6
    with (whole_run / "robustness.csv").open() as stream:
        assert len(list(csv.DictReader(stream))) == 2 * POINTS
    with (whole_run / "summary.csv").open() as stream:
        assert [row["cell"] for row in csv.DictReader(stream)] == ["delta_rule", "efla"]
    assert json.loads((whole_run / "config.json").read_text())["config"]["steps"] == 6
    for name in ("robustness.png", "learning_curves.png"):
        assert (whole_run / name).read_bytes().startswith(b"\x89PNG")


def test_a_finished_run_is_only_reported_again(whole_run, capsys):
    before = (whole_run / "metrics.jsonl").read_bytes(), (whole_run / "robustness.csv").read_bytes()
    assert smnist.main(["--resume", str(whole_run)]) == 0
    assert before == ((whole_run / "metrics.jsonl").read_bytes(), (whole_run / "robustness.csv").read_bytes())
    assert "training " not in capsys.readouterr().out  # the progress of a training


def test_resume_with_another_flag_names_it(whole_run, capsys):
    assert smnist.main(["--resume", str(whole_run), "--lr", "1e-2"]) == 2
    assert "another 'lr': the run began with [], and now it is ['1e-2']" in capsys.readouterr().err
    assert smnist.main(["--out", str(whole_run)]) == 2
    assert "holds a run; give another --out, or --resume" in capsys.readouterr().err


def test_evaluation_is_repeatable(whole_run):
    """Evaluating again, from the checkpoints alone, gives the same records."""
    log = whole_run / "metrics.jsonl"
    before = log.read_text()
    lines = before.splitlines(keepends=True)
    log.write_text("".join(line for line in lines if '"family": "noise"' not in line))
    try:
        assert smnist.main(["--resume", str(whole_run)]) == 0
        assert sorted(log.read_text().splitlines()) == sorted(before.splitlines())
    finally:
        log.write_text(before)


def test_kill_in_training_and_stop_in_evaluation(whole_run, small, tmp_path, monkeypatch, capsys):
    """Killed in the first training and stopped in its evaluation: the same end as an undisturbed run, bit by bit."""
    out = tmp_path / "run"
    log, append = out / "metrics.jsonl", RunFolder.append

    def logged(text: str) -> int:
        return log.read_text().count(text) if log.exists() else 0

    started = launch("-m", "experiments.smnist", *small, "--out", str(out))
    end_when(started, lambda: logged('"loss"') >= 2, signal.SIGKILL)

    def append_and_stop(folder, records):
        append(folder, records)
        if logged('"family": "noise"') == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append", append_and_stop)
        assert smnist.main(["--resume", str(out)]) == 128 + signal.SIGTERM
    assert f"continue with: python -m experiments.smnist --resume {out}" in capsys.readouterr().out
    assert logged('"family"') < POINTS
    assert smnist.main(["--resume", str(out)]) == 0
    assert records(out) == records(whole_run)
    for name in ("robustness.csv", "summary.csv"):
        assert (out / name).read_bytes() == (whole_run / name).read_bytes()
    for run in (out / "checkpoints").iterdir():
        assert checksums(run) == checksums(whole_run / "checkpoints" / run.name)


def checksums(folder: Path) -> dict[str, int]:
    (meta,) = (folder / "6" / "meta").glob("metadata")
    return json.loads(meta.read_text())["crc32"]


def test_other_data_under_the_same_name_is_noticed(small, dataset, whole_run, capsys):
    with np.load(dataset) as archive:
        before = dict(archive)
    try:
        np.savez(dataset, **{**before, "x_test": before["x_test"][::-1]})
        assert smnist.main(["--resume", str(whole_run)]) == 2
        assert "another 'data_sha256'" in capsys.readouterr().err
    finally:
        np.savez(dataset, **before)


def test_divergence_of_one_cell_is_told_and_the_other_goes_on(small, tmp_path, capsys):
    out = tmp_path / "run"
    flags = [*small, "--lr", "efla=1e-3", "delta_rule=1e30"]
    assert smnist.main([*flags, "--out", str(out)]) == 1
    captured = capsys.readouterr()
    assert "error: delta_rule-lr1e+30-seed43 diverged at step" in captured.err
    assert "training 2 of 2, efla-lr0.001-seed43: 6/6" in captured.out
    with (out / "summary.csv").open() as stream:
        rows = {row["cell"]: row for row in csv.DictReader(stream)}
    assert rows["delta_rule"]["diverged"] == "1" and rows["delta_rule"]["clean_mean"] == ""
    assert rows["efla"]["clean_mean"] != ""


def test_a_cell_has_one_hue_and_a_learning_rate_its_shade():
    alone = colors(group_arms(plan("--seeds", "2").arms))
    np.testing.assert_allclose(alone, [to_rgb("C0"), to_rgb("C1")])
    sweep = np.array(colors(group_arms(plan("--lr-sweep").arms))).reshape(2, len(SWEEP), 3)
    assert (np.diff(sweep.mean(-1)) < -0.05).all()  # darker from rate to rate
    for cell, hue in zip(sweep, alone, strict=True):
        assert (cell.argmax(-1) == hue.argmax()).all() and (cell.argmin(-1) == hue.argmin()).all()


def test_sweep_and_seed_bands_are_drawn(tmp_path):
    """The report of a sweep with two seeds, from made-up records; its table names cells whole on 80 columns."""
    sweep = plan("--lr-sweep", "--seeds", "2", "--cell", "delta_rule:raw", "efla:unit")
    printed = StringIO()
    with RunFolder(tmp_path / "run", {}) as folder:
        for arm in sweep.arms:
            folder.append({"run": arm.name, "step": step, "loss": 2.0 / step} for step in range(1, 4))
            folder.append(
                {"run": arm.name, "step": 3, "family": name, "strength": strength, "correct": 5, "count": 10}
                for name, spec in FAMILIES.items()
                for strength in spec.strengths
            )
        write_report(folder, sweep, Console(file=printed, width=80))
    assert len(group_arms(sweep.arms)) == 10
    assert (tmp_path / "run" / "lr_sweep.png").exists()
    assert printed.getvalue().count("delta_rule:raw") == len(SWEEP) and "diverged" not in printed.getvalue()
