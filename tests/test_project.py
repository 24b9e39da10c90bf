"""What holds for the project as a whole: who imports whom, what is documented, what the README says."""

import ast
import importlib
import inspect
import re
import subprocess
import tomllib
import typing
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest
from budgets import BUDGETS, Budget

import eflax

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# A part may import parts of its own rank or below. (`from eflax import cells` counts as eflax.cells.)
RANKS = {
    "eflax": 0,
    "pallas_kernels": 0,
    "eflax.cells": 1,
    "eflax.layers": 2,
    "eflax.linen": 3,
    "eflax.models": 3,
    "eflax.progress": 4,
    "eflax.data": 4,
    "eflax.training": 4,
    "eflax.evaluation": 4,
    "eflax.convert": 4,
    "experiments": 5,
}
PUBLIC = ("eflax.cells", "eflax.cells.affine", "eflax.layers", "eflax.models")


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): path
    for package in ("eflax", "experiments", "pallas_kernels")
    for path in sorted((ROOT / package).rglob("*.py"))
}


def part_of(name):
    """The part of the project that a module belongs to; None for a module of somebody else."""
    top, *rest = name.split(".")
    if top not in {"eflax", "experiments", "pallas_kernels"}:
        return None
    return f"eflax.{rest[0]}" if top == "eflax" and rest else top


def imported_modules(name):
    """The names of all modules that a module imports, anywhere in it."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in MODULES else base


def public_functions():
    """Every function and method that a user of the public packages calls, by its full name."""
    for package in PUBLIC:
        names = vars(importlib.import_module(package))
        public = names.get("__all__", [name for name in names if not name.startswith("_")])
        for thing in (names[name] for name in public):
            if inspect.isfunction(thing):
                yield f"{package}.{thing.__name__}", thing
            elif not isinstance(thing, (dict, ModuleType)):
                owner = thing if inspect.isclass(thing) else type(thing)
                for name, member in inspect.getmembers(owner, inspect.isfunction):
                    if not name.startswith("_") or name in {"__call__", "__init__"}:
                        yield f"{package}.{owner.__name__}.{name}", member


def has_plain_array(annotation):
    """Whether an annotation names an array type that no jaxtyping shape stands around."""
    return annotation in {jax.Array, np.ndarray} or any(map(has_plain_array, typing.get_args(annotation)))


OURS = {name: f for name, f in public_functions() if f.__module__.startswith("eflax")}


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name):
    part = part_of(name)
    assert part in RANKS, f"{part} has no rank: place it in RANKS"
    for target in imported_modules(name):
        if (other := part_of(target)) is not None:
            assert RANKS[other] <= RANKS[part], f"{name} imports {target}: {part} may not know of {other}"


@pytest.mark.parametrize("name", OURS)
def test_public_functions_are_documented_and_typed(name):
    function = OURS[name]
    assert function.__name__ == "__init__" or inspect.getdoc(function), f"{name} has no docstring"
    for argument in inspect.signature(function).parameters.values():
        untyped = argument.annotation is argument.empty and argument.default is argument.empty
        named = argument.name != "self" and argument.kind is not argument.VAR_KEYWORD
        assert not (untyped and named), f"{name}: {argument.name} has no type"
        assert not has_plain_array(argument.annotation), f"{name}: the array {argument.name} has no shape"


def test_no_registry_or_local_address():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout, so the project's own files cannot be told from others")
    hosts = r"(?:pypi|pythonhosted|npmjs)\.(?:org|com)"
    options = rf"--(?:extra-)?index[-]url|--find[-]links|file:[/]{{2}}|{re.escape(str(ROOT))}[/]"
    for path in (ROOT / name for name in listed.stdout.split("\0") if name):
        if path.is_file():  # a file that is deleted but not yet committed is still listed
            found = re.search(f"{hosts}|{options}".encode(), path.read_bytes())
            assert not found, f"{path.relative_to(ROOT)} contains {found.group()!r}"


@pytest.mark.parametrize("name", ["cells", "layers", "models"])
def test_subpackages_are_imported_on_use(name):
    assert eflax.__getattr__(name) is importlib.import_module(f"eflax.{name}")
    assert not hasattr(eflax, f"{name}s")


def test_one_version():
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading and heading.group(1) == eflax.__version__ == PROJECT["version"]


def test_constraints_pin_every_dependency():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [re.fullmatch(r"([\w.-]+)==[\w.]+", line) for line in lines if not line.startswith("#")]
    assert all(pins), "constraints.txt holds name==version lines only"
    pinned = {pin.group(1).lower().replace("_", "-") for pin in pins if pin}
    extras = PROJECT["optional-dependencies"]
    wanted = PROJECT["dependencies"] + extras["dev"] + extras["text"]
    assert not {re.split(r"[\[<>=]", name)[0].lower() for name in wanted} - {"eflax"} - pinned


@pytest.mark.parametrize("name", ["run", "test"])
def test_readme_command_is_one_line_and_is_what_ci_runs(name):
    block = re.search(rf"<!-- {name} -->\n```bash\n(.*)\n```\n<!-- end {name} -->", README)
    assert block, f"README.md has no one-line command between <!-- {name} --> and <!-- end {name} -->"
    assert f"readme_command {name}" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.newest_jax
def test_readme_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_readme_table_is_the_table_of_cells():
    cells = importlib.import_module("eflax.cells").CELLS
    layers = importlib.import_module("eflax.layers")
    row = r"^\| `(\w+)` \| [^|]+ \| `(\w+)` \|.*\| ([\w, ]+) \|$"
    rows = {name: (layer, forms) for name, layer, forms in re.findall(row, README, re.MULTILINE)}
    assert {name: forms for name, (_, forms) in rows.items()} == {
        name: ", ".join(cell.forms) for name, cell in cells.items()
    }
    for name, (layer, _) in rows.items():
        assert getattr(layers, layer).cell is cells[name]


def test_readme_budgets_are_the_budgets():
    rows = re.findall(r"^\| (\w+) \| ([\de.-]+) \| ([\de.-]+) \|$", README, re.MULTILINE)
    assert {name: Budget(float(forward), float(backward)) for name, forward, backward in rows} == BUDGETS


def test_readme_tree_is_the_tree():
    tree = re.search(r"```text\n(.*?)```", README, re.DOTALL)
    assert tree
    folder, listed = ROOT, set()
    for line in tree.group(1).splitlines():
        entry = line.split()[0]
        path = (folder if line.startswith(" ") else ROOT) / entry
        assert path.exists() and path not in listed, f"README.md lists {path.relative_to(ROOT)}, or twice"
        listed.add(path)
        folder = path if entry.endswith("/") and not line.startswith(" ") else folder
