"""The generator: an engine behind an actor, from prompt indices to graded, docked rollouts.

Requests name prompts by index; the text is looked up here. One decode step runs at a time on a thread of
its own, so the actor answers while it generates; weights are swapped between two steps. When all samples
of a group are done, its columns go to the dock of this process, its text goes straight to a reward actor,
and the controller learns lengths, versions and scores.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from meshrl.actors.engines.engine import Engine, FinishedSample
from meshrl.actors.engines.titan import EngineConfig, TitanEngine
from meshrl.actors.generated import GroupInProgress, dock_groups, graded_group
from meshrl.actors.graders import Clock, Graders
from meshrl.actors.models import ModelConfig, load_tokenizer
from meshrl.actors.recorder import RolloutRecord, RolloutRecorder
from meshrl.errors import UserError
from meshrl.handoff.dock import dock
from meshrl.parcel import parcel
from meshrl.rollout import GroupRequest, Rollout, RolloutGroup, Task
from meshrl.waiting import waiting
from meshrl.weights.workers import ReceivesWeights
from meshrl.worker import Worker, endpoint

Result = TypeVar("Result")


@dataclass(frozen=True)
class GeneratorConfig:
    """How responses are made."""

    engine: Literal["titan"] = "titan"
    """`titan`: the learner's own model with a key/value cache, in this process."""
    titan: EngineConfig = field(default_factory=lambda: EngineConfig(slots=256))
    reward_deadline_seconds: float = 600.0
    """Longest wait for the reward actor's answer to one call, over all its rollouts; past it they count as not graded,
    and the third time in a row ends the run."""

    def __post_init__(self) -> None:
        if not self.reward_deadline_seconds > 0:
            raise UserError(f"reward_deadline_seconds is {self.reward_deadline_seconds}: use more than 0")


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
    grading: tuple[int, ...] = ()
    """Groups whose grading began since the last poll, and goes on."""


