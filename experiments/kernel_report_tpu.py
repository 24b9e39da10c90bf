"""Compile the TPU kernels for several generations of TPUs, on any machine, and report what each takes.

`python -m experiments.kernel_report_tpu` writes the table; `--check` compares with it. Needs the extra `tpu`, no TPU.
A TPU core starts one bundle of instructions per cycle, so scheduled bundles are cycles, but for waits on memory.
"""

import os
import sys
import tempfile

# Before libtpu is loaded: no TPU is asked for, others may use the library too, and the compiler leaves its listings.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.update(
    TPU_SKIP_MDS_QUERY="1",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE="v5litepod-4",
    LIBTPU_INIT_ARGS=f"--xla_jf_dump_to={tempfile.mkdtemp()} --xla_jf_dump_llo_text=true",
)

import atexit
import itertools
import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding
from rich.console import Console

from experiments import kernel_table
from pallas_kernels.rank_one.backward_tpu import backward
from pallas_kernels.rank_one.forward_tpu import forward
from pallas_kernels.rank_one.layout import CHUNK
from pallas_kernels.rank_one.tiles_tpu import Plan
from pallas_kernels.rank_one.tpu import make_plan

LISTINGS = Path(os.environ["LIBTPU_INIT_ARGS"].split()[0].partition("=")[2])
atexit.register(shutil.rmtree, LISTINGS)
TABLE = Path(__file__).parent / "results" / "kernels" / "tpu-static.csv"
BATCH, TIME, HEADS = 4, 8192, 16
TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
ALL = "erases decays packed"
# Data type, K, V, features.
CONFIGURATIONS = [
    ("bfloat16", 128, 128, ""),
    ("bfloat16", 128, 128, "decays"),
    ("bfloat16", 128, 128, "erases"),
    ("bfloat16", 128, 128, "erases decays"),
    ("bfloat16", 128, 128, ALL),
    ("bfloat16", 64, 64, "erases decays"),
    ("bfloat16", 256, 256, "erases decays"),
    ("float32", 128, 128, ALL),
    ("float32", 64, 128, "erases"),
]
KERNELS = ("forward", "forward_residuals", "backward")
SLACK = 0.02  # schedules are the same on every machine; this is for small edits


@dataclass(frozen=True)
class Row:
    """One compiled kernel: which, and what it takes."""

    tpu: str
    kernel: str
    dtype: str
    key_dim: int
    value_dim: int
    features: str
    bundles: int = 0  # scheduled, for one chunk of 64 tokens and one value head
    mxu: int = 0  # slots of matrix units in these bundles
    valu: int = 0  # of vector units
    xlu: int = 0  # of units that move data across lanes
    spill_stores: int = 0  # vector registers stored for want of registers, by chunk and head
    vmem: int = 0  # KiB of fast memory: buffers of blocks, the state, spills
    seconds: float = 0.0  # of one core, to lower and compile

    @property
    def key(self) -> tuple:
        """What tells kernels apart."""
        return self.tpu, self.kernel, self.dtype, self.key_dim, self.value_dim, self.features


def main() -> int:
    """Write or check the table; returns 1 where a kernel takes more than in the table or is new, 2 where none can."""

    def flags(check: bool = False, tpu: Literal["all", "v5e", "v6e", "tpu7x"] = "all") -> tuple[bool, str]:
        """Compile every kernel for TPUs: scheduled bundles, use of units, spills, fast memory.

        Args:
            check: Compare with the committed table instead of writing it.
            tpu: With --check, only kernels for this TPU.
        """
        return check, tpu

    check, only = tyro.cli(flags, prog="python -m experiments.kernel_report_tpu")
    if only != "all" and not check:
        print("error: --tpu needs --check: the table has all of them", file=sys.stderr)
        return 2
    wanted = [row for row in rows() if only in ("all", row.tpu)]
    found = []
    for row in wanted:
        try:
            device = topologies.get_topology_desc(TOPOLOGIES[row.tpu], platform="tpu").devices[0]
        except Exception as error:  # without libtpu JAX raises errors of several types
            print(
                f"error: the compiler for TPUs cannot be used; install the extra tpu. {error}",
                file=sys.stderr,
            )
            return 2
        found.append(compiled(row, device))
        print(*asdict(found[-1]).values(), flush=True)
    Console(width=140).print(kernel_table.render(found))
    if check:
        table = [row for row in kernel_table.read(TABLE, Row) if only in ("all", row.tpu)]
        problems = kernel_table.compare(found, table, "bundles", SLACK)
        print("\n".join(problems) or f"{len(found)} kernels, none takes more bundles than in {TABLE.name}")
        return int(bool(problems))
    kernel_table.write(TABLE, found)
    return 0


