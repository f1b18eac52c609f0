"""Run: drives a program, step by step, and leaves nothing behind.

A program is an async generator function `program(session, config)` that yields one `StepReport` per step:

    async for report in meshrl.launch(grpo, config):
        print(report.step, report.metrics["reward"])

Not asking for the next step is the pause.
"""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshrl.errors import UserError
from meshrl.metrics import Sink, StepReport
from meshrl.run_directory import RunDirectory, shown
from meshrl.why import Why

if TYPE_CHECKING:
    from meshrl.session import Session

Program = Callable[[Any, Any], AsyncIterator[StepReport]]
State = Literal["new", "running", "paused", "finished", "failed", "stopped"]

STALL_SECONDS = 120.0
"""A step that takes longer is reported on."""

CLOSE_SECONDS = 5.0
"""A stopped program has this long for its own `finally` blocks; then those are cancelled too."""


def launch(
    program: Program,
    config: Any = None,
    *,
    directory: str | Path | None = None,
    session: Session | None = None,
    stall_seconds: float = STALL_SECONDS,
) -> Run:
    """Drive `program(session, config)`; nothing starts before the first step is asked for.

    Args:
        program: async generator function of a session and a config, yielding `StepReport`s.
        config: its config; None: the defaults of the type that the second parameter is annotated with.
        directory: run directory, new or empty; None: `runs/<program>-<timestamp>`.
        session: where its meshes live; it stays yours: started here if need be, never stopped. None: a
            session of the run's own, stopped with it.
        stall_seconds: where a step takes this long, the run says who waits for whom (`Run.why`), and again after twice
            the time, four times, and so on. 0: never.

    Raises `UserError` where `program` is no such function, its config has no default, or `stall_seconds` is negative.
    """
    if not stall_seconds >= 0:
        raise UserError(
            f"stall_seconds is {stall_seconds:g}: give it seconds, or 0 never to say why a step takes long"
        )
    kind = config_type(program)
    config = make_default(program, kind) if config is None else config
    return Run(program, config, directory, session, stall_seconds)


class Run:
    """A program being driven: an async iterator of its `StepReport`s.

    The program runs in a task of its own, and only while a step is asked for. So a cancelled wait (an
    interrupted cell) leaves program and meshes as they are, and the next `async for` goes on with the
    same step. Everything is closed, program first, then session, when the program ends or raises, on
    `stop()`, on leaving `async with`, when the last reference goes (a `break` out of `async for … in
    launch(…)`) and when the event loop ends. An exception of the program surfaces unchanged, after that.
    """

    def __init__(
        self,
        program: Program,
        config: Any,
        directory: str | Path | None,
        session: Session | None,
        stall_seconds: float,
    ) -> None:
        self._drive = _Drive(program, config, directory, session, stall_seconds)
        self._pending: asyncio.Future[_Answer] | None = None

    @property
    def history(self) -> list[StepReport]:
        """All reports so far, oldest first."""
        return self._drive.history

    @property
    def config(self) -> Any:
        """The config that the program was given."""
        return self._drive.config

    @property
    def session(self) -> Session | None:
        """The session of the run; None before the first step."""
        return self._drive.session

    @property
    def directory(self) -> Path | None:
        """The run directory; None before the first step."""
        return self._drive.directory.path if self._drive.directory else None

    @property
    def state(self) -> State:
        """`paused`: alive, and no step is asked for."""
        return self._drive.state

    @property
    def error(self) -> BaseException | None:
        """What the program raised."""
        return self._drive.error

    def __aiter__(self) -> Run:
        return self

    async def __anext__(self) -> StepReport:
        if self._pending is None:
            if self._drive.closed:
                raise StopAsyncIteration
            self._pending = self._drive.ask()
        answer = await asyncio.shield(self._pending)  # cancelled: the step goes on, the next call gets it
        self._pending = None
        if answer is None:
            raise StopAsyncIteration
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def why(self) -> Why:
        """Who waits for whom at this moment, in all processes, down to whom everything waits for.

        >>> print(await run.why())                                                     # doctest: +SKIP
        grpo is running, step 7 asked for 31.2 s ago
          grpo waits for a batch of finished groups for 31.1 s of at most 600 s, unblocked by generator[0] (…)
            generator[0] waits for grade of Reward for 30.9 s of at most 60 s, unblocked by reward[0]
              reward[0] is in grade for 30.9 s   <- the chain ends here
        """
        return await self._drive.why()

    async def stop(self) -> None:
        """Close the program, then the session. Bounded; the second time it does nothing."""
        await self._drive.stop()

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def __del__(self) -> None:
        self._drive.abandon()

    def __repr__(self) -> str:
        step = f" step {self.history[-1].step}" if self.history else ""
        where = f" {self.directory}" if self.directory else ""
        return f"<Run {program_name(self._drive.program)} {self.state}{step}{where}>"


