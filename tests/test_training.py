"""The train step, the loop, checkpoints and the run folder, within one process; test_resume.py kills real ones."""

import itertools
import json
import os
import select
import shutil
import signal
import time
from contextlib import nullcontext
from threading import Timer
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_run import batches, start

from eflax.progress import Progress
from eflax.training import (
    CheckpointError,
    Checkpoints,
    Diverged,
    Interrupted,
    RunFolder,
    RunFolderError,
    StopRequest,
    Trainer,
    adamw,
    cross_entropy,
    read_config,
)


def train(out, steps=12, step_wrapper=lambda step: step, resume=False, **options):
    state, step = start()
    with RunFolder(out, {"lr": 1e-2}, resume) as folder, StopRequest() as stop:
        return Trainer(folder, stop, steps, **options).train("tiny", state, step_wrapper(step), batches())


def records(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def numpy_adamw(w, grads, lr, decay, b1=0.9, b2=0.999, eps=1e-8):
    """Return what PyTorch's documentation of AdamW computes."""
    m = v = np.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        w = w - lr * decay * w
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        w = w - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
    return w


def test_adamw_is_pytorchs_behind_a_clip():
    rng = np.random.default_rng(0)
    w, grads = rng.normal(size=5), rng.normal(size=(4, 5))
    clipped = [g / max(1.0, float(np.linalg.norm(g))) for g in grads]
    optimizer = adamw(3e-3)
    params = jnp.asarray(w, jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        state = optimizer.init(params)
        for g in grads:
            updates, state = optimizer.update(jnp.asarray(g, jnp.float32), state, params)
            params = jnp.asarray(optax.apply_updates(params, updates))
    np.testing.assert_allclose(params, numpy_adamw(w, clipped, 3e-3, 0.01), rtol=1e-5)


def test_weight_decay_can_leave_parameters_out():
    params = {"matrix": jnp.ones((2, 2)), "rate": jnp.ones(2)}
    optimizer = adamw(
        0.1, weight_decay=0.1, decayed=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)
    )
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    assert jax.tree.map(lambda leaf: bool((leaf < 0).all()), updates) == {"matrix": True, "rate": False}
    assert jax.tree.map(lambda leaf: bool((leaf == 0).all()), updates) == {"matrix": False, "rate": True}


def test_padding_rows_count_for_nothing():
    logits = jax.random.normal(jax.random.key(0), (6, 10))
    labels, weight = jnp.arange(6, dtype=jnp.int32), jnp.array([1.0, 1, 1, 1, 0, 0])

    def loss(logits):
        return cross_entropy(logits, labels[: len(logits)], weight[: len(logits)])

    (padded, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(logits)
    (whole, expected), expected_gradient = jax.value_and_grad(loss, has_aux=True)(logits[:4])
    np.testing.assert_allclose(padded, whole, rtol=1e-6)
    np.testing.assert_allclose(metrics["accuracy"], expected["accuracy"])
    np.testing.assert_allclose(gradient[:4], expected_gradient, rtol=1e-6)
    assert (gradient[4:] == 0).all()


@pytest.mark.newest_jax
def test_loss_falls_every_step_is_logged_and_one_compilation_serves_partial_batches(tmp_path):
    compiled = []
    train(tmp_path / "run", 30, lambda step: compiled.append(step) or step, log_every=4)
    logged = records(tmp_path / "run")
    assert [record["step"] for record in logged] == list(range(1, 31))
    assert logged[-1]["loss"] < logged[0]["loss"]
    assert compiled[0]._cache_size() == 1


def test_resume_of_a_finished_run_changes_nothing(tmp_path):
    first = train(tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    again = train(tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(first), jax.tree.leaves(again))


def test_resume_without_the_metrics_of_the_checkpoint_is_refused(tmp_path):
    train(tmp_path / "run")
    log = tmp_path / "run" / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[3:]))
    with pytest.raises(RunFolderError, match="the loss of 9 steps of tiny, whose checkpoint is of step 12"):
        train(tmp_path / "run", resume=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(
        RunFolderError, match="has tiny up to step 12, and its checkpoints are gone; bring them back"
    ):
        train(tmp_path / "run", resume=True)


@pytest.mark.parametrize("poison", ["loss", "grad_norm"])
def test_divergence_stops_with_the_last_good_checkpoint(tmp_path, poison):
    def wrapper(step):
        calls = itertools.count(1)

        def poisoned(state, batch):
            state, metrics = step(state, batch)
            if next(calls) >= 10:
                metrics = {**metrics, poison: metrics[poison] * jnp.nan}
            return state, metrics

        return poisoned

    with pytest.raises(Diverged, match=f"step 10: {poison} is nan") as caught:
        train(tmp_path / "run", 20, wrapper, checkpoint_every=4)
    assert caught.value.step == 10
    assert Checkpoints(tmp_path / "run" / "checkpoints" / "tiny").latest_step() == 8


def test_a_loss_above_the_limit_is_divergence(tmp_path):
    def wrapper(step):
        def exploding(state, batch):
            state, metrics = step(state, batch)
            return state, metrics | {"loss": metrics["loss"] + 100}

        return exploding

    with pytest.raises(Diverged, match=r"step 1: loss is 10.*, above 50"):
        train(tmp_path / "run", 20, wrapper, loss_limit=50.0)


def test_parameters_that_are_not_finite_are_not_saved(tmp_path):
    def wrapper(step):
        def poisoned(state, batch):
            state, metrics = step(state, batch)
            return state._replace(params=jax.tree.map(lambda leaf: leaf * jnp.inf, state.params)), metrics

        return poisoned

    with pytest.raises(Diverged, match="step 1: a parameter is not finite"):
        train(tmp_path / "run", 20, wrapper, checkpoint_every=1)
    assert Checkpoints(tmp_path / "run" / "checkpoints" / "tiny").latest_step() == 0


class Counted(NamedTuple):
    params: jax.Array


@pytest.mark.parametrize("stopped_after", [None, 5, 7])
def test_a_diverged_member_is_told_once_and_the_last_ends_the_training(tmp_path, capsys, stopped_after):
    """One member of two diverges at step 5, the other at step 7; states are looked at every four steps."""
    limits, asked = {"a": 5, "b": 7}, []

    def step(state, _):
        count = int(state.params) + 1
        losses = {name: jnp.float32(1 if count < limit else jnp.nan) for name, limit in limits.items()}
        if stopped_after == count and not asked:
            asked.append(stop)
            stop.number = signal.SIGTERM
        alive = sum(count < limit for limit in limits.values())
        mean = jnp.float32(1 if alive else jnp.nan)
        metrics = {"loss": mean, "grad_norm": mean, "running": jnp.float32(alive)}
        return Counted(jnp.int32(count)), metrics | losses

    def diverged(state):
        lost = (name for name, limit in limits.items() if limit <= int(state.params))
        return [{"step": limits[name], "diverged": f"{name} at step {limits[name]}"} for name in lost]

    for resume in [False] if stopped_after is None else [False, True]:
        with RunFolder(tmp_path / "run", {}, resume) as folder, StopRequest() as stop:
            trainer = Trainer(folder, stop, 20, log_every=4)
            options = {"finished": lambda state: len(diverged(state)) == 2, "diverged": diverged}
            with nullcontext() if resume or stopped_after is None else pytest.raises(Interrupted):
                trainer.train("all", Counted(jnp.int32(0)), step, batches(), **options)
    assert Checkpoints(tmp_path / "run" / "checkpoints" / "all").latest_step() == 8
    logged = records(tmp_path / "run")
    taken = [record for record in logged if "time" in record]
    assert [(x["step"], "a" in x, "b" in x, "loss" in x) for x in taken] == [
        (n, n < 5, n < 7, n < 7) for n in range(1, 9)
    ]
    assert [x["diverged"] for x in logged if "diverged" in x] == ["a at step 5", "b at step 7"]
    assert capsys.readouterr().out.count("all: a at step 5\n") == 1


def test_signal_is_noted_then_acts():
    before = signal.getsignal(signal.SIGINT)  # ignored, where a shell started the tests in the background
    with StopRequest() as stop:
        stop.check()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        with pytest.raises(Interrupted, match="SIGTERM") as caught:
            stop.check()
        assert caught.value.exit_code == 143
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_is_told_while_the_main_thread_is_outside_python(monkeypatch, tmp_path):
    """Blocked here, so that no system call of the main thread is interrupted and no handler runs in it."""
    reader, writer = os.pipe()
    with open(reader) as told, open(writer, "w", buffering=1) as stderr, StopRequest() as stop:
        monkeypatch.setattr("sys.stderr", stderr)
        Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, stop.SIGNALS)
        try:
            ready, _, _ = select.select([told], [], [], 60)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert (
            ready and told.readline() == "SIGTERM: finishing the step, then saving; again to stop at once\n"
        )
        assert stop.requested


STATE = {"a": jnp.arange(4000.0), "deep": [jnp.int32(3), jnp.ones((2, 3), jnp.bfloat16)]}


@pytest.fixture
def saved(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (1, 2, 3):
        checkpoints.save(step, jax.tree.map(lambda leaf: leaf + jnp.ones_like(leaf), STATE), note=step)
    yield checkpoints
    checkpoints.close()


@pytest.mark.newest_jax
def test_checkpoint_round_trip_keeps_the_last_two(saved):
    state, meta = saved.restore(STATE)
    jax.tree.map(
        np.testing.assert_array_equal, state, jax.tree.map(lambda leaf: leaf + jnp.ones_like(leaf), STATE)
    )
    assert [leaf.dtype for leaf in jax.tree.leaves(state)] == [leaf.dtype for leaf in jax.tree.leaves(STATE)]
    assert meta["note"] == 3
    assert sorted(path.name for path in saved.folder.iterdir()) == ["2", "3"]


def test_a_checkpoint_is_never_silently_left_out(saved):
    for step in (2, 3):
        with pytest.raises(CheckpointError, match=f"checkpoint {step} was not written"):
            saved.save(step, STATE)


def test_half_written_checkpoint_is_not_taken_for_whole(saved):
    half = saved.folder / "4.orbax-checkpoint-tmp"
    (half / "state").mkdir(parents=True)
    (half / "state" / "manifest.ocdbt").write_bytes(b"half")
    again = Checkpoints(saved.folder)
    assert again.latest_step() == 3
    again.restore(STATE)
    again.close()


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def damage_largest(folder):
    flip_a_byte(
        max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    )


def remove_meta(folder):
    (folder / "meta" / "metadata").unlink()


def remove_arrays(folder):
    for path in (folder / "state").rglob("manifest.ocdbt"):
        path.unlink()


def damage_meta(folder):
    (folder / "meta" / "metadata").write_text('{"format": ')


# Where one array cannot be read, Orbax closes its event loop on the reads of the others, which then complain.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", [damage_largest, remove_meta, remove_arrays, damage_meta])
def test_damaged_checkpoint_is_refused(saved, damage):
    damage(saved.folder / "3")
    again = Checkpoints(saved.folder)
    with pytest.raises(CheckpointError, match=r"3 is damaged.*delete that folder"):
        again.restore(STATE)
    again.close()
    time.sleep(0.5)  # for the complaints to come in this test


def test_a_file_where_checkpoints_should_be_is_refused(tmp_path):
    (tmp_path / "tiny").touch()
    with pytest.raises(CheckpointError, match="tiny is a file and must be a folder"):
        Checkpoints(tmp_path / "tiny").latest_step()


def test_foreign_checkpoint_is_refused(saved, tmp_path):
    for template, message in [
        ({**STATE, "a": jnp.zeros(4001)}, r"a is float32\[4000\] there and float32\[4001\] here"),
        ({**STATE, "b": jnp.zeros(2)}, "b is absent there"),
        ({"a": STATE["a"]}, "deep/0 is .* and absent here"),
        ({**STATE, "a": STATE["a"].astype(jnp.int32)}, "a is float32"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            saved.restore(template)
    import orbax.checkpoint as ocp

    manager = ocp.CheckpointManager(tmp_path / "foreign")
    manager.save(5, args=ocp.args.StandardSave({"a": jnp.zeros(3)}))
    manager.close()
    foreign = Checkpoints(tmp_path / "foreign")
    with pytest.raises(CheckpointError, match="damaged or foreign"):
        foreign.restore(STATE)
    foreign.close()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        Checkpoints(tmp_path / "none").restore(STATE)


def test_folder_in_use_or_holding_a_run_is_refused(tmp_path):
    out = tmp_path / "run"
    with RunFolder(out, {"a": 1}):
        for resume in (False, True):
            with pytest.raises(RunFolderError, match=f"in use by process {os.getpid()}"):
                RunFolder(out, {"a": 1}, resume)
    with pytest.raises(RunFolderError, match=f"holds a run; give another --out, or --resume {out}"):
        RunFolder(out, {"a": 1})
    RunFolder(out, {"a": 1}, resume=True).close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(RunFolderError, match=r"not empty \(thesis.tex\)"):
        RunFolder(tmp_path / "other", {})
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.tex"]


def test_folder_that_holds_no_run_cannot_be_resumed(tmp_path):
    with pytest.raises(RunFolderError, match="no such folder"):
        RunFolder(tmp_path / "none", {}, resume=True)
    with pytest.raises(RunFolderError, match=r"there is no config\.json, so no run"):
        RunFolder(tmp_path, {}, resume=True)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RunFolderError, match="damaged or was not written by eflax"):
        RunFolder(tmp_path, {}, resume=True)
    (tmp_path / "config.json").write_text('{"config": [1]}')
    with pytest.raises(RunFolderError, match=r"config.json: 'config' is \[1\] and must be a JSON object"):
        RunFolder(tmp_path, {}, resume=True)
    (tmp_path / "config.json").write_text('{"config": ' + "[" * 100_000)
    with pytest.raises(RunFolderError, match=r"damaged or was not written by eflax \(RecursionError"):
        RunFolder(tmp_path, {}, resume=True)
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="cannot write there"):
        RunFolder(tmp_path / "file" / "run", {})
    with pytest.raises(RunFolderError, match="cannot write there"):
        RunFolder(tmp_path / "null\0byte", {})


def test_a_folder_left_before_its_config_was_written_can_be_used(tmp_path):
    (tmp_path / ".lock").write_text("123\n")
    (tmp_path / "config.jsonabc.part").write_text("{")
    RunFolder(tmp_path, {"a": 1}).close()
    assert read_config(tmp_path) == {"a": 1}


def test_resume_with_another_config_names_the_field(tmp_path):
    RunFolder(tmp_path, {"lr": [1e-3], "steps": 5}).close()
    RunFolder(tmp_path, {"lr": (1e-3,), "steps": 5}, resume=True).close()
    with pytest.raises(RunFolderError, match=r"another 'steps': the run began with 5, and now it is 6"):
        RunFolder(tmp_path, {"lr": [1e-3], "steps": 6}, resume=True)


def test_config_tells_versions_and_revision(tmp_path):
    RunFolder(tmp_path, {}).close()
    told = json.loads((tmp_path / "config.json").read_text())
    assert told["versions"]["jax"] == jax.__version__ and told["revision"] and told["devices"]


def test_metrics_survive_a_cut_line_but_not_a_foreign_one(tmp_path):
    with RunFolder(tmp_path, {}) as folder:
        folder.append({"run": "a", "step": step} for step in range(5))
        with (tmp_path / "metrics.jsonl").open("a") as stream:
            stream.write('{"run": "a", "st')
        assert len(folder.records()) == 5
        folder.keep(lambda record: record["step"] < 3)
        assert [record["step"] for record in records(tmp_path)] == [0, 1, 2]
        (tmp_path / "metrics.jsonl").write_text("hello\n")
        with pytest.raises(
            RunFolderError, match=r"metrics.jsonl, line 1: not a JSON object: 'hello'; restore"
        ):
            folder.records()


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('[1, "a"]', "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ('{"run": "a"}', "'step' is missing and must be a whole number"),
        ('{"run": "a", "step": "2"}', "'step' is '2' and must be a whole number"),
        ('{"run": ["a"], "step": 2}', r"'run' is \['a'\] and must be text"),
        ('{"run": "a", "step": 2, "loss": null}', "'loss' is None and must be a number"),
    ],
)
def test_resume_names_a_wrong_field_of_the_metrics(tmp_path, line, fault):
    with RunFolder(tmp_path, {}) as folder:
        folder.append([{"run": "a", "step": 1, "loss": 2}, {"cell": "of another experiment"}])
    with (tmp_path / "metrics.jsonl").open("a") as log:
        log.write(line + "\n")
    with pytest.raises(RunFolderError, match=f"metrics.jsonl, line 3: {fault}.*start a new run with --out"):
        RunFolder(tmp_path, {}, resume=True)


def test_progress_prints_lines_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr("eflax.progress.SECONDS_BETWEEN_LINES", 0.0)
    with Progress("train x", 10, start=4) as progress:
        progress.advance(1, loss=1.0)
        progress.advance(2, loss=0.5)
        progress.advance(3, loss=0.25)
        progress.advance(0)
    first, middle, last = capsys.readouterr().out.splitlines()
    assert first.startswith("train x: 5/10") and "left" not in first  # the first also compiled
    assert middle.startswith("train x: 7/10") and "s left" in middle and "loss 0.5" in middle
    assert last.startswith("train x: 10/10") and "s left" not in last and "loss 0.25" in last


def test_the_end_of_a_progress_is_told_though_its_line_is_not_due(capsys):
    with Progress("train x", 2) as progress:
        progress.advance(1, loss=0.5)
        progress.advance(1, loss=0.25)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("train x: 2/2") and "loss 0.25" in line


def test_an_unfinished_line_is_cut_off_when_the_run_goes_on(tmp_path):
    with RunFolder(tmp_path / "run", {}) as folder:
        folder.append([{"run": "a", "step": 1}, {"run": "a", "step": 2}])
    log = tmp_path / "run" / "metrics.jsonl"
    log.write_text(log.read_text()[:-5])
    with RunFolder(tmp_path / "run", {}, resume=True) as folder:
        folder.append([{"run": "a", "step": 2}])
        assert folder.records() == [{"run": "a", "step": 1}, {"run": "a", "step": 2}]
