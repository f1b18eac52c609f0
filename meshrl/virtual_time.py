"""Virtual time: an event loop whose clock jumps to the next timer instead of waiting for it.

Sleeps, timeouts and deadlines of code that runs on it take no real time, and the order of events depends on nothing
but the program: two runs of one seed agree.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from meshrl.waiting import waits

Result = TypeVar("Result")

NAMED_TASKS = 8
"""An error names this many of the tasks that wait, at most."""


class Deadlock(RuntimeError):
    """Every task waits, and no timer is set: nothing will ever happen. The message names who waits for what."""


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run`, in virtual time, which begins at 0.

    >>> async def nap() -> float:
    ...     await asyncio.sleep(3600)
    ...     return asyncio.get_running_loop().time()
    >>> run(nap())
    3600.0

    Raises:
        Deadlock: the coroutine waits for something that cannot happen. Besides, what it raises.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Runs what is ready; where nothing is, it is at once the time of the next timer.

    Threads and sockets are not waited for: what they bring is seen when it is there already.
    """

    def __init__(self) -> None:
        self._virtual_seconds = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual_seconds

    def jump(self, seconds: float | None) -> None:
        """Let time pass. None: for ever.

        Raises:
            Deadlock: it is for ever.
        """
        if seconds is None:
            raise Deadlock(f"nothing can happen any more, no timer is set: {self._who_waits()}")
        self._virtual_seconds += seconds
        # asyncio calls what is due before now + resolution, which far from 0 must not round to now.
        self._clock_resolution = max(1e-9, 2 * math.ulp(self._virtual_seconds))

    def _who_waits(self) -> str:
        names = sorted(task.get_name() for task in asyncio.all_tasks(self))
        what = {entry.who: entry.what for entry in waits()}  # of several, the innermost
        shown = [f"{name} ({what[name]})" if name in what else name for name in names[:NAMED_TASKS]]
        more = f" and {len(names) - NAMED_TASKS} more" if len(names) > NAMED_TASKS else ""
        return f"{', '.join(shown)}{more} wait"


class _Jump(selectors.DefaultSelector):
    """Looks at its files, and in place of waiting for one lets the loop's time pass."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout != 0:
            self._loop.jump(timeout)
        return events
