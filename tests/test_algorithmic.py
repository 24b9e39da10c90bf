"""The algorithmic tasks: answers by brute force from the text alone, the published splits, and determinism."""

import re
from itertools import product

import numpy as np
import pytest

from eflax.data.algorithmic import BOS, EOS, PAD, TEST, TRAIN, VALIDATION, VOCABULARY
from eflax.data.algorithmic_tasks import SWAPS, TASKS, split_of

S5_LENGTHS = (32, 48, 64, 96, 128, 192, 256, 512)
PUBLISHED = {  # training lengths, validation lengths and sizes, test lengths and size, symbols behind the length
    "parity": ([*range(3, 41)], (32, 36, 40), (32, 40, 48, 64, 96, 128, 192, 256), 1024),
    "parity-short": ([*range(2, 11)], (10,), (10, 16, 24, 40, 64), 1024),
    "mod5-flat": ([*range(3, 40, 2)], (33, 35, 39), (31, 33, 35, 39, 47, 63, 95, 127, 191, 255), 1024),
    "mod5-brackets": ([*range(3, 41)], (32, 36, 40), (32, 36, 40, 48, 64, 96, 128, 192, 256), 1024),
    "swaps": ([32], (32,), S5_LENGTHS, 1024),
    "s5": ([32], (32,), S5_LENGTHS, 1024),
    "addition": ([8], (8,), (9, 10, 11, 12, 14, 16, 32), 256),
}


def examples(batch):
    """The rows of a batch without padding: what is read, and what is answered at the supervised positions."""
    for tokens, targets, weight in zip(batch["tokens"], batch["targets"], batch["weight"], strict=True):
        row = [int(token) for token in tokens if token != PAD]
        assert row[0] == BOS and (tokens[len(row) :] == PAD).all() and not weight[len(row) :].any()
        assert set(np.unique(weight)) <= {0, 1}
        yield row[1:], [int(target) for target in targets[weight > 0]], np.flatnonzero(weight)


def text(tokens):
    return bytes(tokens).decode()


def solve(name, row):
    """The answers to what is read, by other means than the generator's."""
    if name.startswith("parity"):
        return [ord(str(text(row).count("1") % 2))]
    if name.startswith("mod5"):
        expression = text(row).removesuffix("=")
        assert re.fullmatch(r"[0-4+*()-]+=", text(row))
        if name == "mod5-flat":
            assert re.fullmatch(r"[0-4]([+*-][0-4])*", expression)
        return [ord(str(eval(expression) % 5))]
    if name == "addition":
        a, b, c = (int(number[::-1]) for number in re.findall(r"\[(\d+)\]", text(row)))
        assert a + b == c
        return [*f" [{str(c)[::-1]}]".encode(), EOS]
    things, answers = list(range(5)), []  # acc ∘ x: the thing at place i becomes the one at place x[i]
    symbol = TASKS[name].symbol
    for token in row:
        things = [things[int(place) - 1] for place in symbol(token)]
        answers.append("".join(str(1 + thing) for thing in things))
    return [next(token for token in range(120) if symbol(token) == answer) for answer in answers]


@pytest.mark.parametrize("name", TASKS)
def test_answers_by_brute_force(name):
    task = TASKS[name]
    count = 6 if name in ("s5", "swaps") else 64
    batches = [next(task.batches(count)), task.validation(count), task.test(task.test_lengths[1], count)]
    for batch in batches:
        for row, answers, positions in examples(batch):
            assert answers == solve(name, row)
            assert positions[-1] == len(row)  # the last answer is read at the last token
            assert max(row) < PAD < VOCABULARY
    assert set(np.unique(batches[0]["targets"])) <= set(range(PAD + 1))


