"""Broadcasts on real meshes: two learner ranks, two generator replicas."""

import asyncio
import inspect
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_learners import ModuleLearner
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from meshrl.errors import UserError
from meshrl.mesh import Replica, RoleMesh
from meshrl.session import Session
from meshrl.weights.broadcast import ReceivesWeights, WeightBroadcast, WeightsConfig
from meshrl.weights.errors import (
    DigestMismatch,
    LayoutError,
    TransportUnavailable,
    VersionUnavailable,
    WeightsError,
)
from meshrl.weights.host import HostProcess
from meshrl.weights.layout import Layout
from meshrl.weights.tensors import layout_of
from meshrl.worker import Worker, endpoint

current_process = HostProcess.current  # as it is, whatever a test makes of it


class SmallLearner(ModuleLearner):
    """Holds a small module, sharded as it is told."""

    @endpoint
    async def shard(self, how: str) -> None:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Linear(9, 4))
        mesh = init_device_mesh("cpu", (self.world_size,))
        if how == "fsdp":
            fully_shard(module, mesh=mesh)
        elif how == "tp":
            parallelize_module(module, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        self.module = module.bfloat16() if how == "bf16" else module

    @endpoint
    async def corrupt(self, version: int) -> None:
        """Publish a version and spoil it."""
        assert self._arena is not None
        self._arena.publish(version, self.weight_tensors())
        slot = self._arena.service._leases.lease(version, "test")
        self._arena.service._leases.release(slot, "test")
        self._arena.views[slot][0].add_(1)


class SmallGenerator(ReceivesWeights, Worker):
    """Keeps a copy of what it is given."""

    in_one = False

    @endpoint
    async def setup(self, setup: None) -> None:
        pass

    async def swap_weights(self, named: Mapping[str, Tensor], version: int) -> None:
        self.weights = {name: tensor.clone() for name, tensor in named.items()}
        self.version = version

    @endpoint
    async def want_all_in_one_tensor(self, wanted: bool) -> None:
        self.in_one = wanted

    def weights_target(self, source: Layout) -> Layout:
        return source.whole().renamed(dict.fromkeys(source.parameters, "same") if self.in_one else {})

    @endpoint
    async def pretend_to_be_elsewhere(self, elsewhere: bool) -> None:
        """From now on this process says that it runs on another host."""
        here = current_process()
        found = replace(here, boot="another") if elsewhere else here
        HostProcess.current = classmethod(lambda cls: found)  # pyright: ignore[reportAttributeAccessIssue]

    @endpoint
    async def in_use(self) -> tuple[int, dict[str, Tensor]]:
        return self.version, self.weights


@dataclass
class Meshes:
    """Live meshes and the event loop that they belong to."""

    runner: asyncio.Runner
    learner: RoleMesh
    generator: RoleMesh
    notes: list[str] = field(default_factory=list)

    def connect(self, how: str, config: WeightsConfig | None = None) -> WeightBroadcast:
        self.run(self.learner.call("shard", how))
        return self.run(
            WeightBroadcast.connect(
                source=self.learner, target=self.generator, config=config, note=self.notes.append
            )
        )

    def run(self, awaitable: Any) -> Any:
        return self.runner.run(awaitable)

    def full_weights(self) -> dict[str, Tensor]:
        return self.run(self.learner.call("full_weights"))[0]

    def check(
        self, version: int, full: dict[str, Tensor] | None = None, replicas: slice = slice(None)
    ) -> None:
        """These replicas use exactly these weights, the learner's if none are given, as this version."""
        full = full or self.full_weights()
        for used, weights in self.run(self.generator.call("in_use"))[replicas]:
            assert used == version and list(weights) == list(full)
            for name, tensor in full.items():
                assert weights[name].dtype == tensor.dtype and torch.equal(weights[name], tensor), name


@pytest.fixture(scope="module")
def meshes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Meshes]:
    store: Path = tmp_path_factory.mktemp("store") / "store"
    session = Session()

    async def start() -> tuple[RoleMesh, RoleMesh]:
        await session.start()
        return await asyncio.gather(
            session.spawn(SmallLearner, str(store), procs=2), session.spawn(SmallGenerator, replicas=2)
        )

    with asyncio.Runner() as runner:
        try:
            yield Meshes(runner, *runner.run(start()))
        finally:
            runner.run(session.stop())


@pytest.mark.parametrize("how", ["fsdp", "tp", "replicated", "bf16"])
def test_each_broadcast_is_bit_exact_on_every_replica(meshes: Meshes, how: str) -> None:
    weights = meshes.connect(how)
    assert weights.version == 0 and weights.last is None
    for expected in (1, 2, 3):
        assert meshes.run(weights.broadcast()) == expected == weights.version
        meshes.check(expected)
        meshes.run(meshes.learner.call("train"))
    assert weights.last is not None
    assert (
        weights.last.bytes
        == weights.bytes_per_broadcast
        == 2 * (5 * 9 + 9 + 9 * 4 + 4) * (2 if how == "bf16" else 4)
    )


