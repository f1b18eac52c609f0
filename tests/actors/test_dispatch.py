"""Rollouts and their dispatcher against generators that do as they are told: refills, capacity, deaths."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from meshrl.actors.generator import Finished
from meshrl.actors.rollouts import Rollouts, RolloutsConfig
from meshrl.errors import UserError
from meshrl.handoff.dock import Ticket
from meshrl.programs.tasks import ArithmeticTask
from meshrl.rollout import GroupRequest, RolloutGroup, RolloutHandle, SamplingParams
from meshrl.worker import WorkerDied

TICKET = Ticket(1, 6, 24, 1)


class Replica:
    """One generator: keeps what it was asked for until it is told to finish it."""

    def __init__(self) -> None:
        self.processes = SimpleNamespace(death=asyncio.get_running_loop().create_future())
        self.asked: list[GroupRequest] = []
        self.docked: set[int] = set()
        self.interrupted = False
        self._finished: list[tuple[int, RolloutGroup]] = []
        self._number = 0
        self._news = asyncio.Event()

    def die(self) -> None:
        self.processes.death.set_exception(WorkerDied("generator died: killed by SIGKILL"))
        self.processes.death.exception()
        self._news.set()

    def finish(self, number: int, rewards: Callable[[GroupRequest], list[float | None]]) -> None:
        """Finish the first group asked for."""
        request = self.asked.pop(0)
        handles = [
            RolloutHandle(id, request.group_id, number, 6, 4, 1, 1, "stop", seed, reward, process_id=7)
            for id, seed, reward in zip(request.rollout_ids, request.seeds, rewards(request), strict=True)
        ]
        self.docked.update(request.rollout_ids)
        self._number += 1
        group = RolloutGroup(request.group_id, request.prompt_index, tuple(handles))
        self._finished.append((self._number, group))
        self._news.set()

    async def answer(self, endpoint: str, arguments: tuple[Any, ...]) -> Any:
        if self.processes.death.done():
            raise WorkerDied("generator died: killed by SIGKILL")
        if endpoint == "submit":
            self.asked += arguments[0]._value  # of the parcel
        elif endpoint == "release":
            gone = self.docked.intersection(arguments[0])
            self.docked -= gone
            return len(gone)
        elif endpoint in ("interrupt", "resume"):
            self.interrupted = endpoint == "interrupt"
        elif endpoint == "finished":
            self._finished = [entry for entry in self._finished if entry[0] > arguments[0]]
            while not self._finished and not self.processes.death.done():
                self._news.clear()
                await self._news.wait()
            if self.processes.death.done():
                raise WorkerDied("generator died: killed by SIGKILL")
            groups = tuple(group for _, group in self._finished)
            return Finished(groups, self._number, 0.0, 0.0, tuple(r.group_id for r in self.asked[:1]))
        return True


class Mesh:
    """Generators, and the rewards that their groups get: alternately 0 and 1 unless told otherwise."""

    def __init__(self, replicas: int) -> None:
        self.replicas = [Replica() for _ in range(replicas)]
        self.rewards: Callable[[GroupRequest], list[float | None]] = lambda request: [
            float(i % 2) for i in range(len(request.seeds))
        ]

    async def call_rank(self, endpoint: str, *arguments: Any, replica: int, **_: Any) -> Any:
        return await self.replicas[replica].answer(endpoint, arguments)

    async def settled(self) -> None:
        """Let everybody do what there is to do."""
        for _ in range(50):
            await asyncio.sleep(0)

    async def finish_all(self) -> None:
        """Finish what is asked for, and what is asked for in its stead."""
        await self.settled()
        while any(replica.asked for replica in self.replicas):
            for number, replica in enumerate(self.replicas):
                while replica.asked:
                    replica.finish(number, self.rewards)
            await self.settled()


def drive(
    body: Callable[[Mesh, Rollouts], Coroutine[Any, Any, None]], replicas: int = 2, **settings: Any
) -> list[str]:
    """Run the body; what was noted."""
    notes: list[str] = []

    async def run() -> None:
        mesh = Mesh(replicas)
        revive = settings.pop("revive", None)
        config = RolloutsConfig(**{"prompts_per_step": 4, "group_size": 2, "deadline_seconds": 5, **settings})
        source = Rollouts(
            mesh,  # pyright: ignore[reportArgumentType]
            ArithmeticTask(),
            SamplingParams(),
            config,
            revive=revive and (lambda replica: revive(mesh, replica)),
            note=notes.append,
        )
        async with source:
            await body(mesh, source)
        assert source.buffer.ledger.balanced and source.buffer.rollout_ledger.balanced

    asyncio.run(asyncio.wait_for(run(), 20))
    return notes


def test_what_generators_hold_is_what_the_ledger_says_at_each_step() -> None:
    async def body(mesh: Mesh, source: Rollouts) -> None:
        for step in range(1, 4):
            taking = asyncio.create_task(source.take())
            await mesh.finish_all()
            batch = await taking
            assert source.docked == sum(len(replica.docked) for replica in mesh.replicas) == 8
            assert batch.metrics(1, TICKET)["docked_rollouts"] == 8
            with pytest.raises(RuntimeError, match="tokens of version 1, and version 2 .* max_staleness 0"):
                batch.metrics(2, TICKET)
            source.release(batch, TICKET, {}, step, live=asyncio.sleep(0))
        await mesh.settled()
        assert source.docked == sum(len(replica.docked) for replica in mesh.replicas) == 0

    drive(body)


def test_a_replica_that_does_not_hold_what_it_said_ends_the_run() -> None:
    async def body(mesh: Mesh, source: Rollouts) -> None:
        taking = asyncio.create_task(source.take())
        await mesh.finish_all()
        batch = await taking
        mesh.replicas[1].docked.pop()
        source.release(batch, TICKET, {}, 1, live=asyncio.sleep(0))
        with pytest.raises(RuntimeError, match="replica 1 held 3 of 4 rollouts"):
            await source.take()

    drive(body)


def test_groups_that_teach_nothing_are_replaced_up_to_the_limit() -> None:
    """The first five groups have equal rewards; two may be replaced, so three stay and the batch has one to train."""

    async def body(mesh: Mesh, source: Rollouts) -> None:
        seen: list[int] = []

        def rewards(request: GroupRequest) -> list[float | None]:
            seen.append(request.group_id)
            return [1.0, 1.0] if len(seen) <= 5 else [0.0, 1.0]

        mesh.rewards = rewards
        taking = asyncio.create_task(source.take())
        await mesh.finish_all()
        batch = source.drop_zero_variance(await taking)
        assert len(seen) == 6 and len(batch.groups) == 1
        assert batch.dropped == {"zero variance": 5}
        assert source.buffer.ledger.dropped == {"zero variance": 5}
        assert source.docked == 8  # those replaced are forgotten already
        mesh.rewards = lambda request: [None, 1.0]
        source.release(batch, TICKET, {}, 1, live=asyncio.sleep(0))
        taking = asyncio.create_task(source.take())
        await mesh.finish_all()
        second = await taking
        assert second.groups == () and second.dropped == {"reward failed": 6}
        assert "nothing to train on: 6 groups reward failed" in second.note(TICKET)

    drive(body, refills=2)


def test_batches_without_anything_to_train_on_go_on_or_end_the_run_by_setting() -> None:
    async def body(mesh: Mesh, source: Rollouts) -> None:
        mesh.rewards = lambda request: [1.0, 1.0]
        for step in range(1, 4):
            taking = asyncio.create_task(source.take())
            await mesh.finish_all()
            batch = source.drop_zero_variance(await taking)
            assert batch.groups == () and "4 groups zero variance" in batch.note(TICKET)
            source.release(batch, TICKET, {}, step, live=asyncio.sleep(0))

    drive(body)
    with pytest.raises(UserError, match="2 batches in a row had nothing to train on"):
        drive(body, empty_batches_in_a_row=2)


def test_rollouts_wait_for_a_replica_with_room_the_longest_waiting_first() -> None:
    async def body(mesh: Mesh, source: Rollouts) -> None:
        taking = asyncio.create_task(source.take())
        await mesh.settled()
        first, second = (replica.asked for replica in mesh.replicas)
        assert (len(first), len(second)) == (1, 1)
        earliest = [first[0].group_id, second[0].group_id]
        mesh.replicas[1].finish(1, mesh.rewards)
        await mesh.settled()
        assert [request.group_id for request in second] == [earliest[1] + 1]
        await mesh.finish_all()
        assert [group.group_id for group in (await taking).groups] == list(
            range(earliest[0], earliest[0] + 4)
        )

    drive(body, rollouts_per_generator=2)


def test_a_dead_replicas_groups_are_generated_by_the_others_finished_ones_too() -> None:
    async def body(mesh: Mesh, source: Rollouts) -> None:
        taking = asyncio.create_task(source.take())
        await mesh.settled()
        mesh.replicas[0].finish(0, mesh.rewards)
        await mesh.settled()
        mesh.replicas[0].die()
        await mesh.settled()
        assert len(mesh.replicas[1].asked) == 4
        await mesh.finish_all()
        batch = await taking
        assert {rollout.replica for rollout in batch.rollouts} == {1} and len(batch.groups) == 4
        assert source.docked == 8
        evaluation = asyncio.create_task(source.evaluate(6))
        await mesh.finish_all()
        await evaluation

    assert any("2 groups are generated again" in note for note in drive(body))


def test_an_evaluation_survives_a_death_too() -> None:
    async def body(mesh: Mesh, source: Rollouts) -> None:
        mesh.rewards = lambda request: [1.0] * len(request.seeds)
        evaluation = asyncio.create_task(source.evaluate(6))
        await mesh.settled()
        mesh.replicas[1].die()
        await mesh.finish_all()
        assert await evaluation == 1.0

    drive(body)


def test_the_death_of_the_last_replica_ends_the_run_with_its_cause() -> None:
    async def body(mesh: Mesh, source: Rollouts) -> None:
        taking = asyncio.create_task(source.take())
        await mesh.settled()
        for replica in mesh.replicas:
            replica.die()
        await taking

    with pytest.raises(WorkerDied, match="killed by SIGKILL"):
        drive(body)


def test_a_replica_that_comes_back_is_used_again_and_one_that_cannot_is_told() -> None:
    async def body(mesh: Mesh, source: Rollouts) -> None:
        taking = asyncio.create_task(source.take())
        await mesh.settled()
        mesh.replicas[0].die()
        await mesh.finish_all()
        source.release(await taking, TICKET, {}, 1, live=asyncio.sleep(0))
        taking = asyncio.create_task(source.take())
        await mesh.settled()
        assert bool(mesh.replicas[0].asked) == (not mesh.replicas[0].processes.death.done())
        await mesh.finish_all()
        assert len((await taking).groups) == 4

    async def back(mesh: Mesh, replica: int) -> None:
        mesh.replicas[replica] = Replica()

    async def away(mesh: Mesh, replica: int) -> None:
        raise UserError("no room")

    assert not any("stays away" in note for note in drive(body, revive=back))
    assert any("stays away, the others go on: no room" in note for note in drive(body, revive=away))


def test_rollouts_are_interrupted_only_where_some_are_in_progress() -> None:
    async def body(mesh: Mesh, source: Rollouts) -> None:
        async with source.interrupted():
            assert not any(replica.interrupted for replica in mesh.replicas)
        taking = asyncio.create_task(source.take())
        await mesh.settled()
        async with source.interrupted():
            assert all(replica.interrupted for replica in mesh.replicas)
        assert not any(replica.interrupted for replica in mesh.replicas)
        await mesh.finish_all()
        await taking

    drive(body)


def test_an_inner_interruption_does_not_end_the_outer_one_and_nothing_new_begins_within() -> None:
    async def body(mesh: Mesh, source: Rollouts) -> None:
        async with source.interrupted():
            taking = asyncio.create_task(source.take())
            await mesh.settled()
            assert not any(replica.asked for replica in mesh.replicas)
        await mesh.settled()
        assert sum(len(replica.asked) for replica in mesh.replicas) == 4
        async with source.interrupted():
            async with source.interrupted():
                pass
            assert all(replica.interrupted for replica in mesh.replicas)
        assert not any(replica.interrupted for replica in mesh.replicas)
        await mesh.finish_all()
        await taking

    drive(body)


def test_a_failure_is_not_waited_out_behind_the_batch_before() -> None:
    async def body(mesh: Mesh, source: Rollouts) -> None:
        taking = asyncio.create_task(source.take())
        await mesh.finish_all()
        source.release(await taking, TICKET, {}, 1, live=asyncio.Event().wait())
        taking = asyncio.create_task(source.take())
        await mesh.settled()
        source.failed(LookupError("generator[0] is silent"))
        with pytest.raises(LookupError, match="is silent"):
            await taking

    drive(body)
