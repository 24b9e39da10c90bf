"""The six tasks: parity (and a short one), mod-5 arithmetic flat and in brackets, swaps and all of S5, addition."""

import zlib
from collections.abc import Callable
from itertools import combinations, permutations
from random import Random

import numpy as np
from jaxtyping import Int

from eflax.data.algorithmic import BOS, EOS, MAX_LENGTH, PAD, TEST, TRAIN, VALIDATION, Batch, Task, from_rows

LENGTHS = (32, 40, 48, 64, 96, 128, 192, 256)


class Parity(Task):
    """Bits "0" and "1", fair and independent; the answer is their sum modulo 2, read at the last bit.

    Only the last answer is supervised. There is no "=" behind the bits (a choice).
    """

    name = "parity"
    train_lengths = range(3, 41)
    validation_lengths = (32, 36, 40)
    test_lengths = LENGTHS
    stepwise = True
    chance = 1 / 2

    def num_tokens(self, length: int) -> int:
        """Return T: BOS and the bits."""
        return 1 + length

    def draw(self, rng: np.random.Generator, lengths: Int[np.ndarray, " N"], split: int) -> Batch:
        """Return examples of these lengths."""
        bits = rng.integers(0, 2, (len(lengths), lengths.max()))
        place = np.arange(1, lengths.max() + 1)[None]
        inside = place <= lengths[:, None]
        zero = ord("0")
        return _after_bos(
            np.where(inside, zero + bits, PAD),
            np.where(inside, zero + bits.cumsum(1) % 2, PAD),
            place == lengths[:, None],
        )


class ShortParity(Parity):
    """Parity of 2 to 10 bits, which small models learn within minutes on a CPU; not a task of the paper."""

    name = "parity-short"
    train_lengths = range(2, 11)
    validation_lengths = (10,)
    test_lengths = (10, 16, 24, 40, 64)


