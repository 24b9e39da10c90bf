"""The state-tracking experiment: flags and plans, its scores, its optimizer, and a small run from end to end."""

import csv
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eflax.data.algorithmic_tasks import TASKS
from eflax.evaluation.length import accuracy, example_scores, sum_scores
from eflax.training import TrainState
from experiments import state_tracking, state_tracking_run
from experiments.command import FlagError, saved_flags
from experiments.state_tracking_flags import PRESETS, make_plan
from experiments.state_tracking_models import Arm, Selected, keep_best, optimizer, parse_model
from experiments.state_tracking_published import CURVES, published_curve, published_validation
from experiments.state_tracking_report import length_rows

SMALL = [
    "--task",
    "swaps",
    "--model",
    "rlt1:1+1",
    "--seeds",
    "1",
    "2",
    "3",
    "--width",
    "16",
    "--num-heads",
    "2",
]
SHORT = ["--steps", "4", "--batch-size", "4", "--validate-every", "2", "--checkpoint-every", "2"]
FEW = ["--lengths", "32", "--test-size", "6", "--validation-size", "6", "--eval-batch-size", "4"]


def plan(*args):
    return make_plan(state_tracking.parse_flags(args))


def test_the_paper_protocol():
    named = plan("--task", "parity", "--model", "rlt1", "gpt", "--split", "5+3")
    assert [arm.name for arm in named.arms] == ["rlt1-5+3", "gpt-8"]
    sizes = (named.seeds, named.steps, named.batch_size, named.lr, named.sizes.width, named.sizes.num_heads)
    assert sizes == ((42, 43, 44), 2000, 512, 1e-4, 512, 4)
    assert (named.test_size, named.validation_size) == (1024, 256)
    assert plan("--task", "mod5-flat", "--preset", "splits").steps == 5000
    assert (plan().task, plan("--model", "rlt1").task) == ("parity-short", "parity")
    sixteen = plan("--preset", "sixteen")
    assert (sixteen.seeds, sixteen.batch_size, len(sixteen.arms)) == ((42,), 1024, 10)
    assert {arm.encoder + arm.decoder for arm in sixteen.arms} == {16}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_plans(name):
    for task in TASKS:
        for arm in plan("--task", task, "--preset", name).arms:
            curve = published_curve(task, arm.name)
            assert set(curve) <= set(TASKS[task].test_lengths)
            assert all(0 <= mean <= 100 for mean, _ in curve.values())


def test_published_numbers():
    assert published_curve("parity", "gpt-8")[256] == (50.07, 1.63)
    assert published_curve("swaps", "rlt1-4+4") | {} == {
        **dict.fromkeys((32, 48, 64, 96, 128), (100.0, None)),
        192: (99.45, 0.48),
        256: (97.30, 2.76),
        512: (55.70, 25.78),
    }
    assert published_curve("swaps", "rlt2-4+4") == {48: (68.29, 8.75), 64: (19.60, 6.54)}
    assert published_curve("parity", "deltanet-8") == {}
    assert published_validation("mod5-flat", 5000, "rlt1-5+3") == (99.13, 1.28)
    assert published_validation("mod5-flat", 123, "rlt1-5+3") is None
    for lengths, models in CURVES.values():
        assert all(len(values.split()) == len(lengths) for values in models.values())


def test_models_by_name():
    assert parse_model("rlt1", "5+3") == Arm("rlt1", (), 5, 3)
    assert parse_model("deltanet,allow_negative_eigenvalues=true:8", "4+4").name == (
        "deltanet,allow_negative_eigenvalues=true-8"
    )
    assert parse_model("efla+transformer,num_heads=2", "4+4") == Arm(
        "efla+transformer", (("num_heads", 2),), 8, 0
    )


def test_flags_are_read_back(tmp_path):
    given = ["--task", "swaps", "--preset", "feedback", "--truncate", "4", "--seeds", "1", "--lr", "1e-3"]
    flags = state_tracking.parse_flags(given)
    config = {"experiment": state_tracking.EXPERIMENT, **saved_flags(flags, state_tracking.NOT_SAVED)}
    (tmp_path / "config.json").write_text(json.dumps({"config": config}))
    assert state_tracking.read_flags(tmp_path) == flags


