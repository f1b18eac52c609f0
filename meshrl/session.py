"""Session: starts processes, puts actors on them, notices when one dies, and leaves nothing behind.

The only module that starts or ends worker processes. Today all of them are on this host; meshes on other hosts come
through the same `spawn`.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.errors import UserError

# Read by Monarch when it starts: look after processes twice a second; two sessions on a machine never share a port.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "500ms")
os.environ.setdefault("MONARCH_DEBUG_SERVER_PORT", "0")

import monarch.actor
from monarch.actor import this_host

from meshrl.logs import LogServer, ProcessLog, connect_process
from meshrl.mesh import Processes, Replica, RoleMesh, WorkerDied
from meshrl.pickling import keep_file_names
from meshrl.worker import DeadlineError, RemoteError, Worker, endpoint

__all__ = [
    "DeadlineError",
    "RemoteError",
    "RoleMesh",
    "Session",
    "SessionConfig",
    "Worker",
    "WorkerDied",
    "endpoint",
]

_numbers = itertools.count(1)


@dataclass(frozen=True)
class SessionConfig:
    """How processes are started and ended."""

    threads_per_process: int = 1
    """CPU threads of each worker's tensor operations; 0: as many as the library likes."""
    start_deadline_seconds: float = 180.0
    """Longest wait for new processes to answer."""
    setup_deadline_seconds: float = 600.0
    """Longest wait for an actor's `setup`."""
    stop_seconds: float = 1.0
    """Time that processes have to end by themselves before they are killed."""


@dataclass(frozen=True)
class Rank:
    """Where one worker runs."""

    role: str
    replica: int
    rank: int
    host: str
    pid: int


