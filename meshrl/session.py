"""Session: starts processes, puts actors on them, notices when one dies, and leaves nothing behind.

Worker processes are started here only. Today all of them are on this host; meshes on other hosts come
through the same `spawn`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshrl.errors import UserError

# Read by Monarch when it starts: look after processes twice a second; sessions never share a port.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "500ms")
os.environ.setdefault("MONARCH_DEBUG_SERVER_PORT", "0")

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import this_host

from meshrl.logs import LogServer, ProcessLog
from meshrl.mesh import Replica, RoleMesh
from meshrl.pickling import keep_file_names
from meshrl.processes import Processes, SessionStopped
from meshrl.why import Why, ask
from meshrl.worker import DeadlineError, RemoteError, Worker, WorkerDied, endpoint

__all__ = [
    "DeadlineError",
    "RemoteError",
    "RoleMesh",
    "Session",
    "SessionConfig",
    "SessionStopped",
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

    name: str
    """`generator[1]`."""
    role: str
    replica: int
    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"{self.name} on {self.host}, process {self.pid}"


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
        self._workers: dict[str, type[Worker]] = {}
        self._log_files: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._stopped = False

    async def start(self) -> None:
        """Make ready; the second time it does nothing. A stopped session can be started again."""
        self._stopped = False
        if self._logs is None:
            if "IPython" in sys.modules:
                from meshrl.notebook.init import prepare_kernel

                prepare_kernel()
            keep_file_names()
            _install_fault_hook()
            self._logs = LogServer(self._log_line)

    async def stop(self) -> None:
        """End all processes in bounded time, whatever they are doing; the second time it does nothing.

        Calls that still wait, and later ones, raise `SessionStopped`.
        """
        self._stopped = True
        logs, self._logs = self._logs, None
        if logs is None:
            return
        processes, self._processes, self.meshes = self._processes, [], {}
        try:
            await asyncio.gather(*(each.stop(self.config.stop_seconds) for each in processes))
        finally:
            for each in processes:
                each.kill()
            logs.close()  # a process that was just starting ends with this
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
            Rank(each.name(rank), each.role, each.replica, rank, each.host, pid)
            for each in self._processes
            for rank, pid in sorted(each.by_rank.items())
        ]

    async def why(self) -> Why:
        """Who waits for whom at this moment, in all processes. Takes two seconds at most, also where some are dead or
        stopped."""
        waiting = await ask([Replica(each, each.workers) for each in self._processes])
        return Why("nobody waits for anything" if not waiting else "at this moment", waiting)

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

        Several spawns may run at once; start-up is dominated by imports. Where it fails or is cancelled,
        the processes are ended and the name is free again.

        Args:
            setup: argument of the worker's `setup` endpoint; None: it is not called.
            procs: processes of each replica, which belong together and die together.
            replicas: failure domains.
            name: of the role: letters, digits and underscores; None: the class's name in lower case.

        Raises:
            UserError: a count below 1, a name that is taken or malformed, a class that is no worker.
            DeadlineError, WorkerDied: the processes did not come up. Besides these, what `setup` raises.
            SessionStopped: the session was stopped, before or meanwhile.
        """
        name = name or worker.__name__.lower()
        self._check(worker, setup, procs, replicas, name)
        if self._stopped:  # a task that goes on after the end must not bring processes back
            raise SessionStopped(f"{name}: the session was stopped; `start` it before spawning")
        await self.start()
        self.meshes[name] = RoleMesh(name, [])
        starts = [
            asyncio.create_task(self._bring_up(worker, name, i, replicas, procs)) for i in range(replicas)
        ]
        try:
            mesh = RoleMesh(name, list(await asyncio.gather(*starts)))
            if setup is not None:
                await mesh.call("setup", setup, deadline_seconds=self.config.setup_deadline_seconds)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.shield(self._discard(name, starts))
            raise
        self.meshes[name] = mesh
        self._workers[name] = worker
        return mesh

    async def respawn(self, mesh: RoleMesh, replica: int, setup: Any = None) -> Replica:
        """Bring up new processes in place of a replica's, which end if they have not yet, and call `setup(setup)` on
        them; they are in the mesh when this returns. Other actors that lived on the old ones are gone.

        Raises:
            UserError: the mesh is not of this session. Besides, what `spawn` raises; the old replica is then still in
                the mesh, dead.
        """
        worker = self._workers.get(mesh.name)
        if worker is None or self.meshes.get(mesh.name) is not mesh:
            raise UserError(
                f"no mesh named {mesh.name!r} of this session is running, so no replica can return to it"
            )
        old = mesh.replicas[replica].processes
        await old.stop(self.config.stop_seconds)
        self._processes = [each for each in self._processes if each is not old]
        made = await self._bring_up(worker, mesh.name, replica, len(mesh.replicas), old.size)
        if setup is not None:
            await made.call("setup", setup, deadline_seconds=self.config.setup_deadline_seconds)
        mesh.replicas[replica] = made
        return made

    def _check(self, worker: type[Worker], setup: Any, procs: int, replicas: int, name: str) -> None:
        if not issubclass(worker, Worker):
            raise UserError(f"{worker.__name__} is not a Worker: let it inherit meshrl.worker.Worker")
        if setup is not None and not hasattr(worker, "setup"):
            raise UserError(f"{worker.__name__} has no endpoint `setup` to be given {setup!r}")
        if procs < 1 or replicas < 1:
            raise UserError(f"{name}: {replicas} replicas of {procs} processes; at least 1 of each is needed")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
            raise UserError(f"a mesh cannot be named {name!r}: use letters, digits and underscores")
        if name in self.meshes:
            raise UserError(f"a mesh named {name!r} is already running: give this one another name")

    async def _bring_up(
        self, worker: type[Worker], name: str, replica: int, replicas: int, procs: int
    ) -> Replica:
        if self._logs is None:
            raise SessionStopped(f"{name}: the session was stopped")
        processes = Processes(name, replica, replicas, procs)
        self._processes.append(processes)
        logs, environment = self._logs, self._environment()

        def command(point: Any) -> Any:
            log = processes.logs[point.rank]
            arguments = ["-m", "meshrl.worker_process", logs.address, logs.expect(log), log.name]
            return BootstrapCommand(sys.executable, None, arguments, environment)

        number = next(_numbers)
        try:
            processes.proc_mesh = this_host().spawn_procs(
                {"gpus": procs}, name=f"{name}_{replica}_{number}", bootstrap_command=command
            )
            processes.end_with_interpreter()
            processes.workers = processes.proc_mesh.spawn(f"{name}_{number}", worker)
            made = Replica(processes, processes.workers)
            await made.identify(name, self.config.start_deadline_seconds)
        except (DeadlineError, WorkerDied, SessionStopped):
            raise
        except Exception as error:  # of Monarch, of which our own watching tells more
            await asyncio.wait({processes.death}, timeout=1.0)
            processes.check()
            raise WorkerDied(f"{processes.names()} did not come up: {error}") from error
        return made

    def _environment(self) -> dict[str, str]:
        """What worker processes get besides what they inherit."""
        places = dict.fromkeys(place or os.getcwd() for place in sys.path)
        # The standard library is left out: a reward may start a Python of another version.
        own = (sysconfig.get_path("stdlib"), str(Path(sysconfig.get_path("stdlib")) / "lib-dynload"))
        path = os.pathsep.join(place for place in places if place not in own and Path(place).exists())
        threads = self.config.threads_per_process
        return {
            "PYTHONPATH": path,
            # What `worker_process` does instead ends the worker's children too.
            "HYPERACTOR_MESH_BOOTSTRAP_ENABLE_PDEATHSIG": "false",
        } | ({"OMP_NUM_THREADS": str(threads)} if threads else {})

    async def _discard(self, name: str, starts: list[asyncio.Task[Replica]]) -> None:
        await asyncio.gather(*starts, return_exceptions=True)
        discarded = [each for each in self._processes if each.role == name]
        await asyncio.gather(*(each.stop(self.config.stop_seconds) for each in discarded))
        self._processes = [each for each in self._processes if each not in discarded]
        self.meshes.pop(name, None)

    def _log_line(self, log: ProcessLog, line: str) -> None:
        with self._lock:
            if self.directory is not None:
                file = self._log_files.get(log.name)
                if file is None:
                    folder = self.directory / "logs"
                    folder.mkdir(parents=True, exist_ok=True)
                    path = folder / f"{log.role}-{log.replica}-{log.rank}.log"
                    file = self._log_files[log.name] = path.open("a", encoding="utf-8", buffering=1)
                file.write(line + "\n")
        self.on_log(f"{log.name} {line}")


def _print_line(line: str) -> None:
    print(line, flush=True)


def _install_fault_hook() -> None:
    # Monarch's own ends the controller; here a dead process fails the calls that wait for it, nothing else.
    monarch.actor.unhandled_fault_hook = lambda failure: None  # pyright: ignore[reportAttributeAccessIssue]
