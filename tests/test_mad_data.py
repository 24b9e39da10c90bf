"""The MAD tasks: answers by brute force from the tokens alone, the published fingerprints, order and determinism."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eflax.data.algorithmic import TEST, TRAIN, VALIDATION
from eflax.data.mad import shuffled_rows
from eflax.data.mad_recall import NoisyRecall
from eflax.data.mad_tasks import TASKS, SelectiveCopying, value_map

# Of 1,280 test sequences of the released generators: shape, answers in a sequence, and the macro accuracy of a random
# guess among valid answers, over batches of 128 sequences; settings of the sweep.
FINGERPRINTS = {
    "compression": ((1280, 32), 32.0, 0.126, 11),
    "fuzzy-in-context-recall": ((1280, 128), 4.4, 0.118, 11),
    "in-context-recall": ((1280, 127), 56.0, 0.126, 11),
    "memorization": ((1280, 32), 16.0, 0.008, 6),
    "noisy-in-context-recall": ((1280, 127), 43.7, 0.127, 14),
    "selective-copying": ((1280, 256), 16.0, 0.072, 13),
}


SPECIAL = {
    "in-context-recall": 0,
    "noisy-in-context-recall": 16,
    "fuzzy-in-context-recall": 1,
}  # ids besides symbols


def macro(guesses, batch):
    """The macro accuracy as torchmetrics defines it, averaged over batches of 128, in plain Python."""
    scores = []
    for start in range(0, len(guesses), 128):
        rows = slice(start, start + 128)
        answered = batch["weight"][rows] > 0
        guess, right = guesses[rows][answered], batch["targets"][rows][answered]
        classes = sorted({*guess.tolist(), *right.tolist()})
        recalls = [(guess[right == c] == c).mean() if (right == c).any() else 0.0 for c in classes]
        scores.append(float(np.mean(recalls)))
    return float(np.mean(scores))


def answers(name, task, row):
    """What a sequence asks for: {position: token}, by reading it as a person would."""
    if name == "compression":
        return dict(enumerate(row))
    if name == "memorization":
        value_of = value_map(task.vocab_size)
        return {n: value_of[row[n - 1]] for n in range(1, len(row), 2)}
    if name == "selective-copying":
        data = [token for token in row if token < task.vocab_size - 2]
        return dict(zip(range(len(row) - task.copies, len(row)), data, strict=True))
    raise AssertionError(name)


def recalled(sequence, half, symbols):
    """The answers of a recall task, of a sequence with its last token: runs of key tokens before runs of values."""
    found, value_of, n = {}, {}, 0
    while n < len(sequence):
        start = next((i for i in range(n, len(sequence)) if sequence[i] >= half), len(sequence))
        end = next(
            (i for i in range(start, len(sequence)) if not half <= sequence[i] < symbols), len(sequence)
        )
        key, value = tuple(sequence[n:start]), tuple(sequence[start:end])
        # The last pair is asked for in any case; that fuzzy recall has not shown it before is rare.
        if key and (key in value_of or end == len(sequence)):
            assert value == value_of.get(key, value), "a key has one value"
            found |= {start - 1 + i: token for i, token in enumerate(value)}
        value_of[key] = value
        n = max(end, n + 1)
    return found


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("split", [TRAIN, TEST])
def test_answers_follow_from_the_tokens(name, split):
    task = TASKS[name]()
    batch = task.split(split, 40)
    for tokens, targets, weight in zip(*(batch[key].tolist() for key in batch), strict=True):
        if task.next_token:
            assert targets[:-1] == tokens[1:]
            symbols = task.vocab_size - SPECIAL[name]
            half, sequence = symbols // 2, [*tokens, targets[-1]]
            if name != "fuzzy-in-context-recall":  # keys of one token and values of one, noise in pairs
                pairs = [sequence[n : n + 2] for n in range(0, len(sequence), 2)]
                assert all(
                    (key < half <= value < symbols) or min(key, value) >= symbols for key, value in pairs
                )
            expected = recalled(sequence, half, symbols)
        else:
            expected = answers(name, task, tokens)
        assert {n: targets[n] for n, w in enumerate(weight) if w > 0} == expected
        assert set(weight) <= {0.0, 1.0}


@pytest.mark.parametrize("name", TASKS)
def test_fingerprints_of_the_benchmark(name):
    task, (shape, scored, chance, settings) = TASKS[name](), FINGERPRINTS[name]
    batch = task.split(TEST)
    assert batch["tokens"].shape == batch["targets"].shape == shape
    assert [batch[key].dtype for key in ("tokens", "targets", "weight")] == ["int32", "int32", "float32"]
    assert batch["tokens"].min() >= 0 and batch["tokens"].max() == task.vocab_size - 1
    np.testing.assert_allclose(batch["weight"].sum(1).mean(), scored, rtol=0.025)
    valid = np.unique(batch["targets"][batch["weight"] > 0])
    guesses = np.random.default_rng(0).choice(valid, shape)
    if name == "compression":
        guesses = np.where(np.arange(32) == 31, 15, guesses % 15)
    np.testing.assert_allclose(macro(guesses, batch), chance, atol=0.009)
    np.testing.assert_allclose(task.chance, chance, atol=0.008)
    sweep = task.sweep()
    assert len(sweep) == len({setting.label for setting in sweep}) == settings
    assert sweep[0] == task and sweep[0].label == name


def test_every_setting_of_the_sweep_can_be_drawn():
    settings = [setting for task in TASKS.values() for setting in task().sweep()]
    assert len(settings) == 66
    for setting in settings:
        batch = setting.split(TRAIN, 3)
        assert batch["tokens"].shape[1] in (setting.length, setting.length - 1)
        assert batch["tokens"].max() < setting.vocab_size and batch["weight"].sum(1).min() >= 1


def test_laws_of_fuzzy_recall():
    """Keys have three tokens in tests and one to three in training; values one to three; padding in front."""
    task = TASKS["fuzzy-in-context-recall"]()
    sizes = {}
    for split in (TRAIN, TEST):
        batch = task.split(split, 400)
        runs = []
        for tokens in batch["tokens"].tolist():
            pads = next(n for n, token in enumerate(tokens) if token != 15)
            assert 2 <= pads <= 7 and 15 not in tokens[pads:]
            kinds = "".join("k" if token < 7 else "v" for token in tokens[pads:])
            runs += [len(run) for run in kinds.replace("vk", "v k").replace("kv", "k v").split()[:-2:2]]
        sizes[split] = np.bincount(runs, minlength=4)[1:] / len(runs)
    np.testing.assert_allclose(sizes[TRAIN], 1 / 3, atol=0.02)
    np.testing.assert_allclose(sizes[TEST], [0, 0, 1])


def test_noise_and_blanks_are_spread_as_they_should():
    noisy = NoisyRecall(noise=0.6)
    tokens = noisy.split(TRAIN, 600)["tokens"]
    np.testing.assert_allclose((tokens[:, ::2] >= 16).mean(), 0.6 * 62 / 64, atol=0.01)
    copying = SelectiveCopying(copies=4, length=109)
    at = np.argwhere(copying.split(TEST, 600)["tokens"] < 14)[:, 1].reshape(600, 4)
    np.testing.assert_allclose(at.mean(0), [25, 51, 77, 103], atol=0.8)
    assert (at[:, -1] == 103).all()


def test_sets_and_their_order_depend_on_their_seeds_alone():
    task = TASKS["compression"](train_size=10)
    same = [task.split(TRAIN)["tokens"] for _ in range(2)]
    np.testing.assert_array_equal(same[0], same[1])
    others = [task.split(VALIDATION, 10), task.split(TEST, 10), task.split(TRAIN, seed=1)]
    assert all((other["tokens"] != same[0]).any() for other in others)

    first, second = (shuffled_rows(10, 4, (5, 6)) for _ in range(2))
    steps = [next(first) for _ in range(6)]
    for epoch in (steps[:3], steps[3:]):
        for seed in range(2):
            rows = np.concatenate([step["rows"][seed][step["weight"][seed] > 0] for step in epoch])
            assert sorted(rows) == list(range(10))
    assert (steps[0]["rows"][0] != steps[0]["rows"][1]).any()
    assert any((a["rows"] != b["rows"]).any() for a, b in zip(steps[:3], steps[3:], strict=True))
    next(second)
    second.set_state(second.get_state())
    for step in steps[1:]:
        again = next(second)
        assert all((again[key] == step[key]).all() and again[key].dtype == step[key].dtype for key in step)

    batches = task.batches(4, seed=5)
    for step in steps[:3]:
        batch = next(batches)
        np.testing.assert_array_equal(batch["tokens"], same[0][step["rows"][0]])
        np.testing.assert_array_equal(batch["weight"].any(1), step["weight"][0] > 0)


def test_bad_settings():
    cases: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("in-context-recall", {"length": 5}, "in-context-recall: length=5 must be even"),
        ("noisy-in-context-recall", {"noise": 1.0}, "noise=1.0 must be at least 0 and below 1"),
        ("noisy-in-context-recall", {"vocab_size": 18}, "vocab_size=18 must be larger by 4"),
        ("selective-copying", {"copies": 128}, "length=256 must be more than twice"),
        ("fuzzy-in-context-recall", {"vocab_size": 6}, "vocab_size=6 must be at least 7"),
        ("memorization", {"train_size": 0}, "train_size=0 must be at least 1"),
        ("compression", {"length": 1}, "length=1 must be at least 2"),
    )
    for name, change, message in cases:
        with pytest.raises(ValueError, match=message):
            replace(TASKS[name](), **change)
    with pytest.raises(ValueError, match="size 0"):
        TASKS["compression"]().split(TEST, 0)
    with pytest.raises(ValueError, match="batch_size 0"):
        shuffled_rows(3, 0, (0,))
