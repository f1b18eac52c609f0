"""Worker: what every role actor inherits. Endpoints run concurrently; errors carry where they happened."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import cloudpickle
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch._src.actor.concurrent import concurrent_endpoint
from monarch.actor import Actor, ActorError, current_rank

from meshrl.logs import rank_name
from meshrl.waiting import Wait, waiting, waits

Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])


class DeadlineError(TimeoutError):
    """An answer did not come in time; the message says from whom, to what."""


class RemoteError(RuntimeError):
    """Stands for an exception of a worker that cannot travel; the message holds its type and text."""


class WorkerDied(RuntimeError):
    """A process is gone; the message says which one, why where that is known, and its last words."""

    def __init__(
        self,
        message: str,
        *,
        role: str | None = None,
        replica: int | None = None,
        rank: int | None = None,
        pid: int | None = None,
        cause: str | None = None,
        last_lines: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.role = role
        """None, as for all below: not known, since Monarch noticed first and says no more."""
        self.replica = replica
        self.rank = rank
        self.pid = pid
        self.cause = cause
        """`killed by SIGKILL …`, `it exited with status 7`."""
        self.last_lines = last_lines
        """What it printed last, oldest line first."""


class Worker(Actor):
    """Base class of role actors: several endpoints may be in progress at once, each an `async` method.

    `__init__` does nothing, since an exception in it would poison the processes; a subclass does its work in
    an endpoint `setup(self, setup)`, which `Session.spawn` calls. By then these are set:
    """

    role: str
    """Name of the mesh, such as `generator`."""
    replica: int
    """Which replica of the role this process belongs to."""
    replicas: int
    """Replicas of the role."""
    rank: int
    """Rank within the replica."""
    world_size: int
    """Processes of the replica."""

    def __init__(self) -> None:
        pass

    @concurrent_endpoint
    async def identify(self, role: str, replica: int, replicas: int, world_size: int) -> tuple[int, str]:
        """Called by the session before `setup`. Returns the process id and the host's name."""
        self.role, self.replica, self.replicas, self.world_size = role, replica, replicas, world_size
        self.rank = current_rank().rank
        return os.getpid(), socket.gethostname()

    @concurrent_endpoint
    async def waits(self) -> tuple[Wait, ...]:
        """What this process waits for and is doing, at this moment."""
        return waits()


def endpoint(method: Method) -> Method:
    """Make an `async` method callable from controller and actors.

    Calls run concurrently. An exception reaches the caller as its own type, with notes that say on which rank
    it was raised and hold the traceback from there; one that cannot be pickled, or would lose those notes by
    it, arrives as `RemoteError`.
    """

    @functools.wraps(method)
    async def noted(self: Worker, *args: Any, **kwargs: Any) -> Any:
        return await _run(method, self, args, kwargs)

    return concurrent_endpoint(noted)  # pyright: ignore[reportReturnType]


async def call(handle: Any, name: str, *args: Any, deadline_seconds: float | None, **kwargs: Any) -> Any:
    """Call an endpoint of a single actor from anywhere, another actor included.

    Args:
        handle: from `RoleMesh.handles`.
        deadline_seconds: longest wait; None: for ever.

    Raises:
        DeadlineError: no answer in time.
        WorkerDied: its process is gone. Besides these, whatever the endpoint raised.
    """
    what = f"{name} of {class_name(handle)}"
    try:
        with waiting(what, unblocked_by=lambda: [address(handle)], deadline_seconds=deadline_seconds):
            return await answer_of(find(handle, name).call_one(*args, **kwargs), deadline_seconds, what)
    except SupervisionError as error:
        raise lost(error, what) from None


def find(handle: Any, name: str) -> Any:
    """The Monarch endpoint of that name. Raises `AttributeError` where the actor's class has none."""
    try:
        return getattr(handle, name)
    except AttributeError:
        raise AttributeError(f"{class_name(handle)} has no endpoint named {name!r}") from None


def class_name(handle: Any) -> str:
    """Name of the class of an actor mesh."""
    return handle._class.__name__


def address(handle: Any, rank: int = 0) -> str:
    """Tells actors apart in all processes of a run, which do not know each other's names, such as `reward_3:0`.

    Args:
        rank: of the mesh or slice that the handle stands for.
    """
    return f"{handle._mesh_name}:{handle._shape.ndslice.offset + rank}"


async def answer_of(future: Awaitable[Any], deadline_seconds: float | None, what: str) -> Any:
    """Await a Monarch call: its answer, or the original exception, or `DeadlineError` naming `what`."""
    try:
        async with asyncio.timeout(deadline_seconds):
            return await future
    except ActorError as error:
        raise original(error) from None
    except TimeoutError:
        if deadline_seconds is None:  # Monarch's, then
            raise
        raise DeadlineError(f"waited {deadline_seconds:g} s for {what}") from None


def original(error: ActorError) -> BaseException:
    """The exception that the endpoint raised."""
    inner = error.exception
    return inner if isinstance(inner, Exception) else RemoteError(_headline(inner))


def lost(error: SupervisionError, what: str) -> WorkerDied:
    """What Monarch noticed, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return WorkerDied(f"waited for {what}: {lines[-1] if lines else 'its process is gone'}")


async def _run(method: Callable[..., Awaitable[Any]], worker: Worker, args: Any, kwargs: Any) -> Any:
    # Importable, so that the wrapper of a class defined in a notebook cell refers to it by name.
    try:
        with waiting(method.__name__, kind="work"):  # pyright: ignore[reportAttributeAccessIssue]
            return await method(worker, *args, **kwargs)
    except ActorError as error:  # of an actor that this one called: it has its notes already
        raise original(error) from None
    except (Exception, SystemExit) as error:
        raise _travelling(error, worker) from None


def _travelling(error: BaseException, worker: Worker) -> Exception:
    if isinstance(error, Exception) and any(note.startswith("raised on ") for note in notes_of(error)):
        return error
    frames = "".join(traceback.format_exception(error)).rstrip()
    error.__cause__ = error.__context__ = None
    error.add_note(f"raised on {_name(worker)}, pid {os.getpid()}, host {socket.gethostname()}")
    error.add_note(f"remote traceback:\n{frames}")
    if isinstance(error, Exception) and _arrives_whole(error):
        return error
    stand_in = RemoteError(_headline(error))
    for note in notes_of(error):
        stand_in.add_note(note)
    return stand_in


def notes_of(error: BaseException) -> list[str]:
    """What was added to an exception with `add_note`."""
    return getattr(error, "__notes__", [])


def _arrives_whole(error: Exception) -> bool:
    try:
        return notes_of(cloudpickle.loads(cloudpickle.dumps(error))) == notes_of(error)
    except Exception:
        return False


def _headline(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}: {error}".removeprefix("builtins.")


def _name(worker: Worker) -> str:
    if not hasattr(worker, "role"):
        return type(worker).__name__
    return rank_name(worker.role, worker.replica, worker.rank, worker.replicas, worker.world_size)
