"""The examples run and come to the result that they promise."""

import importlib
import sys
from pathlib import Path

import jax
import pytest

FOLDER = Path(__file__).parent.parent / "examples"
PROMISED = {  # what main() returns: the range that it must be in
    "linen_model": (0.95, 1.0),  # of the numbers looked up are right
    "nnx_model": (0.0, 1.6),  # nats per letter
    "pure_jax": (0.85, 1.0),  # of the digits are right
}


def test_every_example_is_tested():
    assert {path.stem for path in FOLDER.glob("*.py")} == PROMISED.keys()


@pytest.mark.parametrize("name", PROMISED)
def test_example(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    # As users run them, whose JAX is not strict.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        result = importlib.import_module(name).main()
    low, high = PROMISED[name]
    assert low <= result <= high
    assert capsys.readouterr().out
