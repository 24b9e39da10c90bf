"""Mosaic GPU, Hopper: the warpgroup of the kernel in `backward_sm90` that loads and stores.

It loads each tile as soon as its place is free, stores the results, and computes the scores P of the next chunk.
"""

import itertools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.rank_one.backward_block_sm90 import (
    BOTH,
    COLUMNS_OF,
    EARLY,
    LATE,
    MIDDLE,
    SQUARE,
    STAGES,
    Warpgroup,
)
from pallas_kernels.rank_one.layout import COLUMNS
from pallas_kernels.rank_one.stream_sm90 import put_scores


class Loader(Warpgroup):
    """The third warpgroup."""

    def run(self) -> None:
        """Keep the places filled, and the scores one chunk ahead."""
        s, count = self.s, self.plan.chunks
        first = jnp.int32(0)
        self.copy(EARLY, first, s["loaded"].at[first])
        self.copy(MIDDLE, first, s["middle_loaded"])
        self.copy(LATE, first, s["late_loaded"])
        self.score(first)

        @pl.loop(1, count)
        def _(i):
            slot = lax.rem(i, STAGES)
            self.copy(EARLY, i, s["loaded"].at[slot])
            self.score(i)
            plgpu.barrier_wait(s["middle_consumed"])
            self.copy(MIDDLE, i, s["middle_loaded"])
            self.store(i - 1)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(s["stored"])
            self.copy(LATE, i, s["late_loaded"])

        self.store(count - 1)
        plgpu.wait_smem_to_gmem(0)

    def copy(self, names: tuple[str, ...], i: Array, ready: Any) -> None:
        """Start the copies of these arrays' tiles of chunk i."""
        b, h, n, tokens, tile = self.b, self.h, self.plan.chunks - 1 - i, self.tokens(i), self.tiles(i)
        group = self.plan.value_heads // self.given["k"].shape[2]
        part = [pl.ds(half * COLUMNS, COLUMNS) for half in BOTH]
        for name in names:
            if name not in self.given:
                continue
            source = self.given[name]
            if name in ("inverse", "gates"):
                plgpu.copy_gmem_to_smem(source.at[b, h, n], tile(name), ready)
            elif name == "states":
                for j, m in itertools.product(BOTH, BOTH):
                    plgpu.copy_gmem_to_smem(source.at[b, h, n, part[j], part[m]], tile(name, j, m), ready)
            else:
                head = h // group if name in ("q", "k") else h
                for j in BOTH:
                    target = tile("columns", COLUMNS_OF[name], j) if name in COLUMNS_OF else tile(name, j)
                    plgpu.copy_gmem_to_smem(source.at[b, tokens, head, part[j]], target, ready)

    def store(self, i: Any) -> None:
        """Start the copies of the results of chunk i when they are there."""
        plgpu.barrier_wait(self.s["finished"])
        b, h, n, tokens, tile = self.b, self.h, self.plan.chunks - 1 - i, self.tokens(i), self.tiles(i)
        for j in BOTH:
            places = {"dv": tile("columns", 1, j), "dk": tile("dstates", j, 1), "dq": tile("dstates", j, 0)}
            for name, place in places.items():
                if name in self.made:
                    target = self.made[name].at[b, tokens, h, pl.ds(j * COLUMNS, COLUMNS)]
                    plgpu.copy_smem_to_gmem(place, target)
        plgpu.copy_smem_to_gmem(self.s["dgates"], self.made["dgates"].at[b, h, n])

    def score(self, i: Array) -> None:
        """P of chunk i."""
        if not self.reads:
            return
        slot, tile = lax.rem(i, STAGES), self.tiles(i)
        plgpu.barrier_wait(self.s["loaded"].at[slot])
        factors = ((tile("q", j), tile("k", j).transpose((1, 0))) for j in BOTH)
        products = self.unit.product(SQUARE, *factors)
        put_scores(tile("scores"), products, tile("gates"), self.plan)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.s["scored"].at[slot])