class Generator(ReceivesWeights, Worker):
    """One replica: submit groups, poll for those that are finished, release what was trained on."""

    @endpoint
    async def setup(self, setup: GeneratorSetup) -> None:
        self._setup = setup
        self._task = setup.task
        self._tokenizer = load_tokenizer(setup.task.tokenizer)
        self._engine: Engine = TitanEngine(setup.config.titan, setup.model, self._tokenizer)
        self._recorder = RolloutRecorder(setup.directory, self.replica) if setup.directory else None
        self._groups: dict[int, GroupInProgress] = {}
        self._interrupted = False
        self._records: dict[int, RolloutRecord] = {}
        self._finished: deque[tuple[int, RolloutGroup]] = deque()
        self._finished_number = 0
        self._new_weights: deque[tuple[Mapping[str, torch.Tensor], int, asyncio.Future[None]]] = deque()
        self._version: int | None = None
        self._graders: Graders | None = None
        self._grading: list[int] = []
        self._clock = Clock()
        self._failure: BaseException | None = None
        self._generate_seconds = 0.0
        self._work = asyncio.Event()
        self._news = asyncio.Event()
        self._decode_thread = ThreadPoolExecutor(1, thread_name_prefix="decode")
        self._driver = asyncio.create_task(self._drive())
        self._tasks: set[asyncio.Task[None]] = set()

    @endpoint
    async def connect_reward(self, handles: Sequence[Any]) -> None:
        """Grade through these reward actors, in turn."""
        deadline = self._setup.config.reward_deadline_seconds
        self._graders = Graders(handles, first=self.replica, deadline_seconds=deadline)

    @endpoint
    async def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Start on these groups; `finished` tells when they are done.

        Raises:
            UserError: a prompt does not fit the context, or no weights have arrived yet.
        """
        if self._version is None:
            raise UserError("the generator has no weights yet: await weights.broadcast() before generating")
        if self._graders is None:
            raise UserError("the generator has no reward actor: call connect_reward first")
        groups = []
        for request in requests:
            prompt = self._task.prompt(request.split, request.prompt_index)
            ids = self._tokenizer.encode(prompt.text)
            groups.append(GroupInProgress(request, prompt, ids, [None] * len(request.seeds)))
        self._groups |= {group.request.group_id: group for group in groups}
        if self._interrupted:
            groups = [group for group in groups if group.request.split != "train"]
        await self._between_steps(self._submit, groups)
        self._work.set()

    @endpoint
    async def interrupt(self) -> int:
        """Generate no training groups until `resume`; what is in progress keeps all its tokens. Evaluations go on.

        Returns:
            samples in progress that will go on.
        """
        self._interrupted = True
        kept = 0
        for group in [group for group in self._groups.values() if group.request.split == "train"]:
            aborted = await self._between_steps(self._engine.abort, group.request.group_id)
            group.interrupted |= {sample.sample: sample for sample in aborted}
            kept += sum(len(sample.token_ids) > 0 for sample in aborted)
        return kept

    @endpoint
    async def resume(self) -> None:
        """Go on with what `interrupt` stopped, and begin with what was asked for since."""
        if self._interrupted:
            self._interrupted = False
            held = [group for group in self._groups.values() if group.request.split == "train"]
            await self._between_steps(self._submit, held)
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
                with waiting("a group to be finished", kind="idle"):
                    await asyncio.wait_for(self._news.wait(), wait_seconds)
            except TimeoutError:
                pass
        if self._failure is not None:
            raise self._failure
        groups = tuple(group for _, group in self._finished)
        told = {group.group_id for group in groups}
        grading = tuple(group_id for group_id in self._grading if group_id not in told)
        answer = Finished(groups, self._finished_number, self._generate_seconds, self._clock.seconds, grading)
        self._generate_seconds = self._clock.seconds = 0.0
        self._grading.clear()
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
        self._interrupted = False
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

    def _submit(self, groups: Sequence[GroupInProgress]) -> None:
        for position, group in enumerate(groups):
            request = group.request
            try:
                self._engine.submit(group.engine_request())
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
                    self._clock.engine_stands_still()
                    with waiting("groups to generate", kind="idle"):
                        await self._work.wait()
                    continue
                self._clock.engine_works()
                with waiting("generation", kind="work", details=self._progress):
                    while not (self._engine.idle or self._new_weights):
                        started = time.perf_counter()
                        samples = await self._between_steps(self._engine.step)
                        self._generate_seconds += time.perf_counter() - started
                        self._collect(samples)
        except Exception as error:
            self._fail(error)

    def _progress(self) -> str:
        stats = self._engine.stats
        return f"{stats.running_samples} samples running, {stats.waiting_samples} waiting"

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

    async def _grade(self, groups: Sequence[GroupInProgress]) -> None:
        """Dock the groups' columns, have them graded, announce them."""
        rollouts: list[Rollout] = []
        try:
            docked = dock_groups(groups, self._tokenizer)
            rollouts = [rollout for part in docked for rollout in part]
            self._grading += [group.request.group_id for group in groups]
            assert self._graders is not None
            started = self._clock.now()
            grades = await self._graders.grade(rollouts)
            self._clock.graded(started)
            answers = iter(grades)
            for group, part in zip(groups, docked, strict=True):
                graded, records = graded_group(group, part, [next(answers) for _ in part], self.replica)
                self._records |= {record.handle.id: record for record in records}
                self._finished_number += 1
                self._finished.append((self._finished_number, graded))
            self._news.set()
        except asyncio.CancelledError:  # abandoned: nobody will ask for these
            dock().release([rollout.id for rollout in rollouts])
            raise
        except Exception as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Keep the first failure: every later poll raises it, so that nobody waits for a dead engine."""
        if self._failure is None:
            self._failure = error
        while self._new_weights:
            swapped = self._new_weights.popleft()[2]
            if not swapped.done():
                swapped.set_exception(error)
        self._news.set()
