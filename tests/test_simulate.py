"""The program in virtual time: deterministic, its ledger adds up, and what staleness does is what it should."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

import pytest

from meshrl.errors import UserError
from meshrl.programs.cli import main
from meshrl.programs.grpo import grpo
from meshrl.programs.sft import sft
from meshrl.programs.simulate import Outcome, SimulationConfig, simulate
from meshrl.programs.simulated import LearnerModel
from meshrl.programs.simulated_generator import GeneratorModel

SMALL = SimulationConfig(
    generators=(8,),
    learners=(2,),
    prompts_per_step=(16,),
    group_size=8,
    steps=8,
    generator=GeneratorModel(slots=16),
    # A step as long as generating its rollouts, about.
    learner=LearnerModel(step_seconds=30.0, tokens_per_second=20_000),
)
REAL_TIME = ("controller_ms_per_rollout", "total_ms_per_rollout", "wall_seconds")


def outcomes(config: SimulationConfig) -> list[Outcome]:
    return [simulate(grpo, config, scenario) for scenario in config.scenarios()]


@pytest.fixture(scope="module")
def by_staleness() -> list[Outcome]:
    return outcomes(SMALL)


def test_two_simulations_of_one_seed_agree_in_everything_but_real_time(by_staleness: list[Outcome]) -> None:
    for first, second in zip(by_staleness, outcomes(SMALL), strict=True):
        unlike = {
            field.name
            for field in dataclasses.fields(Outcome)
            if getattr(first, field.name) != getattr(second, field.name)
        }
        assert unlike <= set(REAL_TIME)


def test_the_bound_holds_and_the_ledger_adds_up(by_staleness: list[Outcome]) -> None:
    for outcome in by_staleness:
        assert outcome.balanced
        assert max(outcome.staleness) == outcome.scenario.staleness
        assert sum(outcome.staleness.values()) >= outcome.ledger["trained"]
        assert outcome.peak_outstanding <= (outcome.scenario.staleness + 1) * 16 * 8


def test_running_ahead_hides_generation_behind_training(by_staleness: list[Outcome]) -> None:
    synchronous, ahead, further = by_staleness
    assert synchronous.rollouts_per_second < ahead.rollouts_per_second < further.rollouts_per_second
    assert synchronous.generator_idle > ahead.generator_idle > further.generator_idle
    # Without staleness one of the two stands still whenever the other works.
    assert synchronous.learner_idle + synchronous.generator_idle > 0.95


def test_replicas_that_die_cost_time_and_break_nothing() -> None:
    config = replace(SMALL, staleness=(1,), failure_seconds=600.0, replacement_seconds=60.0, refills=4)
    (outcome,) = outcomes(config)
    assert outcome.deaths > 0 and outcome.balanced
    assert max(outcome.staleness) <= 1


def test_what_the_controller_does_for_a_rollout_does_not_grow_with_replicas() -> None:
    """Counted in messages, of which each does a bounded amount of work. Lengths are fixed, so that steps of both last
    as long and have as many polls without news for each replica."""
    model = GeneratorModel(slots=16, length_distribution="fixed", grading_distribution="fixed")
    config = replace(SMALL, staleness=(1,), steps=5, generator=model)
    few, many = (
        outcomes(replace(config, generators=(n,), prompts_per_step=(2 * n,), learners=(n // 4,)))[0]
        for n in (8, 64)
    )
    assert many.messages_per_rollout < 1.2 * few.messages_per_rollout


def test_a_split_of_processes_and_bad_settings() -> None:
    config = SimulationConfig(generators=(48, 56), processes=64, staleness=(1,), steps=4)
    assert [(s.generators, s.learners) for s in config.scenarios()] == [(48, 16), (56, 8)]
    with pytest.raises(UserError, match="64 generators of 64 processes leave no learner"):
        SimulationConfig(generators=(64,), processes=64, staleness=(1,), steps=4).scenarios()
    with pytest.raises(UserError, match="steps is 2: the first S . 1 = 2 fill the slots"):
        SimulationConfig(staleness=(1,), steps=2)
    with pytest.raises(UserError, match="zero_variance is 1.5"):
        GeneratorModel(zero_variance=1.5)
    with pytest.raises(UserError, match="SFTConfig cannot be simulated: .* has `steps`"):
        simulate(sft, SMALL, SMALL.scenarios()[0])  # pyright: ignore[reportArgumentType]


def test_the_command_prints_a_row_for_each_combination(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--generators 4 8 --learners 2 --prompts-per-step 4 --staleness 1 --steps 4".split()
    assert main(["simulate", "grpo", *flags, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["scenario"]["generators"] for row in rows] == [4, 8]
    assert main(["simulate", "grpo", *flags]) == 0
    assert "trained rollouts/s" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "grpo", "--steps", "1"])
    assert ended.value.code == 2 and "steps is 1" in capsys.readouterr().err
