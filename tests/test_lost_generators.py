"""Generators that die in a run: their groups are generated again, the bound holds, the ledger adds up."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from meshrl.actors.reward import RewardConfig
from meshrl.actors.rollouts import Rollouts, RolloutsConfig
from meshrl.metrics import StepReport
from meshrl.programs.config import EvaluationConfig, MeshSizes
from meshrl.programs.grpo import GRPOConfig, grpo
from meshrl.programs.sft import WarmUpConfig
from meshrl.rollout import Rollout, SamplingParams
from meshrl.run import launch
from meshrl.session import Session, WorkerDied


def oddly_long(rollout: Rollout) -> float:
    """An untrained policy earns it now and then."""
    return float(len(rollout.response_token_ids) % 2)


CONFIG = GRPOConfig(
    steps=4,
    rollouts=RolloutsConfig(prompts_per_step=8, group_size=4, deadline_seconds=100),
    sampling=SamplingParams(max_tokens=32),
    reward=RewardConfig(function=oddly_long),
    warm_up=WarmUpConfig(steps=0),
    evaluation=EvaluationConfig(every=0, prompts=0),
    samples_every=0,
)


class Killer:
    """Runs the program, and kills a generator when so many groups have been started or finished."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, event: str, *kills: tuple[int, int]) -> None:
        """
        Args:
            event: `started`, on its way to a generator, or `finished`.
            kills: how many, and the replica to kill then.
        """
        self.kills = dict(kills)
        self.count = 0
        self.sources: set[Rollouts] = set()
        self.notes: list[str] = []
        self.session = Session()
        self.session.on_note = self.notes.append
        tell = getattr(Rollouts, event)

        def told(rollouts: Rollouts, what: object) -> None:
            tell(rollouts, what)
            self.sources.add(rollouts)
            self.count += 1
            replica = self.kills.pop(self.count, None)
            if replica is not None:
                os.kill(self.session.meshes["generator"].replicas[replica].pids[0], signal.SIGKILL)

        monkeypatch.setattr(Rollouts, event, told)

    def run(self, config: GRPOConfig, directory: Path) -> list[StepReport]:
        async def drive() -> list[StepReport]:
            async with self.session as session:
                return [report async for report in launch(grpo, config, directory=directory, session=session)]

        reports = asyncio.run(asyncio.wait_for(drive(), 200))
        assert not self.kills
        return reports


def metrics(reports: Sequence[StepReport]) -> list[dict[str, float]]:
    return [dict(report.metrics) for report in reports]


def test_a_synchronous_run_is_the_same_bit_for_bit_when_its_generator_dies_and_returns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        undisturbed = Killer(patch, "started").run(CONFIG, tmp_path / "undisturbed")
    with monkeypatch.context() as patch:
        # While the second batch of eight is sent out, which is then sent again, and while the third is.
        killer = Killer(patch, "started", (12, 0), (28, 0))
        disturbed = killer.run(CONFIG, tmp_path / "disturbed")
    assert sum("is back" in note for note in killer.notes) == 2
    assert sum(report.metrics["groups_trained"] for report in undisturbed[1:]) > 0
    assert metrics(disturbed) == metrics(undisturbed)


@pytest.mark.parametrize("staleness", [1, 2])
def test_ahead_of_training_the_bound_holds_and_the_ledger_adds_up_whoever_dies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, staleness: int
) -> None:
    killer = Killer(monkeypatch, "finished", (5, 0), (14, 1), (30, 0))
    config = replace(
        CONFIG,
        steps=6,
        meshes=MeshSizes(generator=2),
        rollouts=replace(CONFIG.rollouts, max_staleness=staleness),
    )
    reports = killer.run(config, tmp_path / "run")
    assert [report.step for report in reports] == list(range(7))
    assert max(report.metrics["staleness_max"] for report in reports[1:]) <= staleness
    assert sum("is gone" in note for note in killer.notes) == 3
    (source,) = killer.sources
    for ledger in (source.buffer.ledger, source.buffer.rollout_ledger):
        assert ledger.balanced
    assert source.buffer.ledger.trained == sum(report.metrics["groups_trained"] for report in reports[1:])


def test_the_last_generators_death_ends_the_run_where_none_may_be_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    killer = Killer(monkeypatch, "finished", (11, 0))
    config = replace(CONFIG, meshes=MeshSizes(generator_restarts=0))
    with pytest.raises(WorkerDied, match=r"(?s)generator\[0\] .* SIGKILL.*generator_restarts"):
        killer.run(config, tmp_path / "run")
