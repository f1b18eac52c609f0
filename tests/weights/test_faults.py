"""Processes that die while weights are on their way: an error with a name, no mixture, and the rest goes on."""

import asyncio
import os
import signal
import threading
from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from meshrl.mesh import RoleMesh
from meshrl.session import Session, WorkerDied
from meshrl.weights.broadcast import PublishesWeights, ReceivesWeights, WeightBroadcast, WeightsConfig
from meshrl.weights.errors import ArenaUnreachable
from meshrl.weights.transport import Transport
from meshrl.worker import Worker, endpoint

NAMES = ("a", "b", "c")


class Stopping(dict[str, Tensor]):
    """Weights of which `b` is never given: whoever copies them stands still there."""

    def __init__(self, named: Mapping[str, Tensor], reached: threading.Event) -> None:
        super().__init__(named)
        self.reached = reached

    def __getitem__(self, name: str) -> Tensor:
        if name == "b":
            self.reached.set()
            threading.Event().wait()
        return super().__getitem__(name)


class OneValueLearner(PublishesWeights, Worker):
    """All its weights have one value, so that a mixture of two versions shows."""

    @endpoint
    async def setup(self, setup: bool) -> None:
        self.value = 0.0
        self.reached: threading.Event | None = None

    def weight_tensors(self) -> Mapping[str, Tensor]:
        self.value += 1
        named = {name: torch.full((100, 50), self.value) for name in NAMES}
        return Stopping(named, self.reached) if self.reached else named

    @endpoint
    async def stop_at_next_publish(self) -> None:
        self.reached = threading.Event()

    @endpoint
    async def stands_still(self) -> None:
        assert self.reached is not None
        await asyncio.to_thread(self.reached.wait, 60)


class OneValueGenerator(ReceivesWeights, Worker):
    """Can be told to stand still in the middle of a pull."""

    @endpoint
    async def setup(self, setup: bool) -> None:
        self.reached = threading.Event()

    async def swap_weights(self, named: Mapping[str, Tensor], version: int) -> None:
        self.values = {float(value) for tensor in named.values() for value in tensor.unique()}

    @endpoint
    async def values_in_use(self) -> set[float]:
        return self.values

    @endpoint
    async def stop_at_next_pull(self) -> None:
        assert self._subscriber is not None
        link = next(iter(self._subscriber._owners.values())).link

        def stand_still(*_: Any) -> None:
            self.reached.set()
            threading.Event().wait()

        link.finish = stand_still  # pyright: ignore[reportAttributeAccessIssue]

    @endpoint
    async def stands_still(self) -> None:
        await asyncio.to_thread(self.reached.wait, 60)


async def connected(
    session: Session, transport: str, replicas: int
) -> tuple[RoleMesh, RoleMesh, WeightBroadcast]:
    learner, generator = await asyncio.gather(
        session.spawn(OneValueLearner, True, name="learner"),
        session.spawn(OneValueGenerator, True, name="generator", replicas=replicas),
    )
    config = WeightsConfig(transport=cast(Transport, transport), deadline_seconds=20)
    weights = await WeightBroadcast.connect(source=learner, target=generator, config=config)
    await weights.broadcast()
    return learner, generator, weights


@pytest.mark.parametrize("transport", ["memfd", "nixl", "rdma"])
def test_a_generator_killed_in_the_middle_of_a_pull_blocks_nobody(transport: str) -> None:
    async def drive() -> None:
        async with Session() as session:
            learner, generator, weights = await connected(session, transport, 2)
            await generator.call_rank("stop_at_next_pull", replica=0)
            version = await weights.publish()
            await generator.call_rank("stands_still", replica=0, deadline_seconds=60)
            os.kill(generator.replicas[0].pids[0], signal.SIGKILL)
            with pytest.raises(WorkerDied, match=r"generator\[0\]"):
                await weights.arrival(version)
            assert weights.versions == [1, 2]
            (value,) = await generator.call_rank("values_in_use", replica=1)
            for following in range(version + 1, version + 4):  # the slot that the dead one read is free again
                await learner.call("publish", following, weights._ways.connection, deadline_seconds=60)
            await generator.call_rank("pull_weights", version + 3, 20.0, weights._ways.connection, replica=1)
            assert await generator.call_rank("values_in_use", replica=1) == {value + 3}

    asyncio.run(drive())


@pytest.mark.parametrize("transport", ["memfd", "nixl", "rdma"])
def test_a_learner_killed_in_the_middle_of_a_publish_leaves_generators_as_they_were(
    transport: str,
) -> None:
    async def drive() -> None:
        async with Session() as session:
            learner, generator, weights = await connected(session, transport, 1)
            before = await generator.call_rank("values_in_use")
            await learner.call("stop_at_next_publish")
            publishing = asyncio.create_task(weights.publish())
            await learner.call("stands_still", deadline_seconds=60)
            (pid,) = learner.replicas[0].pids
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(WorkerDied, match="learner"):
                await publishing
            with pytest.raises(ArenaUnreachable, match=f"learner process {pid} on .* is (gone|dead)"):
                await generator.call_rank("pull_weights", 2, 20.0, weights._ways.connection)
            assert await generator.call_rank("values_in_use") == before and len(before) == 1

    asyncio.run(drive())