class Mod5Flat(Task):
    """Digits 0 to 4 with "+", "-", "*" between them, all uniform, and "="; "*" binds first; the value modulo 5."""

    name = "mod5-flat"
    train_lengths = range(3, 40, 2)
    validation_lengths = (33, 35, 39)
    test_lengths = (31, 33, 35, 39, 47, 63, 95, 127, 191, 255)
    chance = 1 / 5

    def num_tokens(self, length: int) -> int:
        """Return T: BOS, the expression, "="."""
        return 2 + length

    def check_length(self, length: int) -> None:
        """Raise ValueError for a length that the task has no examples of."""
        super().check_length(length)
        if length % 2 == 0:
            raise ValueError(
                f"length {length}: {self.name} has odd lengths alone, a digit more than operators"
            )

    def draw(self, rng: np.random.Generator, lengths: Int[np.ndarray, " N"], split: int) -> Batch:
        """Return examples of these lengths."""
        count, most = len(lengths), int(lengths.max())
        digits = rng.integers(0, 5, (count, most // 2 + 1))
        operators = rng.integers(0, 3, (count, most // 2))
        total, term = np.zeros(count, int), digits[:, 0]  # the value so far is total + term
        for place in range(most // 2):
            inside = 2 * place + 2 < lengths
            operator, digit = operators[:, place], digits[:, place + 1]
            times = operator == 2
            total = np.where(inside & ~times, (total + term) % 5, total)
            signed = np.where(operator == 1, -digit, digit)
            term = np.where(inside, np.where(times, term * digit % 5, signed), term)
        symbols = np.full((count, most + 1), PAD)
        symbols[:, 0:most:2] = ord("0") + digits
        symbols[:, 1:most:2] = np.array([ord(symbol) for symbol in "+-*"])[operators]
        place = np.arange(most + 1)[None]
        end = place == lengths[:, None]
        symbols = np.where(end, ord("="), np.where(place < lengths[:, None], symbols, PAD))
        answer = ord("0") + (total + term) % 5
        return _after_bos(symbols, np.where(end, answer[:, None], PAD), end)


class Mod5Brackets(Task):
    """A random tree of "+", "-", "*" over digits 0 to 4, each node in brackets, and "="; the value modulo 5.

    The recursion follows DeepMind's `modular_arithmetic_brackets` (a choice): up to four symbols are d, -d, (d) or
    (-d); of more, the left part has a uniform number, the right part the rest, and the operator is uniform.
    """

    name = "mod5-brackets"
    train_lengths = range(3, 41)
    validation_lengths = (32, 36, 40)
    test_lengths = (32, 36, *LENGTHS[1:])
    chance = 1 / 5

    def num_tokens(self, length: int) -> int:
        """Return T: BOS, the expression, "="."""
        return 2 + length

    def draw(self, rng: np.random.Generator, lengths: Int[np.ndarray, " N"], split: int) -> Batch:
        """Return examples of these lengths."""
        rows, answers = [], []
        for length in lengths.tolist():
            # A tree of this length has fewer than `length` nodes, and each takes one number.
            text, value = _tree(length, iter(rng.random(length).tolist()).__next__)
            rows.append([BOS, *text.encode(), ord("=")])
            answers.append([ord("0") + value])
        return from_rows(rows, answers)


def _tree(length: int, uniform: Callable[[], float]) -> tuple[str, int]:
    """Return an expression of this length and its value modulo 5; ``uniform`` draws from [0, 1)."""
    if length < 5:
        digit = int(5 * uniform())
        text = ("{}", "-{}", "({})", "(-{})")[length - 1].format(digit)
        return text, (-digit if length % 2 == 0 else digit) % 5
    # One number for two choices: the larger part chooses the split, what is left of it the operator.
    choice, rest = divmod((length - 4) * uniform(), 1.0)
    left, a = _tree(1 + int(choice), uniform)
    right, b = _tree(length - 4 - int(choice), uniform)
    operator = "+-*"[int(3 * rest)]
    value = a + b if operator == "+" else a - b if operator == "-" else a * b
    return f"({left}{operator}{right})", value % 5


PERMUTATIONS = tuple(permutations(range(5)))  # number 0 is the identity
INDEX = {permutation: index for index, permutation in enumerate(PERMUTATIONS)}
# PRODUCT[a, b] is a ∘ b: it takes i to a[b[i]].
PRODUCT = np.array([[INDEX[tuple(a[i] for i in b)] for b in PERMUTATIONS] for a in PERMUTATIONS])
SWAPS = (0, *(INDEX[tuple({a: b, b: a}.get(i, i) for i in range(5))] for a, b in combinations(range(5), 2)))


class StandardS5(Task):
    """Permutations of five things, uniform among all 120; after every input, the product of those so far.

    The running product is acc ← acc ∘ x, from the identity. Every answer is supervised.
    """

    name = "s5"
    inputs = tuple(range(120))
    train_lengths = (32,)
    validation_lengths = (32,)
    test_lengths = (32, 48, 64, 96, 128, 192, 256, 512)
    stepwise = True
    chance = 1 / 120

    def num_tokens(self, length: int) -> int:
        """Return T: BOS and the permutations."""
        return 1 + length

    def symbol(self, token: int) -> str:
        """Return where a permutation takes 1 to 5."""
        return "".join(str(1 + i) for i in PERMUTATIONS[token]) if token < 120 else super().symbol(token)

    def draw(self, rng: np.random.Generator, lengths: Int[np.ndarray, " N"], split: int) -> Batch:
        """Return examples of these lengths."""
        elements = np.asarray(self.inputs)[rng.integers(0, len(self.inputs), (len(lengths), lengths.max()))]
        products = np.zeros_like(elements)
        state = np.zeros(len(lengths), int)
        for place in range(elements.shape[1]):
            state = products[:, place] = PRODUCT[state, elements[:, place]]
        inside = np.arange(elements.shape[1])[None] < lengths[:, None]
        return _after_bos(np.where(inside, elements, PAD), np.where(inside, products, PAD), inside)


class SwapsS5(StandardS5):
    """The same, with inputs uniform among the identity and the ten transpositions."""

    name = "swaps"
    inputs = SWAPS


class Addition(Task):
    """The text "[a] + [b] = [c]" with the digits of each number reversed: "[21] + [43] = [64]" is 12 + 34 = 46.

    Supervised are the answer's tokens, from the space after "=" on, and EOS. Each operand has 1 to 8 digits, the
    number of digits uniform and the digits then, too, without a leading zero. A test example has two operands of
    exactly `length` digits; no unordered pair comes twice.

    No pair of one split comes in another. How the paper parts them is not public; here a CRC-32 of the unordered pair
    gives one pair in 16 to the tests and one to validation, which draws operands as training does.
    """

    name = "addition"
    train_lengths = (8,)
    validation_lengths = (8,)
    test_lengths = (9, 10, 11, 12, 14, 16, 32)
    test_size = 256
    seeds = (42, 42, 42)
    metric = "token"

    def num_tokens(self, length: int) -> int:
        """Return T for two operands of `length` digits and a carry: the paper's 39 tokens but EOS for 8."""
        return 3 * length + 14

    def draw(self, rng: np.random.Generator, lengths: Int[np.ndarray, " N"], split: int) -> Batch:
        """Return examples: of operands with exactly these digits for tests, and with up to so many otherwise."""
        pairs: dict[tuple[int, int], tuple[int, int]] = {}
        rows, answers = [], []
        number = Random(int(rng.integers(2**62))).randrange  # of any size
        while len(rows) < len(lengths):
            digits = int(lengths[len(rows)])
            widths = (digits, digits) if split == TEST else rng.integers(1, digits + 1, 2).tolist()
            # One digit may be 0; more have no leading zero.
            a, b = (number(0 if width == 1 else 10 ** (width - 1), 10**width) for width in widths)
            pair = (min(a, b), max(a, b))
            if split_of(*pair) != split or (split == TEST and pair in pairs):
                continue
            pairs[pair] = (a, b)
            context = f"[{_reversed(a)}] + [{_reversed(b)}] ="
            answer = [*f" [{_reversed(a + b)}]".encode(), EOS]
            rows.append([BOS, *context.encode(), *answer[:-1]])
            answers.append(answer)
        return from_rows(rows, answers)

    def check_length(self, length: int) -> None:
        """Raise ValueError for operands that the tests cannot have so many different pairs of."""
        if not 2 <= length <= MAX_LENGTH:
            raise ValueError(f"length {length}: {self.name} has test operands of 2 to {MAX_LENGTH} digits")


def split_of(a: int, b: int) -> int:
    """Return the split of an unordered pair of operands, a ≤ b."""
    return {0: TEST, 1: VALIDATION}.get(zlib.crc32(f"{a}+{b}".encode()) % 16, TRAIN)


def _reversed(number: int) -> str:
    return str(number)[::-1]


def _after_bos(
    tokens: Int[np.ndarray, "N L"], targets: Int[np.ndarray, "N L"], supervised: np.ndarray
) -> Batch:
    """Return the batch of these columns behind a BOS."""
    first = ((0, 0), (1, 0))
    return {
        "tokens": np.pad(tokens, first, constant_values=BOS).astype(np.int32),
        "targets": np.pad(targets, first, constant_values=PAD).astype(np.int32),
        "weight": np.pad(supervised, first).astype(np.float32),
    }


TASKS: dict[str, Task] = {
    task.name: task
    for task in (Parity(), ShortParity(), Mod5Flat(), Mod5Brackets(), SwapsS5(), StandardS5(), Addition())
}