_Answer = StepReport | BaseException | None
"""A report, what the program raised, or None: the end."""

_DRIVES: set[_Drive] = set()
"""Keeps drives alive until closed: asyncio holds tasks weakly, and a drive outlives its `Run` to close."""


class _Drive:
    """The task behind a `Run`. Holds no reference to it, so that dropping the `Run` can end the task.

    Waits for: the next request of a step. Unblocked by: `ask`, or the cancellation of its task.
    """

    def __init__(
        self,
        program: Program,
        config: Any,
        directory: str | Path | None,
        session: Session | None,
        stall_seconds: float,
    ) -> None:
        self.program = program
        self._stall_seconds = stall_seconds
        self._watch: asyncio.Task[None] | None = None
        self.config = config
        self.session = session
        self.directory: RunDirectory | None = None
        self.history: list[StepReport] = []
        self.state: State = "new"
        self.error: BaseException | None = None
        self._wanted_directory = directory
        self._owns_session = session is None
        self._sinks: list[Sink] = []
        self._asked_at = 0.0
        self._requests: asyncio.Queue[asyncio.Future[_Answer]] = asyncio.Queue()
        self._request: asyncio.Future[_Answer] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def closed(self) -> bool:
        return self.state in ("finished", "failed", "stopped")

    def ask(self) -> asyncio.Future[_Answer]:
        request = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(request)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name=program_name(self.program))
            _DRIVES.add(self)
            self._task.add_done_callback(self._ended)
        return request

    async def why(self) -> Why:
        name = program_name(self.program)
        if self.state != "running":
            reasons = {"paused": ": nobody asked for the next step", "new": ": ask for the first step"}
            return Why(f"{name} is {self.state}{reasons.get(self.state, '')}")
        asked = asyncio.get_running_loop().time() - self._asked_at
        state = f"{name} is running, step {len(self.history)} asked for {asked:.1f} s ago"
        if self.session is None:
            return Why(state)
        return replace(await self.session.why(), state=state)

    async def _say_why(self) -> None:
        """When a step takes long. Waits for: time."""
        seconds = self._stall_seconds
        while True:
            await asyncio.sleep(self._asked_at + seconds - asyncio.get_running_loop().time())
            why = await self.why()
            if self.session is not None:
                self.session.note(f"no step for {seconds:g} s: {why}")
            seconds *= 2

    async def stop(self) -> None:
        if self._task is None:
            self.state = "stopped"
        elif not self._task.done():
            self._cancel(self._task)
            await asyncio.wait({self._task})  # cancelled: closing goes on

    def abandon(self) -> None:
        """The `Run` is gone: close, from whatever thread."""
        task = self._task
        if task is not None and not task.done() and not task.get_loop().is_closed():
            task.get_loop().call_soon_threadsafe(self._cancel, task)

    def _cancel(self, task: asyncio.Task[None]) -> None:
        if not self.closed and not task.cancelling():
            task.cancel()
            task.get_loop().call_later(CLOSE_SECONDS, self._cancel_again, task)

    def _cancel_again(self, task: asyncio.Task[None]) -> None:
        if not self.closed:
            task.cancel()

    async def _run(self) -> None:
        state: State = "finished"
        try:
            await self._steps()
        except asyncio.CancelledError as error:
            state = "stopped"
            # Cancelled by us or by the end of the loop; a program that raises it by itself has failed.
            if not _cancelled_from_outside():
                state, self.error = "failed", error
        except BaseException as error:
            state, self.error = "failed", error
        self.state = state
        await self._close()

    def _ended(self, _: asyncio.Task[None]) -> None:
        """Answer whoever still waits: also where the task was cancelled before it had begun."""
        _DRIVES.discard(self)
        if not self.closed:
            self.state = "stopped"
        self._answer(self.error)
        while not self._requests.empty():
            self._request = self._requests.get_nowait()
            self._answer(None)

    async def _steps(self) -> None:
        await self._next_request()
        await self._start()
        assert self.session is not None
        steps = self.program(self.session, self.config)
        assert isinstance(steps, AsyncGenerator)
        try:
            async for report in steps:
                self.history.append(report)
                for sink in self._sinks:
                    sink.write(report)
                self._answer(report)
                await self._next_request()
        finally:
            await steps.aclose()

    async def _next_request(self) -> None:
        if self._requests.empty():
            self.state = "paused"
        self._request = await self._requests.get()
        self.state = "running"
        self._asked_at = asyncio.get_running_loop().time()
        if self._stall_seconds > 0:
            self._watch = asyncio.create_task(self._say_why(), name="watch for stalls")

    async def _start(self) -> None:
        from meshrl.session import Session  # imports Monarch and torch

        name = program_name(self.program)
        wanted = self._wanted_directory
        self.directory = RunDirectory.new(name) if wanted is None else RunDirectory(wanted)
        self.directory.write_config(name, self.config)
        if self.session is None:
            self.session = Session()
        self.session.directory = self.directory.path
        self.session.note(f"run directory {shown(self.directory.path)}")
        await self.session.start()
        self._sinks = self.directory.sinks()

    async def _close(self) -> None:
        for sink in self._sinks:
            try:
                sink.close()
            except OSError as error:
                self._trouble("a metrics file was not closed", error)
        if self.session is None or not self._owns_session:
            return
        # The end of the loop cancels every task, this one in the midst of stopping too: stop it is.
        for _ in range(3):
            try:
                await self.session.stop()
                return
            except asyncio.CancelledError:
                continue
            except Exception as error:
                self._trouble("the session did not stop cleanly", error)
                return

    def _trouble(self, what: str, error: Exception) -> None:
        """An error while closing must not hide the one that led there."""
        if self.error is None:
            self.state, self.error = "failed", error
        else:
            self.error.add_note(f"and {what}: {error!r}")

    def _answer(self, answer: _Answer) -> None:
        if self._watch is not None:
            self._watch.cancel()
        request, self._request = self._request, None
        if request is not None and not request.done():
            request.set_result(answer)


