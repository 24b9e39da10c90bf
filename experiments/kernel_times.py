"""Time every GPU kernel alone, on a Hopper GPU, beside what the machine can do.

`python -m experiments.kernel_times --out FILE.csv` times the launches of `experiments.kernel_launches` on random
numbers: milliseconds; bytes of arguments and results over time, as a share of the machine's copy; and operations of the
matrix products that the formulas have over time, as a share of the machine's largest products. Copy and products are
measured in the same call. Registers, spills and shared memory are in `experiments/results/kernels/h200-static.csv`.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from tyro.conf import arg

from experiments import kernel_table
from experiments.kernel_launches import BATCH, HEADS, TIME, Kernel, Key, all_launches
from experiments.timing import seconds_per_call
from pallas_kernels.device import Unsupported, check_hopper
from pallas_kernels.rank_one.layout import CHUNK

LAUNCHES = 10  # of a kernel in one program: to start a program takes as long as a small kernel
COPIED, SQUARE = 2**28, 8192  # float32 numbers, and the size of matrices, for the machine's limits


@dataclass(frozen=True)
class Flags:
    """Time every GPU kernel alone: ms, GB/s, TFLOP/s, and shares of what this machine reaches."""

    # Names of kernels to time, such as forward or scan_backward; by default all.
    kernels: Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="")] = ()

    # Measurements of at least 20 ms each; the median counts.
    repeats: int = 5

    # The table as CSV; nothing is written by default.
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None


@dataclass(frozen=True)
class Row(Kernel):
    """One kernel. Shares are of this machine's copy and of its bfloat16 products; 0 where nothing is multiplied."""

    ms: float
    gb_per_s: float
    share_of_copy: float
    tflop_per_s: float = 0.0
    share_of_products: float = 0.0


def main(flags: Flags) -> int:
    """Time the kernels and print the table; returns 2 where they cannot run or a name is unknown."""
    launches = list(all_launches())
    names = dict.fromkeys(key[0] for key, *_ in launches)
    try:
        check_hopper()
        if unknown := [name for name in flags.kernels if name not in names]:
            raise ValueError(f"--kernels {unknown[0]}: there are {', '.join(names)}")
        if flags.repeats < 1:
            raise ValueError(f"--repeats {flags.repeats}: must be at least 1")
    except (ValueError, Unsupported) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    copy, products = machine_limits(flags.repeats)
    print(f"this machine: copy {copy / 1e9:.0f} GB/s, products {products / 1e12:.0f} TFLOP/s", flush=True)
    rows = []
    for key, function, arguments in launches:
        if key[0] in (flags.kernels or names):
            rows.append(measure(key, function, arguments, copy, products, flags.repeats))
            print(*rows[-1].key, f"{rows[-1].ms:.3f} ms", flush=True)
            if flags.out is not None:
                kernel_table.write(flags.out, rows)
    Console(width=150).print(kernel_table.render(rows))
    return 0


def machine_limits(repeats: int) -> tuple[float, float]:
    """Return bytes a second that a copy reads and writes, and operations a second of bfloat16 products."""
    x = random_array(0, jax.ShapeDtypeStruct((COPIED,), jnp.float32))
    copied = jax.jit(lambda x: x + 1.0)
    copy = 8 * COPIED / seconds_per_call(lambda: copied(x), jax.block_until_ready, repeats)
    a = random_array(1, jax.ShapeDtypeStruct((SQUARE, SQUARE), jnp.bfloat16))
    product = jax.jit(lambda a: a @ a)
    return copy, 2 * SQUARE**3 / seconds_per_call(lambda: product(a), jax.block_until_ready, repeats)


def measure(
    key: Key, function: Callable, arguments: tuple, copy: float, products: float, repeats: int
) -> Row:
    """Return the row of one kernel."""
    function = jax.jit(function)  # lowered once for all launches
    leaves, tree = jax.tree.flatten(arguments)
    arrays = [random_array(n, leaf) for n, leaf in enumerate(leaves)]
    in_place = key[0] == "decode"  # then each launch takes the state that the last one has updated
    # Otherwise launches differ in their smallest argument, and all results are kept: XLA merges equal launches.
    differs = min(range(len(arrays)), key=lambda i: arrays[i].nbytes)
    others = [random_array(n, leaves[differs]) for n in range(LAUNCHES)]

    def launches(others: list[jax.Array], *leaves: jax.Array) -> Any:
        given, results = list(leaves), []
        for other in others:
            if in_place and results:
                given[0] = results.pop()[0]
            elif not in_place:
                given[differs] = other
            results.append(function(*jax.tree.unflatten(tree, given)))
        return results

    call = jax.jit(launches, donate_argnums=1 if in_place else ())

    def run() -> Any:
        results = call(others, *arrays)
        if in_place:
            arrays[0] = results[0][0]
        return results

    seconds = seconds_per_call(run, jax.block_until_ready, repeats) / LAUNCHES
    results = jax.tree.leaves(jax.eval_shape(function, *arguments))
    moved = sum(x.size * x.dtype.itemsize for x in (*leaves, *results))
    rate = moved / seconds
    row = Row(*key, round(seconds * 1e3, 4), round(rate / 1e9, 1), round(rate / copy, 3))
    rate = multiplications(key) / seconds
    return replace(row, tflop_per_s=round(rate / 1e12, 1), share_of_products=round(rate / products, 3))


def random_array(seed: int, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Small random numbers; zeros where they must be integers."""
    if jnp.issubdtype(like.dtype, jnp.integer):
        return jnp.zeros(like.shape, like.dtype)
    return (0.1 * jax.random.normal(jax.random.key(seed), like.shape)).astype(like.dtype)


def multiplications(key: Key) -> float:
    """Operations of the matrix products in the formulas of a kernel, two a multiplication; 0 for the others.

    Those of `pallas_kernels.rank_one`, with all that the features ask for, but for the inversion in `solve`.
    """
    kernel, k, v, features = key
    erases = "erases" in features
    state, rows, keys = 2 * k * v, 2 * CHUNK * v, 2 * CHUNK * k  # of a token: K × V, C × V and C × K
    recurrence = (2 + erases) * state + (1 + erases) * rows + keys  # O, D, S, P; or dD, dR, dS, P
    inputs = (2 + erases) * state + (1 + erases) * (
        rows + 2 * keys
    )  # P̄, L̄, and what they and the states give q and k
    each = {
        "solve": keys,
        "forward": recurrence,
        "forward_residuals": recurrence,
        "backward_states": recurrence,
        "backward_chunks": inputs,
        "backward": recurrence + inputs,
    }
    return float(each.get(kernel, 0) * BATCH * TIME * HEADS)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Flags, prog="python -m experiments.kernel_times")))
