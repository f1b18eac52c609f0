"""GRPO steps on real meshes, synchronous and ahead of training: `python -m benchmarks.step`.

Lengths of responses are `fixed`: all of `mean_tokens`; or `geometric`: each token ends a response with probability
1/`mean_tokens`, up to `most_tokens`; or those of the `task`: GRPO at its defaults, after its warm-up. The first two
begin from random weights that never choose the end token, and a learning rate of 0 keeps it so.

Reference: the computation alone, which is what generator and learner were busy with in the same steps: generation is
the time of the engine's decode steps, training that of `learner.step`. `step_over_longest_phase` is a step's time over
the longer of the two: 1.0 would mean that everything else hides behind it. `step_over_compute` is over their sum, which
is the best that synchronous steps can do. Idle shares are of the time of all counted steps.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from meshrl.actors.learner import LearnerConfig, OptimizerConfig
from meshrl.actors.models import ModelConfig, build_model, export_hugging_face, load_tokenizer
from meshrl.actors.reward import RewardConfig
from meshrl.actors.rollouts import RolloutsConfig
from meshrl.metrics import StepReport
from meshrl.programs.config import EvaluationConfig, MeshSizes
from meshrl.programs.grpo import GRPOConfig, grpo
from meshrl.programs.sft import WarmUpConfig
from meshrl.rollout import Rollout, SamplingParams
from meshrl.run import launch
from meshrl.session import Session

Lengths = Literal["fixed", "geometric", "task"]

PROMPTS = 1024


@dataclass(frozen=True)
class StepBenchmark:
    """Time GRPO steps with 1+1+1 processes."""

    steps: int = 40
    """Steps of each case; the first quarter is not counted."""
    staleness: tuple[int, ...] = (0, 1, 2)
    """One case each, for each kind of lengths."""
    lengths: tuple[Lengths, ...] = ("fixed", "geometric")
    meshes: MeshSizes = MeshSizes()
    """Processes of each role."""
    model: str = "tiny-0.4m"
    """Not of `task`, as all below."""
    prompts_per_step: int = 8
    group_size: int = 8
    prompt_tokens: int = 16
    mean_tokens: int = 48
    most_tokens: int = 192
    """Cap where lengths are geometric."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object per row in place of the table."""


def main() -> None:
    """Run and print."""
    benchmark = tyro.cli(StepBenchmark, description=__doc__)
    rows = []
    for lengths in benchmark.lengths:
        with tempfile.TemporaryDirectory() as directory:
            config = program_config(benchmark, lengths, Path(directory))
            rows += [asyncio.run(measure(config, lengths, staleness)) for staleness in benchmark.staleness]
    if benchmark.json:
        for row in rows:
            print(json.dumps(row))
        return
    table = Table(title="GRPO step, medians")
    for name in rows[0]:
        table.add_column(name.replace("_", " "))
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=240).print(table)


def program_config(benchmark: StepBenchmark, lengths: Lengths, directory: Path) -> GRPOConfig:
    """Settings of the program; prompts and weights that it starts from are written into the directory."""
    config = GRPOConfig(
        steps=benchmark.steps,
        meshes=benchmark.meshes,
        evaluation=EvaluationConfig(prompts=0),
        samples_every=0,
    )
    if lengths == "task":
        return replace(config, evaluation=EvaluationConfig(every=0, prompts=8, greedy=False))
    data = directory / "prompts.jsonl"
    prompts = (f"{number:0{benchmark.prompt_tokens}}" for number in range(PROMPTS))
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    model = ModelConfig(benchmark.model, max_tokens=benchmark.prompt_tokens + benchmark.most_tokens)
    endless_weights(model, directory / "weights")
    return replace(
        config,
        data=data,
        model=model,
        learner=LearnerConfig(OptimizerConfig(learning_rate=0.0), initial_weights=directory / "weights"),
        reward=RewardConfig(function=alternating),
        rollouts=RolloutsConfig(benchmark.prompts_per_step, benchmark.group_size),
        sampling=sampling(benchmark, lengths),
        warm_up=WarmUpConfig(steps=0),
    )


def sampling(benchmark: StepBenchmark, lengths: Lengths) -> SamplingParams:
    """What makes responses of such lengths, of weights that choose every byte equally often."""
    if lengths == "fixed":
        return SamplingParams(max_tokens=benchmark.mean_tokens)
    ends = tuple(range(max(1, round(256 / benchmark.mean_tokens))))
    return SamplingParams(max_tokens=benchmark.most_tokens, stop_token_ids=ends)


def endless_weights(config: ModelConfig, directory: Path) -> None:
    """Write random weights that choose every byte about equally often, and what is no byte, such as the end, never.

    The embedding is also the output layer. One of its dimensions outweighs all others; there bytes have one value, and
    the rest has its opposite.
    """
    tokenizer = load_tokenizer("bytes")
    weights = build_model(config, tokenizer.vocab_size, seed=0).state_dict()
    embedding: torch.Tensor = weights["tok_embeddings.weight"]
    embedding[:256, 0], embedding[256:, 0] = 8.0, -8.0
    export_hugging_face(weights, config, tokenizer, directory)


def alternating(rollout: Rollout) -> float:
    """Rewards that differ within groups, whatever the responses are."""
    return float(rollout.id % 2)


async def measure(config: GRPOConfig, lengths: Lengths, staleness: int) -> dict[str, Any]:
    """One row."""
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
    return {"lengths": lengths, "staleness": staleness} | summarize(reports, ends)


def summarize(reports: Sequence[StepReport], ends: Sequence[float]) -> dict[str, Any]:
    """Medians over the counted steps: neither the first quarter nor the last, which evaluates and exports.

    Args:
        reports: of all steps, from 0 on.
        ends: when each was done, in seconds.
    """
    first = len(reports) // 4
    steps = [after - before for before, after in pairwise(ends)][first:-1]
    counted = reports[first + 1 : -1]
    step = statistics.median(steps)
    phases = {
        name: statistics.median([report.seconds.get(name, 0.0) for report in counted])
        for name in counted[0].seconds
    }

    def busy(phase: str) -> float:
        return sum(report.seconds.get(phase, 0.0) for report in counted) / sum(steps)

    def metric(name: str) -> float:
        return statistics.fmean([report.metrics[name] for report in counted])

    compute = phases["generate"], phases["train"]
    rollouts = metric("response_tokens") / metric("response_tokens_mean")
    return {
        "rollouts_per_second": rollouts * len(steps) / sum(steps),
        "response_tokens_per_second": metric("response_tokens") * len(steps) / sum(steps),
        "step_over_longest_phase": step / max(compute),
        "step_over_compute": step / sum(compute),
        "generator_idle_share": 1 - busy("generate"),
        "learner_idle_share": 1 - busy("train"),
        "step_seconds": step,
        **{f"{name}_seconds": seconds for name, seconds in phases.items()},
        "response_tokens_mean": metric("response_tokens_mean"),
        "staleness_mean": metric("staleness_mean"),
    }


if __name__ == "__main__":
    main()
