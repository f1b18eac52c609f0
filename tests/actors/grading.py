"""What the tests of the grader share."""

import asyncio
import os
import select
from collections.abc import Callable

from meshrl.actors.grader_process import GraderProcess
from meshrl.rewards import Grade
from meshrl.rollout import Prompt, Rollout

DEADLINE_SECONDS = 60.0


def rollouts(count: int, response: str = "231") -> list[Rollout]:
    prompt = Prompt(0, "train", "47+85=", "231")
    return [Rollout(i, prompt, response, (1, 2, 3), "stop") for i in range(count)]


def here(function: Callable) -> Callable:
    """As if defined in a notebook cell: the child cannot import it and gets it by value."""
    function.__module__ = "__main__"
    return function


def grade(function, count: int = 6, **options) -> list[Grade]:
    async def run() -> list[Grade]:
        grader = GraderProcess(function, **options)
        try:
            return await asyncio.wait_for(grader.grade(rollouts(count)), DEADLINE_SECONDS)
        finally:
            await grader.close()

    return asyncio.run(run())


def ended(pid: int) -> bool:
    """Wait until the process is gone."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], DEADLINE_SECONDS)[0])
    finally:
        os.close(handle)
