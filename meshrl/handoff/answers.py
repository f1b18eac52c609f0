"""Waiting for both ends of a handoff at once, and telling the cause of a failure from its consequences."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from monarch.mesh_controller import RemoteException

from meshrl.mesh import Replica
from meshrl.worker import RemoteError, WorkerDied

CAUSE_SECONDS = 2.0
"""After one end of a handoff failed, how long the others are given to say why."""


async def answers_of(
    calls: Sequence[tuple[Replica, Any]], deadline_seconds: float, what: str
) -> list[list[Any]]:
    """Answers of each call's ranks. Of several failures a `WorkerDied` is raised, else the first in `calls`.

    Waits for: every call, or one failure and, a moment longer, the others: where one end of the link fails, so does the
    other, and the cause is worth more than the consequence.
    """
    tasks = [
        asyncio.ensure_future(replica.processes.answer(future, deadline_seconds, what))
        for replica, future in calls
    ]
    try:
        _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if waiting:
            await asyncio.wait(waiting, timeout=CAUSE_SECONDS)
        failures = [error for task in tasks if task.done() and (error := task.exception()) is not None]
        # A dead process is the cause of whatever its peers complain about.
        for error in sorted(failures, key=lambda error: not isinstance(error, WorkerDied)):
            raise error
        return [[value for _, value in task.result()] for task in tasks]
    except RemoteException as error:
        raise RemoteError(
            f"tensor code of the program failed on rank {error.rank} of the learner mesh:\n{error}"
        ) from None
    finally:
        for task in tasks:
            task.cancel()
