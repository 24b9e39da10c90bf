"""The MAD experiment: protocols and flags, models and scores, a grid as one program, a small run from end to end."""

import csv
import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import kernels
import numpy as np
import pytest
from flax import nnx
from jax import Array
from test_mad_data import macro

from eflax.data.algorithmic import TEST, TRAIN
from eflax.data.mad import shuffled_rows
from eflax.data.mad_tasks import TASKS, Compression, Memorization
from eflax.training import RunFolder, StopRequest, Trainer, initial_state, make_train_step
from experiments import mad
from experiments.command import FlagError, saved_flags
from experiments.mad_flags import make_plan
from experiments.mad_models import MadModel, Mixer, Sizes, loss_function, sinusoids
from experiments.mad_published import PUBLISHED, published
from experiments.mad_report import member_rows, result_row, score_row
from experiments.mad_settings import BASELINES, PRESETS
from experiments.mad_training import (
    Member,
    batch_scores,
    cut,
    in_groups,
    keep_best,
    make_score,
    make_step,
    optimizer,
    start,
)

TASK = "memorization,vocab_size=9,length=6,train_size=12"
SMALL = ["--tasks", TASK, "--layers", "linear-attention", "--width", "16", "--dtype", "float32"]
SHORT = ["--epochs", "2", "--batch-size", "6", "--test-size", "10", "--checkpoint-every", "1"]
GRID = ["--lrs", "1e-2", "4e9", "--weight-decays", "0", "--seeds", "1", "2"]
RUN = f"{TASK}@linear-attention"


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Let the tests of this module share what they compile."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (str(tmp_path_factory.mktemp("compiled")), 0.0), strict=True):
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def plan(*args):
    return make_plan(mad.parse_flags(args))


def test_the_published_protocol():
    whole = plan("--preset", "sweep")
    assert len(whole.tasks) == 66 and [mixer.label for mixer in whole.mixers] == ["deltanet", "efla"]
    chosen = whole.settings
    assert chosen == plan("--protocol", "mad", "--sweep", "--layers", "efla").settings
    assert (chosen.schedule, chosen.select, chosen.loss, chosen.decay) == ("constant", "test", "all", "all")
    assert (chosen.lrs, chosen.weight_decays, chosen.seeds) == ((1e-4, 5e-4, 1e-3), (0, 0.1), (12345,))
    assert (chosen.epochs, chosen.batch_size, chosen.width, chosen.enough) == (200, 128, 128, 0.999)
    steps = {task.label: chosen.steps(task) for task in whole.tasks}
    assert steps["compression"] == 20_000 and steps["memorization"] == 400
    assert steps["compression,train_size=800"] == 200 * 7
    clean = plan("--preset", "benchmark")
    assert [task.label for task in clean.tasks] == list(TASKS)
    assert tuple(mixer.label for mixer in clean.mixers) == BASELINES
    chosen = clean.settings
    assert (chosen.schedule, chosen.select, chosen.loss, chosen.decay) == (
        "cosine", "validation", "answers", "matrices",
    )  # fmt: skip
    assert len(chosen.members) == 18 and [member.seed for member in chosen.members[:4]] == [1, 2, 3, 1]
    assert plan().settings.protocol == "clean" and plan("--loss", "all").settings.loss == "all"
    assert plan("--tasks", "compression").mixers == clean.mixers


def test_published_numbers():
    averages = {"deltanet": (65.7, 71.8), "efla": (66.4,), "transformer": (74.5,), "mamba": (69.3,)}
    for layer, expected in averages.items():
        found = [float(np.mean(rows[layer])) for rows in PUBLISHED.values() if layer in rows]
        np.testing.assert_allclose(found, expected, atol=0.06)
    assert published("memorization", "deltanet") == pytest.approx(
        {"EFLA paper": 0.299, "DeltaNet paper": 0.528}
    )
    assert published("memorization", "mamba2") == {}


def test_flags_are_read_back(tmp_path):
    flags = mad.parse_flags(
        ["--protocol", "mad", "--layers", "deltanet,num_heads=1", "--lrs", "1e-3", "--sweep"]
    )
    assert flags.preset == "benchmark" and flags.tasks == PRESETS["benchmark"].tasks
    config = {"experiment": mad.EXPERIMENT, **saved_flags(flags, mad.NOT_SAVED)}
    (tmp_path / "config.json").write_text(json.dumps({"config": config}))
    assert mad.read_flags(tmp_path) == flags