BAD_FLAGS = {
    "model": (["--model", "rlt3"], "--model rlt3: there are rlt1"),
    "split": (["--model", "rlt1", "--split", "x"], "--split x: layers are E\\+D"),
    "no encoder": (["--model", "rlt1:0+8"], "--model rlt1:0\\+8: layers are E\\+D with E ≥ 1"),
    "option": (["--model", "efla,order=x"], "'order=x' must be OPTION=VALUE"),
    "options of rlt": (["--model", "rlt1,a=1"], "rlt1 has no options"),
    "twice": (["--model", "gpt:8", "gpt"], "give each model once"),
    "interval": (["--interval", "0"], "--interval 0: must be at least 1"),
    "window": (["--window", "0"], "--window 0: must be at least 1"),
    "steps": (["--steps", "0"], "--steps 0"),
    "lr": (["--lr", "-1"], "--lr -1.0: must be a positive number"),
    "lengths": (
        ["--lengths", "9999"],
        "--lengths 9999: length 9999: parity-short has examples of length 1 to 4096",
    ),
    "even": (["--task", "mod5-flat", "--lengths", "32"], "odd lengths alone"),
    "seeds": (["--seeds", "1", "1"], "--seeds 1 1: give different numbers"),
    "eval-only": (["--eval-only"], "--eval-only: say with --resume FOLDER"),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_flags(case):
    args, message = BAD_FLAGS[case]
    with pytest.raises(FlagError, match=message):
        plan(*args)


def test_what_cannot_run_is_told_before(tmp_path, capsys):
    for model, message in (
        ("rlt2:1+1", "truncate=6 is not divisible by feedback_interval=4"),
        ("mamba,colour=1:1", "colour"),
    ):
        flags = ["--model", model, "--truncate", "6", "--width", "32", "--out", str(tmp_path / "run")]
        assert state_tracking.main(flags) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_scores():
    targets = jnp.array([[0, 1, 2, 0], [2, 1, 0, 0]], jnp.int32)
    weight = jnp.array([[0, 1, 1, 0], [0, 0, 1, 1]], jnp.float32)
    guesses = np.array([[0, 1, 1, 2], [1, 0, 0, 0]])
    logits = 5 * np.eye(3, dtype="f")[guesses]
    scores = {key: np.asarray(x) for key, x in example_scores(jnp.asarray(logits), targets, weight).items()}
    right, wrong = -np.log(np.exp(5) / (np.exp(5) + 2)), -np.log(1 / (np.exp(5) + 2))
    np.testing.assert_allclose(scores.pop("loss"), [(right + wrong) / 2, right], rtol=1e-4)
    expected = {"final": [0, 1], "sequence": [0, 1], "token": [1, 2], "supervised": [2, 2]}
    assert {key: list(x) for key, x in scores.items()} == expected
    logits[1, 3, 0] = np.nan
    assert example_scores(jnp.asarray(logits), targets, weight)["final"][1] == 0

    def score(part):
        rows = part["tokens"][:, 0].astype(float)
        return {"token": np.stack([rows, 2 * rows]), "supervised": np.full((2, len(rows)), 10.0)}

    totals = sum_scores(score, {"tokens": np.arange(5)[:, None]}, 2)
    np.testing.assert_array_equal(totals["token"], [10, 20])
    assert accuracy({key: x[1] for key, x in totals.items()}, "token", 5) == 20 / 50


def test_optimizer_has_the_paper_rates_and_groups():
    tree = {"layer": {"kernel": 0, "scale": 0}, "embedding": 0, "start": 0, "convolution": {"kernel": 0}}
    params = jax.tree.map(lambda _: jnp.ones(2), tree)
    update = optimizer(1e-4, 2000, 512)
    gradient = jax.tree.map(lambda _: jnp.full(2, 1e-3), tree)

    def step(state, _):
        updates, state = update.update(gradient, state, params)
        return state, jax.tree.map(lambda x: -x[0], updates)

    with jax.numpy_dtype_promotion("standard"):
        _, rates = jax.jit(lambda state: jax.lax.scan(step, state, None, 2000))(update.init(params))
    scale = rates["layer"]["scale"]  # Adam's step of a constant gradient is the rate
    np.testing.assert_allclose(
        np.asarray(scale)[[0, 99, 199, 1099, 1999]], [5e-7, 5e-5, 1e-4, 5.25e-5, 5e-6], rtol=2e-3
    )
    last = jax.tree.map(lambda x: x[199], rates)
    np.testing.assert_allclose(last["start"], last["layer"]["scale"], rtol=1e-6)
    np.testing.assert_allclose(last["embedding"], 1e-4 * 1.1, rtol=2e-3)
    np.testing.assert_allclose(last["layer"]["kernel"], 2e-4 * 1.1, rtol=2e-3)
    np.testing.assert_allclose(last["convolution"]["kernel"], 1e-4 * 1.1, rtol=2e-3)


def test_the_earliest_of_equal_validation_losses_is_kept():
    def at(value):
        params = {"w": jnp.full((2, 3), value, jnp.float32)}
        return TrainState(params, {}, optax.EmptyState())

    zeros = (jnp.zeros(2, jnp.int32) for _ in range(3))
    state = Selected(at(0.0), at(0.0).params, jnp.full(2, jnp.inf), *zeros)
    for step, losses in enumerate(([1.0, 3.0], [1.0, 2.0], [2.0, jnp.nan], [3.0, 0.0]), start=1):
        state = state._replace(train=at(float(step)), step=jnp.full(2, step, jnp.int32))
        if step == 4:  # what stands still since it diverged is not validated
            state = state._replace(diverged=jnp.array([0, 4], jnp.int32))
        state = keep_best(state, jnp.asarray(losses, jnp.float32))
    np.testing.assert_array_equal(state.best["w"][:, 0], [1, 2])
    np.testing.assert_array_equal(state.best_step, [1, 2])
    np.testing.assert_array_equal(state.best_loss, [1, 2])


def test_rows_are_of_the_newest_checkpoint():
    records = [
        {
            "run": "gpt-8",
            "step": step,
            "length": 32,
            "count": 4,
            "seed": seed,
            "final": value,
            "sequence": 0.0,
            "token": 0.5,
        }
        for step, seed, value in ((100, 42, 0.0), (2000, 42, 0.5), (2000, 43, 1.0))
    ]
    (row,) = length_rows("gpt-8", plan("--task", "swaps", "--model", "gpt:8"), records)
    assert (row["step"], row["seeds"], row["final_mean"]) == (2000, 2, 0.75)
    assert row["final_sd"] == pytest.approx(0.125**0.5) and row["published_mean"] == pytest.approx(0.9909)


@pytest.fixture(scope="module")
def third_seed_diverges():
    """Let a moment of Adam of the third seed become NaN before step 3."""
    make_step = state_tracking_run.make_step

    def poison(moment):
        values = np.array(moment)
        if values.ndim > 1:  # else it is a count
            values[2] = np.nan
        return jnp.asarray(values)

    def make(*arguments):
        step = make_step(*arguments)

        def poisoned(state, batch):
            if int(state.step[0]) == 2:
                wrong = jax.tree.map(poison, state.train.opt_state)
                state = state._replace(train=state.train._replace(opt_state=wrong))
            return step(state, batch)

        return poisoned

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_tracking_run, "make_step", make)
        yield


