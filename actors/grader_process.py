"""The reward actor's side of the grader child: keeps one running, restarts it, loses no rollout.

Rollouts go to the child as jobs. A child that is silent for too long while it has a job, or that dies, is
replaced; the rollout that it was busy with is failed with the reason, the others are sent again. Where the
culprit is not certain (an async function had several in progress, or the child died, perhaps of something
else) the suspects are first tried again, one at a time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import cloudpickle

from meshrl.actors.grader import SHOW_STACK_SIGNAL, failed
from meshrl.actors.grader_messages import FrameReader, Hello, Job, LoadFailed, Ready, frame
from meshrl.errors import UserError
from meshrl.rewards import Grade, RewardFunction
from meshrl.rollout import Rollout

STACK_SECONDS = 0.1
"""Time that a hanging child is given to write its stack before it is killed."""


class RewardError(RuntimeError):
    """The reward function cannot be loaded, or fails on everything: going on makes no sense."""


@dataclass
class _Call:
    """One call of `grade`, complete when no job of it is left."""

    grades: list[Grade | None]
    jobs_left: int
    done: asyncio.Future[None]


@dataclass(eq=False)
class _Pending:
    """A job that has no answer yet."""

    job: Job
    call: _Call
    offset: int
    """Where in the call its grades belong."""
    sent: bool = False
    suspect: bool = False
    """May have been the one in progress when a child was lost; sent alone from then on."""


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    lifeline: int
    """Closing it, on purpose or by dying, kills the child's process group."""
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    ready: Ready
    hung_on: _Pending | None = None
    """The oldest job at the time when the child's time was up."""

    def kill(self) -> None:
        if self.process.returncode is None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