def test_a_damaged_version_changes_nothing_and_the_next_one_arrives(meshes: Meshes) -> None:
    weights = meshes.connect("fsdp", WeightsConfig(digests="always"))
    meshes.run(weights.broadcast())
    before = meshes.run(meshes.generator.call("in_use"))
    meshes.run(meshes.learner.call("train"))
    meshes.run(meshes.learner.call("corrupt", 2))
    with pytest.raises(
        DigestMismatch, match="of version 2 from learner process .* arrived with digest"
    ) as raised:
        meshes.run(meshes.generator.call("pull_weights", 2, 30.0, weights._ways.connection))
    assert any("generator" in note for note in raised.value.__notes__)
    after = meshes.run(meshes.generator.call("in_use"))
    for (version, old), (same_version, same) in zip(before, after, strict=True):
        assert version == same_version and all(torch.equal(old[name], same[name]) for name in old)
    with pytest.raises(VersionUnavailable, match="version 2 cannot follow version 2"):
        meshes.run(weights.broadcast())
    assert weights.version == 1
    assert meshes.run(weights.broadcast()) == 3  # a number whose broadcast failed is not used again
    meshes.check(3)


def test_broadcasts_that_overlap_follow_one_another(meshes: Meshes) -> None:
    weights = meshes.connect("tp")

    async def several() -> list[int]:
        return await asyncio.gather(*(weights.broadcast() for _ in range(5)))

    assert meshes.run(several()) == [1, 2, 3, 4, 5]
    meshes.check(5)


def test_a_version_that_nobody_has_begun_to_read_is_not_replaced(meshes: Meshes) -> None:
    weights = meshes.connect("tp")

    async def drive() -> None:
        async with weights._pulling[0]:  # replica 0 is slow to begin
            await weights.publish()
            await weights.publish()
            third = asyncio.create_task(weights.publish())
            await asyncio.wait([third], timeout=0.2)
            assert not third.done()
        assert await third == 3
        await weights.arrival(3)
        assert weights.versions == [3, 3]

    meshes.run(drive())
    meshes.check(3)


def test_connecting_again_replaces_the_way_before(meshes: Meshes) -> None:
    first = meshes.connect("fsdp")
    meshes.run(first.broadcast())
    second = meshes.connect("tp")
    meshes.run(second.broadcast())
    meshes.check(1)
    with pytest.raises(WeightsError, match="generators were connected by another one since"):
        meshes.run(first.broadcast())
    with pytest.raises(WeightsError, match="generators were connected by another one since"):
        meshes.run(first.use(1, replica=0))
    meshes.run(second.broadcast())
    meshes.check(2)


def test_a_version_whose_publish_failed_never_arrives_and_says_why_each_time(meshes: Meshes) -> None:
    weights = meshes.connect("fsdp")
    meshes.run(weights.broadcast())
    meshes.run(meshes.learner.call("shard", "tp"))
    with pytest.raises(LayoutError, match="have changed their layout"):
        meshes.run(weights.publish())
    for _ in range(2):
        with pytest.raises(LayoutError, match="have changed their layout"):
            meshes.run(weights.arrival(2))
    assert weights.published == weights.version == 1


