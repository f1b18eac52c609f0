"""RoleMesh: the actors of one role, as the controller sees them. Every call has a deadline and names whom it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from meshrl.worker import answer_of

if TYPE_CHECKING:
    from meshrl.logs import LogServer

DEADLINE_SECONDS = 600.0
"""Longest wait of a call that names no deadline of its own."""


class WorkerDied(RuntimeError):
    """A process of a mesh is gone; the message names role, rank, process and its last words."""


@dataclass
class Processes:
    """The processes of one replica, shared by all actors on them."""

    proc_mesh: Any
    """Monarch `ProcMesh`."""
    role: str
    replica: int
    size: int
    logs: LogServer
    pids: list[int] = field(default_factory=list)
    """By rank; empty until the first actor has answered."""
    host: str = ""
    death: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Fails with `WorkerDied` when one of the processes ends before it is told to."""

    def name(self, rank: int | None = None) -> str:
        """`generator[1]`, by replica and, where there are several, by rank."""
        inside = ([str(self.replica)] if self.size == 1 or self.replica else []) + (
            [str(rank)] if self.size > 1 and rank is not None else []
        )
        return f"{self.role}[{','.join(inside)}]" if inside else self.role

    def died(self, pid: int, cause: str = "its process is gone") -> None:
        """Fail all pending and later calls."""
        if self.death.done():
            return
        rank = self.pids.index(pid) if pid in self.pids else None
        log = self.logs.by_pid.get(pid)
        words = "".join(f"\n  | {line}" for line in list(log.lines)[-10:]) if log else ""
        last = f"; its last output:{words}" if words else "; it printed nothing"
        self.death.set_exception(WorkerDied(f"{self.name(rank)} (pid {pid}) died: {cause}{last}"))
        self.death.exception()  # looked at: no warning where nobody was waiting

    async def answer(self, future: Awaitable[Any], deadline_seconds: float | None, what: str) -> Any:
        """Await a Monarch call, or the death of a process, whichever comes first."""
        answer = asyncio.ensure_future(answer_of(future, deadline_seconds, f"{what} on {self.name()}"))
        try:
            await asyncio.wait({answer, self.death}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            self.death.result()
        except SupervisionError as error:
            # Monarch may know before we do; the process's own death says more.
            await asyncio.wait({self.death}, timeout=1.0)
            if self.death.done():
                self.death.result()
            reason = str(error).strip().splitlines()[-1].strip()
            raise WorkerDied(f"{self.name()}, asked for {what}, is lost: {reason}") from None
        finally:
            answer.cancel()


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

    async def call(self, endpoint: str, *args: Any, deadline_seconds: float | None, **kwargs: Any) -> list[Any]:
        """Answers of every rank, in order."""
        future = getattr(self.actors, endpoint).call(*args, **kwargs)
        answers = await self.processes.answer(future, deadline_seconds, endpoint)
        return [value for _, value in answers]

    async def call_rank(
        self, endpoint: str, *args: Any, rank: int, deadline_seconds: float | None, **kwargs: Any
    ) -> Any:
        """Answer of one rank."""
        actor = self.actors if self.size == 1 else self.actors.slice(gpus=rank)
        future = getattr(actor, endpoint).call_one(*args, **kwargs)
        return await self.processes.answer(future, deadline_seconds, endpoint)


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
            WorkerDied: a process is gone. Besides these, what the endpoint raised, as its own type.
        """
        answers = await asyncio.gather(
            *(replica.call(endpoint, *args, deadline_seconds=deadline_seconds, **kwargs) for replica in self.replicas)
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
        """Call an endpoint on one rank; see `call`."""
        return await self.replicas[replica].call_rank(
            endpoint, *args, rank=rank, deadline_seconds=deadline_seconds, **kwargs
        )

    async def spawn_beside(self, actor: type, name: str, *args: Any) -> RoleMesh:
        """Another actor on the same processes (any Monarch `Actor` class, given `args`)."""
        return RoleMesh(
            name,
            [Replica(r.processes, r.proc_mesh.spawn(name, actor, *args)) for r in self.replicas],
        )
