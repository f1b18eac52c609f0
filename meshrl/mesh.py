"""RoleMesh: the actors of one role, as the controller sees them. Each call has a deadline."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from meshrl.errors import UserError
from meshrl.processes import Processes
from meshrl.worker import Worker, address, find

DEADLINE_SECONDS = 600.0
"""Longest wait of a call that names no deadline of its own."""


@dataclass(frozen=True)
class Replica:
    """One replica of a role: an actor on each of its processes."""

    processes: Processes
    actors: Any
    """Monarch actor mesh."""

    @property
    def proc_mesh(self) -> Any:
        return self.processes.proc_mesh

    @property
    def pids(self) -> list[int]:
        return self.processes.pids

    @property
    def size(self) -> int:
        return self.processes.size

    def address(self, rank: int) -> str:
        """What a rank is known by in processes that do not know its name; see `meshrl.worker.address`."""
        return address(self.actors, rank)

    async def call(
        self, endpoint: str, *args: Any, deadline_seconds: float | None, **kwargs: Any
    ) -> list[Any]:
        """Answers of every rank, in order."""
        future = find(self.actors, endpoint).call(*args, **kwargs)
        what = f"{endpoint} on {self.processes.names()}"
        answers = await self.processes.answer(future, deadline_seconds, what)
        return [value for _, value in answers]

    async def call_rank(
        self, endpoint: str, *args: Any, rank: int, deadline_seconds: float | None, **kwargs: Any
    ) -> Any:
        """Answer of one rank."""
        if not 0 <= rank < self.size:
            raise UserError(f"{self.processes.names()}: there is no rank {rank}, only 0 to {self.size - 1}")
        actor = self.actors if self.size == 1 else self.actors.slice(gpus=rank)
        future = find(actor, endpoint).call_one(*args, **kwargs)
        what = f"{endpoint} on {self.processes.name(rank)}"
        return await self.processes.answer(future, deadline_seconds, what)

    async def identify(self, role: str, deadline_seconds: float | None = DEADLINE_SECONDS) -> None:
        """Tell the workers who they are, and learn their process ids."""
        where = await self.call(
            "identify",
            role,
            self.processes.replica,
            self.processes.replicas,
            self.size,
            deadline_seconds=deadline_seconds,
        )
        for rank, (pid, host) in enumerate(where):
            self.processes.add(rank, pid)
            self.processes.host = host


@dataclass(frozen=True)
class RoleMesh:
    """All replicas of a role. A replica is one proc mesh, hence one failure domain."""

    name: str
    replicas: list[Replica]

    @property
    def size(self) -> int:
        """Processes over all replicas."""
        return sum(replica.size for replica in self.replicas)

    @property
    def handles(self) -> list[Any]:
        """Actor meshes, one per replica, to be given to other actors; see `meshrl.worker.call`."""
        return [replica.actors for replica in self.replicas]

    async def call(
        self, endpoint: str, *args: Any, deadline_seconds: float | None = DEADLINE_SECONDS, **kwargs: Any
    ) -> list[Any]:
        """Call an endpoint on every rank of every replica.

        Args:
            deadline_seconds: longest wait; None: for ever.

        Returns:
            the answers, by replica, then rank.

        Raises:
            DeadlineError: an answer did not come in time.
            WorkerDied: a process is gone, within about a second.
            SessionStopped: the session is. Besides these, what the endpoint raised, as its own type.
        """
        answers = await asyncio.gather(
            *(
                replica.call(endpoint, *args, deadline_seconds=deadline_seconds, **kwargs)
                for replica in self.replicas
            )
        )
        return [answer for part in answers for answer in part]

    async def call_rank(
        self,
        endpoint: str,
        *args: Any,
        replica: int = 0,
        rank: int = 0,
        deadline_seconds: float | None = DEADLINE_SECONDS,
        **kwargs: Any,
    ) -> Any:
        """Call an endpoint on one rank; see `call`. Raises `UserError` where there is no such rank."""
        if not 0 <= replica < len(self.replicas):
            last = len(self.replicas) - 1
            raise UserError(f"{self.name}: there is no replica {replica}, only 0 to {last}")
        return await self.replicas[replica].call_rank(
            endpoint, *args, rank=rank, deadline_seconds=deadline_seconds, **kwargs
        )

    async def spawn_beside(self, actor: type, name: str, *args: Any) -> RoleMesh:
        """Another actor on the same processes.

        Args:
            actor: any Monarch `Actor` class; a `Worker` is told its role, which is `name`, and its rank.
            name: unlike those of the other actors on these processes.
            args: of the class.
        """
        mesh = RoleMesh(
            name, [Replica(r.processes, r.proc_mesh.spawn(name, actor, *args)) for r in self.replicas]
        )
        if issubclass(actor, Worker):
            await asyncio.gather(*(replica.identify(name) for replica in mesh.replicas))
        return mesh
