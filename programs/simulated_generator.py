"""A simulated generator replica: continuous batching in virtual time.

All samples that run get one token each decode step, and a step takes a time that grows with their number. So what
counts is the number of steps done: a sample of n tokens that began at step k is finished at step k + n, and a heap of
these tells which is next. One event for each finished sample, none for a token.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import deque
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, Protocol

from meshrl.actors.generator import Finished
from meshrl.actors.prompts import sample_seed
from meshrl.errors import UserError
from meshrl.rollout import GroupRequest, RolloutGroup, RolloutHandle
from meshrl.worker import WorkerDied

Distribution = Literal["fixed", "geometric", "lognormal"]

_NORMAL = NormalDist()


@dataclass(frozen=True)
class GeneratorModel:
    """How long generating takes, and what comes of it. The defaults are of a dense model of 8 billion parameters in
    bfloat16, one accelerator of 3 TB/s a replica: a decode step reads the weights once."""

    slots: int = 128
    """Samples that a replica decodes at once; more wait for one to finish."""
    decode_seconds: float = 0.008
    """Of a decode step of one sample."""
    decode_seconds_per_sample: float = 0.0001
    """By which each further sample makes the step longer."""
    prompt_tokens: int = 512
    """Of every prompt, which the samples of a group share."""
    prefill_tokens_per_second: float = 20_000.0
    """Prompt tokens; decoding stands still meanwhile."""
    length_distribution: Distribution = "lognormal"
    """Of response lengths. `fixed`: all of the mean; `geometric`: the end may come at any token; `lognormal`: a long
    tail, as reasoning has."""
    mean_tokens: float = 2000.0
    """Of a response, before it is cut."""
    sigma: float = 1.0
    """Spread of the lognormal: the standard deviation of the logarithm."""
    max_tokens: int = 16_384
    """Longer responses are cut here."""
    grading_seconds: float = 1.0
    """Mean time from the last sample of a group to its grades."""
    grading_distribution: Literal["fixed", "exponential"] = "exponential"
    zero_variance: float = 0.2
    """Share of groups whose rewards are all equal."""
    message_seconds: float = 0.001
    """Between controller and replica, there and back."""

    def __post_init__(self) -> None:
        for name in ("slots", "prompt_tokens", "mean_tokens", "max_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: at least 1 is needed")
        for name in ("decode_seconds", "prefill_tokens_per_second"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} is {getattr(self, name)}: it must be above 0")
        for name in ("decode_seconds_per_sample", "sigma", "grading_seconds", "message_seconds"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}: use 0 or more")
        if not 0 <= self.zero_variance <= 1:
            raise UserError(f"zero_variance is {self.zero_variance}: it is a share, between 0 and 1")

    def step_seconds(self, samples: int) -> float:
        """Of one decode step of so many samples."""
        return self.decode_seconds + self.decode_seconds_per_sample * (samples - 1)

    def response_tokens(self, u: float) -> int:
        """Length of the response at which the distribution function, before the cut, is `u`, in (0, 1)."""
        match self.length_distribution:
            case "fixed":
                tokens = self.mean_tokens
            case "geometric":
                tokens = 1 + math.log1p(-u) / math.log1p(-1 / self.mean_tokens) if self.mean_tokens > 1 else 1
            case "lognormal":
                mu = math.log(self.mean_tokens) - self.sigma**2 / 2
                tokens = math.exp(mu + self.sigma * _NORMAL.inv_cdf(u)) + 0.5
        return min(max(int(tokens), 1), self.max_tokens)

    def rewards(self, seeds: tuple[int, ...]) -> list[float]:
        """0 or 1 of each sample of a group; in a group that teaches something the first two differ."""
        first = float(uniform(seeds[0], "reward") < 0.5)
        if uniform(seeds[0], "variance") < self.zero_variance:
            return [first] * len(seeds)
        return [first, 1 - first, *(float(uniform(seed, "reward") < 0.5) for seed in seeds[2:])][: len(seeds)]

    def grading(self, u: float) -> float:
        """Seconds that grading takes."""
        fixed = self.grading_distribution == "fixed"
        return self.grading_seconds if fixed else self.exponential(self.grading_seconds, u)

    @staticmethod
    def exponential(mean: float, u: float) -> float:
        """Value at which the distribution function is `u`."""
        return -mean * math.log1p(-u)


def uniform(seed: int, *path: object) -> float:
    """A number in (0, 1) that depends on seed and path alone."""
    return (sample_seed(seed, *path) + 1) / (2**63 + 2)


class ProcessorTime:
    """Adds up the processor time of the thread spent within it: what simulated actors cost, not the controller."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._began = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.thread_time() - self._began