@pytest.mark.parametrize("name", TASKS)
def test_published_splits(name):
    task = TASKS[name]
    train, validation, test, size = PUBLISHED[name]
    assert [*task.train_lengths] == train and task.validation_lengths == validation
    assert (task.test_lengths, task.test_size, task.validation_size) == (test, size, 256)
    assert task.seeds == ((42, 42, 42) if name == "addition" else (20260914, 20260915, 20260916))
    assert len(task.validation()["tokens"]) == 256 * len(validation)
    ends = name.startswith("mod5")
    lengths = {len(row) - ends for row, _, _ in examples(next(task.batches(1024)))}
    if name == "addition":
        assert (
            next(task.batches(1024))["tokens"].shape[1] == 39 - 1
        )  # the paper's 39 tokens, but EOS is not read
    else:
        assert lengths == set(train)
        assert {len(row) - ends for row, _, _ in examples(task.test(test[-1], 3))} == {test[-1]}


def test_uniform_laws():
    bits = next(TASKS["parity"].batches(2000))["tokens"]
    assert abs((bits == ord("1")).sum() / np.isin(bits, [ord("0"), ord("1")]).sum() - 0.5) < 0.01
    swaps = next(TASKS["swaps"].batches(1000))["tokens"][:, 1:]
    counts = np.bincount(swaps.ravel(), minlength=120)
    assert set(np.flatnonzero(counts)) == set(SWAPS) and len(SWAPS) == 11
    assert abs(counts[list(SWAPS)] / 32_000 - 1 / 11).max() < 0.01
    flat = "".join(text(row) for row, _, _ in examples(next(TASKS["mod5-flat"].batches(500))))
    assert max(abs(flat.count(o) / sum(map(flat.count, "+-*")) - 1 / 3) for o in "+-*") < 0.03
    trees = [text(row) for row, _, _ in examples(TASKS["mod5-brackets"].test(5, 600))]
    assert {tree[1:4] for tree in trees} == {"".join(x) for x in product("01234", "+-*", "01234")}


def test_addition_pairs():
    pairs = {}
    task = TASKS["addition"]
    for split, batch in (
        (TRAIN, next(task.batches(500))),
        (VALIDATION, task.validation()),
        (TEST, task.test(9)),
    ):
        rows = [row for row, _, _ in examples(batch)]
        numbers = [[x[::-1] for x in re.findall(r"\[(\d+)\]", text(row))][:2] for row in rows]
        assert not any(x != "0" and x.startswith("0") for pair in numbers for x in pair)
        pairs[split] = [tuple(sorted(map(int, pair))) for pair in numbers]
        assert all(split_of(*pair) == split for pair in pairs[split])
        widths = np.bincount([len(x) for pair in numbers for x in pair], minlength=10) / (2 * len(rows))
        assert widths[9] == 1 if split == TEST else abs(widths[1:9] - 1 / 8).max() < 0.06
    assert len(set(pairs[TEST])) == 256
    assert not set(pairs[TRAIN]) & set(pairs[TEST])


@pytest.mark.parametrize("name", TASKS)
def test_batches_depend_on_their_number_alone(name):
    task = TASKS[name]
    first, second = task.batches(8), task.batches(8)
    several = [next(first) for _ in range(4)]
    assert any((x["tokens"] != several[0]["tokens"]).any() for x in several[1:])
    next(second)
    state = second.get_state()
    for iterator in (second, task.batches(8)):
        iterator.set_state(state)
        for batch in several[1:]:
            again = next(iterator)
            assert all(
                (again[key] == batch[key]).all() and again[key].dtype == batch[key].dtype for key in batch
            )
    assert (next(task.batches(8, seed=1))["tokens"] != several[0]["tokens"]).any()


def test_bad_requests():
    for name, length, message in (
        ("mod5-flat", 32, "length 32: mod5-flat has odd lengths alone"),
        ("parity", 0, "length 0: parity has examples of length 1 to 4096"),
        ("swaps", 5000, "length 5000: swaps has examples of length 1 to 4096"),
        ("addition", 1, "length 1: addition has test operands of 2"),
    ):
        with pytest.raises(ValueError, match=message):
            TASKS[name].test(length)
    with pytest.raises(ValueError, match="batch_size 0"):
        TASKS["parity"].batches(0)
    with pytest.raises(ValueError, match="size 0"):
        TASKS["parity"].validation(0)
