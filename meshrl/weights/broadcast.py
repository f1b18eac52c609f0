"""From a learner mesh to every generator: the controller's side.

The controller sends version numbers and gets short reports; layouts pass through it once, when the meshes are
connected. No rank holds, sends or waits for more than its own part.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshrl.errors import UserError
from meshrl.waiting import waiting
from meshrl.weights.arena import WeightsConfig
from meshrl.weights.errors import ArenaBusy, WeightsError
from meshrl.weights.plan import Plan
from meshrl.weights.transfer import PullReport
from meshrl.weights.ways import Ways, open_ways
from meshrl.weights.workers import PublishesWeights, ReceivesWeights
from meshrl.worker import WorkerDied

if TYPE_CHECKING:
    from meshrl.mesh import RoleMesh

__all__ = ["BroadcastReport", "PublishesWeights", "ReceivesWeights", "WeightBroadcast", "WeightsConfig"]

_MESSAGE_SECONDS = 30.0
"""Longer than the workers' own deadlines, whose errors say more than that an answer is missing."""
_KEPT_OUTCOMES = 100
"""Versions that `arrival` knows of."""


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
    >>> print(weights.plan.explain())
    >>> version = await weights.publish()     # waits for the learner's copy: train on
    >>> await weights.arrival(version)        # waits for the generators, which pull meanwhile
    """

    def __init__(
        self,
        source: RoleMesh,
        target: RoleMesh,
        ways: Ways,
        config: WeightsConfig,
        outlive_generators: bool,
        note: Callable[[str], None],
    ) -> None:
        """Use `WeightBroadcast.connect`."""
        self.source = source
        self.target = target
        self.config = config
        self._ways = ways
        self._outlive = outlive_generators
        self._note = note
        self._versions = [0] * len(target.replicas)
        self.last: BroadcastReport | None = None
        """Of the newest version that arrived everywhere."""
        self._numbered = self._published = 0
        self._pinned: set[int] = set()
        self._connected = [replica.processes for replica in target.replicas]
        self._publishing = asyncio.Lock()
        self._pulling = [asyncio.Lock() for _ in target.replicas]
        self._pulled = asyncio.Event()
        self._outcomes: dict[int, asyncio.Future[BroadcastReport]] = {}

    @classmethod
    async def connect(
        cls,
        *,
        source: RoleMesh,
        target: RoleMesh,
        config: WeightsConfig | None = None,
        outlive_generators: bool = False,
        note: Callable[[str], None] = print,
    ) -> WeightBroadcast:
        """Plan what every rank of `target` (`ReceivesWeights`) takes from which rank of `source`
        (`PublishesWeights`), and open the ways.

        A learner serves the mesh that was connected last.

        Args:
            outlive_generators: a replica whose process died is passed by until `reconnect`. False: a broadcast fails
                where a generator is dead.
            note: told when a preferred transport did not work and another is taken.

        Raises:
            LayoutError: the learner's ranks do not hold what a generator needs.
            TransportUnavailable: there is no way from some learner rank to some generator.
        """
        config = config or WeightsConfig()
        ways = await open_ways(source, target, config, note)
        return cls(source, target, ways, config, outlive_generators, note)

    async def reconnect(self) -> None:
        """Open the ways anew to the replicas that are alive now: another process took the place of one that died.

        Waits for: versions on their way; then for every replica to have weights: the newest version again if the
        learner still has these, else the next one that is published.
        """
        async with self._publishing:
            if self._outcomes:
                await asyncio.wait(self._outcomes.values())
            self._ways = await open_ways(self.source, self.target, self.config, self._note, self._ways)
            connected = [replica.processes for replica in self.target.replicas]
            returned = {r for r, processes in enumerate(connected) if processes is not self._connected[r]}
            self._connected = connected
            self._pinned -= returned
            for replica in returned:
                self._versions[replica] = 0
            version = self._published
            if version and all(await self._publish("publish_again", version)):
                await asyncio.gather(*(self._pull(version, replica) for replica in returned))
        # The learner has trained since: the program is about to publish, which tells of every replica, dead ones too.
        while self._published and any(self._versions[replica] == 0 for replica in returned - self._lost):
            self._pulled.clear()
            with waiting("the program to publish the next version"):
                await self._pulled.wait()

    @property
    def plan(self) -> Plan:
        """Who reads what from whom."""
        return self._ways.plan

    @property
    def transports(self) -> tuple[str, ...]:
        """By which each generator process that is alive reads, by replica, then rank."""
        return tuple(transport for transport in self._ways.transports if transport is not None)

    @property
    def versions(self) -> list[int]:
        """What each replica uses; 0 before the first broadcast."""
        return list(self._versions)

    @property
    def version(self) -> int:
        """The last version that every generator uses, pinned ones aside; 0 before the first broadcast."""
        others = self._pinned | self._lost
        followers = [version for r, version in enumerate(self._versions) if r not in others]
        return min(followers or self._versions)

    @property
    def published(self) -> int:
        """The last version that was published, on its way or arrived; 0 before the first."""
        return self._published

    @property
    def bytes_per_broadcast(self) -> int:
        """Taken by all generators together."""
        return int(self.plan.traffic.sum())

    async def broadcast(self) -> int:
        """Bring the learner's weights, as they are now, to every generator that is not pinned: `publish`, then
        `arrival`.

        Returns:
            the new version: 1, 2, …

        Raises:
            WeightsError: a generator did not get them. It keeps the version it had; others may be one ahead.
        """
        version = await self.publish()
        await self.arrival(version)
        return version

    async def publish(self) -> int:
        """Copy the learner's weights out as a new version; generators begin to pull it. Training may go on.

        Waits for: every learner rank has copied its share, into the place of a version that has arrived; so at
        most `keep_versions` others are on their way.

        Returns:
            the version, for `arrival`.
        """
        async with self._publishing:
            started = time.perf_counter()
            # A version whose broadcast failed is never used again: it may be in use somewhere.
            self._numbered = version = self._numbered + 1
            outcome: asyncio.Future[BroadcastReport]
            try:
                await self._make_room(version)
                seconds = await self._publish("publish", version)
            except BaseException as error:
                outcome = asyncio.get_running_loop().create_future()
                cancelled = isinstance(error, asyncio.CancelledError)
                outcome.set_exception(
                    WeightsError(f"the publish of version {version} was cancelled") if cancelled else error
                )
                self._keep(version, outcome)
                raise
            self._published = version
            self._keep(version, asyncio.create_task(self._bring(version, started, max(seconds))))
            return version

    async def arrival(self, version: int) -> BroadcastReport:
        """Wait until a published version is in use.

        Waits for: every generator has pulled, verified and swapped, between two decode steps.

        Returns:
            what it took.

        Raises:
            WeightsError: a generator did not get it, and keeps what it had; or it was not published. Each time anew.
            UserError: there was no such version, or only long ago.
        """
        if version not in self._outcomes:
            kept = f"known are the last {len(self._outcomes)}, up to {self._numbered}"
            raise UserError(f"version {version} was not published of late: {kept}")
        return await asyncio.shield(self._outcomes[version])

    async def use(self, version: int, *, replica: int) -> None:
        """Bring a version that is still kept (`WeightsConfig.keep_versions`) to one replica and pin it there:
        broadcasts pass it by until `unpin`.

        Raises:
            VersionUnavailable: it is not kept any more. The replica goes on with what it had, and is not pinned.
        """
        self._check_replica(replica)
        # On a task of its own: the replica goes on with it even if nobody waits any more, and that is to be known.
        await asyncio.shield(asyncio.create_task(self._pull(version, replica, pin=True)))

    def unpin(self, replica: int) -> None:
        """Let the next broadcast reach this replica again."""
        self._check_replica(replica)
        self._pinned.discard(replica)

    @property
    def pinned(self) -> frozenset[int]:
        """Replicas that broadcasts pass by."""
        return frozenset(self._pinned)

    async def _publish(self, endpoint: str, version: int) -> list[Any]:
        deadline = self.config.deadline_seconds + _MESSAGE_SECONDS
        return await self.source.call(endpoint, version, self._ways.connection, deadline_seconds=deadline)

    async def _make_room(self, version: int) -> None:
        """Wait until the version whose place this one takes has arrived: the learner keeps what is being read, but
        not what nobody has begun to read."""
        replaced = version - self.config.keep_versions - 1
        in_the_way = [outcome for older, outcome in self._outcomes.items() if older <= replaced]
        _, late = (
            await asyncio.wait(in_the_way, timeout=self.config.deadline_seconds) if in_the_way else ((), ())
        )
        if late:
            raise ArenaBusy(
                f"cannot publish version {version}: after {self.config.deadline_seconds:g} s version {replaced} has "
                f"not arrived at {self._behind(replaced)}"
            )

    def _keep(self, version: int, outcome: asyncio.Future[BroadcastReport]) -> None:
        """Let `arrival` find it. A failure is raised by whoever awaits that; nobody may, where the program has failed
        elsewhere."""
        outcome.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._outcomes[version] = outcome
        for old in [v for v, o in self._outcomes.items() if v <= version - _KEPT_OUTCOMES and o.done()]:
            del self._outcomes[old]

    async def _bring(self, version: int, started: float, publish_seconds: float) -> BroadcastReport:
        pulls = (self._pull(version, replica) for replica in range(len(self.target.replicas)))
        parts = await asyncio.gather(*pulls, return_exceptions=True)
        for part in parts:
            if isinstance(part, BaseException):
                raise part
        reports = [report for part in parts if not isinstance(part, BaseException) for report in part]
        self.last = BroadcastReport(
            version=version,
            bytes=sum(report.bytes for report in reports),
            publish_seconds=publish_seconds,
            pull_seconds=max((report.seconds for report in reports), default=0.0),
            total_seconds=time.perf_counter() - started,
        )
        return self.last

    async def _pull(self, version: int, replica: int, *, pin: bool = False) -> list[PullReport]:
        """Versions reach a replica in the order in which they were asked for; one that is pinned by then is left
        alone, unless the version is what it is to be pinned to."""
        async with self._pulling[replica]:
            try:
                if replica in self._lost or (replica in self._pinned and not pin):
                    return []
                reports = await self.target.replicas[replica].call(
                    "pull_weights",
                    version,
                    self.config.deadline_seconds,
                    self._ways.connection,
                    deadline_seconds=self.config.deadline_seconds + _MESSAGE_SECONDS,
                )
            except WorkerDied:
                if pin or replica not in self._lost:
                    raise
                return []
            finally:
                self._pulled.set()
            self._versions[replica] = version
            if pin:
                self._pinned.add(replica)
            return reports

    @property
    def _lost(self) -> set[int]:
        """Replicas that are passed by: dead, or not connected since another process took their place."""
        if not self._outlive:
            return set()
        return {
            r
            for r, replica in enumerate(self.target.replicas)
            if replica.processes is not self._connected[r] or replica.processes.death.done()
        }

    def _behind(self, version: int) -> str:
        """The replicas that do not have a version yet."""
        late = [
            r
            for r, used in enumerate(self._versions)
            if used < version and r not in self._pinned | self._lost
        ]
        return " and ".join(self.target.replicas[r].processes.names() for r in late) or "a generator"

    def _check_replica(self, replica: int) -> None:
        if not 0 <= replica < len(self.target.replicas):
            last = len(self.target.replicas) - 1
            raise UserError(f"{self.target.name}: there is no replica {replica}, only 0 to {last}")
