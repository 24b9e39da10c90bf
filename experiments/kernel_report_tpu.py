"""Compile the TPU kernels for several generations of TPUs, on any machine, and report what each takes.

`python -m experiments.kernel_report_tpu` writes the table; `--check` compares with it. Needs the extra `tpu`, no TPU.
A TPU core starts one bundle of instructions per cycle, so scheduled bundles are cycles, but for waits on memory. Bodies
of loops count as often as they run; what stands before and after a program's steps counts once, as if of one step.
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
import math
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import tyro
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding
from rich.console import Console

from experiments import kernel_launches_tpu, kernel_table

LISTINGS = Path(os.environ["LIBTPU_INIT_ARGS"].split()[0].partition("=")[2])
atexit.register(shutil.rmtree, LISTINGS)
TABLE = Path(__file__).parent / "results" / "kernels" / "tpu-static.csv"
TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
NAMES = ("rank_one", "selective_scan")  # of kernels, in part
SLACK = 0.02  # schedules are the same on every machine; this is for small edits


@dataclass(frozen=True)
class Row:
    """One compiled kernel: which, and what it takes."""

    tpu: str
    kernel: str
    dtype: str
    key_dim: int  # of scans N
    value_dim: int  # of scans D
    features: str
    # Scheduled, for 64 tokens and one value head; of scans for 64 tokens and 128 channels; of decoding for one token
    # and one head.
    bundles: int = 0
    mxu: int = 0  # slots of matrix units in these bundles
    valu: int = 0  # of vector units
    xlu: int = 0  # of units that move data across lanes
    spill_stores: int = 0  # vector registers stored for want of registers
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
    for tpu, kernel in itertools.product(TOPOLOGIES, kernel_launches_tpu.kernels()):
        yield Row(tpu, *kernel)


def compiled(row: Row, device: Any) -> Row:
    """The row with what the compiler's listings say of its kernel."""
    start = time.process_time()
    abstract = AbstractDevice(device_kind=device.device_kind, num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        launch = kernel_launches_tpu.launch(*row.key[1:])
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device)),
        launch.arguments,
    )
    jax.jit(launch.function).trace(*placed).lower(lowering_platforms=("tpu",)).compile()
    seconds = time.process_time() - start
    weights = runs(_only("final_bundles.txt", without="schedule-analysis"), launch.trips)
    slots = utilization(_only("final_hlo-static-per-bundle-utilization.txt"), weights)
    (report,) = LISTINGS.glob("*vmem_report.html")
    vmem = fast_memory(report.read_text())
    for path in LISTINGS.iterdir():
        path.unlink()

    def each(total: int) -> int:
        return round(total / launch.units)

    return replace(
        row,
        bundles=each(sum(weights)),
        mxu=each(slots["MXU"]),
        valu=each(slots["VALU"]),
        xlu=each(slots["XLU"]),
        spill_stores=each(slots["VSTORE:SPILL"]),
        vmem=vmem // 1024,
        seconds=round(seconds, 1),
    )


def runs(listing: str, trips: tuple[int, ...]) -> list[int]:
    """Of a listing of bundles, how often each runs in a step, given how often the loops in it do, in their order.

    A line is an address, LB where a loop begins, as many > as loops it is in, the outermost that of all steps, and the
    instructions in braces; an empty bundle is where the one before it is.
    """
    lines = re.findall(r"^ *(?:0x[0-9a-f]+|0) +(LB)?:?[^{\n]*?:?((?: *>)*) *(\{\}?)", listing, re.MULTILINE)
    left, weights, within, depth = list(trips), [], [], 0
    for label, arrows, instructions in lines:
        depth = depth if instructions == "{}" else arrows.count(">")
        if label:
            within = [*within[: depth - 1], left.pop(0) if depth > 1 else 1]
        weights.append(math.prod(within[:depth]))
    if left:
        raise ValueError(
            f"the listing has {len(left)} loops fewer than the kernel; the compiler unrolled some"
        )
    return weights


def utilization(listing: str, weights: list[int]) -> dict[str, int]:
    """Of a listing of the units that each bundle uses, the sum by unit, bundles counting by their weights."""
    units = [name.strip() for name in listing.splitlines()[1].split(",")]
    lines = listing.split("== UTILIZATION:")[1].split("==")[0].splitlines()
    counts = [list(map(int, line.split())) for line in lines if re.fullmatch(r"\s*\d[\d ]*", line)]
    return {
        name: sum(line[i] * weight for line, weight in zip(counts, weights, strict=True))
        for i, name in enumerate(units)
    }


def fast_memory(report: str) -> int:
    """Of the compiler's report on fast memory, the bytes that the kernel takes."""
    found = re.search(r"DATA\s*=\s*(\{.*?\})\s*;?\s*(?://|const|</script>)", report, re.DOTALL)
    if found is None:
        raise ValueError(
            "the compiler's report on fast memory has no data; this libtpu writes another format"
        )
    breakdown = json.loads(found[1])["hlo_breakdowns"]
    (size,) = (
        entry["total_size"] for name, entry in breakdown.items() if any(part in name for part in NAMES)
    )
    return size


def _only(ending: str, without: str = " ") -> str:
    """The one listing of the kernel that ends like this."""
    found = [
        path for name in NAMES for path in LISTINGS.glob(f"*{name}*{ending}") if without not in path.name
    ]
    (path,) = found
    return path.read_text()


if __name__ == "__main__":
    sys.exit(main())
