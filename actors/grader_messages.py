"""What the reward actor and its grader child say to each other.

Messages are frames: four bytes of length, then a pickle. To the child: `Hello` once, then `list[Job]`. From
the child: `Ready` or `LoadFailed` once, then a `Done` per job, in order unless the function is async;
`Alive` now and then while async jobs run.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshrl.rollout import Rollout

HEADER = struct.Struct(">I")


@dataclass(frozen=True)
class Hello:
    """What to run."""

    function: str | bytes
    """Import path, or the function itself, pickled by cloudpickle."""
    timeout_seconds: float
    """For async functions, which can be timed out from inside."""
    concurrency: int
    """Async jobs at once."""


@dataclass(frozen=True)
class Ready:
    batched: bool
    concurrent: bool
    """Jobs run side by side, so the one that hangs or crashes the process is not known."""


@dataclass(frozen=True)
class LoadFailed:
    text: str
    user_error: bool
    """The name is wrong; else the user's module raised, and `text` is the traceback."""


@dataclass(frozen=True)
class Job:
    id: int
    rollouts: list[Rollout]
    """One, or all of a call for a `@batched` function."""


Done = tuple[int, list[tuple[float | None, str | None]]]
"""Id of a job, and reward and error of each of its rollouts: plain tuples, as there are many."""


@dataclass(frozen=True)
class Alive:
    pass


def frame(message: Any) -> bytes:
    """A message as bytes."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


class FrameReader:
    """Turns chunks of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Messages that are complete now."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) >= start + HEADER.size:
                end = start + HEADER.size + HEADER.unpack_from(self._buffer, start)[0]
                if len(self._buffer) < end:
                    break
                body = bytes(self._buffer[start + HEADER.size : end])
                start = end
                yield pickle.loads(body)
        finally:
            del self._buffer[:start]
