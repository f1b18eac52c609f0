"""The controller's line to the generators: which replica works on what, holds what, and is alive.

Groups wait here for a replica with room, go out with one message a replica, and come back by polling. When a
replica dies, what was generated or docked there is handed back to the owner, and another process may take its
place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol

from meshrl.actors.generator import Finished
from meshrl.mesh import Replica, RoleMesh
from meshrl.parcel import parcel
from meshrl.processes import SessionStopped
from meshrl.rollout import GroupRequest, RolloutGroup, RolloutHandle
from meshrl.scheduling import Placement
from meshrl.waiting import waiting
from meshrl.worker import WorkerDied

POLL_SECONDS = 5.0
"""A poll without news comes back after this long, so that a dead generator is noticed by its missing answer."""

DEATH_SECONDS = 2.0
"""Monarch may report a death this much earlier than the process's own end is noticed."""


class Owner(Protocol):
    """Who decides what is generated. All calls are made by the event loop, between two awaits."""

    def next_request(self) -> GroupRequest | None:
        """The group that waits longest; None: none does. Asked again, the same, until `started`."""
        ...

    def started(self, request: GroupRequest) -> None:
        """It goes to a replica."""
        ...

    def grading(self, group_id: int) -> None:
        """It is generated and being graded."""
        ...

    def finished(self, group: RolloutGroup) -> None:
        """It is graded; its columns are docked on its replica."""
        ...

    def lost(self, replica: int, unfinished: Sequence[GroupRequest], error: WorkerDied) -> None:
        """The replica died, with these groups unfinished, and with all that was docked there."""
        ...

    def failed(self, error: BaseException) -> None:
        """Generation cannot go on."""
        ...


