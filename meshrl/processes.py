"""Processes of one replica: found, watched and ended. They stand or fall together."""

from __future__ import annotations

import asyncio
import atexit
import copy
import fcntl
import functools
import os
import signal
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from meshrl.logs import ProcessLog, rank_name
from meshrl.waiting import waiting
from meshrl.worker import WorkerDied, answer_of, lost

Answer = TypeVar("Answer")

LAST_WORDS = 10
"""Lines of output told of a process that died."""


class SessionStopped(RuntimeError):
    """The session was stopped while a call waited for an answer, or before it was made."""


@dataclass(eq=False)
class Processes:
    """The processes of one replica, shared by all actors on them."""

    role: str
    replica: int
    replicas: int
    """Replicas of the role."""
    size: int
    proc_mesh: Any = None
    """Monarch `ProcMesh`; None: not yet asked for."""
    workers: Any = None
    """Monarch mesh of the role's actors on them; None: not yet asked for."""
    host: str = ""
    """Where they run; empty: they have not answered yet."""
    by_rank: dict[int, int] = field(default_factory=dict)
    """Process ids; filled while the processes start."""
    logs: list[ProcessLog] = field(init=False)
    """By rank."""
    death: asyncio.Future[None] = field(init=False)
    """Fails with `WorkerDied` when one of the processes ends, with `SessionStopped` when they are told to."""
    _watched: dict[int, Callable[[], None]] = field(default_factory=dict)
    """By process id: what ends watching it."""
    _reports: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.death = self._loop.create_future()
        self.logs = [
            ProcessLog(
                self.name(rank),
                self.role,
                self.replica,
                rank,
                on_start=functools.partial(self._started, rank),
            )
            for rank in range(self.size)
        ]

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [pid for _, pid in sorted(self.by_rank.items())]

    def name(self, rank: int) -> str:
        """`generator[1]`."""
        return rank_name(self.role, self.replica, rank, self.replicas, self.size)

    def names(self) -> str:
        """All ranks, for messages."""
        if self.size <= 4:
            return ", ".join(map(self.name, range(self.size)))
        return f"{self.name(0)} … {self.name(self.size - 1)}"

    def _rank_names(self) -> list[str]:
        return [self.name(rank) for rank in range(self.size)]

    def _started(self, rank: int, pid: int) -> None:
        """On the thread of the logs."""
        try:
            self._loop.call_soon_threadsafe(self.add, rank, pid)
        except RuntimeError:  # the loop is closed: the controller is about to end
            pass

    def add(self, rank: int, pid: int) -> None:
        """Watch a process from now on."""
        self.by_rank[rank] = pid
        if pid in self._watched:
            return
        if self.death.done():  # the others are ended already
            _kill_group(pid)
            return
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended(rank, pid, "its process is gone")
            return
        loop = asyncio.get_running_loop()

        def stop_watching() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)

        def ended() -> None:
            cause = exit_cause(descriptor)
            self._watched.pop(pid)()
            self._ended(rank, pid, cause)

        self._watched[pid] = stop_watching
        loop.add_reader(descriptor, ended)

    def end_with_interpreter(self) -> None:
        """Kill the groups when the interpreter exits though nobody stopped the session.

        Exit handlers run last one first: called after Monarch has registered its own, which asks workers to end
        and thereby orphans the children of those that comply.
        """
        atexit.register(self._kill_at_exit)

    def _kill_at_exit(self) -> None:  # the event loop is closed by now
        for pid in self._watched:
            _kill_group(pid)

    def check(self) -> None:
        """Raise what ended the processes, if anything did."""
        if self.death.done() and (error := self.death.exception()) is not None:
            raise copy.copy(error)  # each caller's own: a shared one would gather everybody's tracebacks

    async def answer(self, future: Awaitable[Answer], deadline_seconds: float | None, what: str) -> Answer:
        """Await a Monarch call, or the death of a process, whichever comes first."""
        answer = asyncio.ensure_future(answer_of(future, deadline_seconds, what))
        try:
            with waiting(what, unblocked_by=self._rank_names, deadline_seconds=deadline_seconds):
                await asyncio.wait({answer, self.death}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                self.check()
            return answer.result()
        except SupervisionError as error:
            # Monarch may know before we do; the process's own death says more.
            await asyncio.wait({self.death}, timeout=1.0)
            self.check()
            raise lost(error, what) from None
        finally:
            answer.cancel()

    async def stop(self, seconds: float) -> None:
        """End the processes: ask Monarch, and kill what is left after so long."""
        if self.death.done():
            seconds = min(seconds, 0.1)  # Monarch waits long for a mesh with a dead process
        else:
            self.death.set_exception(SessionStopped(f"{self.names()}: the session was stopped"))
            self.death.exception()  # looked at: no warning where nobody was waiting
        try:
            async with asyncio.timeout(seconds):
                await self.proc_mesh.stop("session stopped")
        except Exception:
            pass
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the processes and those that they started, and watch them no more."""
        atexit.unregister(self._kill_at_exit)
        while self._watched:
            pid, stop_watching = self._watched.popitem()
            _kill_group(pid)
            stop_watching()

    def _ended(self, rank: int, pid: int, cause: str) -> None:
        _kill_group(pid)  # processes that it started
        if self.death.done():
            return
        report = asyncio.get_running_loop().create_task(self._report(rank, pid, cause))
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)

    async def _report(self, rank: int, pid: int, cause: str) -> None:
        log = self.logs[rank]
        await asyncio.to_thread(log.ended.wait, 0.3)
        if self.death.done():
            return
        last = tuple(log.lines)[-LAST_WORDS:]
        words = (
            "its last output:" + "".join(f"\n  | {line}" for line in last) if last else "it printed nothing"
        )
        self.death.set_exception(
            WorkerDied(
                f"{self.name(rank)} (pid {pid}) died: {cause}; {words}",
                role=self.role,
                replica=self.replica,
                rank=rank,
                pid=pid,
                cause=cause,
                last_lines=last,
            )
        )
        self.death.exception()


def exit_cause(descriptor: int) -> str:
    """How the process of a pidfd ended, where that can still be known."""
    try:  # not yet waited for by Monarch
        ended = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            return _status(ended.si_status, by_signal=ended.si_code != os.CLD_EXITED)
    except ChildProcessError:
        pass
    try:  # PIDFD_GET_INFO with PIDFD_INFO_EXIT, Linux 6.15
        answer = fcntl.ioctl(descriptor, 0xC040FF0B, struct.pack("Q56x", 1 << 3))
        if struct.unpack_from("Q", answer)[0] & 1 << 3:
            status = struct.unpack_from("i", answer, 60)[0]
            return _status(status & 0x7F or status >> 8, by_signal=status & 0x7F != 0)
    except OSError:
        pass
    return "its process is gone"


def _status(number: int, by_signal: bool) -> str:
    if not by_signal:
        return f"it exited with status {number}"
    hint = ", as the kernel does when memory runs out" if number == signal.SIGKILL else ""
    return f"killed by {signal.Signals(number).name}{hint}"


def _kill_group(pid: int) -> None:
    """Kill a worker and the processes that it started: Monarch makes each worker the leader of a group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
