"""What a broadcast of weights costs besides copies and messages: `python -m benchmarks.plan`.

Planning, on one core, of synthetic layouts: a learner that shards every tensor by rows over all its ranks, to
generators of eight ranks each that cut every other tensor by columns. `over_first` is the time over that of the
first row. Each row runs in a process of its own, whose peak memory is told.

Sampled digests: drawing and hashing the blocks of one version, on one side, over the copy of the same bytes by
one core in the same run (reference).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch
import tyro
from rich.console import Console
from rich.table import Table

from meshrl.weights.digests import blocks_to_verify, digest
from meshrl.weights.layout import Box, Layout, Parameter, join
from meshrl.weights.plan import plan

TENSOR_PARALLEL = 8
PLANS = (
    # layers, tensors of each, shapes that differ, learner ranks, generator ranks
    (61, 250, 10, 256, 128),
    (61, 1000, 10, 64, 32),
    (61, 1000, 10, 256, 128),
    (30, 1000, 100, 256, 128),
    (61, 1000, 1000, 256, 128),
)
SLOTS = {"134 MB in 4 tensors": [(2048, 4096)] * 4, "31 MB in 300 tensors": [(128, 200)] * 300}


@dataclass(frozen=True)
class PlanBenchmark:
    """Time planning and sampled digests."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object per row in place of the tables."""


def main() -> None:
    """Run and print."""
    benchmark = tyro.cli(PlanBenchmark, description=__doc__)
    processes = multiprocessing.get_context("spawn")
    with processes.Pool(1, maxtasksperchild=1) as pool:
        plans = [pool.apply(time_plan, case) for case in PLANS]
    for row in plans:
        row["over_first"] = row["plan_seconds"] / plans[0]["plan_seconds"]
    digests = [time_digests(case) for case in SLOTS]
    for title, rows in (("Planning", plans), ("Sampled digests", digests)):
        if benchmark.json:
            for row in rows:
                print(json.dumps(row))
            continue
        table = Table(title=title)
        for name in rows[0]:
            table.add_column(name.replace("_", " "))
        for row in rows:
            cells = (f"{cell:.3g}" if isinstance(cell, float) else f"{cell}" for cell in row.values())
            table.add_row(*cells)
        Console(width=160).print(table)


def time_plan(layers: int, tensors: int, shapes: int, learners: int, generators: int) -> dict[str, Any]:
    """One row: of making the plan and adding up who reads how much from whom."""
    one = {}
    for number in range(layers * tensors):
        shape = (4096 + 256 * (number % tensors % shapes), 4096)
        one[f"p{number}"] = Parameter(shape, torch.bfloat16, (Box.whole(shape),))
    whole = Layout(one, ranks=1)
    source = whole.split(dict.fromkeys(one, 0), learners)
    cut = whole.split({name: number % 2 for number, name in enumerate(one)}, TENSOR_PARALLEL)
    target = join([cut] * (generators // TENSOR_PARALLEL))
    started = perf_counter()
    made = plan(source, target)
    moved = int(made.traffic.sum())
    seconds = perf_counter() - started
    return {
        "parameters": f"{sum(p.shape[0] * p.shape[1] for p in one.values()) / 1e12:.1f} T",
        "tensors": len(one),
        "different_shapes": shapes,
        "ranks": f"{learners} to {generators}",
        "plan_seconds": seconds,
        "bytes_moved_over_needed": moved / made.bytes_needed,
        "peak_gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def time_digests(case: str) -> dict[str, Any]:
    """One row: medians over versions, each after a copy that leaves nothing of the weights in caches."""
    layout = Layout(
        {f"p{i}": Parameter(s, torch.float32, (Box.whole(s),)) for i, s in enumerate(SLOTS[case])}, ranks=1
    )
    made = plan(layout, layout)
    cells, stretches = made.cells(0), made.stretches(0)
    held = [torch.randn(cell.box.shape) for cell in cells]
    copies = [torch.zeros_like(tensor) for tensor in held]
    copying, hashing = [], []
    for version in range(11):
        copying.append(_seconds(lambda: [a.copy_(b) for a, b in zip(copies, held, strict=True)]))
        hashing.append(
            _seconds(
                lambda v=version: [
                    digest(block.of(held[block.cell]))
                    for block in blocks_to_verify(cells, stretches, "sampled", v)
                ]
            )
        )
    copy, sampled = statistics.median(copying), statistics.median(hashing)
    return {
        "case": case,
        "copy_seconds": copy,
        "digest_seconds": sampled,
        "digest_over_copy": sampled / copy,
    }


def _seconds(work: Callable[[], object]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started


if __name__ == "__main__":
    main()
