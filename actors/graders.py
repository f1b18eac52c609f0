"""The generator's line to the reward mesh: texts out, grades in, nobody waited for without end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from meshrl.parcel import parcel
from meshrl.rewards import Grade
from meshrl.rollout import Rollout
from meshrl.worker import DeadlineError, call

MISSES_IN_A_ROW = 3
"""So many calls without an answer, one after another, are a failure of the reward mesh, not of rollouts."""


class Graders:
    """Reward actors, asked in turn."""

    def __init__(self, handles: Sequence[Any], *, first: int, deadline_seconds: float) -> None:
        """
        Args:
            handles: single actors with an endpoint `grade`.
            first: which is asked first: generators begin at different ones.
            deadline_seconds: longest wait for one answer.
        """
        first %= len(handles)
        self._next = itertools.cycle([*range(first, len(handles)), *range(first)])
        self._handles = list(handles)
        self._deadline_seconds = deadline_seconds
        self._misses = 0

    async def grade(self, rollouts: Sequence[Rollout]) -> list[Grade]:
        """Grades, in order. Where no answer comes in time, these rollouts have none, and the reason says so.

        Waits for: the reward actor whose turn it is.

        Raises:
            DeadlineError: the third answer in a row did not come. Besides, what the actor raises.
        """
        number = next(self._next)
        deadline = self._deadline_seconds
        try:
            grades = await call(self._handles[number], "grade", parcel(rollouts), deadline_seconds=deadline)
        except DeadlineError as error:
            self._misses += 1
            if self._misses >= MISSES_IN_A_ROW:
                raise DeadlineError(
                    f"reward actor {number}: {error}; {self._misses} calls in a row had no answer. Is its process "
                    "stopped? A longer generator.reward_deadline_seconds helps where it is only slow"
                ) from None
            reason = f"reward actor {number} did not answer in {self._deadline_seconds:g} s"
            return [Grade(None, f"rollout {rollout.id}: {reason}") for rollout in rollouts]
        self._misses = 0
        return grades


class Clock:
    """Adds up the time in which groups waited for grades while their engine stood still.

    Calls that overlap are counted once.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._idle_since: float | None = None

    def engine_stands_still(self) -> None:
        """From now on, unless it did already."""
        self._idle_since = self._idle_since or _now()

    def engine_works(self) -> None:
        """From now on."""
        self._idle_since = None

    def graded(self, started: float) -> None:
        """A call since `started` has been answered."""
        if self._idle_since is not None:
            self.seconds += _now() - max(started, self._idle_since)
            self._idle_since = _now()

    @staticmethod
    def now() -> float:
        """Seconds of the event loop."""
        return _now()


def _now() -> float:
    return asyncio.get_running_loop().time()
