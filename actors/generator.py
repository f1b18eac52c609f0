"""The generator: an engine behind an actor, from prompt indices to graded, docked rollouts.

Requests name prompts by index; the text is looked up here. One decode step runs at a time on a thread of
its own, so the actor answers while it generates; weights are swapped between two steps. When all samples
of a group are done, its columns go to the dock of this process, its text goes straight to a reward actor,
and the controller learns lengths, versions and scores.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from meshrl.actors.engines.engine import Engine, EngineRequest, FinishedSample
from meshrl.actors.engines.titan import EngineConfig, TitanEngine
from meshrl.actors.models import ModelConfig, load_tokenizer
from meshrl.actors.recorder import RolloutRecord, RolloutRecorder
from meshrl.errors import UserError
from meshrl.handoff.dock import dock
from meshrl.parcel import parcel
from meshrl.rewards import Grade
from meshrl.rollout import GroupRequest, Prompt, Rollout, RolloutGroup, RolloutHandle, Task
from meshrl.weights.workers import ReceivesWeights
from meshrl.worker import Worker, call, endpoint

Result = TypeVar("Result")


@dataclass(frozen=True)
class GeneratorConfig:
    """How responses are made."""

    engine: Literal["titan"] = "titan"
    """`titan`: the learner's own model with a key/value cache, in this process."""
    titan: EngineConfig = field(default_factory=lambda: EngineConfig(slots=256))
    reward_deadline_seconds: float = 600.0
    """Longest wait for the reward actor's answer to one call, over all its rollouts."""


@dataclass(frozen=True)
class GeneratorSetup:
    """What `Generator.setup` needs."""

    config: GeneratorConfig
    model: ModelConfig
    task: Task
    directory: Path | None = None
    """Where rollouts are recorded as Parquet; None: nowhere."""


@dataclass(frozen=True)
class Finished:
    """Answer of one `finished` poll: groups done since the last one, and where the time since then went."""

    groups: tuple[RolloutGroup, ...]
    number: int
    """Pass it to the next poll: groups up to here have arrived. What was never acknowledged is told again."""
    generate_seconds: float
    """Time that the engine was stepping."""
    reward_seconds: float
    """Time that groups waited for their grades with no decode step running."""


@dataclass
class _Group:
    """A group on its way through the engine."""

    request: GroupRequest
    prompt: Prompt
    prompt_ids: list[int]
    samples: list[FinishedSample | None]

    @property
    def complete(self) -> bool:
        return all(sample is not None for sample in self.samples)


