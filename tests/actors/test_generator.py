"""The generator around its engine, without a mesh: its methods are called as they are."""

import asyncio
import inspect
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from meshrl.actors.generator import Generator, GeneratorConfig, GeneratorSetup
from meshrl.actors.models import ModelConfig, build_model
from meshrl.handoff.dock import dock
from meshrl.programs.tasks import ArithmeticTask
from meshrl.rewards import Grade
from meshrl.rollout import GroupRequest, RolloutGroup, SamplingParams
from meshrl.worker import DeadlineError


class Watched:
    """An engine that keeps by which threads its methods were called."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.threads: set[int] = set()
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._engine, name)
        if not callable(value):
            return value

        def called(*args: Any) -> Any:
            self.threads.add(threading.get_ident())
            self.steps += name == "step"
            return value(*args)

        return called


def endpoint(generator: Generator, name: str) -> Any:
    method: Any = getattr(Generator, name)
    return lambda *args: inspect.unwrap(method._method)(generator, *args)


def requests(first: int, count: int) -> Sequence[GroupRequest]:
    sampling = SamplingParams(max_tokens=24)
    return [
        GroupRequest(number, "train", number, (2 * number, 2 * number + 1), (1, 2), sampling)
        for number in range(first, first + count)
    ]


def test_an_engine_is_called_by_one_thread_and_abandoning_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never_answers(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("meshrl.actors.graders.call", never_answers)

    async def drive() -> Watched:
        task, model = ArithmeticTask(), ModelConfig()
        generator = Generator.__new__(Generator)
        generator.replica = 0
        await endpoint(generator, "setup")(GeneratorSetup(GeneratorConfig(), model, task))
        generator._engine = watched = Watched(generator._engine)  # pyright: ignore[reportAttributeAccessIssue]
        weights = dict(build_model(model, generator._tokenizer.vocab_size, seed=0).named_parameters())

        await endpoint(generator, "connect_reward")(["a reward actor"])
        for phase in range(3):
            await generator.swap_weights(weights, phase)
            for part in range(4):
                await endpoint(generator, "submit")(requests(100 * phase + 10 * part, 10))
            seen = watched.steps
            while watched.steps < seen + 5:
                await asyncio.sleep(0)
            await endpoint(generator, "abandon")()
            assert watched.idle and not generator._groups and len(dock()) == 0
        generator._driver.cancel()
        return watched

    watched = asyncio.run(asyncio.wait_for(drive(), 120))
    assert len(watched.threads) == 1 and threading.get_ident() not in watched.threads


async def started(replica: int = 0) -> Generator:
    """A generator with weights, whose rewards come at once."""
    task, model = ArithmeticTask(), ModelConfig()
    generator = Generator.__new__(Generator)
    generator.replica = replica
    await endpoint(generator, "setup")(GeneratorSetup(GeneratorConfig(), model, task))
    weights = dict(build_model(model, generator._tokenizer.vocab_size, seed=0).named_parameters())
    await endpoint(generator, "connect_reward")(["a reward actor"])
    await generator.swap_weights(weights, 1)
    return generator


async def collect(generator: Generator, wanted: range, arrived: int = 0) -> list[RolloutGroup]:
    """Poll until these groups have come."""
    groups: dict[int, RolloutGroup] = {}
    while not groups.keys() >= set(wanted):
        answer = (await endpoint(generator, "finished")(arrived, 5.0))._value  # of the parcel
        arrived = answer.number
        groups |= {group.group_id: group for group in answer.groups}
    return [groups[number] for number in wanted]


def test_interrupted_groups_go_on_with_their_tokens_and_evaluations_need_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def grades(_: Any, __: str, rollouts: Any, **___: Any) -> list[Grade]:
        return [Grade(1.0) for _ in rollouts._value]

    monkeypatch.setattr("meshrl.actors.graders.call", grades)

    async def undisturbed() -> dict[int, list[int]]:
        generator = await started()
        await endpoint(generator, "submit")(requests(0, 12))
        groups = await collect(generator, range(12))
        return await tokens(generator, groups)

    async def tokens(generator: Generator, groups: Sequence[RolloutGroup]) -> dict[int, list[int]]:
        ids = [rollout.id for group in groups for rollout in group.rollouts]
        held = {i: dock().get(i)["token_ids"].tolist() for i in ids}
        await endpoint(generator, "abandon")()
        generator._driver.cancel()
        return held

    async def interrupted() -> dict[int, list[int]]:
        generator = await started()
        generator._engine = watched = Watched(generator._engine)  # pyright: ignore[reportAttributeAccessIssue]
        await endpoint(generator, "submit")(requests(0, 8))
        while watched.steps < 6:
            await asyncio.sleep(0)
        assert await endpoint(generator, "interrupt")() > 0
        await endpoint(generator, "submit")(requests(8, 4))  # asked for meanwhile: waits
        evaluation = [replace(request, split="heldout") for request in requests(50, 3)]
        await endpoint(generator, "submit")(evaluation)
        await collect(generator, range(50, 53))
        assert watched.idle and len(generator._groups) == 12
        await endpoint(generator, "resume")()
        groups = await collect(generator, range(12))
        assert all(rollout.oldest_version == 1 for group in groups for rollout in group.rollouts)
        return await tokens(generator, groups)

    async def drive() -> None:
        assert await interrupted() == await undisturbed()

    asyncio.run(asyncio.wait_for(drive(), 120))


def test_a_reward_actor_that_does_not_answer_costs_its_rollouts_and_the_third_time_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(*_: Any, **__: Any) -> None:
        raise DeadlineError("waited 600 s for grade of Reward")

    monkeypatch.setattr("meshrl.actors.graders.call", never)

    async def drive() -> None:
        generator = await started()
        for number in range(2):
            await endpoint(generator, "submit")(requests(number, 1))
            (group,) = await collect(generator, range(number, number + 1))
            assert group.rewards == (None, None)
            assert "reward actor 0 did not answer in 600 s" in (group.rollouts[0].reward_error or "")
        await endpoint(generator, "submit")(requests(2, 1))
        with pytest.raises(DeadlineError, match="3 calls in a row had no answer. Is its process stopped"):
            await collect(generator, range(2, 3), arrived=2)
        await endpoint(generator, "abandon")()
        generator._driver.cancel()

    asyncio.run(asyncio.wait_for(drive(), 60))
