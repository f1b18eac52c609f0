"""The program itself, on real meshes."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from meshrl.actors.batch import Batch
from meshrl.actors.prompts import prompt_index, sample_seed
from meshrl.actors.reward import RewardConfig
from meshrl.actors.rollouts import RolloutsConfig
from meshrl.advantages import group_relative
from meshrl.losses import policy_loss
from meshrl.metrics import StepReport
from meshrl.programs.config import EvaluationConfig, MeshSizes
from meshrl.programs.grpo import GRPOConfig, grpo
from meshrl.programs.sft import SFTConfig, WarmUpConfig, fingerprint, sft, warm_up
from meshrl.programs.start import finish, start
from meshrl.rollout import GroupRequest, RolloutGroup
from meshrl.run import launch
from meshrl.session import Session

SHORT = GRPOConfig(
    steps=4,
    rollouts=RolloutsConfig(prompts_per_step=8, group_size=4, deadline_seconds=120),
    warm_up=WarmUpConfig(steps=60, check_every=60, cache=False),
    evaluation=EvaluationConfig(every=0, prompts=32),
    samples_every=2,
)


def run(config: GRPOConfig, directory: Path, program=grpo) -> list[StepReport]:
    async def drive() -> list[StepReport]:
        return [report async for report in launch(program, config, directory=directory)]

    return asyncio.run(asyncio.wait_for(drive(), 300))


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[StepReport], Path]:
    directory = tmp_path_factory.mktemp("synchronous") / "run"
    return run(SHORT, directory), directory


def test_sampler_and_learner_agree_on_policy(synchronous: tuple[list[StepReport], Path]) -> None:
    for report in synchronous[0][1:]:
        if report.metrics.get("skipped"):
            continue
        assert report.metrics["logprob_difference_max"] <= 1e-5
        assert report.metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert report.metrics["clip_fraction_low"] == report.metrics["clip_fraction_high"] == 0
        assert report.metrics["staleness_max"] == 0


def test_same_seed_same_metrics(synchronous: tuple[list[StepReport], Path], tmp_path: Path) -> None:
    again = run(SHORT, tmp_path / "again")
    assert [dict(report.metrics) for report in again] == [dict(report.metrics) for report in synchronous[0]]


async def by_hand(session: Session, config: GRPOConfig) -> AsyncIterator[StepReport]:
    """The same algorithm, one thing after the other: no buffer, no slots, nothing behind the scenes."""
    loss = policy_loss(clip=config.clip)
    parts = await start(session, config, config.steps, loss)
    await warm_up(session, parts, config, config.warm_up)
    size, rollouts = config.rollouts.group_size, itertools.count(10_000)
    await parts.weights.broadcast()
    arrived = 0
    for step in range(1, config.steps + 1):
        first = (step - 1) * config.rollouts.prompts_per_step
        requests = []
        for position in range(first, first + config.rollouts.prompts_per_step):
            index = prompt_index(position, parts.task.train_size, config.seed)
            seeds = tuple(sample_seed(config.seed, "train", index, position + 1, i) for i in range(size))
            ids = tuple(next(rollouts) for _ in range(size))
            requests.append(GroupRequest(10_000 + position, "train", index, ids, seeds, config.sampling))
        await parts.generator.call("submit", requests)
        groups: dict[int, RolloutGroup] = {}
        while len(groups) < len(requests):
            answer = await parts.generator.call_rank("finished", arrived, 5.0)
            arrived = answer.number
            groups |= {group.group_id: group for group in answer.groups}
        taken = tuple(groups[request.group_id] for request in requests)
        batch = Batch(taken, taken, 0.0, 0.0, docked_rollouts=sum(len(group.rollouts) for group in taken))
        equal = [group.group_id for group in taken if len(set(group.rewards)) == 1]
        batch = batch.without(equal, "zero variance")
        rewards, numbers = parts.handoff.rewards(batch.groups)
        advantages = parts.handoff.on_mesh(group_relative)(rewards, numbers)
        ticket = await parts.handoff(batch.groups, advantages=advantages)
        update = await parts.learner.step(loss, ticket)
        metrics = {**batch.metrics(parts.weights.published, ticket), **update.metrics}
        await parts.weights.broadcast()
        await parts.generator.call("release", [r.id for group in taken for r in group.rollouts], {}, step)
        yield StepReport(step, metrics)
    await finish(session, parts)


def test_without_staleness_the_program_is_the_synchronous_one_bit_for_bit(
    synchronous: tuple[list[StepReport], Path], tmp_path: Path
) -> None:
    reports, directory = synchronous
    plain = run(SHORT, tmp_path / "run", by_hand)
    for report, by_itself in zip(reports[1:], plain, strict=True):
        own = {name: value for name, value in report.metrics.items() if not name.startswith("heldout")}
        assert own == dict(by_itself.metrics)
    final = "final/model.safetensors"
    assert (directory / final).read_bytes() == (tmp_path / "run" / final).read_bytes()


def test_run_directory_holds_config_metrics_and_every_rollout(
    synchronous: tuple[list[StepReport], Path],
) -> None:
    reports, directory = synchronous
    assert json.loads((directory / "config.json").read_text())
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4] == [report.step for report in reports]
    assert list((directory / "tensorboard").iterdir())
    table = parquet.read_table(directory / "rollouts").to_pylist()
    assert len(table) == 4 * 8 * 4
    trained = sum(int(report.metrics["groups_trained"]) for report in reports[1:]) * 4
    assert sum(row["advantage"] is not None for row in table) == trained
    for row in table:
        assert len(row["token_ids"]) == len(row["sampler_logprobs"]) == len(row["weight_versions"])
        # 0 is the end token, and the padding too: the first one belongs to the response.
        assert (row["token_ids"][-1] == 0) == (row["stop_reason"] == "stop")
        assert row["reward"] == float(
            row["stop_reason"] == "stop" and row["response"].removesuffix("$") == row["answer"]
        )
    assert len({row["seed"] for row in table}) == len(table)


def test_final_checkpoint_loads_in_transformers(synchronous: tuple[list[StepReport], Path]) -> None:
    transformers = pytest.importorskip("transformers")
    final = synchronous[1] / "final"
    model = transformers.AutoModelForCausalLM.from_pretrained(final)
    tokenizer = transformers.AutoTokenizer.from_pretrained(final)
    ids = tokenizer("47+85=", return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, 6, 16)


def test_samples_are_readable(synchronous: tuple[list[StepReport], Path]) -> None:
    shown = [report for report in synchronous[0] if report.samples]
    assert [report.step for report in shown] == [2, 4]
    assert all("=" in line and "reward" in line for line in shown[0].samples)


def test_two_generators_and_two_learners_one_step_ahead(tmp_path: Path) -> None:
    config = replace(
        SHORT,
        meshes=MeshSizes(generator=2, learner=2, reward=1),
        rollouts=replace(SHORT.rollouts, max_staleness=1),
    )
    reports = run(config, tmp_path / "run")
    assert len(reports) == 5
    assert max(report.metrics["staleness_max"] for report in reports[1:]) == 1
    assert len(list((tmp_path / "run" / "rollouts").glob("generator-1-*"))) == 1


def test_reward_that_fails_on_some_is_counted_and_never_zero(tmp_path: Path) -> None:
    def moody(rollout) -> float | None:
        if rollout.id % 16 == 0:
            raise ValueError("no opinion")
        return None if rollout.id % 16 == 5 else float(rollout.id % 2)

    reports = run(
        replace(SHORT, steps=2, warm_up=WarmUpConfig(steps=0), reward=RewardConfig(function=moody)),
        tmp_path / "run",
    )
    assert sum(report.metrics.get("dropped_reward_failed", 0) for report in reports[1:]) > 0
    # An untrained policy samples entries that decoding and encoding again would change: training saw the sampled ids.
    assert all(report.metrics["logprob_difference_max"] <= 1e-5 for report in reports[1:])
    for row in parquet.read_table(tmp_path / "run" / "rollouts").to_pylist():
        if row["reward"] is None:
            assert row["reward_error"] and row["advantage"] is None


def test_nothing_to_learn_from_is_a_counted_skip(tmp_path: Path) -> None:
    def indifferent(rollout) -> float:
        return 0.5

    reports = run(
        replace(SHORT, steps=2, warm_up=WarmUpConfig(steps=0), reward=RewardConfig(function=indifferent)),
        tmp_path / "run",
    )
    for report in reports[1:]:
        assert report.metrics["dropped_zero_variance"] == 8
        assert report.metrics["skipped"] == 1


def test_warm_up_is_cached_by_its_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = replace(SHORT, steps=2, warm_up=replace(SHORT.warm_up, steps=20, cache=True))
    first = run(config, tmp_path / "first")
    second = run(config, tmp_path / "second")
    assert len(list((tmp_path / "cache" / "meshrl").iterdir())) == 1
    assert [dict(report.metrics) for report in first] == [dict(report.metrics) for report in second]


def test_a_warm_up_that_another_evaluation_ended_is_another_one() -> None:
    known = fingerprint(SHORT, SHORT.warm_up)
    shorter = replace(SHORT, evaluation=replace(SHORT.evaluation, prompts=16))
    assert fingerprint(shorter, SHORT.warm_up) != known
    assert fingerprint(replace(SHORT, steps=9, samples_every=1), SHORT.warm_up) == known


def test_supervised_program_lowers_the_loss(tmp_path: Path) -> None:
    config = SFTConfig(
        evaluation=EvaluationConfig(every=0, prompts=16),
        train=WarmUpConfig(steps=30, check_every=0, cache=False, until_accuracy=2.0),
    )
    reports = run(config, tmp_path / "run", program=sft)  # pyright: ignore[reportArgumentType]
    assert reports[-1].metrics["loss"] < 0.8 * reports[0].metrics["loss"]


def test_what_passes_through_the_controller_does_not_grow_with_tokens() -> None:
    def measure(max_tokens: int) -> dict[str, float]:
        script = Path(__file__).with_name("controller_bytes.py")
        done = subprocess.run(
            [sys.executable, script, str(max_tokens)], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    short, long = measure(2), measure(32)
    assert long["tokens"] > 5 * short["tokens"]
    # A longer batch may be told of in up to three more polls (four groups); its tokens alone would be 7 kB.
    assert long["bytes"] < 1.6 * short["bytes"] < 10_000
