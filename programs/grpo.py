"""GRPO: group-relative policy optimization (Shao et al. 2024, arXiv:2402.03300), with DAPO's asymmetric clip
(Yu et al. 2025, arXiv:2503.14476) and token-mean aggregation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from meshrl.actors.learner import LearnerConfig, OptimizerConfig
from meshrl.advantages import group_relative
from meshrl.errors import UserError
from meshrl.losses import policy_loss
from meshrl.metrics import StepReport, Stopwatch
from meshrl.programs.config import ProgramConfig
from meshrl.programs.sft import WarmUpConfig, warm_up
from meshrl.programs.start import finish, start
from meshrl.session import Session


@dataclass(frozen=True)
class GRPOConfig(ProgramConfig):
    """GRPO on a small Qwen3: a short supervised warm-up, then reinforcement learning."""

    steps: int = 400
    """Optimizer steps."""
    clip: tuple[float, float] = (0.2, 0.28)
    """Ratio clip, below and above 1."""
    learner: LearnerConfig = field(
        default_factory=lambda: LearnerConfig(
            optimizer=OptimizerConfig(learning_rate=7e-4, decay="linear", final_fraction=0.1)
        )
    )
    warm_up: WarmUpConfig = field(default_factory=WarmUpConfig)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"steps is {self.steps}: at least 1 is needed")
        if self.sampling.temperature <= 0:
            raise UserError(
                f"sampling.temperature is {self.sampling.temperature:g}: training needs samples of one prompt to "
                "differ, so above 0 (held-out prompts are answered greedily as well)"
            )


async def grpo(session: Session, config: GRPOConfig) -> AsyncIterator[StepReport]:
    """Sample groups, score them, push each sample up or down by how it did within its group."""
    loss = policy_loss(clip=config.clip)
    parts = await start(session, config, config.steps, loss)
    learner, weights, handoff = parts.learner, parts.weights, parts.handoff
    await warm_up(session, parts, config, config.warm_up)

    async with parts.rollouts(config) as rollouts:
        await weights.broadcast()
        yield StepReport(0, await config.evaluation.run(rollouts))
        for step in range(1, config.steps + 1):
            time = Stopwatch()
            batch = await rollouts.take()  # waits for: groups generated and graded
            time.lap("generate", batch.generate_seconds).lap("reward", batch.reward_seconds).rest("wait")

            batch = rollouts.drop_zero_variance(batch)
            rewards, groups = handoff.rewards(batch.groups)  # tensors on the learner mesh
            advantages = handoff.on_mesh(group_relative)(rewards, groups)
            ticket = await handoff(batch.groups, advantages=advantages)
            time.rest("handoff")

            update = await learner.step(loss, ticket)
            time.rest("train")
            metrics = {**batch.metrics(weights.published, ticket), **update.metrics}
            version = await weights.publish()  # waits for: the learner's copy; generators pull meanwhile
            time.rest("weights")

            if config.evaluation.due(step, config.steps):
                await weights.arrival(version)
                metrics |= await config.evaluation.run(rollouts)
            samples = await rollouts.samples(batch, config.samples_due(step))
            rollouts.release(batch, ticket, update.advantages, step, live=weights.arrival(version))
            yield StepReport(step, metrics, time.seconds, samples, batch.note(ticket))
    await finish(session, parts)