class Session:
    """Processes and actors of one run; use as an async context, or `start` and `stop`.

    >>> async with Session() as session:                                              # doctest: +SKIP
    ...     reward = await session.spawn(Reward, RewardSetup(config), replicas=2)
    ...     await reward.call("grade", rollouts, deadline_seconds=60)
    """

    def __init__(self, config: SessionConfig | None = None) -> None:
        self.config = config or SessionConfig()
        self.directory: Path | None = None
        """Run directory: logs of workers go to `logs/` in it; None: nowhere."""
        self.meshes: dict[str, RoleMesh] = {}
        self.on_note: Callable[[str], None] = print
        """Told what the session and the program are doing."""
        self.on_log: Callable[[str], None] = _print_line
        """Told each line that a worker prints, tagged; called on a thread of its own."""
        self._logs: LogServer | None = None
        self._processes: list[Processes] = []
        self._log_files: dict[str, Any] = {}
        self._lock = threading.Lock()

    async def start(self) -> None:
        """Make ready; the second time it does nothing."""
        if self._logs is None:
            if "IPython" in sys.modules:
                from meshrl.notebook.init import prepare_kernel

                prepare_kernel()
            keep_file_names()
            _install_fault_hook()
            self._logs = LogServer(self._log_line)

    async def stop(self) -> None:
        """End all processes in bounded time, whatever they are doing; the second time it does nothing."""
        logs, self._logs = self._logs, None
        if logs is None:
            return
        processes, self._processes, self.meshes = self._processes, [], {}
        for each in processes:
            each.death.cancel()
        pids = [pid for each in processes for pid in each.pids]
        try:
            await asyncio.gather(*(_stop_processes(each, self.config.stop_seconds) for each in processes))
        finally:
            logs.close()  # a process that is still there, or was just starting, ends with this
            for pid in pids:
                _kill(pid)
            for file in self._log_files.values():
                file.close()
            self._log_files.clear()

    async def __aenter__(self) -> Session:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def note(self, text: str) -> None:
        """Say what is going on, for a person to read."""
        self.on_note(text)

    def describe(self) -> list[Rank]:
        """Every worker process."""
        return [
            Rank(each.role, each.replica, rank, each.host, pid)
            for each in self._processes
            for rank, pid in enumerate(each.pids)
        ]

    async def spawn(
        self,
        worker: type[Worker],
        setup: Any = None,
        *,
        procs: int = 1,
        replicas: int = 1,
        name: str | None = None,
    ) -> RoleMesh:
        """Bring up `replicas` × `procs` processes with a worker on each, and call its `setup(setup)`.

        Several spawns may run at once; start-up is dominated by imports.

        Args:
            setup: argument of the worker's `setup` endpoint; None: it is not called.
            procs: processes of each replica, which belong together and die together.
            replicas: failure domains.
            name: of the role; None: the class's name in lower case.

        Raises:
            UserError: a count below 1, or a name that is taken.
            DeadlineError, WorkerDied: the processes did not come up. Besides these, what `setup` raises.
        """
        name = name or worker.__name__.lower()
        if self._logs is None:
            await self.start()
        if procs < 1 or replicas < 1:
            raise UserError(f"{name}: {replicas} replicas of {procs} processes; at least 1 of each is needed")
        if name in self.meshes:
            raise UserError(f"a mesh named {name!r} is already running: give this one another name")
        self.meshes[name] = RoleMesh(name, [])
        try:
            parts = await asyncio.gather(*(self._bring_up(worker, name, i, procs) for i in range(replicas)))
            mesh = self.meshes[name] = RoleMesh(name, list(parts))
            if setup is not None:
                await mesh.call("setup", setup, deadline_seconds=self.config.setup_deadline_seconds)
        except BaseException:
            self.meshes.pop(name, None)
            raise
        return mesh

    async def _bring_up(self, worker: type[Worker], name: str, replica: int, procs: int) -> Replica:
        assert self._logs is not None
        _export_environment(self.config.threads_per_process)
        number = next(_numbers)
        proc_mesh = this_host().spawn_procs(
            {"gpus": procs},
            bootstrap=functools.partial(connect_process, self._logs.address, name, replica),
            name=f"{name}_{replica}_{number}",
        )
        processes = Processes(proc_mesh, name, replica, procs, self._logs)
        self._processes.append(processes)
        made = Replica(processes, proc_mesh.spawn(f"{name}_{number}", worker))
        where = await made.call(
            "identify", name, replica, procs, deadline_seconds=self.config.start_deadline_seconds
        )
        processes.pids[:] = [pid for pid, _ in where]
        processes.host = where[0][1]
        for pid in processes.pids:
            _watch(pid, processes)
        return made

    def _log_line(self, log: ProcessLog, line: str) -> None:
        tag = f"{log.role}[{log.replica}]" if not log.rank else f"{log.role}[{log.replica},{log.rank}]"
        with self._lock:
            if self.directory is not None:
                file = self._log_files.get(tag)
                if file is None:
                    folder = self.directory / "logs"
                    folder.mkdir(parents=True, exist_ok=True)
                    path = folder / f"{log.role}-{log.replica}-{log.rank}.log"
                    file = self._log_files[tag] = path.open("a", encoding="utf-8", buffering=1)
                file.write(line + "\n")
        self.on_log(f"{tag} {line}")


def _print_line(line: str) -> None:
    print(line, flush=True)


def _export_environment(threads: int) -> None:
    """What worker processes inherit: importable modules of this process, and their number of threads."""
    path = [place for place in sys.path if place and Path(place).exists()]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)


def _install_fault_hook() -> None:
    # Monarch's own hook ends the controller; here a dead process fails the calls that wait for it, nothing else.
    monarch.actor.unhandled_fault_hook = lambda failure: None  # pyright: ignore[reportAttributeAccessIssue]


def _watch(pid: int, processes: Processes) -> None:
    """Tell `processes` as soon as the process ends (pidfd: no polling)."""
    loop = asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        processes.died(pid)
        return

    def ended() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        processes.died(pid)

    loop.add_reader(descriptor, ended)


async def _stop_processes(processes: Processes, seconds: float) -> None:
    """Ask Monarch, then kill."""
    if processes.death.done() and not processes.death.cancelled():
        seconds = 0.1  # Monarch waits long for a mesh with a dead process
    try:
        await asyncio.wait_for(_stop_mesh(processes.proc_mesh), seconds)
    except Exception:
        pass
    for pid in processes.pids:
        _kill(pid)


async def _stop_mesh(proc_mesh: Any) -> None:
    await proc_mesh.stop("session stopped")


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
