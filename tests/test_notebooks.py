"""The notebooks: their sources run, all assertions hold, and the pages with outputs are made of the same cells."""

import json
import os
import re
from pathlib import Path

import pytest
from processes import finish, launch

FOLDER = Path(__file__).parent.parent / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]_*.py"))
LARGEST = 400_000  # bytes: readers load these pages, and every clone holds all their versions

every_notebook = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


def cells_of(source):
    """(kind, text) of each cell of percent-format Python."""
    for part in re.split(r"^# %%", source.read_text(), flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            yield "markdown", re.sub(r"^# ?", "", body, flags=re.MULTILINE).strip()
        else:
            yield "code", body.strip()


def test_there_are_six():
    assert len(SOURCES) == 6


@every_notebook
def test_source_runs(source, monkeypatch):
    monkeypatch.setitem(os.environ, "MPLBACKEND", "agg")
    code, output = finish(launch(str(source)))
    assert code == 0, output


@every_notebook
def test_page_with_outputs_is_that_of_the_source(source):
    page = source.with_suffix(".ipynb")
    assert page.stat().st_size < LARGEST, "lower figure.dpi in notebooks/matplotlibrc, or draw less"
    cells = json.loads(page.read_text())["cells"]
    found = [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in cells]
    assert found == list(cells_of(source)), "renew the page: CONTRIBUTING.md has the command"
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in code), "the page was not run to its end"
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [each for each in outputs if each["output_type"] == "error" or each.get("name") == "stderr"]
    assert any("image/png" in each.get("data", {}) for each in outputs)
