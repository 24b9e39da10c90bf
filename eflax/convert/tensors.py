"""The tensors of a Hugging Face folder: model.safetensors, or several files and model.safetensors.index.json."""

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from eflax.convert.errors import ConversionError

type Shape = tuple[int, ...]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # all of which float32 holds exactly
MAX_BYTES = 5 * 10**9  # of one file


def safetensors(module: str) -> Any:
    """Return a module of the package safetensors. Raises ConversionError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConversionError(
            f"this needs the package safetensors: pip install 'eflax[text]' ({error})"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ConversionError where there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConversionError(f"{path} cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise ConversionError(f"{path} holds {found!r:.60} and must hold a JSON object")
    return found


class TensorFiles:
    """The tensors of a folder by name, read one at a time; use it as a context manager.

    Attributes:
        shapes: of every tensor.
        dtypes: of every tensor, by the name that NumPy has for it.

    Raises:
        ConversionError: there are no such files, they are damaged, they hold other tensors than the index says, or
            one that is not float32, bfloat16 or float16.
    """

    def __init__(self, folder: Path) -> None:
        self._files = {}
        self._file_of: dict[str, str] = {}
        self._open = safetensors("safetensors").safe_open
        for name, promised in _promised(folder).items():
            self._add(folder / name, promised)
        self.shapes: dict[str, Shape] = {}
        self.dtypes: dict[str, str] = {}
        for name, file in self._file_of.items():
            part = self._files[file].get_slice(name)
            if (dtype := part.get_dtype()) not in DTYPES:
                raise ConversionError(
                    f"{file}: the tensor {name} {part.get_shape()} is {dtype} and must be one of {', '.join(DTYPES)}"
                )
            self.shapes[name], self.dtypes[name] = tuple(part.get_shape()), DTYPES[dtype]

    def _add(self, path: Path, promised: set[str] | None) -> None:
        try:
            self._files[str(path)] = self._open(path, "np")
            found = set(self._files[str(path)].keys())
        except Exception as error:  # the library's own kind, or OSError
            raise ConversionError(f"{path} cannot be read or is damaged ({error})") from error
        if promised is not None and (different := sorted(found ^ promised)):
            where = "in the file and not" if different[0] in found else "not in the file but"
            raise ConversionError(
                f"{path}: the tensor {different[0]} is {where} in {INDEX}; fetch the folder anew"
            )
        self._file_of |= dict.fromkeys(sorted(found), str(path))

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()  # which unmaps them

    def read(self, name: str) -> np.ndarray:
        """Return a tensor as float32, which holds each of its values exactly."""
        return self._files[self._file_of[name]].get_tensor(name).astype(np.float32)


def _promised(folder: Path) -> dict[str, set[str] | None]:
    """Return the files of a folder, each with the tensors that the index says it has; None without an index."""
    single, index = folder / SINGLE, folder / INDEX
    if single.exists() and index.exists():
        raise ConversionError(f"{folder} has both {SINGLE} and {INDEX}; remove the one that is out of date")
    if single.exists():
        return {SINGLE: None}
    if not index.exists():
        raise ConversionError(f"{folder} has neither {SINGLE} nor {INDEX}; other formats are not read")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConversionError(f"{index}: 'weight_map' is {weight_map!r:.60} and must map tensors to files")
    promised: dict[str, set[str] | None] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ConversionError(f"{index}: the file of {name} is {file!r} and must be one beside it")
        names = promised.setdefault(file, set())
        assert names is not None
        names.add(name)
    return promised


def write_tensors(
    folder: Path,
    shapes: Mapping[str, Shape],
    make: Callable[[str], np.ndarray],
    dtype: str,
    max_bytes: int = MAX_BYTES,
) -> None:
    """Write tensors in as few files as their size allows, with an index where that is more than one.

    Args:
        folder: an empty one.
        shapes: of the tensors by name, in their order.
        make: returns a tensor of that name, float32.
        dtype: what the tensors are rounded to.
        max_bytes: of the tensors of a file; one that is larger has a file to itself.

    Raises:
        ConversionError: a value does not fit the dtype.
    """
    save = safetensors("safetensors.numpy").save_file
    size = {name: int(np.prod(shape)) * jnp.dtype(dtype).itemsize for name, shape in shapes.items()}
    groups: list[list[str]] = [[]]
    for name in shapes:
        if groups[-1] and sum(size[other] for other in groups[-1]) + size[name] > max_bytes:
            groups.append([])
        groups[-1].append(name)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = {name: _rounded(name, make(name), dtype) for name in names}
        save(tensors, folder / file, metadata={"format": "pt"})  # what transformers asks for
        weight_map |= dict.fromkeys(names, file)
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(size.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _rounded(name: str, values: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore"):  # reported below, by name
        rounded = np.ascontiguousarray(values.astype(jnp.dtype(dtype)))
    if (np.isfinite(values) & ~np.isfinite(rounded.astype(np.float32))).any():
        largest = np.abs(values[np.isfinite(values)]).max()
        raise ConversionError(f"the tensor {name} has values up to {largest:.3g}, too large for {dtype}")
    return rounded
