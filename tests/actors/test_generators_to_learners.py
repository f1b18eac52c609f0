"""From docks to gradients on real meshes: however many generators and learners, the same batch, loss and gradient."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from handoff_workers import Filler, groups_of
from learner_workers import ShowsGradients
from torch import Tensor

from meshrl.actors.learner import LearnerConfig, LearnerSetup
from meshrl.actors.models import ModelConfig
from meshrl.advantages import group_relative
from meshrl.handoff.handoff import Handoff, HandoffConfig
from meshrl.losses import SequenceMean, policy_loss
from meshrl.mesh import RoleMesh
from meshrl.programs.tasks import ArithmeticTask
from meshrl.rollout import RolloutGroup
from meshrl.session import Session

MODEL = ModelConfig("tiny-0.4m", max_tokens=64)
LOSSES = {"token mean": policy_loss(), "sequence mean": policy_loss(aggregation=SequenceMean())}
SIZES = [4, 3, 2, 4]
"""Rollouts of each group."""


class SmallFiller(Filler):
    """Token ids that the tiny model knows."""

    vocabulary = 16


@dataclass(frozen=True)
class Answer:
    """Of one loss: what every learner rank found."""

    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    content: dict[int, dict[str, Tensor]]
    """By rollout, of all ranks."""
    ranks: int
    """Ranks that had some rollouts."""


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as started:
        yield started


async def measure(learners: int, generators: Sequence[int]) -> dict[tuple[int, str], Answer]:
    """By number of generators that hold the rollouts, and loss. The last number is that of all generators."""
    config = LearnerConfig(max_gradient_norm=0)
    answers = {}
    async with Session() as session:
        generator, learner = await asyncio.gather(
            session.spawn(SmallFiller, replicas=generators[-1], name="generator"),
            session.spawn(ShowsGradients, procs=learners, name="learner"),
        )
        store = await learner.call_rank("open_store")
        await learner.call("setup", LearnerSetup(config, MODEL, ArithmeticTask(), 3, store))
        handoff = await Handoff.connect(
            source=generator, target=learner, config=HandoffConfig(microbatch_tokens=24)
        )
        for number in generators:
            groups = groups_of(SIZES, replicas=number, first_id=1)
            await generator.call("fill", [handle for group in groups for handle in group.rollouts])
            for name, loss in LOSSES.items():
                answers[number, name] = await answer(handoff, learner, groups, loss)
            ids = [handle.id for group in groups for handle in group.rollouts]
            await generator.call("release", ids)
    return answers


async def answer(handoff: Handoff, learner: RoleMesh, groups: list[RolloutGroup], loss: object) -> Answer:
    rewards, numbers = handoff.rewards(groups)
    ticket = await handoff(groups, advantages=handoff.on_mesh(group_relative)(rewards, numbers))
    ranks = await learner.call("gradients_of", loss, ticket)
    content = {rollout: columns for *_, part in ranks for rollout, columns in part.items()}
    assert len(content) == sum(len(part) for *_, part in ranks)  # no rollout is on two ranks
    metrics, gradients, _ = ranks[0]
    return Answer(metrics, gradients, content, sum(bool(part) for *_, part in ranks))


@pytest.fixture(scope="module")
def alone(runner: asyncio.Runner) -> dict[tuple[int, str], Answer]:
    return runner.run(measure(1, [1, 2]))


@pytest.mark.parametrize("learners", [1, 2, 4])
def test_batch_loss_and_gradient_are_those_of_one_process(
    learners: int, runner: asyncio.Runner, alone: dict[tuple[int, str], Answer]
) -> None:
    answers = alone if learners == 1 else runner.run(measure(learners, [1, 2]))
    for (generators, name), found in answers.items():
        wanted = alone[1, name]
        assert set(found.content) == set(wanted.content) and len(found.content) == sum(SIZES)
        assert found.ranks == learners
        for rollout, columns in wanted.content.items():
            for column, values in columns.items():
                assert torch.equal(found.content[rollout][column], values), (generators, rollout, column)
        for metric in ("loss", "entropy", "gradient_norm", "ratio_mean", "logprob_difference_mean"):
            assert found.metrics[metric] == pytest.approx(wanted.metrics[metric], rel=1e-5), metric
        for parameter, gradient in wanted.gradients.items():
            error = (found.gradients[parameter] - gradient).abs().max() / gradient.abs().max()
            assert error <= 1e-5, (generators, name, parameter, float(error))
