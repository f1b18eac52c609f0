"""Seconds of one GRPO step on real meshes, by phase: `python -m benchmarks.step`.

Reference: the computation alone, which is what generator and learner were busy with in the same steps.
`step_over_compute` is the step's time over that sum: 1.0 would mean that messages, handoff and weights
cost nothing, below 1.0 that generation and training overlap.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from meshrl.metrics import StepReport
from meshrl.programs.config import EvaluationConfig, MeshSizes
from meshrl.programs.grpo import GRPOConfig, grpo
from meshrl.programs.sft import WarmUpConfig
from meshrl.run import launch
from meshrl.session import Session

COMPUTE = ("generate", "train")
"""Phases in which a mesh computes; the rest is moving data and waiting."""


@dataclass(frozen=True)
class StepBenchmark:
    """Time GRPO steps with 1+1+1 processes, synchronous and one step ahead."""

    steps: int = 40
    """Steps of each case; the first quarter is not counted."""
    staleness: tuple[int, ...] = (0, 1)
    """One case each."""
    meshes: MeshSizes = MeshSizes()
    """Processes of each role."""
    warm_up_steps: int = 600
    """Most supervised steps first, as in the demo, cached; 0: none."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object per row in place of the table."""


def main() -> None:
    """Run and print."""
    benchmark = tyro.cli(StepBenchmark, description=__doc__)
    rows = [asyncio.run(measure(benchmark, staleness)) for staleness in benchmark.staleness]
    if benchmark.json:
        for row in rows:
            print(json.dumps(row))
        return
    table = Table(title="GRPO step, median seconds", show_lines=False)
    for name in rows[0]:
        table.add_column(name.replace("_", " "))
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=160).print(table)


async def measure(benchmark: StepBenchmark, staleness: int) -> dict[str, Any]:
    """One row: medians over the counted steps."""
    config = GRPOConfig(
        steps=benchmark.steps,
        meshes=benchmark.meshes,
        warm_up=WarmUpConfig(steps=benchmark.warm_up_steps),
        evaluation=EvaluationConfig(every=0, prompts=8, greedy=False),
        samples_every=0,
    )
    config = replace(config, rollouts=replace(config.rollouts, max_staleness=staleness))
    reports: list[StepReport] = []
    ends: list[float] = []
    session = Session()
    session.on_note = lambda text: None
    async with session:
        with tempfile.TemporaryDirectory() as directory:
            async for report in launch(grpo, config, directory=directory, session=session):
                reports.append(report)
                ends.append(perf_counter())
    meshes = benchmark.meshes
    first = benchmark.steps // 4 + 1
    # The last step evaluates.
    step_seconds = statistics.median([b - a for a, b in pairwise(ends)][first:-1])
    counted = reports[first:-1]
    phases = {name: _median(counted, name) for name in counted[0].seconds}
    compute = sum(phases.get(name, 0.0) for name in COMPUTE)
    tokens = statistics.median([report.metrics["response_tokens"] for report in counted])
    return {
        "case": f"{meshes.generator} generator + {meshes.reward} reward + {meshes.learner} learner",
        "staleness": staleness,
        "step_seconds": step_seconds,
        **{f"{name}_seconds": seconds for name, seconds in phases.items()},
        "overhead_seconds": step_seconds - compute,
        "step_over_compute": step_seconds / compute,
        "response_tokens_per_second": tokens / step_seconds,
    }


def _median(reports: Sequence[StepReport], phase: str) -> float:
    return statistics.median([report.seconds.get(phase, 0.0) for report in reports])


if __name__ == "__main__":
    main()