def rows() -> Iterator[Row]:
    """Every kernel in every configuration, not compiled yet."""
    for tpu, configuration, kernel in itertools.product(TOPOLOGIES, CONFIGURATIONS, KERNELS):
        yield Row(tpu, kernel, *configuration)


def launch(row: Row) -> tuple[Plan, Any, tuple]:
    """The plan of a row's kernel, the function and its arguments' shapes."""

    def array(*shape: int, dtype: Any = row.dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    k, v = (array(BATCH, TIME, HEADS, width) for width in (row.key_dim, row.value_dim))
    gate = array(BATCH, TIME, HEADS, dtype=jnp.float32)
    given: Any = {name: gate if name in row.features else None for name in ("erases", "decays", "packed")}
    plan = make_plan(k, k, v, given["erases"], given["decays"], given["packed"], row.key_dim**-0.5)
    k, v = (array(BATCH, TIME, HEADS * width) for width in (row.key_dim, row.value_dim))
    gates = array(BATCH, HEADS, plan.chunks, plan.gate_rows, CHUNK, dtype=jnp.float32)
    state = array(BATCH, HEADS, row.key_dim, row.value_dim, dtype=jnp.float32)
    if row.kernel != "backward":
        residuals = row.kernel == "forward_residuals"
        return plan, partial(forward, plan=plan, residuals=residuals), (k, k, v, gates, state)
    inverse = array(BATCH, plan.chunks, CHUNK, HEADS * CHUNK) if plan.erases else None
    states = array(BATCH, plan.chunks, HEADS, row.key_dim, row.value_dim)
    return plan, partial(backward, plan=plan), (k, k, v, v, v, gates, inverse, states, state)


def compiled(row: Row, device: Any) -> Row:
    """The row with what the compiler's listings say of its kernel."""
    start = time.process_time()
    abstract = AbstractDevice(device_kind=device.device_kind, num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        plan, function, arguments = launch(row)
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device)), arguments
    )
    jax.jit(function).trace(*placed).lower(lowering_platforms=("tpu",)).compile()
    seconds = time.process_time() - start
    kernel = "*rank_one*"
    (count,) = re.findall(
        r"total scheduled bundles:\s+(\d+)", _only(f"{kernel}schedule-analysis_final_bundles.txt")
    )
    slots = utilization(_only(f"{kernel}final_hlo-static-per-bundle-utilization.txt"))
    vmem = fast_memory(_only("*vmem_report.html"))
    for path in LISTINGS.iterdir():
        path.unlink()

    def each(total: int) -> int:
        return round(total / plan.heads)

    return replace(
        row,
        bundles=each(int(count)),
        mxu=each(slots["MXU"]),
        valu=each(slots["VALU"]),
        xlu=each(slots["XLU"]),
        spill_stores=each(slots["VSTORE:SPILL"]),
        vmem=vmem // 1024,
        seconds=round(seconds, 1),
    )


def utilization(listing: str) -> dict[str, int]:
    """Of a listing of the units that each bundle uses, the sum by unit."""
    units = [name.strip() for name in listing.splitlines()[1].split(",")]
    lines = listing.split("== UTILIZATION:")[1].split("==")[0].splitlines()
    counts = [list(map(int, line.split())) for line in lines if re.fullmatch(r"\s*\d[\d ]*", line)]
    return {name: sum(line[i] for line in counts) for i, name in enumerate(units)}


def fast_memory(report: str) -> int:
    """Of the compiler's report on fast memory, the bytes that the kernel takes."""
    found = re.search(r"DATA\s*=\s*(\{.*?\})\s*;?\s*(?://|const|</script>)", report, re.DOTALL)
    if found is None:
        raise ValueError(
            "the compiler's report on fast memory has no data; this libtpu writes another format"
        )
    breakdown = json.loads(found[1])["hlo_breakdowns"]
    (size,) = (entry["total_size"] for name, entry in breakdown.items() if "rank_one" in name)
    return size


def _only(pattern: str) -> str:
    (path,) = LISTINGS.glob(pattern)
    return path.read_text()


if __name__ == "__main__":
    sys.exit(main())
