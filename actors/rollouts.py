"""Rollouts: the controller's side of generation. Metadata only: indices out, handles in.

Keeps the generators busy as far as the buffer's slots allow, collects finished groups, hands them out as
batches. With `max_staleness` S and P groups per step there are (S + 1)·P slots, so at S = 0 nothing is
generated until the batch before has been trained on and its weights are live, and at S = 1 generation
runs one step ahead.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from meshrl.actors.batch import REWARD_FAILED, ZERO_VARIANCE, Batch, teaches_nothing
from meshrl.actors.dispatch import Dispatcher
from meshrl.actors.prompts import prompt_index, sample_seed
from meshrl.actors.rollouts_config import RolloutsConfig
from meshrl.buffer import RolloutBuffer, State
from meshrl.errors import UserError
from meshrl.handoff.dock import Ticket
from meshrl.processes import Processes
from meshrl.rollout import GroupRequest, RolloutGroup, SamplingParams, Split, Task
from meshrl.session import DeadlineError, RoleMesh, WorkerDied
from meshrl.waiting import waiting

__all__ = ["Rollouts", "RolloutsConfig"]

_group_ids = itertools.count()
_rollout_ids = itertools.count()
# Unique in the process: a generator may still hold groups of an earlier `Rollouts`.


class Rollouts:
    """Asynchronous source of batches; use as an async context.

    Waits for: `take` for finished groups (unblocked by generators and rewards); `evaluate` likewise.
    """

    def __init__(
        self,
        generator: RoleMesh,
        task: Task,
        sampling: SamplingParams,
        config: RolloutsConfig | None = None,
        *,
        seed: int = 0,
        reward: RoleMesh | None = None,
        revive: Callable[[int], Awaitable[None]] | None = None,
        note: Callable[[str], None] = print,
    ) -> None:
        """
        Args:
            sampling: of training; evaluation changes the temperature.
            seed: of prompts and samples.
            reward: the mesh that the generators grade with; when one of its processes dies, waiting ends at once.
            revive: brings up another process in place of the generator replica of that number, which died; None:
                the others do its work.
            note: told what happened to replicas.
        """
        self.config = config = config or RolloutsConfig()
        self.buffer = RolloutBuffer(config.prompts_per_step, config.max_staleness)
        self._reward = reward
        self._task = task
        self._sampling = sampling
        self._seed = seed
        self._note = note
        self._dispatcher = Dispatcher(
            generator,
            self,
            capacity=config.rollouts_per_generator,
            affinity_rollouts=config.affinity_rollouts,
            deadline_seconds=config.deadline_seconds,
            revive=revive,
            note=note,
        )
        self._next_prompt = 0
        self._requests: dict[int, GroupRequest] = {}  # of the groups in the buffer
        self._groups: dict[int, RolloutGroup] = {}  # finished ones of those
        self._evaluations: dict[int, asyncio.Future[RolloutGroup]] = {}
        self._to_evaluate: deque[GroupRequest] = deque()
        self._refilled: Counter[str] = Counter()  # for the next batch, by reason
        self._empty_in_a_row = self._last_step = self._interruptions = 0
        self._generators_told = False  # of an interruption
        self._news = asyncio.Event()
        self._failure: BaseException | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._releases: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Rollouts:
        self._dispatcher.start()
        for replica in self._reward.replicas if self._reward else []:
            self._watches.append(asyncio.create_task(self._watch(replica.processes)))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._failure is None:
            await asyncio.gather(*self._releases, return_exceptions=True)
        for task in [*self._releases, *self._watches]:
            task.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await self._dispatcher.close()
        if self._failure is None:
            await self._dispatcher.tell_all("abandon")

    @property
    def heldout_size(self) -> int:
        """Prompts that the task keeps out of training."""
        return self._task.heldout_size

    @property
    def docked(self) -> int:
        """Rollouts whose columns generators hold: all that are finished and not yet released."""
        return self._dispatcher.docked

    async def take(self) -> Batch:
        """The next batch, groups whose grading failed dropped. Waits for: P finished groups, and without staleness for
        the release of the batch before."""
        if self.config.max_staleness == 0:
            await self._until(lambda: not self._releases, "the weights of the batch before to be live")
        await self._admit()
        await self._until(
            lambda: self.buffer.ready >= self.config.prompts_per_step, "a batch of finished groups"
        )
        groups = tuple(self._groups[group_id] for group_id in self.buffer.take())
        dispatcher = self._dispatcher
        batch = Batch(
            groups,
            groups,
            generate_seconds=max(dispatcher.generate_seconds),
            reward_seconds=max(dispatcher.reward_seconds),
            dropped=dict(self._refilled),
            docked_rollouts=dispatcher.docked,
            max_staleness=self.config.max_staleness,
        )
        self._refilled.clear()
        dispatcher.generate_seconds[:] = [0.0] * len(dispatcher.generate_seconds)
        dispatcher.reward_seconds[:] = [0.0] * len(dispatcher.reward_seconds)
        return self._drop_for(batch, REWARD_FAILED)

    def drop(self, batch: Batch, group_ids: Iterable[int], reason: str) -> Batch:
        """The batch without these groups; the ledger counts them under `reason`."""
        gone = set(group_ids)
        for group_id in gone:
            self.buffer.drop(group_id, reason)
        return batch.without(gone, reason) if gone else batch

    def drop_zero_variance(self, batch: Batch) -> Batch:
        """The batch without groups whose rewards are all equal: their advantage is 0, they teach nothing."""
        return self._drop_for(batch, ZERO_VARIANCE)

    def release(
        self,
        batch: Batch,
        ticket: Ticket,
        advantages: Mapping[int, float],
        step: int,
        *,
        live: Awaitable[object],
    ) -> None:
        """Free the batch's slots and columns once the weights trained on it are live on the generators.

        Returns at once. Where `live` fails, the next `take` raises what it raised.

        Args:
            ticket: of the batch's handoff: what that left out is no longer counted as trained on.
            live: is done when they are, such as `weights.arrival(version)`.
        """
        left_out = {
            group.group_id: Counter(ticket.dropped[r.id] for r in group.rollouts if r.id in ticket.dropped)
            for group in batch.groups
        }
        trained = []
        for group in batch.groups:
            for reason, count in left_out[group.group_id].items():
                self.buffer.leave_out(group.group_id, count, reason)
            if left_out[group.group_id].total() < len(group.rollouts):
                trained.append(group.group_id)
        self._last_step = step
        self._empty_in_a_row = 0 if trained else self._empty_in_a_row + 1
        self._check_empty(batch.note(ticket))
        task = asyncio.create_task(self._release(batch, trained, advantages, step, live))
        self._releases.add(task)
        task.add_done_callback(self._released)

    async def _release(
        self,
        batch: Batch,
        trained: Sequence[int],
        advantages: Mapping[int, float],
        step: int,
        live: Awaitable[object],
    ) -> None:
        try:
            await live
            self.buffer.release(trained)
            for group in batch.taken:
                del self._groups[group.group_id], self._requests[group.group_id]
            await self._dispatcher.release(batch.taken, advantages, step)
            if self.config.max_staleness > 0:
                await self._admit()
        except Exception as error:
            self.failed(error)
        self._news.set()

    def _released(self, task: asyncio.Task[None]) -> None:
        self._releases.discard(task)
        self._news.set()

    async def evaluate(self, count: int, *, temperature: float = 1.0) -> float:
        """Share of `count` held-out prompts (or all, where the task has fewer) whose response gets a reward of 1.

        The sampling seed of a prompt depends on the run's seed and its index alone: two evaluations of
        the same weights agree. A response that could not be graded counts as wrong.
        """
        count = min(count, self._task.heldout_size)
        sampling = replace(self._sampling, temperature=temperature)
        requests = [self._request("heldout", index, 1, sampling, "evaluation") for index in range(count)]
        loop = asyncio.get_running_loop()
        answers = [self._evaluations.setdefault(r.group_id, loop.create_future()) for r in requests]
        dispatcher = self._dispatcher
        of_training = list(dispatcher.generate_seconds), list(dispatcher.reward_seconds)
        self._to_evaluate.extend(requests)
        await dispatcher.dispatch()
        await self._until(lambda: all(future.done() for future in answers), f"{count} evaluated responses")
        # What engines did meanwhile belongs to no training step.
        dispatcher.generate_seconds[:], dispatcher.reward_seconds[:] = of_training
        groups = [future.result() for future in answers]
        await dispatcher.release(groups, {}, step=0, record=False)
        return sum((group.rewards[0] or 0) >= 1 for group in groups) / max(count, 1)

    @asynccontextmanager
    async def interrupted(self) -> AsyncIterator[None]:
        """Within it no training rollout is generated; those in progress go on afterwards where they stood, their
        tokens kept. What is evaluated meanwhile need not wait for them; a `take` may. It may be nested."""
        self._interruptions += 1
        try:
            if self._interruptions == 1 and self.buffer.count(State.GENERATING):
                self._generators_told = True
                await self._dispatcher.tell_all("interrupt")
            yield
        finally:
            self._interruptions -= 1
            if self._interruptions == 0:
                if self._generators_told:
                    self._generators_told = False
                    await self._dispatcher.tell_all("resume")
                await self._dispatcher.dispatch()

    async def samples(self, batch: Batch, count: int) -> tuple[str, ...]:
        """Readable lines of `count` rollouts, for a person: the only text that the controller ever asks for."""
        return await self._dispatcher.samples([group.rollouts[0] for group in batch.taken[:count]])

    # What the dispatcher asks and tells.

    def next_request(self) -> GroupRequest | None:
        """Evaluations first: somebody waits for all of them."""
        if self._to_evaluate:
            return self._to_evaluate[0]
        group_id = None if self._interruptions else self.buffer.next_to_generate()
        return None if group_id is None else self._requests[group_id]

    def started(self, request: GroupRequest) -> None:
        if request.split == "heldout":
            self._to_evaluate.popleft()
        else:
            self.buffer.start(request.group_id)

    def grading(self, group_id: int) -> None:
        if group_id not in self._evaluations:
            self.buffer.grade(group_id)

    def finished(self, group: RolloutGroup) -> None:
        self._news.set()
        waiting = self._evaluations.pop(group.group_id, None)
        if waiting is not None:
            waiting.set_result(group)
            return
        self.buffer.finish(group.group_id)
        reason = teaches_nothing(group)
        if reason is None or self._refilled.total() >= self.config.refills:
            self._groups[group.group_id] = group
            return
        self.buffer.drop(group.group_id, reason)
        del self._requests[group.group_id]
        self._refilled[reason] += 1
        self._dispatcher.spawn(self._dispatcher.release([group], {}, self._last_step + 1))
        self._dispatcher.spawn(self._admit())

    def lost(self, replica: int, unfinished: Sequence[GroupRequest], error: WorkerDied) -> None:
        for request in unfinished:
            if request.split == "heldout":
                self._to_evaluate.append(request)
            else:
                self.buffer.requeue(request.group_id)
        ready = [
            i for i, g in self._groups.items() if g.rollouts[0].replica == replica and self.buffer.is_ready(i)
        ]
        for group_id in ready:
            self.buffer.requeue(group_id)
            del self._groups[group_id]
        again = len(unfinished) + len(ready)
        self._note(f"generator replica {replica} is gone, {again} groups are generated again: {error}")
        self._news.set()

    def failed(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._news.set()

    async def _admit(self) -> None:
        """Ask for as many groups as there are free slots."""
        for _ in range(self.buffer.free):
            index = prompt_index(self._next_prompt, self._task.train_size, self._seed)
            self._next_prompt += 1
            size = self.config.group_size
            request = self._request("train", index, size, self._sampling, self._next_prompt)
            self.buffer.admit(request.group_id, size)
            self._requests[request.group_id] = request
        await self._dispatcher.dispatch()

    def _request(
        self, split: Split, index: int, samples: int, sampling: SamplingParams, occasion: int | str
    ) -> GroupRequest:
        """`occasion` keeps apart the seeds of a prompt that comes up again in a later epoch."""
        rollout_ids = tuple(next(_rollout_ids) for _ in range(samples))
        seeds = tuple(sample_seed(self._seed, split, index, occasion, sample) for sample in range(samples))
        return GroupRequest(next(_group_ids), split, index, rollout_ids, seeds, sampling)

    def _drop_for(self, batch: Batch, reason: str) -> Batch:
        return self.drop(batch, [g.group_id for g in batch.groups if teaches_nothing(g) == reason], reason)

    def _check_empty(self, note: str) -> None:
        limit = self.config.empty_batches_in_a_row
        if 0 < limit <= self._empty_in_a_row:
            self.failed(
                UserError(
                    f"{self._empty_in_a_row} batches in a row had nothing to train on; of the last: {note}. Look at "
                    "the rewards; take easier or harder prompts, larger groups, a higher temperature, more refills, "
                    "or a larger learner.microbatch_tokens"
                )
            )

    async def _watch(self, processes: Processes) -> None:
        """End all waiting when a process of the mesh dies. Waits for: that, and does not keep it from others."""
        await asyncio.wait({processes.death})
        self.failed(processes.death.exception() or RuntimeError("a reward process ended"))

    async def _until(self, done: Callable[[], bool], what: str) -> None:
        """Wait until `done()`. A failed generator ends the wait with its error, the deadline with what is missing."""
        seconds = self.config.deadline_seconds
        limit = asyncio.timeout(seconds)
        busy, details = self._dispatcher.busy, self.buffer.__str__
        try:
            with waiting(what, unblocked_by=busy, deadline_seconds=seconds, details=details):
                async with limit:
                    while not done():
                        if self._failure is not None:
                            raise self._failure
                        self._news.clear()
                        await self._news.wait()
        except TimeoutError:
            if not limit.expired():  # the failure was a deadline of its own, which says more
                raise
            raise DeadlineError(
                f"waited {seconds:g} s for {what}; rollouts outstanding by generator replica: "
                f"{self._dispatcher.outstanding()}; {self.buffer}"
            ) from None