class Generator(ReceivesWeights, Worker):
    """One replica: submit groups, poll for those that are finished, release what was trained on."""

    @endpoint
    async def setup(self, setup: GeneratorSetup) -> None:
        self._setup = setup
        self._task = setup.task
        self._tokenizer = load_tokenizer(setup.task.tokenizer)
        self._engine: Engine = TitanEngine(setup.config.titan, setup.model, self._tokenizer)
        self._recorder = RolloutRecorder(setup.directory, self.replica) if setup.directory else None
        self._groups: dict[int, _Group] = {}
        self._records: dict[int, RolloutRecord] = {}
        self._finished: deque[tuple[int, RolloutGroup]] = deque()
        self._finished_number = 0
        self._new_weights: deque[tuple[Mapping[str, torch.Tensor], int, asyncio.Future[None]]] = deque()
        self._version: int | None = None
        self._rewards: itertools.cycle[Any] | None = None
        self._failure: BaseException | None = None
        self._generate_seconds = self._reward_seconds = 0.0
        self._idle_since: float | None = None
        self._work = asyncio.Event()
        self._news = asyncio.Event()
        self._decode_thread = ThreadPoolExecutor(1, thread_name_prefix="decode")
        self._driver = asyncio.create_task(self._drive())
        self._tasks: set[asyncio.Task[None]] = set()

    @endpoint
    async def connect_reward(self, handles: Sequence[Any]) -> None:
        """Grade through these reward actors, in turn."""
        offset = self.replica % len(handles)
        self._rewards = itertools.cycle([*handles[offset:], *handles[:offset]])

    @endpoint
    async def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Start on these groups; `finished` tells when they are done.

        Raises:
            UserError: a prompt does not fit the context, or no weights have arrived yet.
        """
        if self._version is None:
            raise UserError("the generator has no weights yet: await weights.broadcast() before generating")
        if self._rewards is None:
            raise UserError("the generator has no reward actor: call connect_reward first")
        groups = []
        for request in requests:
            prompt = self._task.prompt(request.split, request.prompt_index)
            ids = self._tokenizer.encode(prompt.text)
            groups.append(_Group(request, prompt, ids, [None] * len(request.seeds)))
        self._groups |= {group.request.group_id: group for group in groups}
        await self._between_steps(self._submit, groups)
        self._work.set()

    @endpoint
    async def finished(self, arrived: int, wait_seconds: float) -> Finished:
        """Groups done since poll number `arrived`; waits up to `wait_seconds` for one, then answers with none.

        A poll whose caller has gone takes nothing away: groups are kept until a later poll says that they
        arrived.
        """
        while self._finished and self._finished[0][0] <= arrived:
            self._finished.popleft()
        if not self._finished and self._failure is None:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), wait_seconds)
            except TimeoutError:
                pass
        if self._failure is not None:
            raise self._failure
        groups = tuple(group for _, group in self._finished)
        answer = Finished(groups, self._finished_number, self._generate_seconds, self._reward_seconds)
        self._generate_seconds = self._reward_seconds = 0.0
        return parcel(answer)

    @endpoint
    async def abandon(self) -> None:
        """Forget all that is in progress or docked, and write what was recorded: nobody will ask for the rest."""
        for group_id in list(self._groups):
            await self._between_steps(self._engine.abort, group_id)
        grading = list(self._tasks)
        for task in grading:
            task.cancel()
        await asyncio.gather(*grading, return_exceptions=True)
        dock().release(list(self._records))
        self._groups.clear()
        self._records.clear()
        self._finished.clear()
        if self._recorder is not None:
            self._recorder.flush()

    @endpoint
    async def release(
        self, rollout_ids: Sequence[int], advantages: Mapping[int, float], step: int, record: bool = True
    ) -> int:
        """Forget these rollouts; recorded, unless told not to, with their advantage (null where they were dropped).

        Returns:
            how many were docked here.
        """
        records = [self._records.pop(i) for i in rollout_ids if i in self._records]
        if record and self._recorder is not None:
            self._recorder.add(records, advantages, step)
        return dock().release(rollout_ids)

    @endpoint
    async def samples(self, rollout_ids: Sequence[int]) -> list[str]:
        """Readable lines of rollouts that are still docked here, for a person to look at."""
        return [self._records[i].line() for i in rollout_ids if i in self._records]

    async def swap_weights(self, named: Mapping[str, torch.Tensor], version: int) -> None:
        """Use these weights from the next decode step on; returns when they are in use."""
        swapped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._new_weights.append((named, version, swapped))
        self._work.set()
        await swapped

    def _submit(self, groups: Sequence[_Group]) -> None:
        for position, group in enumerate(groups):
            request = group.request
            try:
                self._engine.submit(
                    EngineRequest(request.group_id, group.prompt_ids, request.seeds, request.sampling)
                )
            except UserError as error:
                for refused in groups[position:]:
                    del self._groups[refused.request.group_id]
                raise UserError(f"{request.split} prompt {request.prompt_index}: {error}") from None

    async def _between_steps(self, method: Callable[..., Result], *args: Any) -> Result:
        """Call the engine on its own thread, which no other may: it may be in the middle of a step."""
        return await asyncio.get_running_loop().run_in_executor(self._decode_thread, method, *args)

    async def _drive(self) -> None:
        """Step the engine while it has work. Waits for: `submit` or `swap_weights`."""
        try:
            while True:
                while self._new_weights:
                    named, version, swapped = self._new_weights.popleft()
                    await self._between_steps(self._engine.load_weights, named, version)
                    self._version = version
                    if not swapped.done():
                        swapped.set_result(None)
                if self._engine.idle:
                    self._work.clear()
                    self._idle_since = self._idle_since or time.perf_counter()
                    await self._work.wait()
                    continue
                self._idle_since = None
                started = time.perf_counter()
                samples = await self._between_steps(self._engine.step)
                self._generate_seconds += time.perf_counter() - started
                self._collect(samples)
        except Exception as error:
            self._fail(error)

    def _collect(self, samples: Sequence[FinishedSample]) -> None:
        """Put samples into their groups; send the groups that are complete to be graded, in one call."""
        complete = []
        for sample in samples:
            group = self._groups.get(sample.group_id)
            if group is None:  # abandoned
                continue
            group.samples[sample.sample] = sample
            if group.complete:
                complete.append(self._groups.pop(sample.group_id))
        if complete:
            task = asyncio.create_task(self._grade(complete))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _grade(self, groups: Sequence[_Group]) -> None:
        """Dock the groups' columns, have them graded, announce them."""
        rollouts: list[Rollout] = []
        try:
            docked = self._dock(groups)
            rollouts = [rollout for part in docked for rollout in part]
            assert self._rewards is not None
            started = time.perf_counter()
            grades = await call(
                next(self._rewards),
                "grade",
                parcel(rollouts),
                deadline_seconds=self._setup.config.reward_deadline_seconds,
            )
            self._count_grading(started)
            answers = iter(grades)
            for group, part in zip(groups, docked, strict=True):
                self._finished_number += 1
                handles = self._handles(group, part, [next(answers) for _ in part])
                self._finished.append((self._finished_number, handles))
            self._news.set()
        except asyncio.CancelledError:  # abandoned: nobody will ask for these
            dock().release([rollout.id for rollout in rollouts])
            raise
        except Exception as error:
            self._fail(error)

    def _count_grading(self, started: float) -> None:
        """Count the part of a call since `started` in which the engine stood still; overlapping calls once."""
        if self._idle_since is not None:
            now = time.perf_counter()
            self._reward_seconds += now - max(started, self._idle_since)
            self._idle_since = now

    def _dock(self, groups: Sequence[_Group]) -> list[list[Rollout]]:
        """Dock the columns over prompt and response, `[tokens]` each; returns the texts for the reward, by group.

        Columns are made for all rollouts at once and cut apart: one at a time would cost as much as decoding.
        """
        tokens, logprobs, versions, lengths = [], [], [], []
        for group in groups:
            prompt = torch.tensor(group.prompt_ids, dtype=torch.int32)
            zeros, unsampled = torch.zeros(len(prompt)), torch.full_like(prompt, -1)
            for sample in group.samples:
                assert sample is not None
                tokens += [prompt, sample.token_ids]
                logprobs += [zeros, sample.logprobs]
                versions += [unsampled, sample.versions]
                lengths.append(len(prompt) + len(sample.token_ids))
        version = torch.cat(versions)
        columns = {
            "token_ids": torch.cat(tokens),
            "response_mask": version >= 0,
            "sampler_logprobs": torch.cat(logprobs),
            "weight_version": version,
        }
        parts = zip(*(column.split(lengths) for column in columns.values()), strict=True)
        docked = []
        for group in groups:
            rollouts = []
            for rollout_id, sample in zip(group.request.rollout_ids, group.samples, strict=True):
                assert sample is not None
                dock().put(rollout_id, dict(zip(columns, next(parts), strict=True)))
                ids = sample.token_ids.tolist()
                text = self._tokenizer.decode(ids[:-1] if ids[-1:] == [self._tokenizer.end_id] else ids)
                rollouts.append(Rollout(rollout_id, group.prompt, text, tuple(ids), sample.stop_reason))
            docked.append(rollouts)
        return docked

    def _handles(self, group: _Group, rollouts: Sequence[Rollout], grades: Sequence[Grade]) -> RolloutGroup:
        request, handles = group.request, []
        for rollout, seed, sample, grade in zip(rollouts, request.seeds, group.samples, grades, strict=True):
            assert sample is not None
            versions = sample.versions.tolist()
            handle = RolloutHandle(
                id=rollout.id,
                group_id=request.group_id,
                replica=self.replica,
                prompt_tokens=len(group.prompt_ids),
                response_tokens=len(versions),
                oldest_version=min(versions),
                newest_version=max(versions),
                stop_reason=sample.stop_reason,
                seed=seed,
                reward=grade.reward,
                reward_error=grade.error,
            )
            handles.append(handle)
            self._records[rollout.id] = RolloutRecord(
                handle=handle,
                prompt=group.prompt,
                response=rollout.response,
                token_ids=list(rollout.response_token_ids),
                sampler_logprobs=sample.logprobs.tolist(),
                versions=versions,
            )
        return RolloutGroup(request.group_id, request.prompt_index, tuple(handles))

    def _fail(self, error: BaseException) -> None:
        """Keep the first failure: every later poll raises it, so that nobody waits for a dead engine."""
        if self._failure is None:
            self._failure = error
        while self._new_weights:
            swapped = self._new_weights.popleft()[2]
            if not swapped.done():
                swapped.set_exception(error)
        self._news.set()
