"""Parameters and batches on a mesh of devices with the axes data, fsdp and tensor.

Batches are cut over data and fsdp. Every matrix is cut over fsdp on one side and over tensor on the other, so that a
layer's first products give each device of the tensor axis some of the channels, and its last product sums over them
(Megatron-LM, arXiv 1909.08053). Moments lie where their parameters lie. An axis that does not divide a side leaves it
whole. The result of a step does not depend on the mesh, but for the order of sums.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from eflax.training.step import TrainState

AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")
# What a matrix is called, and what its inputs and outputs are cut over.
IN, OUT = ("fsdp", "tensor"), ("tensor", "fsdp")
SIDES = {
    "projection": IN,
    "gate": IN,
    "up": IN,
    "beta": IN,
    "dt": IN,
    "head": IN,
    "selection": OUT,
    "out": OUT,
    "down": OUT,
    "embedding": OUT,
    "convolution": (None, "tensor"),
}


def make_mesh(
    fsdp: int = 1, tensor: int = 1, data: int | None = None, devices: Sequence[Any] | None = None
) -> Mesh:
    """Return a mesh over devices, by default all of all processes.

    Args:
        fsdp: devices that share each parameter, and cut batches, too.
        tensor: devices that share each product.
        data: devices or groups of them that hold all parameters; by default what is left.
        devices: those of the mesh.

    Raises:
        ValueError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    count = len(devices)
    data = max(count // (fsdp * tensor), 1) if data is None else data
    if min(data, fsdp, tensor) < 1 or data * fsdp * tensor != count:
        raise ValueError(
            f"a mesh of data={data} x fsdp={fsdp} x tensor={tensor} needs {data * fsdp * tensor} devices and there "
            f"are {count}; choose sizes that multiply to that"
        )
    return jax.make_mesh((data, fsdp, tensor), AXES, (AxisType.Auto,) * 3, devices=devices)


def batch_shards(mesh: Mesh) -> int:
    """Return into how many parts the mesh cuts a batch."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def check_batch(sequences: int, accumulate: int, mesh: Mesh) -> None:
    """Raise ValueError unless a batch of so many sequences can be cut into equal parts."""
    parts = accumulate * batch_shards(mesh)
    if sequences % parts:
        raise ValueError(
            f"a batch of {sequences} sequences cannot be cut into {accumulate} accumulated parts for "
            f"{batch_shards(mesh)} devices of the axes data and fsdp; give a multiple of {parts}"
        )


def batch_sharding(mesh: Mesh, accumulate: int = 1) -> NamedSharding:
    """Return where the arrays of a batch lie: [B, …], or [accumulate, B, …]."""
    lead = () if accumulate == 1 else (None,)
    return NamedSharding(mesh, PartitionSpec(*lead, BATCH))


def own_rows(sequences: int, mesh: Mesh, accumulate: int = 1) -> list[int]:
    """Return which sequences of a batch the devices of this process need, in order; all where it is the only one."""
    size = sequences // (accumulate * batch_shards(mesh))
    parts = range(0, sequences, sequences // accumulate)
    starts = (part + shard * size for part in parts for shard in _own_shards(mesh))
    return [row for start in starts for row in range(start, start + size)]


def _own_shards(mesh: Mesh) -> list[int]:
    here = jax.process_index()
    holders = mesh.devices.reshape(batch_shards(mesh), -1)
    return [
        shard for shard, devices in enumerate(holders) if any(each.process_index == here for each in devices)
    ]


def place_batch(batch: dict[str, np.ndarray], mesh: Mesh, accumulate: int = 1) -> dict[str, jax.Array]:
    """Put a batch on the mesh; each process gives its `own_rows` of it.

    With `accumulate`, the rows [B, …] become [accumulate, B / accumulate, …].
    """
    sharding, shards = batch_sharding(mesh, accumulate), _own_shards(mesh)

    def place(rows: np.ndarray) -> jax.Array:
        size = rows.shape[0] // (accumulate * len(shards))
        lead = () if accumulate == 1 else (accumulate,)
        rows = rows.reshape(*lead, len(shards) * size, *rows.shape[1:])
        shape = (*lead, batch_shards(mesh) * size, *rows.shape[len(lead) + 1 :])

        def part(index: Any) -> np.ndarray:  # a tuple of slices
            shard = (index[len(lead)].start or 0) // size
            at = shards.index(shard) * size
            return rows[(*index[: len(lead)], slice(at, at + size))]

        return jax.make_array_from_callback(shape, sharding, part)

    return {name: place(rows) for name, rows in batch.items()}


def state_shardings(state: PyTree, mesh: Mesh) -> Any:
    """Return where each leaf of a (possibly abstract) train state lies, as a tree like it."""

    def place(path: Any, leaf: Any) -> NamedSharding:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        return NamedSharding(mesh, _spec(names, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(place, state)


def _spec(names: list[str], shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    sides = next((SIDES[name] for name in reversed(names) if name in SIDES), None)
    if sides is None or len(shape) < 2 or {"bias", "scale"} & set(names):
        return PartitionSpec()
    fitting = [
        axis if axis and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(sides, shape[-2:], strict=True)
    ]
    return PartitionSpec(*(None,) * (len(shape) - 2), *fitting)


def sharded_state(
    build: Callable[[], nnx.Module], optimizer: optax.GradientTransformation, mesh: Mesh
) -> tuple[TrainState, TrainState]:
    """Return the state from which the model of `build` is trained, made in place on the mesh, and its shardings.

    The numbers do not depend on the mesh.
    """

    def make() -> TrainState:
        _, params, rest = nnx.split(build(), nnx.Param, ...)
        return TrainState(params, rest, optimizer.init(params))

    shardings = state_shardings(jax.eval_shape(make), mesh)
    return jax.jit(make, out_shardings=shardings)(), shardings
