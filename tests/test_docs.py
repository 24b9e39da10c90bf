"""The pages under docs/, the README's generated table, and the helpers that they name."""

import re
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest

from eflax.data.packing import segment_ids_from_cu_seqlens

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def test_readme_table_of_platforms_is_generated():
    module = runpy.run_path(str(ROOT / "docs" / "cell_table.py"))
    assert module["renewed"](README.read_text()) == README.read_text(), "run python docs/cell_table.py"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            exec(compile(block, page.name, "exec"), names)
    assert names


def test_segment_ids_from_cu_seqlens():
    ids = segment_ids_from_cu_seqlens(np.array([0, 3, 3, 4], np.int32), 6)
    assert ids.tolist() == [[0, 0, 0, 2, 3, 3]] and ids.dtype == np.int32
    assert segment_ids_from_cu_seqlens(np.array([0, 2]), 2).tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("offsets", "length", "message"),
    [
        ([1, 3], 4, r"cu_seqlens=\[1, 3\].*starts with 0"),
        ([0], 4, r"shape \[N \+ 1\]"),
        ([[0, 2]], 4, r"shape \[N \+ 1\]"),
        ([0, 3, 2], 4, r"cu_seqlens=\[0, 3, 2\] decreases"),
        ([0, 5], 4, "ends at 5, behind length=4"),
    ],
)
def test_offsets_that_do_not_fit(offsets, length, message):
    with pytest.raises(ValueError, match=message):
        segment_ids_from_cu_seqlens(np.array(offsets), length)


def test_offsets_are_integers(without_shape_checks):
    with pytest.raises(TypeError, match="cu_seqlens has dtype float64"):
        segment_ids_from_cu_seqlens(np.array([0.0, 2.0]), 2)
