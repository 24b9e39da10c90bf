"""Compile the GPU kernels for an H200, on any machine, and report what each takes of it.

`python -m experiments.kernel_report` writes the table; `--check` compares with it. Needs the extra `aot`, no GPU.
"""

import os
import sys

# Before JAX is imported; the compiler's target is only described.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import tyro
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from rich.console import Console

from experiments import kernel_table
from experiments.kernel_launches import Kernel, all_launches

TABLE = Path(__file__).parent / "results" / "kernels" / "h200-static.csv"
# Public numbers of the machine, as XLA wants them.
TARGET = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 151397597184
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
  name: "NVIDIA H200"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H200"
"""


@dataclass(frozen=True)
class Row(Kernel):
    """One compiled kernel: which, and what it takes. Registers are per thread, before warpgroups trade theirs."""

    registers: int = 0
    spill_stores: int = 0  # bytes
    shared_memory: int = 0  # bytes of a block: buffers and barriers
    hgmma: int = 0  # matrix instructions in the program text
    seconds: float = 0.0  # of one core, to lower and compile


def main() -> int:
    """Write or check the table; returns 1 where a kernel spills more than in the table or is new, 2 where none can."""

    def flags(check: bool = False) -> bool:
        """Compile every kernel for an H200: registers, spills, shared memory, matrix instructions.

        Args:
            check: Compare with the committed table instead of writing it.
        """
        return check

    check = tyro.cli(flags, prog="python -m experiments.kernel_report")
    try:
        device = topologies.get_topology_desc(
            platform="cuda", target_config=TARGET, topology="1x1x1"
        ).devices[0]
    except Exception as error:  # without the plugin JAX raises errors of several types
        print(f"error: the compiler for GPUs cannot be used; install the extra aot. {error}", file=sys.stderr)
        return 2
    rows = []
    for row in report(SingleDeviceSharding(device)):
        rows.append(row)
        print(*asdict(row).values(), flush=True)
    Console(width=132).print(kernel_table.render(rows))
    if check:
        problems = kernel_table.compare(rows, kernel_table.read(TABLE, Row), "spill_stores")
        print("\n".join(problems) or f"{len(rows)} kernels, none spills more than in {TABLE.name}")
        return int(bool(problems))
    kernel_table.write(TABLE, rows)
    return 0


def report(sharding: SingleDeviceSharding) -> Iterator[Row]:
    """Compile all kernels, one by one."""
    for key, function, arguments in all_launches():
        yield compiled(Row(*key), function, jax.tree.map(partial(_place, sharding=sharding), arguments))


def _place(x: jax.ShapeDtypeStruct, sharding: SingleDeviceSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def compiled(row: Row, function: Callable, arguments: tuple) -> Row:
    """The row with what ptxas and the disassembler say of its kernel."""
    start = time.process_time()
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder  # not before: dumps make the lowering four times slower
        try:
            lowered.compile()
        finally:
            del os.environ["MOSAIC_GPU_DUMP_TO"]
        ptxas, sass, passes = (_only(folder, pattern) for pattern in ("*.ptxas", "*.sass*", "*mlir-passes*"))
    return Row(
        *row.key,
        registers=_number(r"Used (\d+) registers", ptxas),
        spill_stores=_number(r"(\d+) bytes spill stores", ptxas),
        shared_memory=_number(r"dynamic_shared_memory_size %c(\d+)_i32", passes),
        hgmma=len(re.findall(r"\bHGMMA\b", sass)),
        seconds=round(time.process_time() - start, 1),
    )


def _only(folder: str, pattern: str) -> str:
    (path,) = Path(folder).glob(pattern)
    return path.read_text()


def _number(pattern: str, text: str) -> int:
    (found,) = set(re.findall(pattern, text))
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
