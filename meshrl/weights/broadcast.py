"""From a learner mesh to every generator: two actor mix-ins, and the controller's side of a broadcast.

The controller sends a version number and gets short reports; layouts pass through it once, when the meshes
are connected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from meshrl.weights.errors import WeightsError
from meshrl.weights.layout import Layout
from meshrl.weights.transfer import Publisher, PullReport, Subscriber, WeightSource
from meshrl.worker import endpoint

if TYPE_CHECKING:
    from meshrl.session import RoleMesh


class PublishesWeights:
    """Mix-in of a worker whose weights others want; put it before `Worker` and write `weight_tensors`."""

    _publisher: Publisher | None = None

    def weight_tensors(self) -> Mapping[str, Tensor]:
        """This rank's weights by name: whole or sharded (DTensor), the same names and shards always."""
        raise NotImplementedError(f"{type(self).__name__} must define weight_tensors()")

    @endpoint
    async def weights_layout(self) -> WeightSource:
        """Make the arena of this rank, new and empty, and say what lies where in it.

        Generators that were connected before find no new version in the old arena: connect them again.
        """
        self._publisher = Publisher(self.weight_tensors())
        return self._publisher.source

    @endpoint
    async def publish(self, version: int) -> float:
        """Copy the weights into the arena as `version`; they may change once this returns.

        Returns:
            seconds it took.
        """
        if self._publisher is None:
            raise WeightsError("no one is connected: await WeightBroadcast.connect(...) before publishing")
        started = time.perf_counter()
        # On a thread, so that this rank answers while a large copy runs.
        await asyncio.to_thread(self._publisher.publish, version, self.weight_tensors())
        return time.perf_counter() - started


class ReceivesWeights:
    """Mix-in of a worker that uses a learner's weights; put it before `Worker` and write `swap_weights`."""

    _subscriber: Subscriber | None = None
    _pulling: asyncio.Lock | None = None

    async def swap_weights(self, named: Mapping[str, Tensor], version: int) -> None:
        """Use these weights; return when they are in use and `named` is not: the next pull overwrites it."""
        raise NotImplementedError(f"{type(self).__name__} must define swap_weights(named, version)")

    def weights_target(self, source: Layout) -> tuple[Layout, int]:
        """What this worker needs of the learner's weights, and its rank in that; here everything, whole."""
        return source.whole(), 0

    @endpoint
    async def connect_weights(self, sources: Sequence[WeightSource]) -> int:
        """Plan what to take from which learner rank and open their arenas.

        Returns:
            bytes that each pull will take.
        """
        subscriber = await asyncio.to_thread(Subscriber, sources, self.weights_target)
        self._pulling = self._pulling or asyncio.Lock()
        async with self._pulling:
            self._subscriber = subscriber
        return subscriber.bytes

    @endpoint
    async def pull_weights(self, version: int) -> PullReport:
        """Fetch `version`, verify it, and have it used. On any error the old weights stay in use."""
        if self._subscriber is None or self._pulling is None:
            raise WeightsError(
                "not connected to a learner: await WeightBroadcast.connect(...) before pulling"
            )
        async with self._pulling:
            named, report = await asyncio.to_thread(self._subscriber.pull, version)
            await self.swap_weights(named, version)
        return report


@dataclass(frozen=True)
class BroadcastReport:
    """What one broadcast did; times are of the slowest rank."""

    version: int
    bytes: int
    """Taken by all generators together."""
    publish_seconds: float
    """The learner was blocked for this long, messages not counted."""
    pull_seconds: float
    total_seconds: float
    """From the call until every generator used the new weights, as the controller saw it."""


class WeightBroadcast:
    """The way of weights from a learner mesh to a generator mesh.

    >>> weights = await WeightBroadcast.connect(source=learner, target=generator)  # doctest: +SKIP
    >>> version = await weights.broadcast()
    """

    def __init__(
        self, source: RoleMesh, target: RoleMesh, bytes_per_broadcast: int, deadline_seconds: float
    ) -> None:
        """Use `WeightBroadcast.connect`."""
        self.source = source
        self.target = target
        self.bytes_per_broadcast = bytes_per_broadcast
        self.deadline_seconds = deadline_seconds
        self.version: int = 0
        """The last version that every generator uses; 0 before the first broadcast."""
        self.last: BroadcastReport | None = None
        self._published = 0
        self._one_at_a_time = asyncio.Lock()

    @classmethod
    async def connect(
        cls, *, source: RoleMesh, target: RoleMesh, deadline_seconds: float = 60.0
    ) -> WeightBroadcast:
        """Let every rank of `target` (`ReceivesWeights`) plan what it takes from the ranks of `source`
        (`PublishesWeights`).

        A learner serves the mesh that was connected last.

        Args:
            deadline_seconds: of each of the two calls that make a broadcast.

        Raises:
            LayoutError: the learner's ranks do not hold what a generator needs.
            ArenaUnreachable: a generator cannot open a learner's arena.
        """
        sources = await source.call("weights_layout", deadline_seconds=deadline_seconds)
        sizes = await target.call("connect_weights", sources, deadline_seconds=deadline_seconds)
        return cls(source, target, sum(sizes), deadline_seconds)

    async def broadcast(self) -> int:
        """Bring the learner's weights, as they are now, to every generator.

        Returns:
            the new version: 1, 2, …

        Raises:
            WeightsError: a generator did not get them. It keeps the version it had; others may be one ahead.
        """
        async with self._one_at_a_time:
            started = time.perf_counter()
            # A version whose broadcast failed is never used again: it may be in use somewhere.
            self._published = version = self._published + 1
            # Waits for: every learner rank has copied its shards. Training may go on after it.
            publish_seconds = await self.source.call(
                "publish", version, deadline_seconds=self.deadline_seconds
            )
            # Waits for: every generator has pulled, verified and swapped, between two decode steps.
            reports: list[PullReport] = await self.target.call(
                "pull_weights", version, deadline_seconds=self.deadline_seconds
            )
            self.version = version
            self.last = BroadcastReport(
                version=version,
                bytes=sum(report.bytes for report in reports),
                publish_seconds=max(publish_seconds),
                pull_seconds=max(report.seconds for report in reports),
                total_seconds=time.perf_counter() - started,
            )
            return version