class Dispatcher:
    """Sends groups to generator replicas and collects them.

    Waits for: each replica's poll, which answers at least every POLL_SECONDS; a replica's death ends it.
    """

    def __init__(
        self,
        generator: RoleMesh,
        owner: Owner,
        *,
        capacity: int,
        affinity_rollouts: int,
        deadline_seconds: float,
        revive: Callable[[int], Awaitable[None]] | None = None,
        note: Callable[[str], None] = print,
    ) -> None:
        """
        Args:
            capacity: most rollouts outstanding at a replica; 0: no bound.
            deadline_seconds: longest wait for a poll's answer.
            revive: brings up another process in place of a replica that died; None: the others do its work.
            note: told when that does not succeed.
        """
        self._generator = generator
        self._owner = owner
        self._deadline_seconds = deadline_seconds
        self._revive = revive
        self._note = note
        replicas = len(generator.replicas)
        self.placement = Placement(replicas, capacity, affinity_rollouts)
        self._outstanding: dict[int, tuple[GroupRequest, int]] = {}
        self._docked: list[set[int]] = [set() for _ in range(replicas)]
        self._reviving: set[int] = set()
        self.generate_seconds = [0.0] * replicas
        """Time that each replica's engine was stepping, since it was last set to 0."""
        self.reward_seconds = [0.0] * replicas
        """Time that it stood still for grading."""
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to listen."""
        for replica in self.placement.alive:
            self.spawn(self._listen(replica))

    async def close(self) -> None:
        """Listen no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def docked(self) -> int:
        """Rollouts whose columns generators hold, as told and not yet released."""
        return sum(map(len, self._docked))

    def outstanding(self) -> dict[int, int]:
        """Rollouts asked for and not finished, by replica that has any."""
        return {replica: load for replica, load in enumerate(self.placement.loads) if load}

    def busy(self) -> list[str]:
        """Names of the replicas that have something outstanding."""
        return [self._generator.replicas[replica].processes.names() for replica in self.outstanding()]

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this meanwhile; its error is a failure of generation."""
        task = asyncio.create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def dispatch(self) -> None:
        """Send waiting groups to replicas that have room: one message a replica."""
        by_replica: dict[int, list[GroupRequest]] = {}
        while (request := self._owner.next_request()) is not None:
            prefix = (request.split, request.prompt_index)
            replica = self.placement.place(prefix, len(request.seeds))
            if replica is None:
                break
            self._owner.started(request)
            self._outstanding[request.group_id] = request, replica
            by_replica.setdefault(replica, []).append(request)
        await asyncio.gather(*(self._call(r, "submit", parcel(part)) for r, part in by_replica.items()))

    async def release(
        self, groups: Iterable[RolloutGroup], advantages: Mapping[int, float], step: int, record: bool = True
    ) -> None:
        """Tell each replica which rollouts it may let go of.

        Raises:
            RuntimeError: a replica did not hold what it said.
        """
        by_replica: dict[int, list[int]] = {}
        for group in groups:
            for rollout in group.rollouts:
                if rollout.id in self._docked[rollout.replica]:
                    by_replica.setdefault(rollout.replica, []).append(rollout.id)
        for replica, ids in by_replica.items():
            self._docked[replica].difference_update(ids)

        async def tell(replica: int, ids: list[int]) -> None:
            own = {i: advantages[i] for i in ids if i in advantages}
            released = await self._call(replica, "release", ids, own, step, record)
            if released is not None and released != len(ids):
                raise RuntimeError(
                    f"generator replica {replica} held {released} of {len(ids)} rollouts that were to be released: "
                    f"the ledger and its dock disagree, first about rollout {min(ids)}"
                )

        await asyncio.gather(*(tell(replica, ids) for replica, ids in by_replica.items()))

    async def samples(self, rollouts: Sequence[RolloutHandle]) -> tuple[str, ...]:
        """Readable lines of rollouts that are docked."""
        answers = [await self._call(rollout.replica, "samples", [rollout.id]) for rollout in rollouts]
        return tuple(line for answer in answers for line in answer or ())

    async def tell_all(self, endpoint: str, *arguments: Any) -> list[Any]:
        """Call an endpoint on every replica that is alive; the answers of those that still are."""
        replicas = self.placement.alive
        answers = await asyncio.gather(*(self._call(replica, endpoint, *arguments) for replica in replicas))
        return [answer for answer in answers if answer is not None]

    async def _call(self, replica: int, endpoint: str, *arguments: Any) -> Any:
        """Its answer; None: it died, which has been seen to."""
        if not self.placement.is_alive(replica):
            return None
        mesh = self._generator.replicas[replica]
        try:
            return await self._generator.call_rank(
                endpoint, *arguments, replica=replica, deadline_seconds=self._deadline_seconds
            )
        except WorkerDied as error:
            if not await _died(mesh):
                raise
            self._lose(replica, mesh, error)
            return None

    async def _listen(self, replica: int) -> None:
        """Collect what one replica finishes, until it dies."""
        arrived = 0
        while True:
            with waiting("news", kind="idle"):
                answer: Finished | None = await self._call(replica, "finished", arrived, POLL_SECONDS)
            if answer is None:
                return
            self.generate_seconds[replica] += answer.generate_seconds
            self.reward_seconds[replica] += answer.reward_seconds
            arrived = answer.number
            for group_id in answer.grading:
                if group_id in self._outstanding:
                    self._owner.grading(group_id)
            for group in answer.groups:
                request, _ = self._outstanding.pop(group.group_id, (None, replica))
                if request is None:
                    continue  # told twice
                self.placement.done(replica, len(request.seeds))
                self._docked[replica].update(rollout.id for rollout in group.rollouts)
                self._owner.finished(group)
            if answer.groups and self._owner.next_request() is not None:
                await self.dispatch()

    def _lose(self, replica: int, mesh: Replica, error: WorkerDied) -> None:
        if not self.placement.is_alive(replica) or self._generator.replicas[replica] is not mesh:
            return  # known already
        self.placement.lose(replica)
        self._docked[replica].clear()
        unfinished = [request for request, at in self._outstanding.values() if at == replica]
        for request in unfinished:
            del self._outstanding[request.group_id]
        self._owner.lost(replica, unfinished, error)
        if self._revive is not None:
            self._reviving.add(replica)
            self.spawn(self._bring_back(replica, error))
        elif not self.placement.alive and not self._reviving:
            self._owner.failed(error)
        self.spawn(self.dispatch())

    async def _bring_back(self, replica: int, error: WorkerDied) -> None:
        assert self._revive is not None
        try:
            await self._revive(replica)
        except SessionStopped:
            return
        except Exception as trouble:
            self._reviving.discard(replica)
            if not self.placement.alive and not self._reviving:
                raise WorkerDied(f"{error}; and no other takes its place: {trouble}") from trouble
            self._note(f"generator replica {replica} stays away, the others go on: {trouble}")
            return
        self._reviving.discard(replica)
        self.placement.restore(replica)
        self.spawn(self._listen(replica))
        await self.dispatch()

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self._owner.failed(error)


async def _died(replica: Replica) -> bool:
    """Whether it was the replica itself that died, rather than somebody that it waited for."""
    death = replica.processes.death
    await asyncio.wait({death}, timeout=DEATH_SECONDS)
    return death.done() and isinstance(death.exception(), WorkerDied)
