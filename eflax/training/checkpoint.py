"""Checkpoints through Orbax: written whole or not at all, checked leaf by leaf when read."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from eflax.training.processes import from_first, whole

FORMAT = "eflax-checkpoint-1"
STATE, META = "state", "meta"

type Leaf = Any  # jax.Array, or jax.ShapeDtypeStruct in a template


class CheckpointError(ValueError):
    """A checkpoint is damaged, or belongs to something else; the message names it and the way out."""


class Checkpoints:
    """The last few checkpoints of one training run in one folder.

    Orbax writes each under a temporary name and renames it when complete, so a killed process leaves no
    half-written checkpoint behind. What Orbax does not check is stored beside the arrays and checked at
    `restore`: the names, shapes, dtypes and a CRC-32 of every leaf.

    Args:
        folder: where the checkpoints lie, one subfolder a step; created at the first save.
        keep: how many to keep.
        asynchronous: let `save` return when the arrays are copied, and write in the background; `close`, the next
            `save` and `restore` wait.
    """

    def __init__(self, folder: Path, keep: int = 2, *, asynchronous: bool = False) -> None:
        self.folder = folder.absolute()
        self._keep, self._asynchronous = keep, asynchronous
        self._opened: ocp.CheckpointManager | None = None

    @property
    def _manager(self) -> ocp.CheckpointManager:
        if self._opened is None:
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self._keep,
                enable_async_checkpointing=self._asynchronous,
                cleanup_tmp_directories=True,
            )
            self._opened = ocp.CheckpointManager(self.folder, options=options)
        return self._opened

    def latest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint, None where there is none.

        Raises:
            CheckpointError: the folder is a file.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is a file and must be a folder of checkpoints; remove it")
        # Of several processes the first looks: another might see what the first has begun to write.
        step = self._manager.latest_step() if from_first(self.folder.exists()) else None
        step = from_first(-1 if step is None else step)
        return None if step < 0 else step

    def save(self, step: int, state: PyTree, **extra: Any) -> None:
        """Write `state`, a tree of arrays, and `extra`, which JSON can hold.

        Returns when it is on disk, or, where saving is asynchronous, when `state` may change.

        Raises:
            CheckpointError: the folder holds a checkpoint of this or a later step, or it, or where saving is
                asynchronous the one before, could not be written.
        """
        leaves = _named_leaves(state)
        meta = {
            "format": FORMAT,
            "step": step,
            "leaves": _describe(leaves),
            "crc32": _checksums(leaves),
            **extra,
        }
        meta["meta_crc32"] = _meta_checksum(meta)
        items = ocp.args.Composite(**{STATE: ocp.args.StandardSave(leaves), META: ocp.args.JsonSave(meta)})
        if not self._write(lambda: self._manager.save(step, args=items)):
            raise CheckpointError(f"checkpoint {step} was not written: {self.folder} holds it or a later one")

    def restore(self, template: PyTree) -> tuple[PyTree, dict[str, Any]]:
        """Return the newest state and what was saved beside it.

        Args:
            template: a tree of arrays of the same structure, shapes and dtypes as the saved one, placed as wanted;
                `jax.ShapeDtypeStruct` with a sharding does, too.

        Raises:
            CheckpointError: there is none, it cannot be read, or it does not fit `template`.
        """
        step = self.latest_step()
        if step is None:
            raise CheckpointError(f"no complete checkpoint in {self.folder}")
        where = f"checkpoint {self.folder / str(step)}"
        way_out = (
            "delete that folder to continue from the checkpoint before it, if one is left, or from the start"
        )
        expected = _named_leaves(template)
        meta = self._read(step, META, ocp.args.JsonRestore(), f"{where} is damaged or foreign; {way_out}")
        if not isinstance(meta, dict) or meta.get("format") != FORMAT:
            raise CheckpointError(
                f"{where} was not written by eflax (no format {FORMAT!r}); give another folder"
            )
        if meta.pop("meta_crc32", None) != _meta_checksum(meta) or meta["step"] != step:
            raise CheckpointError(
                f"{where} is damaged: wrong checksum of what lies beside the arrays; {way_out}"
            )
        _compare(meta["leaves"], _describe(expected), where)
        abstract = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in expected.items()
        }
        leaves = self._read(step, STATE, ocp.args.StandardRestore(abstract), f"{where} is damaged; {way_out}")
        found = _checksums(leaves)
        damaged = [name for name, crc in meta["crc32"].items() if found[name] != crc]
        if damaged:
            raise CheckpointError(f"{where} is damaged: wrong checksum of {damaged[0]}; {way_out}")
        return jax.tree.unflatten(jax.tree.structure(template), [leaves[name] for name in expected]), meta

    def _read(self, step: int, item: str, args: Any, complaint: str) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]
        except Exception as error:  # Orbax and TensorStore raise a dozen kinds for a damaged file
            reason = (str(error).splitlines() or [repr(error)])[0]
            raise CheckpointError(f"{complaint} ({type(error).__name__}: {reason})") from error

    def _write(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # Orbax and TensorStore raise a dozen kinds where nothing can be written
            reason = (str(error).splitlines() or [repr(error)])[0]
            raise CheckpointError(
                f"a checkpoint could not be written to {self.folder} ({type(error).__name__}: {reason[:300]}); make "
                "room there, and continue from the one before it"
            ) from error

    def close(self) -> None:
        """Wait until all is written, and release what Orbax holds open. Raises CheckpointError as `save` does."""
        if self._opened is not None:
            opened, self._opened = self._opened, None
            self._write(opened.close)


def _named_leaves(tree: PyTree) -> dict[str, Leaf]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in paths}


def _describe(leaves: dict[str, Leaf]) -> dict[str, str]:
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in leaves.items()}


def _checksums(leaves: dict[str, Leaf]) -> dict[str, int]:
    return {name: zlib.crc32(np.ascontiguousarray(_on_host(leaf)).tobytes()) for name, leaf in leaves.items()}


def _on_host(leaf: Leaf) -> np.ndarray:
    return whole(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf)


def _meta_checksum(meta: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode())


def _compare(saved: dict[str, str], expected: dict[str, str], where: str) -> None:
    for name in [*expected, *saved]:
        if saved.get(name) != expected.get(name):
            raise CheckpointError(
                f"{where} belongs to another model or optimizer: {name} is {saved.get(name, 'absent')} there "
                f"and {expected.get(name, 'absent')} here; resume with the settings that wrote it"
            )
