"""Supervised fine-tuning: cross-entropy on a task's answers; also the warm-up of the other programs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

from meshrl.actors.learner import OptimizerConfig
from meshrl.losses import cross_entropy
from meshrl.metrics import StepReport, Stopwatch
from meshrl.programs.config import ProgramConfig
from meshrl.programs.start import Parts, finish, start
from meshrl.session import Session


@dataclass(frozen=True)
class WarmUpConfig:
    """A short supervised phase, so that the policy has something to improve."""

    steps: int = 600
    """Most optimizer steps; 0: no warm-up."""
    examples_per_step: int = 64
    until_accuracy: float = 0.3
    """Stop when held-out sampled accuracy reaches this; above 1: run all steps."""
    check_every: int = 25
    """Steps between two looks at held-out accuracy; 0: only after the last."""
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(learning_rate=3e-3, warmup_steps=20)
    )
    cache: bool = True
    """Keep the result in `~/.cache/meshrl` (`$XDG_CACHE_HOME/meshrl`) by a hash of its inputs, for next time."""


@dataclass(frozen=True)
class SFTConfig(ProgramConfig):
    """Supervised fine-tuning on a task's answers, with held-out accuracy by generation.

    How often that is measured is `train.check_every`; `evaluation.every`, `samples` and `samples_every` have no effect.
    """

    train: WarmUpConfig = field(default_factory=lambda: WarmUpConfig(cache=False, until_accuracy=2.0))


async def sft(session: Session, config: SFTConfig) -> AsyncIterator[StepReport]:
    """Train on the task's answers; reports like any other program."""
    parts = await start(session, config, config.train.steps)
    async for report in supervise(parts, config, config.train):
        yield report
    await finish(session, parts)


async def supervise(parts: Parts, config: ProgramConfig, train: WarmUpConfig) -> AsyncIterator[StepReport]:
    """One report per optimizer step, held-out accuracy in every `check_every`-th; ends when it is high enough."""
    await parts.learner.reset_optimizer(train.optimizer)
    async with parts.rollouts(config) as rollouts:
        for step in range(1, train.steps + 1):
            time = Stopwatch()
            first = (step - 1) * train.examples_per_step
            update = await parts.learner.supervised_step(cross_entropy(), first, train.examples_per_step)
            time.rest("train")
            metrics = dict(update.metrics)
            if step == train.steps or (train.check_every > 0 and step % train.check_every == 0):
                await parts.weights.broadcast()
                time.rest("weights")
                metrics |= await config.evaluation.run(rollouts)
                time.rest("generate")
            yield StepReport(step, metrics, time.seconds)
            if metrics.get("heldout_accuracy", 0.0) >= train.until_accuracy:
                return


async def warm_up(session: Session, parts: Parts, config: ProgramConfig, train: WarmUpConfig) -> None:
    """Supervise, or load what the same inputs gave before; then a fresh optimizer."""
    if train.steps == 0:
        return
    cached = cache_directory() / f"warm-up-{fingerprint(config, train)}"
    if train.cache and cached.is_dir():
        session.note(f"warm-up: loaded from {cached}")
        await parts.learner.load(cached)
    else:
        session.note(f"warm-up: supervised, until held-out accuracy {train.until_accuracy:g}")
        report = None
        async for report in supervise(parts, config, train):
            if "heldout_accuracy" in report.metrics:
                session.note(
                    f"warm-up step {report.step}  loss {report.metrics['loss']:.3f}  "
                    f"held-out accuracy {report.metrics['heldout_accuracy']:.3f}"
                )
        if train.cache:
            unfinished = cached.with_name(f"{cached.name}.{os.getpid()}")
            await parts.learner.save(unfinished)
            if cached.exists():
                shutil.rmtree(unfinished)
            else:
                unfinished.rename(cached)
    await parts.learner.reset_optimizer(parts.optimizer)


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/meshrl`, by default `~/.cache/meshrl`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshrl"


def fingerprint(config: ProgramConfig, train: WarmUpConfig) -> str:
    """Hash of all that the warm-up depends on: task, data, seed, model, optimizer, learner processes, library versions,
    and the evaluation that says when it is over."""
    inputs = {
        "task": config.task,
        "data": hashlib.sha256(config.data.read_bytes()).hexdigest() if config.data else None,
        "seed": config.seed,
        "model": asdict(config.model),
        "train": asdict(train),
        "learner": asdict(config.learner),
        "learners": config.meshes.learner,
        "evaluation": asdict(config.evaluation),
        "sampling": asdict(config.sampling),
        "versions": {name: version(name) for name in ("meshrl", "torch", "torchtitan")},
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()[:16]