def test_a_use_that_nobody_waits_for_any_more_is_known_when_it_has_happened(
    meshes: Meshes, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = meshes.connect("fsdp", WeightsConfig(keep_versions=2))
    begun = asyncio.Event()
    call = Replica.call

    async def telling(replica: Replica, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        answer = asyncio.ensure_future(call(replica, name, *args, **kwargs))
        await asyncio.sleep(0)  # the message is on its way
        begun.set()
        return await answer

    async def drive() -> None:
        await weights.broadcast()
        await weights.broadcast()
        monkeypatch.setattr(Replica, "call", telling)
        going_back = asyncio.create_task(weights.use(1, replica=0))
        await begun.wait()
        going_back.cancel()
        await asyncio.wait([going_back])
        assert going_back.cancelled()
        async with weights._pulling[0]:  # what was begun has ended
            assert weights.versions == [1, 2] and weights.pinned == {0}
        (used, _), _ = await meshes.generator.call("in_use")
        assert used == 1

    meshes.run(drive())


def test_a_target_that_cannot_be_leaves_the_way_before_as_it_was(meshes: Meshes) -> None:
    weights = meshes.connect("fsdp")
    meshes.run(weights.broadcast())
    meshes.run(meshes.generator.call("want_all_in_one_tensor", True))
    try:
        with pytest.raises(LayoutError, match="the parts of same .*"):
            meshes.run(WeightBroadcast.connect(source=meshes.learner, target=meshes.generator))
    finally:
        meshes.run(meshes.generator.call("want_all_in_one_tensor", False))
    meshes.run(weights.broadcast())
    meshes.check(2)


def test_no_weight_passes_through_the_controller(meshes: Meshes, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = meshes.connect("fsdp")
    sizes: list[int] = []
    call = Replica.call

    async def counting(replica: Replica, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        answers = await call(replica, name, *args, **kwargs)
        sizes.extend(map(len, map(pickle.dumps, [args, kwargs, *answers])))
        return answers

    monkeypatch.setattr(Replica, "call", counting)
    meshes.run(weights.broadcast())
    # One call of the learner, which has two ranks, and one of each replica, however large the weights:
    # numbers and short reports.
    assert len(sizes) == (2 + 2) + 2 * (2 + 1) and max(sizes) < 200


def test_training_goes_on_while_a_version_is_on_its_way(meshes: Meshes) -> None:
    weights = meshes.connect("fsdp")
    before = meshes.full_weights()

    async def overlapped() -> None:
        version = await weights.publish()
        assert weights.published == version == 1
        await meshes.learner.call("train")
        report = await weights.arrival(version)
        assert report == weights.last == await weights.arrival(version) and weights.versions == [1, 1]

    meshes.run(overlapped())
    meshes.check(1, before)


def test_two_versions_in_quick_succession_arrive_one_after_the_other(meshes: Meshes) -> None:
    weights = meshes.connect("tp")

    async def quick() -> None:
        first = await weights.publish()
        await meshes.learner.call("train")
        second = await weights.publish()
        await weights.arrival(second)
        await weights.arrival(first)
        assert weights.versions == [2, 2]

    meshes.run(quick())
    meshes.check(2)


def test_a_version_that_was_not_published_does_not_arrive(meshes: Meshes) -> None:
    weights = meshes.connect("fsdp")
    with pytest.raises(UserError, match="version 1 was not published of late: known are the last 0"):
        meshes.run(weights.arrival(1))


def test_a_replica_goes_back_to_a_version_that_is_kept_and_stays_until_it_is_unpinned(meshes: Meshes) -> None:
    weights = meshes.connect("fsdp", WeightsConfig(keep_versions=2))
    by_version = {}
    for version in (1, 2, 3):
        by_version[version] = meshes.full_weights()
        meshes.run(weights.broadcast())
        meshes.run(meshes.learner.call("train"))
    meshes.run(weights.use(1, replica=1))
    assert weights.versions == [3, 1] and weights.pinned == {1} and weights.version == 3
    meshes.check(1, by_version[1], slice(1, 2))
    meshes.run(weights.broadcast())
    meshes.check(1, by_version[1], slice(1, 2))
    assert weights.versions == [4, 1]
    with pytest.raises(VersionUnavailable, match="does not hold version 1 but version 2 and"):
        meshes.run(weights.use(1, replica=0))
    assert weights.pinned == {1}
    weights.unpin(1)
    meshes.run(weights.broadcast())
    meshes.check(5)
    with pytest.raises(UserError, match="there is no replica 2, only 0 to 1"):
        meshes.run(weights.use(5, replica=2))


def test_a_pin_that_fails_or_is_overtaken_by_a_broadcast_takes_no_other_pin_away(meshes: Meshes) -> None:
    weights = meshes.connect("fsdp", WeightsConfig(keep_versions=3))

    async def drive() -> None:
        for _ in range(3):
            await weights.broadcast()
        failing, pinning, following = await asyncio.gather(
            weights.use(9, replica=0),
            weights.use(1, replica=0),
            weights.broadcast(),
            return_exceptions=True,
        )
        assert isinstance(failing, VersionUnavailable) and pinning is None and following == 4
        assert weights.pinned == {0} and weights.versions == [1, 4] and weights.version == 4
        await weights.use(2, replica=1)
        assert weights.version == 1  # nobody follows

    meshes.run(drive())


def test_a_way_that_is_refused_is_told_once_and_the_next_is_taken(meshes: Meshes) -> None:
    meshes.notes.clear()
    meshes.run(meshes.generator.call("pretend_to_be_elsewhere", True))
    try:
        weights = meshes.connect("fsdp")
        assert set(weights.transports) <= {"nixl", "rdma", "tcp"} and len(weights.transports) == 2
        (note,) = meshes.notes
        assert note.startswith(
            f"weights travel by {weights.transports[0]}, since a preferred way does not work: memfd"
        )
        meshes.run(weights.broadcast())
        meshes.check(1)
        with pytest.raises(
            TransportUnavailable, match="no way for weights to process .*: memfd: .* within one host"
        ):
            meshes.connect("fsdp", WeightsConfig(transport="memfd"))
    finally:
        meshes.run(meshes.generator.call("pretend_to_be_elsewhere", False))


def test_without_a_connection_the_way_out_is_named(meshes: Meshes) -> None:
    async def unconnected() -> RoleMesh:
        return await meshes.learner.spawn_beside(SmallLearner, "unconnected_learner")

    mesh = meshes.run(unconnected())
    with pytest.raises(WeightsError, match="this WeightBroadcast is not in use: connect first"):
        meshes.run(mesh.call("publish", 1, "none"))


def test_a_target_for_several_ranks_is_refused_with_the_way_out() -> None:
    class ForBothRanks(SmallGenerator):
        def weights_target(self, source: Layout) -> Layout:
            return source.whole(ranks=2)

    asks: Any = ReceivesWeights.weights_needed
    source = layout_of({"w": torch.ones(3)})
    with pytest.raises(LayoutError, match=r"ForBothRanks answers for 2 ranks .* \.of_rank\(self\.rank\)"):
        asyncio.run(inspect.unwrap(asks._method)(ForBothRanks(), source))