@pytest.fixture(scope="module")
def whole_run(compiled_once, third_seed_diverges, tmp_path_factory):
    out = tmp_path_factory.mktemp("state") / "run"
    assert state_tracking.main([*SMALL, *SHORT, *FEW, "--out", str(out)]) == 1
    return out


def records(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def test_a_run_leaves_its_files(whole_run):
    logged = records(whole_run)
    assert logged[0] == {"run": "rlt1-1+1", "step": 0, "parameters": logged[0]["parameters"]}
    assert [record["step"] for record in logged if "loss" in record] == [1, 2, 3, 4]
    tested = [record for record in logged if "length" in record]
    assert [(x["length"], x["seed"], x["count"]) for x in tested] == [(32, 1, 6), (32, 2, 6), (32, 3, 6)]
    assert tested[0]["example_loss"] != tested[1]["example_loss"]
    for name in ("lengths.png", "validation.png"):
        assert (whole_run / name).read_bytes().startswith(b"\x89PNG")


def test_a_seed_that_diverges_stands_still_alone_and_is_named(whole_run, capsys):
    logged = records(whole_run)
    (lost,) = (record for record in logged if "diverged" in record)
    assert (lost["step"], lost["seed"]) == (3, 3) and "seed 3 diverged at step 3: its loss" in lost[
        "diverged"
    ]
    steps = [record for record in logged if "loss" in record]
    assert [record["running"] for record in steps] == [3, 3, 2, 2]
    assert ["loss_seed3" in record for record in steps] == [True, True, False, False]
    assert steps[-1]["loss"] == pytest.approx((steps[-1]["loss_seed1"] + steps[-1]["loss_seed2"]) / 2)
    validated = [(x["step"], x["seed"]) for x in logged if "validation" in x]
    assert validated == [(2, 1), (2, 2), (2, 3), (4, 1), (4, 2)]
    tested = [record for record in logged if "length" in record]
    assert [x.get("diverged_at") for x in tested] == [None, None, 3] and tested[2]["best_step"] == 2
    for name in ("lengths.csv", "validation.csv"):
        with (whole_run / name).open() as stream:
            row = list(csv.DictReader(stream))[-1]
        assert (row["model"], row["diverged"]) == ("rlt1-1+1", "3@3")
    with (whole_run / "lengths.csv").open() as stream:
        (row,) = csv.DictReader(stream)
    assert (row["length"], row["seeds"]) == ("32", "2")
    assert float(row["token_mean"]) == pytest.approx((tested[0]["token"] + tested[1]["token"]) / 2)
    assert state_tracking.main(["--resume", str(whole_run), "--lengths", "32"]) == 1
    told = capsys.readouterr()
    assert "error: rlt1-1+1: seed 3 diverged at step 3" in told.err and "3@3" in told.out
    assert records(whole_run) == logged


def test_a_resumed_run_ends_as_one_that_was_not_stopped(whole_run, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(whole_run, out)
    shutil.rmtree(out / "checkpoints" / "rlt1-1+1" / "4")
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] < 3))
    assert state_tracking.main(["--resume", str(out), "--eval-only", "--lengths", "32"]) == 0
    early = [record for record in records(out) if "length" in record]
    assert [(record["step"], record["best_step"]) for record in early] == [(2, 2)] * 3
    assert state_tracking.main(["--resume", str(out), "--lengths", "32"]) == 1
    assert (
        "rlt1-1+1: seed 3 diverged at step 3" in capsys.readouterr().out
    )  # once more, for it is trained anew
    again = [record for record in records(out) if record not in early]
    assert again == records(whole_run)
    capsys.readouterr()
    assert state_tracking.main(["--resume", str(out), "--task", "parity"]) == 2
    assert "another 'task': the run began with 'swaps', and now it is 'parity'" in capsys.readouterr().err


def test_generate_shows_the_state(whole_run, capsys):
    assert state_tracking.main(["generate", "--run", str(whole_run), "--seed", "3", "--example", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("0.0") >= 30  # the probability of the right answer after each prefix
    assert "Parameters of step 2; seed 3 diverged at step 3" in shown
    assert (whole_run / "example-rlt1-1+1-seed3-length32-1.png").exists()
    for flags, message in (
        (["--seed", "4"], "--seed 4: the run has 1, 2, 3"),
        (["--model", "gpt-8"], "--model gpt-8: the run has rlt1-1\\+1"),
        (["--example", "6"], "--example 6: the run has tests 0 to 5"),
    ):
        assert state_tracking.main(["generate", "--run", str(whole_run), *flags]) == 2
        assert message.replace("\\", "") in capsys.readouterr().err
    assert state_tracking.main(["generate", "--run", str(whole_run / "none")]) == 2


def test_time_prints_a_row(capsys):
    flags = ["--model", "gpt:1", "--width", "16", "--batch-size", "2", "--seeds", "1", "--steps", "2"]
    assert state_tracking.main(["time", *flags, "--precision", "float32"]) == 0
    assert "gpt-1" in capsys.readouterr().out
