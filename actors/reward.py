"""The reward actor: text in, grades out. The user's function runs in a child process, one per reward rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from meshrl.actors.grader_process import GraderProcess
from meshrl.parcel import parcel
from meshrl.rewards import EXACT_MATCH, Grade, RewardFunction
from meshrl.rollout import Rollout
from meshrl.worker import Worker, endpoint


def _function_name(function: str | RewardFunction | None) -> list[str]:
    if function is None:
        return ["of the task"]
    return [function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"]


# How the command line reads and shows a function; tyro knows no such thing.
_FUNCTION_ARGUMENT = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="MODULE:FUNCTION",
    instance_from_str=lambda words: words[0],
    is_instance=lambda value: value is None or isinstance(value, str) or callable(value),
    str_from_instance=_function_name,
)


@dataclass(frozen=True)
class RewardConfig:
    """Which function grades, and what happens when it does not."""

    function: Annotated[str | RewardFunction | None, _FUNCTION_ARGUMENT] = None
    """`module:function` or `path/to/file.py:function`; or the function itself. None: the task's own."""
    timeout_seconds: float = 10.0
    """Longest time for a rollout, or a call of a `@batched` function; past it there is no reward."""
    load_timeout_seconds: float = 60.0
    """Longest time to import the function's module."""
    concurrency: int = 64
    """Calls of an async function in progress at once, on each reward rank."""
    failures_in_a_row: int = 64
    """This many rollouts without a reward, one after another, end the run. 0: never."""
    hangs_in_a_row: int = 3
    """This many rollouts that hang until their process is killed, in a row, end the run. 0: never."""


@dataclass(frozen=True)
class RewardSetup:
    """What `Reward.setup` needs."""

    config: RewardConfig = field(default_factory=RewardConfig)
    default: str = EXACT_MATCH
    """Import path of the function where the config names none."""


class Reward(Worker):
    """One replica: grades rollouts that generators send."""

    @endpoint
    async def setup(self, setup: RewardSetup) -> None:
        """Start the grader and load the function.

        Raises:
            UserError: no such file, module or function.
            RewardError: the user's module raised while it was imported.
        """
        config = setup.config
        self._grader = GraderProcess(
            setup.default if config.function is None else config.function,
            timeout_seconds=config.timeout_seconds,
            load_timeout_seconds=config.load_timeout_seconds,
            concurrency=config.concurrency,
            failures_in_a_row=config.failures_in_a_row,
            hangs_in_a_row=config.hangs_in_a_row,
        )
        await self._grader.start()

    @endpoint
    async def grade(self, rollouts: Sequence[Rollout]) -> list[Grade]:
        """Grades, in order. A rollout that could not be graded has reward None and the reason, never 0.

        Many rollouts are best sent as `parcel(rollouts)`.

        Raises:
            RewardError: the function fails on everything.
        """
        return parcel(await self._grader.grade(rollouts))