class Counts(Protocol):
    """Who keeps count of all replicas."""

    finished_rollouts: int
    deaths: int

    def count(self, outstanding: int) -> None: ...


@dataclass
class _Group:
    request: GroupRequest
    tokens: list[int]
    versions: list[tuple[int, int]]
    """Of first and last token, by sample."""
    missing: int
    prefilled: bool = False


class SimulatedReplica:
    """Answers as `meshrl.actors.generator.Generator` does. As much of a `Replica` as dispatch and handoff look at."""

    def __init__(
        self,
        model: GeneratorModel,
        counts: Counts,
        replica: int,
        number: int,
        version: int,
        actors: ProcessorTime,
    ) -> None:
        """
        Args:
            number: of the process, unlike all others'.
            version: of its weights.
        """
        self.version = version
        self.pids = [number]
        self.death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._model, self._counts, self._replica, self._actors = model, counts, replica, actors
        self._waiting: deque[tuple[_Group, int]] = deque()  # samples without a slot
        self._running: list[
            tuple[float, int, _Group, int]
        ] = []  # a heap by the step that finishes the sample
        self._number = 0  # samples begun: tells those apart that finish at once
        self._steps = 0.0  # done by `_since`; while a prompt is read, that is in the future
        self._since = self._counted_until = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._unfinished = 0
        self._docked: set[int] = set()
        self._finished: deque[tuple[int, RolloutGroup]] = deque()
        self._finished_number = 0
        self._grading: dict[int, None] = {}
        self._news = asyncio.Event()
        self._busy_seconds = self._sample_seconds = self._told_busy_seconds = 0.0

    @property
    def processes(self) -> SimulatedReplica:
        """Itself: `death` and `names` are what is asked of it."""
        return self

    def names(self) -> str:
        return f"generator[{self._replica}]"

    async def answer(self, endpoint: str, *arguments: Any) -> Any:
        """One call. Raises `WorkerDied` where it is dead, or dies meanwhile."""
        if self._model.message_seconds:
            await asyncio.sleep(self._model.message_seconds)
        self._check()
        match endpoint:
            case "submit":
                with self._actors:
                    return self._submit(arguments[0])
            case "finished":
                arrived, wait_seconds = arguments
                while self._finished and self._finished[0][0] <= arrived:
                    self._finished.popleft()
                if not self._finished:
                    self._news.clear()
                    try:
                        async with asyncio.timeout(wait_seconds):
                            await self._news.wait()
                    except TimeoutError:
                        pass
                    self._check()
                with self._actors:
                    return self._tell()
            case "release":
                held = len(self._docked)
                self._docked.difference_update(arguments[0])
                return held - len(self._docked)
            case "samples":
                return [f"rollout {rollout}" for rollout in arguments[0]]
            case "abandon":
                return None
        raise UserError(f"the program asks generators to {endpoint!r}, which is not simulated")

    def die(self) -> None:
        """With all that it holds."""
        with self._actors:
            self._advance()
        if self._timer is not None:
            self._timer.cancel()
        self._counts.count(-self._unfinished)
        self._counts.deaths += 1
        self._running.clear()
        self._waiting.clear()
        self.death.set_exception(WorkerDied(f"{self.names()}: its time had come"))
        self.death.exception()  # seen: asyncio need not complain that nobody looked
        self._news.set()

    def busy_seconds(self) -> float:
        """In which at least one sample ran."""
        self._advance()
        return self._busy_seconds

    def sample_seconds(self) -> float:
        """In which samples ran, all together."""
        self._advance()
        return self._sample_seconds

    def _check(self) -> None:
        if self.death.done():
            raise WorkerDied(f"{self.names()}: its time had come")

    def _submit(self, parcel: Any) -> None:
        self._advance()
        for request in parcel._value:
            tokens = [self._model.response_tokens(uniform(seed, "length")) for seed in request.seeds]
            group = _Group(request, tokens, [(0, 0)] * len(tokens), len(tokens))
            self._waiting.extend((group, sample) for sample in range(len(tokens)))
            self._unfinished += len(tokens)
            self._counts.count(len(tokens))
        self._fill()

    def _tell(self) -> Finished:
        self._advance()
        groups = tuple(group for _, group in self._finished)
        busy, self._told_busy_seconds = self._busy_seconds - self._told_busy_seconds, self._busy_seconds
        grading = tuple(self._grading)
        self._grading.clear()
        return Finished(groups, self._finished_number, busy, 0.0, grading)

    def _advance(self) -> None:
        """Count the steps done by now."""
        now, running = self._loop.time(), len(self._running)
        if running and not self.death.done():
            self._busy_seconds += now - self._counted_until
            self._sample_seconds += running * (now - self._counted_until)
            self._steps += max(now - self._since, 0.0) / self._model.step_seconds(running)
        self._counted_until = now
        self._since = max(now, self._since)

    def _fill(self) -> None:
        """Begin samples that wait, and be back when the next one finishes."""
        while self._waiting and len(self._running) < self._model.slots:
            group, sample = self._waiting.popleft()
            group.versions[sample] = self.version, self.version
            if not group.prefilled:
                group.prefilled = True
                self._since += self._model.prompt_tokens / self._model.prefill_tokens_per_second
            heapq.heappush(self._running, (self._steps + group.tokens[sample], self._number, group, sample))
            self._number += 1
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._running:
            steps = self._running[0][0] - self._steps
            when = self._since + steps * self._model.step_seconds(len(self._running))
            self._timer = self._loop.call_at(when, self._finish)

    def _finish(self) -> None:
        with self._actors:
            self._advance()
            self._steps = max(self._steps, self._running[0][0])
            while self._running and self._running[0][0] <= self._steps + 1e-6:
                _, _, group, sample = heapq.heappop(self._running)
                group.versions[sample] = group.versions[sample][0], self.version
                group.missing -= 1
                if group.missing == 0:
                    seconds = self._model.grading(uniform(group.request.seeds[0], "grading"))
                    self._grading[group.request.group_id] = None
                    self._loop.call_later(seconds, self._graded, group)
            self._fill()

    def _graded(self, group: _Group) -> None:
        if self.death.done():
            return
        with self._actors:
            request, model = group.request, self._model
            rewards = model.rewards(request.seeds)
            handles = tuple(
                RolloutHandle(
                    id=rollout_id,
                    group_id=request.group_id,
                    replica=self._replica,
                    prompt_tokens=model.prompt_tokens,
                    response_tokens=group.tokens[sample],
                    oldest_version=group.versions[sample][0],
                    newest_version=group.versions[sample][1],
                    stop_reason="length" if group.tokens[sample] == model.max_tokens else "stop",
                    seed=request.seeds[sample],
                    reward=rewards[sample],
                    process_id=self.pids[0],
                )
                for sample, rollout_id in enumerate(request.rollout_ids)
            )
            self._docked.update(request.rollout_ids)
            self._grading.pop(request.group_id, None)
            self._finished_number += 1
            self._finished.append(
                (self._finished_number, RolloutGroup(request.group_id, request.prompt_index, handles))
            )
            self._unfinished -= len(handles)
            self._counts.count(-len(handles))
            self._counts.finished_rollouts += len(handles)
        self._news.set()
