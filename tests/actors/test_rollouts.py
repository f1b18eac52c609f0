"""Which prompt comes next, and the seed of each sample."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.actors.generator import Finished
from meshrl.actors.prompts import prompt_index, sample_seed
from meshrl.actors.rollouts import Rollouts, RolloutsConfig
from meshrl.handoff.dock import Ticket
from meshrl.programs.tasks import ArithmeticTask
from meshrl.rollout import GroupRequest, RolloutGroup, RolloutHandle, SamplingParams
from meshrl.session import DeadlineError

TICKET = Ticket(1, 6, 24, 1)


class AtOnce:
    """Stands for a generator mesh of one replica, which takes a second for each group on a clock of its own."""

    replicas = (None,)

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure, self.groups, self.done = failure, [], asyncio.Event()

    async def call_rank(self, endpoint: str, *arguments: Any, **_: Any) -> Any:
        if endpoint == "submit":
            self.groups += [self._finish(request) for request in arguments[0]._value]  # of the parcel
            self.done.set()
        elif endpoint == "finished":
            await self.done.wait()
            self.done.clear()
            if self.failure is not None:
                raise self.failure
            groups, self.groups = self.groups, []
            return Finished(tuple(groups), 0, generate_seconds=len(groups), reward_seconds=0.5)
        elif endpoint == "release":
            return len(arguments[0])
        return None

    @staticmethod
    def _finish(request: GroupRequest) -> RolloutGroup:
        handles = [
            RolloutHandle(id, request.group_id, 0, 6, 4, 1, 1, "stop", seed, reward=float(id % 2))
            for id, seed in zip(request.rollout_ids, request.seeds, strict=True)
        ]
        return RolloutGroup(request.group_id, request.prompt_index, tuple(handles))


def rollouts(generator: AtOnce, staleness: int = 0) -> Rollouts:
    config = RolloutsConfig(prompts_per_step=3, group_size=2, max_staleness=staleness)
    return Rollouts(generator, ArithmeticTask(), SamplingParams(), config)  # pyright: ignore[reportArgumentType]


def test_an_evaluation_is_charged_to_no_training_step() -> None:
    async def drive() -> Sequence[float]:
        async with rollouts(AtOnce()) as source:
            first = await source.take()
            assert await source.evaluate(10) == 0.5
            source.release(first, TICKET, {}, 1, live=asyncio.sleep(0))
            second = await source.take()
            return first.generate_seconds, second.generate_seconds, second.reward_seconds

    assert asyncio.run(drive()) == (3, 3, 0.5)


def test_a_failure_of_a_generator_surfaces_as_it_is_a_deadline_too() -> None:
    async def drive(failure: Exception) -> None:
        async with rollouts(AtOnce(failure)) as source:
            await source.take()

    for failure in (DeadlineError("waited 7 s for the grader"), LookupError("lost")):
        with pytest.raises(type(failure)) as raised:
            asyncio.run(drive(failure))
        assert raised.value is failure


@pytest.mark.parametrize("staleness", [0, 1])
def test_slots_are_freed_when_the_weights_are_live_and_not_before(staleness: int) -> None:
    async def drive() -> list[int]:
        live: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with rollouts(AtOnce(), staleness) as source:
            first = await source.take()
            source.release(first, TICKET, {}, 1, live=live)
            free = [source.buffer.free]
            following = asyncio.create_task(source.take())
            if staleness:
                await following
            else:
                await asyncio.wait([following], timeout=0.01)
                assert not following.done()
            free.append(source.buffer.free)
            live.set_result(None)
            await following
            return free

    assert asyncio.run(drive()) == [0, 0]


def test_weights_that_do_not_arrive_end_the_next_batch() -> None:
    async def lost() -> None:
        raise LookupError("a generator did not get version 1")

    async def drive() -> None:
        async with rollouts(AtOnce()) as source:
            source.release(await source.take(), TICKET, {}, 1, live=lost())
            await source.take()

    with pytest.raises(LookupError, match="did not get version 1"):
        asyncio.run(drive())


def test_no_two_samples_share_a_seed() -> None:
    paths = [
        (split, prompt, occasion, sample)
        for split in ("train", "heldout")
        for prompt in range(20)
        for occasion in (0, 1, "evaluation")
        for sample in range(8)
    ]
    seeds = {sample_seed(seed, *path) for seed in (0, 1) for path in paths}
    assert len(seeds) == 2 * len(paths)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(3, "train", 5, 0, 1) == sample_seed(3, "train", 5, 0, 1)


@given(size=st.integers(1, 50), seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_every_epoch_has_each_prompt_once_in_an_order_of_its_own(size: int, seed: int, epoch: int) -> None:
    order = [prompt_index(position, size, seed) for position in range(epoch * size, (epoch + 1) * size)]
    assert sorted(order) == list(range(size))
    assert order == [
        prompt_index(position, size, seed) for position in range(epoch * size, (epoch + 1) * size)
    ]


def test_an_endless_task_goes_on_and_on() -> None:
    assert [prompt_index(position, None, 7) for position in (0, 1, 10**9)] == [0, 1, 10**9]
