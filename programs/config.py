"""Settings that every program shares; nested frozen dataclasses, one flag per field on the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from meshrl.actors.generator import GeneratorConfig
from meshrl.actors.learner import LearnerConfig
from meshrl.actors.models import ModelConfig
from meshrl.actors.reward import RewardConfig
from meshrl.actors.rollouts import Rollouts, RolloutsConfig
from meshrl.errors import UserError
from meshrl.rollout import SamplingParams
from meshrl.weights.arena import WeightsConfig


@dataclass(frozen=True)
class MeshSizes:
    """Processes of each role."""

    generator: int = 1
    """Generator replicas, one process each."""
    learner: int = 1
    """Learner processes; they share one model by FSDP and tensor parallelism."""
    reward: int = 1
    """Reward processes."""
    generator_restarts: int = 3
    """How often, over a run, another process takes the place of a generator that died. 0: never; the others do its
    work, and the death of the last one ends the run."""

    def __post_init__(self) -> None:
        for role in ("generator", "learner", "reward"):
            if getattr(self, role) < 1:
                raise UserError(f"meshes.{role} is {getattr(self, role)}: each role needs at least 1 process")
        if self.generator_restarts < 0:
            raise UserError(f"meshes.generator_restarts is {self.generator_restarts}: use 0 or more")


@dataclass(frozen=True)
class EvaluationConfig:
    """Accuracy on prompts held out of training: the share of responses with a reward of 1."""

    every: int = 50
    """Evaluate after this many steps, and always before the first and after the last; 0: only then."""
    prompts: int = 256
    """Held-out prompts, one response each; fewer where the task has fewer. 0: never evaluate."""
    greedy: bool = True
    """Also report the accuracy of greedy decoding."""

    def __post_init__(self) -> None:
        for name in ("every", "prompts"):
            if getattr(self, name) < 0:
                raise UserError(f"evaluation.{name} is {getattr(self, name)}: use 0 or more")

    def due(self, step: int, last: int) -> bool:
        return step == last or (self.every > 0 and step % self.every == 0)

    async def run(self, rollouts: Rollouts) -> dict[str, float]:
        """`heldout_accuracy` at temperature 1, and `heldout_accuracy_greedy`; nothing where there are no prompts."""
        if min(self.prompts, rollouts.heldout_size) == 0:
            return {}
        async with rollouts.interrupted():
            metrics = {"heldout_accuracy": await rollouts.evaluate(self.prompts, temperature=1.0)}
            if self.greedy:
                metrics["heldout_accuracy_greedy"] = await rollouts.evaluate(self.prompts, temperature=0.0)
        return metrics


@dataclass(frozen=True)
class ProgramConfig:
    """What a program with learner, generator and reward meshes needs."""

    task: str = "arithmetic"
    """`arithmetic` (two-digit addition, built in), or `reasoning_gym:NAME` (needs `pip install meshrl[tasks]`)."""
    data: Path | None = None
    """JSONL or Parquet file with `prompt` and `answer` fields, used in place of `task`; None: use `task`."""
    seed: int = 0
    """Seed of weights, prompts and samples."""
    meshes: MeshSizes = field(default_factory=MeshSizes)
    model: ModelConfig = field(default_factory=ModelConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=8))
    rollouts: RolloutsConfig = field(default_factory=RolloutsConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    samples_every: int = 50
    """Show a few sampled rollouts after this many steps; 0: never."""
    samples: int = 3
    """How many to show."""

    def samples_due(self, step: int) -> int:
        """How many rollouts to show after this step."""
        return self.samples if self.samples_every > 0 and step % self.samples_every == 0 else 0
