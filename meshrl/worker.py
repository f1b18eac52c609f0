"""Worker: what every role actor inherits. Endpoints run concurrently; errors carry where they happened."""

from __future__ import annotations

import asyncio
import functools
import os
import pickle
import socket
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from monarch._src.actor.concurrent import concurrent_endpoint
from monarch.actor import Actor, ActorError, current_rank

Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])


class DeadlineError(TimeoutError):
    """An answer did not come in time; the message says from whom, to what."""


class RemoteError(RuntimeError):
    """Stands for an exception of a worker that cannot travel; the message holds its type and text."""


class Worker(Actor):
    """Base class of role actors: several endpoints may be in progress at once, each an `async` method.

    `__init__` does nothing, since an exception in it would poison the processes; a subclass does its work in an endpoint
    `setup(self, setup)`, which `Session.spawn` calls. By then `role`, `replica`, `rank` and `world_size` are set.
    """

    role: str
    """Name of the mesh, such as `generator`."""
    replica: int
    """Which replica of the role this process belongs to."""
    rank: int
    """Rank within the replica."""
    world_size: int
    """Processes of the replica."""

    def __init__(self) -> None:
        pass

    @concurrent_endpoint
    async def identify(self, role: str, replica: int, world_size: int) -> tuple[int, str]:
        """Called by the session before `setup`. Returns the process id and the host's name."""
        self.role, self.replica, self.world_size = role, replica, world_size
        self.rank = current_rank().rank
        return os.getpid(), socket.gethostname()


def endpoint(method: Method) -> Method:
    """Make an `async` method callable from controller and actors.

    Calls run concurrently. An exception reaches the caller as its own type, with notes that say on which rank it was
    raised and hold the traceback from there; one that cannot be pickled arrives as `RemoteError`.
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
        DeadlineError: no answer in time. Besides these, whatever the endpoint raised.
    """
    return await answer_of(getattr(handle, name).call_one(*args, **kwargs), deadline_seconds, f"{name} of {handle}")


async def answer_of(future: Awaitable[Any], deadline_seconds: float | None, what: str) -> Any:
    """Await a Monarch call: its answer, or the original exception, or `DeadlineError` naming `what`."""
    try:
        async with asyncio.timeout(deadline_seconds):
            return await future
    except ActorError as error:
        raise original(error) from None
    except TimeoutError:
        raise DeadlineError(f"waited {deadline_seconds:g} s for {what}") from None


def original(error: ActorError) -> BaseException:
    """The exception that the endpoint raised."""
    return error.exception if isinstance(error.exception, Exception) else error


async def _run(method: Callable[..., Awaitable[Any]], worker: Worker, args: Any, kwargs: Any) -> Any:
    # Importable, so that the wrapper of a class defined in a notebook cell refers to it by name.
    try:
        return await method(worker, *args, **kwargs)
    except ActorError as error:  # of an actor that this one called: it has its notes already
        raise original(error) from None
    except Exception as error:
        raise _travelling(error, worker) from None


def _travelling(error: Exception, worker: Worker) -> Exception:
    if any(note.startswith("raised on ") for note in getattr(error, "__notes__", ())):
        return error
    where = f"{getattr(worker, 'role', type(worker).__name__)}[{getattr(worker, 'rank', '?')}]"
    if getattr(worker, "replica", 0):
        where += f" of replica {worker.replica}"
    frames = "".join(traceback.format_exception(error)).rstrip()
    try:
        pickle.loads(pickle.dumps(error))
        arrived = error
    except Exception:
        arrived = RemoteError(f"{type(error).__module__}.{type(error).__qualname__}: {error}")
    arrived.__cause__ = arrived.__context__ = None
    arrived.add_note(f"raised on {where}, pid {os.getpid()}, host {socket.gethostname()}")
    arrived.add_note(f"remote traceback:\n{frames}")
    return arrived