def program_name(program: Program) -> str:
    """The function's name."""
    return getattr(program, "__name__", type(program).__name__)


def config_type(program: Program) -> type:
    """The type that the second parameter of `program` is annotated with.

    Raises `UserError` where `program` is not an async generator function of a session and a config.
    """
    name = program_name(program)
    if not inspect.isasyncgenfunction(program):
        raise UserError(
            f"{name} is not a program: it must be an `async def` of (session, config) that yields StepReports"
        )
    parameters = list(inspect.signature(program).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2 or any(p.default is p.empty for p in positional[2:]):
        given = ", ".join(str(p) for p in parameters)
        raise UserError(f"{name}({given}) is no program: it must take two parameters, session and config")
    try:
        kind = typing.get_type_hints(program).get(positional[1].name)
    except NameError as error:
        raise UserError(f"the annotations of {name} name something unknown: {error}") from error
    if not isinstance(kind, type):
        raise UserError(
            f"{name} does not say what its config is: annotate its second parameter, "
            f"`{positional[1].name}: YourConfig`, with a frozen dataclass"
        )
    return kind


def make_default(program: Program, kind: type) -> Any:
    """The default config of a program. Raises `UserError` where a field has no default."""
    try:
        return kind()
    except TypeError as error:
        raise UserError(f"{program_name(program)} needs a config: {error}") from error


def _cancelled_from_outside() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