class GraderProcess:
    """One grader child at a time. All methods belong to one event loop."""

    def __init__(
        self,
        function: str | RewardFunction,
        *,
        timeout_seconds: float = 10.0,
        load_timeout_seconds: float = 60.0,
        concurrency: int = 64,
        failures_in_a_row: int = 64,
        hangs_in_a_row: int = 3,
    ) -> None:
        """Starts nothing; see `RewardConfig` for the arguments."""
        payload = function if isinstance(function, str) else cloudpickle.dumps(function)
        self._hello = Hello(payload, timeout_seconds, concurrency)
        self._timeout_seconds = timeout_seconds
        self._load_timeout_seconds = load_timeout_seconds
        self._failures_in_a_row = failures_in_a_row
        self._hangs_in_a_row = hangs_in_a_row
        self._pending: dict[int, _Pending] = {}  # oldest first
        self._unsent: deque[_Pending] = deque()  # those of them that the child has not been given
        self._next_id = self._failures = self._hangs = 0
        self._child: _Child | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._heard = 0.0
        self._watchdog: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """Process of the child; None: none is running."""
        return self._child.process.pid if self._child else None

    async def start(self) -> None:
        """Bring the child up, if it is not, and load the function.

        Raises:
            UserError: the function's name is wrong.
            RewardError: the module that it is in raised, or took too long.
        """
        async with self._starting:
            await self._ensure_child()

    async def grade(self, rollouts: Sequence[Rollout]) -> list[Grade]:
        """Grade rollouts, in order. Unblocked by the child's answers, its timeout or its death.

        Raises:
            RewardError: too many failures in a row.
        """
        if not rollouts:
            return []
        await self.start()
        assert self._child is not None
        size = len(rollouts) if self._child.ready.batched else 1
        offsets = range(0, len(rollouts), size)
        call = _Call([None] * len(rollouts), len(offsets), asyncio.get_running_loop().create_future())
        for offset in offsets:
            job = Job(self._next_id, list(rollouts[offset : offset + size]))
            self._next_id += 1
            self._pending[job.id] = pending = _Pending(job, call, offset)
            self._unsent.append(pending)
        self._send()
        await call.done
        return [grade for grade in call.grades if grade is not None]

    async def close(self) -> None:
        """Kill the child and fail what it has not graded."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        self._fail_all(RewardError("the grader was closed"))

    async def _ensure_child(self) -> None:
        if self._child is None:
            self._child = await self._launch()
            self._supervisor = asyncio.create_task(self._supervise(self._child))
            self._send()

    async def _launch(self) -> _Child:
        ours, theirs = socket.socketpair()
        their_end, lifeline = os.pipe()
        try:
            process = subprocess.Popen(
                # -P: the working directory must not shadow the standard library of a process that is ours.
                [sys.executable, "-P", "-m", "meshrl.actors.grader", str(theirs.fileno()), str(their_end)],
                pass_fds=(theirs.fileno(), their_end),
                stdin=subprocess.DEVNULL,
                # Its own group: killed with its children, and out of reach of the terminal's Ctrl-C.
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        except BaseException:
            os.close(lifeline)
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(their_end)
        reader, writer = await asyncio.open_connection(sock=ours)
        child = _Child(process, lifeline, reader, writer, Ready(False, False))
        try:
            writer.write(frame(self._hello))
            answer = await asyncio.wait_for(self._first_message(reader), self._load_timeout_seconds)
        except TimeoutError:
            await self._bury(child)
            raise RewardError(
                f"the reward function was not loaded within {self._load_timeout_seconds:g} s; "
                "make its module import faster, or raise load_timeout_seconds"
            ) from None
        except BaseException:
            await self._bury(child)
            raise
        if isinstance(answer, Ready):
            child.ready = answer
            return child
        await self._bury(child)
        if answer is None:
            raise RewardError(f"the grader process {_ending(process)} while it loaded the reward function")
        assert isinstance(answer, LoadFailed)
        if answer.user_error:
            raise UserError(answer.text)
        raise RewardError(f"the reward function cannot be loaded:\n{answer.text}")

    async def _first_message(self, reader: asyncio.StreamReader) -> object:
        frames = FrameReader()
        while data := await reader.read(1 << 16):
            for message in frames.feed(data):
                return message
        return None

    async def _supervise(self, child: _Child) -> None:
        """Read the child's answers until it is gone; then replace it if there is work left."""
        try:
            await self._read(child)
        except BaseException:
            self._child = None
            await self._bury(child)
            raise
        async with self._starting:  # no new child before it is known what happened to this one
            self._child = None
            await self._bury(child)
            self._blame(child)
            if self._pending:
                try:
                    await self._ensure_child()
                except Exception as error:
                    self._fail_all(error)

    async def _read(self, child: _Child) -> None:
        frames = FrameReader()
        try:
            while data := await child.reader.read(1 << 16):
                self._heard = time.monotonic()
                for message in frames.feed(data):
                    if isinstance(message, tuple):
                        job_id, grades = message
                        self._finish(job_id, [Grade(*grade) for grade in grades])
                self._send()
        except ConnectionError:
            pass  # as good as the end of the stream

    async def _bury(self, child: _Child) -> None:
        """Kill and reap the child with all its own children."""
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        child.kill()
        child.writer.close()
        await asyncio.to_thread(child.process.wait)
        os.close(child.lifeline)

    def _blame(self, child: _Child) -> None:
        """Decide which rollout the child was lost on; all others will be sent again."""
        lost = [pending for pending in self._pending.values() if pending.sent]
        for pending in lost:
            pending.sent = False
        self._unsent = deque(self._pending.values())
        hung = child.hung_on is not None
        if not lost or (hung and child.hung_on not in lost):
            return
        suspects = lost if child.ready.concurrent else lost[:1]
        if len(suspects) > 1 or not (hung or suspects[0].suspect):
            for pending in suspects:
                pending.suspect = True
            return
        job = suspects[0].job
        reason = f"timed out after {self._timeout_seconds:g} s" if hung else _ending(child.process)
        grades = failed(job.rollouts, reason)
        print(f"{grades[0].error}; its process is replaced", file=sys.stderr, flush=True)
        self._hangs += hung
        self._unsent.popleft()
        self._finish(job.id, grades)
        if self._hangs_in_a_row and self._hangs >= self._hangs_in_a_row:
            self._give_up(f"hung {self._hangs} times in a row", grades[0])

    def _finish(self, job_id: int, grades: list[Grade]) -> None:
        pending = self._pending.pop(job_id, None)
        if pending is None:
            return
        call = pending.call
        call.grades[pending.offset : pending.offset + len(grades)] = grades
        call.jobs_left -= 1
        if not call.jobs_left and not call.done.done():
            call.done.set_result(None)
        for grade in grades:
            if grade.error is None:
                self._failures = self._hangs = 0
            else:
                self._failures += 1
        if self._failures_in_a_row and self._failures >= self._failures_in_a_row:
            self._give_up(f"failed on {self._failures} rollouts in a row", grades[-1])

    def _give_up(self, what: str, last: Grade) -> None:
        self._failures = self._hangs = 0
        self._fail_all(RewardError(f"the reward function {what}; the last: {last.error}"))
        if self._child is not None:
            self._child.kill()

    def _fail_all(self, error: Exception) -> None:
        for pending in self._pending.values():
            if not pending.call.done.done():
                pending.call.done.set_exception(error)
        self._pending.clear()
        self._unsent.clear()

    def _send(self) -> None:
        """Send what the child may have now: everything, or one job at a time while there are suspects."""
        if self._child is None or not self._unsent:
            return
        oldest = next(iter(self._pending.values()))
        if oldest.suspect and oldest.sent:
            return
        batch = [self._unsent.popleft() for _ in range(1 if oldest.suspect else len(self._unsent))]
        if not any(pending.sent for pending in self._pending.values()):
            self._heard = time.monotonic()
        for pending in batch:
            pending.sent = True
        self._child.writer.write(frame([pending.job for pending in batch]))
        if self._watchdog is None:
            self._watch(self._child)

    def _watch(self, child: _Child) -> None:
        """Look again when the child's time is up, if nothing is heard until then."""
        loop = asyncio.get_running_loop()
        left = self._heard + self._timeout_seconds - time.monotonic()
        oldest = next((pending for pending in self._pending.values() if pending.sent), None)
        if oldest is None:
            self._watchdog = None
        elif left > 0:
            self._watchdog = loop.call_later(left, self._watch, child)
        else:
            child.hung_on = oldest
            # Not Popen.send_signal, which may reap the child; its group could then not be killed safely.
            os.kill(child.process.pid, SHOW_STACK_SIGNAL)
            self._watchdog = loop.call_later(STACK_SECONDS, child.kill)


def _ending(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    if code is not None and code < 0:
        return f"ended its process by signal {signal.Signals(-code).name}"
    return f"ended its process with exit code {code}"