BAD_FLAGS = {
    "task": (["--tasks", "recall"], "--tasks recall: there are compression"),
    "change": (["--tasks", "compression,noise=0.1"], "compression can be changed by vocab_size=N"),
    "kind": (["--tasks", "compression,length=1.5"], "compression can be changed by"),
    "impossible": (["--tasks", "in-context-recall,length=9"], "length=9 must be even"),
    "layer": (["--layers", "rwkv"], "--layers rwkv: there are linear-attention"),
    "option": (["--layers", "efla,order"], "'order' must be OPTION=VALUE"),
    "twice": (["--layers", "efla", "efla"], "--layers efla efla: give each once"),
    "epochs": (["--epochs", "0"], "--epochs 0: must be at least 1"),
    "lrs": (["--lrs", "1e-3", "0"], "--lrs 0.001 0.0: must be positive"),
    "nan": (["--lrs", "nan"], "--lrs nan: must be positive"),
    "weight decays": (["--weight-decays", "-1"], "--weight-decays -1.0: must be at least 0"),
    "seeds": (["--seeds", "3", "3"], "--seeds 3 3: give each once"),
    "together": (["--together", "0"], "--together 0: must be at least 1"),
    "eval-only": (["--eval-only"], "--eval-only: say with --resume FOLDER"),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_flags(case):
    args, message = BAD_FLAGS[case]
    with pytest.raises(FlagError, match=message):
        plan(*args)


def test_what_cannot_run_is_told_before(tmp_path, capsys):
    flags = ["--layers", "transformer,colour=1", "--width", "16", "--out", str(tmp_path / "run")]
    assert mad.main(flags) == 2
    assert "--layers transformer,colour=1" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_dry_run_counts_steps(capsys):
    assert mad.main(["--preset", "benchmark", "--layers", "transformer", "--dry-run"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "6 trainings of 3 learning rates × 2 weight decays × 3 seeds, at most 100,400 steps" in told


def build(task, layer="linear-attention", seed: Any = 0):
    return MadModel(task, Mixer(layer), Sizes(16), rngs=nnx.Rngs(jax.random.key(seed)))


def test_the_auto_encoder_reads_its_last_position_alone():
    model = build(Compression(vocab_size=5, length=4), layer="transformer")
    tokens = jnp.asarray([[0, 1, 2, 4], [3, 1, 2, 4]], jnp.int32)

    @jax.jit
    def run(state, tokens):
        network = nnx.merge(nnx.graphdef(model), state)
        x = network.embedding[...][tokens]
        for block in network.blocks:
            x, _ = block(x)
        return x[:, -1], network(tokens)

    z, logits = (np.asarray(x, np.float64) for x in run(nnx.state(model), tokens))

    def normed(x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    def gelu(x):
        return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2

    rates = 10_000.0 ** (-np.arange(8) / 7)
    for p in range(4):
        y = z + np.concatenate([np.sin(p * rates), np.cos(p * rates)])
        for layer in model.decoder.layers:
            y = gelu(normed(y) @ np.asarray(layer.matrix.kernel[...], np.float64))
        expected = normed(y) @ np.asarray(model.out.matrix.kernel[...], np.float64)
        np.testing.assert_allclose(logits[:, p], expected, rtol=2e-4, atol=1e-6)
    assert sinusoids(3, 16).shape == (3, 16)
    kernels_of = [layer.matrix.kernel[...] for layer in (*model.decoder.layers, model.out)]
    assert all(0.01 < float(kernel.std()) < 0.03 for kernel in kernels_of)


def test_macro_accuracy_is_that_of_torchmetrics():
    """Per batch of 128, over classes that are asked for or guessed, by the plain code that tests the data."""
    rng = np.random.default_rng(0)
    shape = (200, 3)
    examples = {
        "tokens": np.zeros(shape, np.int32),
        "targets": rng.choice([1, 2, 3, 5], shape, p=[0.7, 0.2, 0.09, 0.01]).astype(np.int32),
        "weight": rng.integers(0, 2, shape).astype(np.float32),
    }
    guesses = np.where(rng.random(shape) < 0.5, examples["targets"], rng.choice([1, 2, 7], shape))
    logits = 3.0 * np.eye(9, dtype=np.float32)[guesses]
    parts = cut(examples, 128)
    assert parts["tokens"].shape == (2, 128, 3) and parts["size"].tolist() == [128, 72]
    score = jax.jit(batch_scores)
    padded = np.pad(logits, ((0, 56), (0, 0), (0, 0))).reshape(2, 128, 3, 9)
    found = [score(jnp.asarray(padded[n]), {key: x[n] for key, x in parts.items()}) for n in range(2)]
    plain = [
        macro(guesses[rows], {k: x[rows] for k, x in examples.items()})
        for rows in (slice(0, 128), slice(128, 200))
    ]
    np.testing.assert_allclose([float(x["accuracy"]) for x in found], plain, rtol=1e-6)
    answered = examples["weight"] > 0
    right = (guesses == examples["targets"])[answered]
    assert sum(float(x["hits"]) for x in found) == right.sum()
    assert sum(float(x["answers"]) for x in found) == answered.sum()
    total = np.log(np.exp(3) + 8)
    first = (guesses == examples["targets"])[:128][answered[:128]]
    np.testing.assert_allclose(found[0]["perplexity"], np.exp(total - 3 * first.mean()), rtol=1e-5)


def test_optimizers_of_the_protocols():
    """Weight decay at zero gradients, which Adam does not move; and the rates of both schedules."""
    params = {
        "matrix": {"kernel": jnp.ones(1)},
        "bias": jnp.ones(1),
        "A_log": jnp.ones(1),
        "norm": {"scale": jnp.ones(1)},
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    for schedule, decay_all in (("constant", True), ("cosine", False)):
        update = optimizer(schedule, 4, decay_all, jnp.float32(0.1), jnp.float32(0.5))
        state = update.init(params)
        moved = []
        with jax.numpy_dtype_promotion("standard"):
            for _ in range(5):
                updates, state = update.update(zeros, state, params)
                moved.append(jax.tree.map(lambda x: -float(x[0]) / 0.5, updates))
        rates = [move["matrix"]["kernel"] for move in moved]
        cosine = [1e-6 + (0.1 - 1e-6) * (1 + math.cos(math.pi * n / 4)) / 2 for n in range(5)]
        np.testing.assert_allclose(rates, [0.1] * 5 if decay_all else cosine, rtol=1e-4)
        others = [moved[0][name] for name in ("bias", "A_log")] + [moved[0]["norm"]["scale"]]
        np.testing.assert_allclose(others, [0.1 * decay_all] * 3, rtol=1e-5)


def test_a_grid_is_its_members_and_one_that_diverges_stops_alone():
    task = Memorization(vocab_size=9, length=6, train_size=12)
    examples = {key: jnp.asarray(x) for key, x in task.split(TRAIN).items()}
    members = [Member(lr, 0.1, seed) for lr in (1e-2, 4e9) for seed in (1, 2)]
    update = partial(optimizer, "cosine", 4, False)  # the program of the runs below
    model = nnx.eval_shape(lambda: build(task))
    grid = start(lambda seed: build(task, seed=seed), members, update)
    step, rows, logged = make_step(model, update, 2), shuffled_rows(12, 6, (1, 2)), []
    batches = [next(rows) for _ in range(6)]
    for batch in batches:
        grid, metrics = step(grid, batch, examples)
        logged.append({key: float(x) for key, x in metrics.items()})
    diverged = np.asarray(grid.diverged)
    assert diverged[:2].tolist() == [0, 0] and (diverged[2:] > 0).all()
    assert all(math.isfinite(x) for metrics in logged for x in metrics.values())
    assert [metrics["running"] for metrics in logged][::5] == [4, 2]
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(grid.train))

    alone = make_train_step(model, update(1e-2, 0.1), loss_function)
    for n in range(2):
        state = initial_state(build(task, seed=1 + n), update(0.0, 0.0))
        for batch in batches:
            own = {key: x[batch["rows"][n]] for key, x in examples.items()}
            state, _ = alone(state, own)
        jax.tree.map(
            lambda x, y, n=n: np.testing.assert_allclose(x[n], y, rtol=2e-3, atol=2e-5),
            grid.params,
            state.params,
        )

    score = make_score(model)
    scores = score(grid.params, grid.train.rest, cut(task.split(TEST, 10), 6))
    assert {key: x.shape for key, x in scores.items()} == dict.fromkeys(
        ("accuracy", "perplexity", "micro"), (4,)
    )
    kept = keep_best(grid, scores | {"accuracy": jnp.asarray([0.5, 1.0, 1.0, 0.2], jnp.float32)}, 0.999)
    assert kept.over.tolist() == [False, True, True, True]
    assert kept.best_step.tolist() == [6, 6, 0, 0] and kept.perplexity[3] == jnp.inf
    stopped = np.asarray(kept.params.embedding[...][1])
    kept, metrics = step(kept, batches[0], examples)
    np.testing.assert_array_equal(kept.params.embedding[...][1], stopped)
    assert metrics["running"] == 1
    worse = keep_best(kept, scores | {"perplexity": jnp.full(4, 1e9, jnp.float32)}, 0.999)
    assert worse.best_step.tolist() == [6, 6, 0, 0]


def test_groups_are_put_together_in_order():
    seen = []

    def function(group):
        seen.append(group["x"].shape)
        return group["x"] * group["y"]

    members = {"x": jnp.arange(7.0)[:, None], "y": jnp.full((7, 1), 2.0)}
    for together, shapes in ((3, [(3, 1), (1, 1)]), (None, [(7, 1)]), (9, [(7, 1)])):
        seen.clear()
        np.testing.assert_array_equal(in_groups(function, members, together), 2.0 * np.arange(7)[:, None])
        assert seen == shapes


def test_a_grid_in_bfloat16_takes_the_kernels_of_a_hopper_gpu():
    """Traced only: all members go through one launch of each kernel a layer."""
    task = TASKS["in-context-recall"](length=66, train_size=4)
    sizes = Sizes(128, "bfloat16")
    update = partial(optimizer, "cosine", 10, False)
    with kernels.h200():

        def make(seed):
            return MadModel(task, Mixer("efla"), sizes, rngs=nnx.Rngs(jax.random.key(seed)))

        members = [Member(1e-3, 0.0, seed) for seed in (1, 2)]
        grid = jax.eval_shape(lambda: start(make, members, update))
        examples = {key: jnp.asarray(x) for key, x in task.split(TRAIN).items()}
        step = make_step(nnx.eval_shape(lambda: make(0)), update)
        assert kernels.kernels_in(step, grid, next(shuffled_rows(4, 4, (1, 2))), examples) == dict.fromkeys(
            kernels.KERNELS, 2
        )


def test_the_choice_is_by_the_selecting_examples_and_of_all_seeds():
    def record(lr, seed, selected, tested, **changes):
        row = {"run": "compression,vocab_size=32@efla", "step": 9, "test": 4, "lr": lr, "weight_decay": 0.0}
        row |= {"seed": seed, "accuracy": tested, "micro": tested / 2, "perplexity": 1.0, "finished": True}
        return row | {"selected_accuracy": selected, "best_step": 3, "diverged": 0} | changes

    records = [
        record(1e-3, 1, 0.5, 0.1, step=4, finished=False),  # of an earlier test of the same training
        record(1e-3, 1, 0.9, 0.3),
        record(1e-3, 2, 0.5, 0.5),
        record(1e-2, 1, 0.6, 0.9),
        record(1e-2, 2, 0.6, 0.8, diverged=7),
        record(1e-1, 1, 1.0, 0.9),  # the best, but for a seed that diverged
        record(1e-1, 2, 1.0, 0.8, diverged=7),
    ]
    row = result_row(member_rows(records))
    assert (row["lr"], row["macro"], row["micro"], row["seeds"]) == (1e-3, 0.4, 0.2, "1 2")
    assert row["macro_sd"] == pytest.approx(0.02**0.5) and row["chance"] == 1 / 16
    assert (row["diverged"], row["trainings"]) == (2, 6)
    baseline = {**row, "setting": "compression", "macro": 0.6}
    score = score_row([baseline, row])
    assert (score["macro"], score["macro_sd"], score["settings"]) == (0.5, None, 2)
    assert (
        score["published: EFLA paper"] == pytest.approx(0.438) and score["published: DeltaNet paper"] is None
    )
    assert score_row([row])["published: EFLA paper"] is None  # another task than the one that is published


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("mad") / "run"
    assert mad.main([*SMALL, *SHORT, *GRID, "--out", str(out)]) == 0
    return out


def records(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def test_a_run_leaves_its_files(whole_run):
    logged = records(whole_run)
    assert [record["step"] for record in logged if "loss" in record] == [1, 2, 3, 4]
    validated = [record for record in logged if "validation" in record]
    assert [(x["step"], x["validation"], x["split"]) for x in validated] == [
        (2, 10, "validation"),
        (4, 10, "validation"),
    ]
    tested = [record for record in logged if "test" in record]
    assert [(x["lr"], x["seed"]) for x in tested] == [(0.01, 1), (0.01, 2), (4e9, 1), (4e9, 2)]
    assert [x["diverged"] > 0 for x in tested] == [False, False, True, True]
    lost = [record for record in logged if isinstance(record.get("diverged"), str)]
    assert [(x["lr"], x["seed"]) for x in lost] == [(4e9, 1), (4e9, 2)]
    assert lost[0]["diverged"].startswith(
        f"lr 4000000000.0, weight decay 0.0, seed 1 diverged at step {lost[0]['step']}"
    )
    assert tested[0]["perplexity"] != tested[1]["perplexity"] and all(x["finished"] for x in tested)
    with (whole_run / "results.csv").open() as stream:
        (row,) = csv.DictReader(stream)
    assert (row["setting"], row["layer"], row["lr"], row["diverged"]) == (
        TASK,
        "linear-attention",
        "0.01",
        "2",
    )
    for name in ("grid.csv", "scores.csv"):
        assert (whole_run / name).read_text().startswith("task,")
    assert (whole_run / "scores.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def no_report(monkeypatch):
    """Leave out tables and figures, which take longer than the runs."""
    monkeypatch.setattr(mad, "write_report", lambda *_: None)


def test_a_resumed_run_ends_as_one_that_was_not_stopped(whole_run, no_report, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(whole_run, out)
    shutil.rmtree(out / "checkpoints" / RUN / "4")
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] < 4]
    (out / "metrics.jsonl").write_text("".join(kept))
    assert mad.main(["--resume", str(out), "--eval-only"]) == 0
    early = [record for record in records(out) if "test" in record]
    assert {record["step"] for record in early} == {3} and not any(record["finished"] for record in early)
    assert mad.main(["--resume", str(out)]) == 0
    assert [record for record in records(out) if record not in early] == records(whole_run)
    capsys.readouterr()
    assert mad.main(["--resume", str(out), "--epochs", "3"]) == 2
    assert "another 'epochs': the run began with 2, and now it is 3" in capsys.readouterr().err


def test_a_resumed_run_may_go_on_with_other_layers_and_ends_when_all_are_good(
    whole_run, no_report, tmp_path, capsys
):
    out = tmp_path / "run"
    shutil.copytree(whole_run, out)
    began = (out / "config.json").read_text()
    assert mad.main(["--resume", str(out), "--layers", "linear-attention,num_heads=1", "--eval-only"]) == 0
    assert (
        out / "config.json"
    ).read_text() == began  # nothing of that layer is on record, so nothing was tested
    assert records(out) == records(whole_run)
    good = ["--enough", "0.0001", "--lrs", "1e-2", "1e-3", "--seeds", "1", "2", "--weight-decays", "0"]
    over = tmp_path / "over"
    assert mad.main([*SMALL, *SHORT, *good, "--out", str(over)]) == 0
    assert [record["step"] for record in records(over) if "loss" in record] == [1, 2]
    assert {record["step"] for record in records(over) if "test" in record} == {2}
    assert mad.main(["--resume", str(over)]) == 0
    assert len(records(over)) == 2 + 1 + 4
    capsys.readouterr()
    assert mad.main(["join", "--runs", str(whole_run), str(over)]) == 2
    assert "its settings differ" in capsys.readouterr().err
    assert mad.main(["join", "--runs", str(whole_run), str(out)]) == 2
    assert f"another run has {RUN}, too" in capsys.readouterr().err


def test_runs_are_joined(whole_run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(whole_run, other)
    layers = ["linear-attention", "linear-attention,num_heads=1"]
    for name in ("config.json", "metrics.jsonl"):
        (other / name).write_text((other / name).read_text().replace(layers[0], layers[1]))
    joined = tmp_path / "joined"
    assert mad.main(["join", "--runs", str(whole_run), str(other), "--out", str(joined)]) == 0
    assert records(joined) == records(whole_run) + records(other)
    with (joined / "scores.csv").open() as stream:
        assert [row["layer"] for row in csv.DictReader(stream)] == layers
    assert mad.read_flags(joined).layers == tuple(layers)


def test_long_trainings_leave_fewer_records(tmp_path):
    class State(NamedTuple):
        params: Array

    def step(state, _):
        return state, {"loss": jnp.float32(1), "grad_norm": jnp.float32(1)}

    with RunFolder(tmp_path / "run", {}) as folder, StopRequest() as stop:
        trainer = Trainer(folder, stop, 9, checkpoint_every=9, log_every=4, record_every=4)
        for _ in range(2):  # the second time it finds what the first one left
            trainer.train("all", State(jnp.zeros(1)), step, shuffled_rows(4, 2, (1,)))
        assert [record["step"] for record in folder.records()] == [4, 8]
