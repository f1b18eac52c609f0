"""The child process that runs a reward function: `python -m meshrl.actors.grader SOCKET LIFELINE`.

A process of its own because user code may hang, use signals, exit or crash; a plain one because it must
start in a moment. The function runs in the main thread, so graders that use signals work. What it prints
goes to the log of the reward actor.
"""

from __future__ import annotations

import asyncio
import faulthandler
import fcntl
import io
import math
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from meshrl.actors.grader_messages import Alive, Done, FrameReader, Hello, Job, LoadFailed, Ready, frame
from meshrl.errors import UserError
from meshrl.rewards import Grade, RewardFunction, is_async, is_batched, load_reward
from meshrl.rollout import Rollout

SHOW_STACK_SIGNAL = signal.SIGUSR2
"""Makes the child write its stack to stderr, even from inside C code."""
TRACEBACKS_SHOWN = 3
"""Exceptions of the reward function that are printed in full; all are told in the grade."""


class Grader:
    """A reward function with its results checked: what is not a finite number is an error, never a 0."""

    def __init__(self, function: RewardFunction, timeout_seconds: float) -> None:
        self._function = function
        self._timeout_seconds = timeout_seconds
        self._tracebacks_left = TRACEBACKS_SHOWN
        self.batched = is_batched(function)

    def grade(self, rollouts: list[Rollout]) -> list[Grade]:
        """Call a plain function."""
        try:
            value = self._function(rollouts if self.batched else rollouts[0])
        except BaseException as error:  # SystemExit too: a grader that calls exit() has not graded
            return self._raised(rollouts, error)
        return self._results(rollouts, value)

    async def grade_async(self, rollouts: list[Rollout]) -> list[Grade]:
        """Call an async function; give up waiting at the timeout, even if it ignores being cancelled."""

        async def call() -> Any:
            return await self._function(rollouts if self.batched else rollouts[0])

        task = asyncio.create_task(call())
        done, _ = await asyncio.wait({task}, timeout=self._timeout_seconds)
        if not done:
            task.cancel()
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            return failed(rollouts, f"timed out after {self._timeout_seconds:g} s")
        try:
            value = task.result()
        except BaseException as error:
            return self._raised(rollouts, error)
        return self._results(rollouts, value)

    def _results(self, rollouts: list[Rollout], value: Any) -> list[Grade]:
        if not self.batched:
            return [_checked(rollouts[0], value)]
        try:
            values = list(value)
        except TypeError:
            return failed(rollouts, f"returned {_shown(value)}, not a list of {len(rollouts)} numbers")
        if len(values) != len(rollouts):
            return failed(rollouts, f"returned {len(values)} rewards for {len(rollouts)} rollouts")
        return [_checked(rollout, one) for rollout, one in zip(rollouts, values, strict=True)]

    def _raised(self, rollouts: list[Rollout], error: BaseException) -> list[Grade]:
        if self._tracebacks_left:
            self._tracebacks_left -= 1
            traceback.print_exception(error)
            if not self._tracebacks_left:
                print("further exceptions of the reward function are counted, not printed", file=sys.stderr)
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = _short(f"{type(error).__name__}: {error}", 200)
        return failed(rollouts, f"raised {text} ({os.path.basename(place.filename)}:{place.lineno})")


def failed(rollouts: list[Rollout], reason: str) -> list[Grade]:
    """Grades of rollouts that share the same failure."""
    return [Grade(None, f"rollout {rollout.id}: the reward function {reason}") for rollout in rollouts]


def _checked(rollout: Rollout, value: Any) -> Grade:
    if value is None:
        return failed([rollout], "returned None")[0]
    try:
        # float() alone would also take the text "1".
        number = float(value) if hasattr(type(value), "__float__") else None
    except Exception:
        number = None
    if number is None:
        return failed([rollout], f"returned {_shown(value)}, not a number")[0]
    if not math.isfinite(number):
        return failed([rollout], f"returned {number}, not a finite number")[0]
    return Grade(number)


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {_short(repr(value), 40)}"


def _short(text: str, characters: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= characters else text[: characters - 1] + "…"


def die_with_parent(lifeline: int) -> None:
    """Have the kernel kill this process group, the function's own children included, when the parent is gone.

    The parent holds the other end of the pipe `lifeline` and never writes; its closing is an event,
    delivered as SIGKILL. Unlike PR_SET_PDEATHSIG this reaches the group, and does not fire when a mere
    thread of the parent ends.
    """
    os.set_inheritable(lifeline, False)
    if sys.platform == "linux":
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        sys.exit(0)  # it went before the signal was armed


def main() -> None:
    connection, lifeline = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    connection.set_inheritable(False)
    die_with_parent(lifeline)
    faulthandler.enable()
    faulthandler.register(SHOW_STACK_SIGNAL)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    messages = _messages(connection)
    hello: Hello = next(messages)
    try:
        function = _load(hello.function)
    except UserError as error:
        connection.sendall(frame(LoadFailed(str(error), user_error=True)))
        return
    except BaseException:
        connection.sendall(frame(LoadFailed(traceback.format_exc(), user_error=False)))
        return
    grader = Grader(function, hello.timeout_seconds)
    concurrent = is_async(function)
    connection.sendall(frame(Ready(grader.batched, concurrent)))
    if concurrent:
        asyncio.run(_serve_async(connection, grader, hello))
        return
    for jobs in messages:
        for job in jobs:
            connection.sendall(frame(_done(job, grader.grade(job.rollouts))))


class _FunctionUnpickler(pickle.Unpickler):
    """Monarch has functions pickled by value ask the controller for their source; from here they cannot."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "monarch._src.actor.source_loader":
            return _NoSource
        return super().find_class(module_name, global_name)


class _NoSource:
    """Stands for Monarch's source loader, whose import would make the start slow."""

    def get_source(self, module_name: str) -> str:
        raise ImportError(f"the source of {module_name} is not here")


def _load(function: str | bytes) -> RewardFunction:
    return (
        load_reward(function)
        if isinstance(function, str)
        else _FunctionUnpickler(io.BytesIO(function)).load()
    )


def _done(job: Job, grades: list[Grade]) -> Done:
    return job.id, [(grade.reward, grade.error) for grade in grades]


def _messages(connection: socket.socket) -> Iterator[Any]:
    frames = FrameReader()
    while data := connection.recv(1 << 16):
        yield from frames.feed(data)


async def _serve_async(connection: socket.socket, grader: Grader, hello: Hello) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    slots, running = asyncio.Semaphore(hello.concurrency), set[asyncio.Task[None]]()

    async def run(job: Job) -> None:
        async with slots:
            grades = await grader.grade_async(job.rollouts)
        writer.write(frame(_done(job, grades)))

    async def show_life() -> None:
        while True:
            await asyncio.sleep(min(1, hello.timeout_seconds / 4))
            if running:
                writer.write(frame(Alive()))

    pulse = asyncio.create_task(show_life())
    frames = FrameReader()
    while data := await reader.read(1 << 16):
        for jobs in frames.feed(data):
            for job in jobs:
                task = asyncio.create_task(run(job))
                running.add(task)
                task.add_done_callback(running.discard)
    pulse.cancel()


if __name__ == "__main__":
    main()
