"""Rollouts: the controller's side of generation. Metadata only: indices out, handles in.

Keeps the generators busy as far as the buffer's slots allow, collects finished groups, hands them out as
batches. With `max_staleness` S and P groups per step there are (S + 1)·P slots, so at S = 0 nothing is
generated until the batch before has been trained on and its weights are live, and at S = 1 generation
runs one step ahead.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from meshrl.actors.generator import Finished
from meshrl.buffer import RolloutBuffer
from meshrl.errors import UserError
from meshrl.handoff.dock import Ticket
from meshrl.parcel import parcel
from meshrl.processes import Processes
from meshrl.rollout import GroupRequest, RolloutGroup, RolloutHandle, SamplingParams, Split, Task
from meshrl.session import DeadlineError, RoleMesh

_group_ids = itertools.count()
_rollout_ids = itertools.count()
# Unique in the process: a generator may still hold groups of an earlier `Rollouts`.

POLL_SECONDS = 5.0
"""A poll without news comes back after this long, so that a dead generator is noticed by its missing answer."""


@dataclass(frozen=True)
class RolloutsConfig:
    """How many rollouts, and how far ahead of training."""

    prompts_per_step: int = 32
    """Groups in one batch (P)."""
    group_size: int = 8
    """Samples of each prompt."""
    max_staleness: int = 0
    """Steps that generation may run ahead (S). 0: synchronous, exactly on-policy, reproducible."""
    deadline_seconds: float = 600.0
    """Longest wait for a batch or an evaluation before it is an error."""

    def __post_init__(self) -> None:
        if self.prompts_per_step < 1:
            raise UserError(f"prompts_per_step is {self.prompts_per_step}: a batch needs at least 1 prompt")
        if self.group_size < 2:
            raise UserError(
                f"group_size is {self.group_size}: a rollout is compared with its group, so 2 or more"
            )
        if self.max_staleness < 0:
            raise UserError(f"max_staleness is {self.max_staleness}: 0 is synchronous, less is impossible")


@dataclass(frozen=True)
class Batch:
    """Groups of one training step; `groups` shrinks when some are dropped."""

    groups: tuple[RolloutGroup, ...]
    taken: tuple[RolloutGroup, ...]
    """All groups that the batch started with."""
    generate_seconds: float
    """Time that engines spent on steps since the batch before, evaluations aside (the slowest replica)."""
    reward_seconds: float
    """Time that engines stood still because groups were being graded (the slowest replica)."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Groups dropped, by reason."""

    @property
    def rollouts(self) -> tuple[RolloutHandle, ...]:
        return tuple(rollout for group in self.groups for rollout in group.rollouts)

    def metrics(self, version: int, ticket: Ticket) -> dict[str, float]:
        """Means over all rollouts taken, and what was dropped.

        Args:
            version: of the weights that the batch trains.
            ticket: of its handoff, which names rollouts that are too long for a micro-batch.
        """
        rollouts = [rollout for group in self.taken for rollout in group.rollouts]
        graded = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        count = max(len(rollouts), 1)
        return {
            "reward": sum(graded) / max(len(graded), 1),
            "accuracy": sum(reward >= 1 for reward in graded) / max(len(graded), 1),
            "response_tokens": sum(r.response_tokens for r in rollouts),
            "response_tokens_mean": sum(r.response_tokens for r in rollouts) / count,
            "truncated": sum(r.stop_reason == "length" for r in rollouts) / count,
            "staleness_mean": sum(version - r.oldest_version for r in rollouts) / count,
            "staleness_max": max((version - r.oldest_version for r in rollouts), default=0),
            "groups_trained": len(self.groups),
            "rollouts_too_long": len(ticket.dropped),
            **{f"dropped_{reason.replace(' ', '_')}": n for reason, n in self.dropped.items()},
        }


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
    ) -> None:
        """
        Args:
            sampling: of training; evaluation changes the temperature.
            seed: of prompts and samples.
            reward: the mesh that the generators grade with; when one of its processes dies, waiting ends at once.
        """
        self.config = config or RolloutsConfig()
        self.buffer = RolloutBuffer(self.config.prompts_per_step, self.config.max_staleness)
        self._generator = generator
        self._reward = reward
        self._task = task
        self._sampling = sampling
        self._seed = seed
        self._next_prompt = 0
        self._evaluations: dict[int, asyncio.Future[RolloutGroup]] = {}
        self._generate_seconds = [0.0] * len(generator.replicas)
        self._reward_seconds = [0.0] * len(generator.replicas)
        self._load = [0] * len(generator.replicas)
        self._replica_of: dict[int, int] = {}
        self._groups: dict[int, RolloutGroup] = {}
        self._news = asyncio.Event()
        self._failure: BaseException | None = None
        self._listeners: list[asyncio.Task[None]] = []
        self._releases: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Rollouts:
        self._listeners = [
            asyncio.create_task(self._listen(replica)) for replica in range(len(self._generator.replicas))
        ]
        for replica in self._reward.replicas if self._reward else []:
            self._listeners.append(asyncio.create_task(self._watch(replica.processes)))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._failure is None:
            await asyncio.gather(*self._releases, return_exceptions=True)
        for release in self._releases:
            release.cancel()
        for listener in self._listeners:
            listener.cancel()
        await asyncio.gather(*self._listeners, return_exceptions=True)
        if self._failure is None:
            await self._generator.call("abandon", deadline_seconds=10)

    @property
    def heldout_size(self) -> int:
        """Prompts that the task keeps out of training."""
        return self._task.heldout_size

    async def take(self) -> Batch:
        """The next batch, its failed groups dropped. Waits for: P finished groups, and without staleness for
        the release of the batch before."""
        if self.config.max_staleness == 0 and self._releases:
            await asyncio.wait(self._releases)
        await self._admit()
        await self._until(
            lambda: self.buffer.ready >= self.config.prompts_per_step, "a batch of finished groups"
        )
        groups = tuple(self._groups[group_id] for group_id in self.buffer.take())
        batch = Batch(
            groups,
            groups,
            generate_seconds=max(self._generate_seconds),
            reward_seconds=max(self._reward_seconds),
        )
        self._generate_seconds = [0.0] * len(self._generate_seconds)
        self._reward_seconds = [0.0] * len(self._reward_seconds)
        failed = [g.group_id for g in groups if any(reward is None for reward in g.rewards)]
        return self.drop(batch, failed, "reward failed")

    def drop(self, batch: Batch, group_ids: Iterable[int], reason: str) -> Batch:
        """The batch without these groups; the ledger counts them under `reason`."""
        gone = set(group_ids)
        for group_id in gone:
            self.buffer.drop(group_id, reason)
        counts = Counter(batch.dropped) + Counter({reason: len(gone)})
        groups = tuple(group for group in batch.groups if group.group_id not in gone)
        return replace(batch, groups=groups, dropped=dict(counts))

    def drop_zero_variance(self, batch: Batch) -> Batch:
        """The batch without groups whose rewards are all equal: their advantage is 0, they teach nothing."""
        equal = [g.group_id for g in batch.groups if _spread(g) <= 1e-6]
        return self.drop(batch, equal, "zero variance")

    def release(
        self, batch: Batch, advantages: Mapping[int, float], step: int, *, live: Awaitable[object]
    ) -> None:
        """Free the batch's slots and columns once the weights trained on it are live on the generators.

        Returns at once. Where `live` fails, the next `take` raises what it raised.

        Args:
            live: is done when they are, such as `weights.arrival(version)`.
        """
        task = asyncio.create_task(self._release(batch, advantages, step, live))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(
        self, batch: Batch, advantages: Mapping[int, float], step: int, live: Awaitable[object]
    ) -> None:
        try:
            await live
            self.buffer.release([group.group_id for group in batch.groups])
            for group in batch.taken:
                del self._groups[group.group_id]
            await self._forget(batch.taken, advantages, step)
            if self.config.max_staleness > 0:
                await self._admit()
        except Exception as error:
            self._failure = self._failure or error
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
        waiting = [self._evaluations.setdefault(r.group_id, loop.create_future()) for r in requests]
        of_training = list(self._generate_seconds), list(self._reward_seconds)
        await self._submit(requests)
        await self._until(lambda: all(future.done() for future in waiting), f"{count} evaluated responses")
        # What engines did meanwhile belongs to no training step.
        self._generate_seconds, self._reward_seconds = of_training
        groups = [future.result() for future in waiting]
        await self._forget(groups, {}, step=0, record=False)
        return sum((group.rewards[0] or 0) >= 1 for group in groups) / max(count, 1)

    async def samples(self, batch: Batch, count: int) -> tuple[str, ...]:
        """Readable lines of `count` rollouts, for a person: the only text that the controller ever asks for."""
        lines: list[str] = []
        for group in batch.taken[:count]:
            rollout = group.rollouts[0]
            lines += await self._generator.call_rank(
                "samples", [rollout.id], replica=rollout.replica, deadline_seconds=30
            )
        return tuple(lines)

    async def _admit(self) -> None:
        """Ask for as many groups as there are free slots."""
        requests = []
        for _ in range(self.buffer.free):
            index = _prompt_index(self._next_prompt, self._task.train_size, self._seed)
            self._next_prompt += 1
            request = self._request("train", index, self.config.group_size, self._sampling, self._next_prompt)
            self.buffer.admit(request.group_id)
            requests.append(request)
        await self._submit(requests)

    def _request(
        self, split: Split, index: int, samples: int, sampling: SamplingParams, occasion: int | str
    ) -> GroupRequest:
        """`occasion` keeps apart the seeds of a prompt that comes up again in a later epoch."""
        rollout_ids = tuple(next(_rollout_ids) for _ in range(samples))
        seeds = tuple(sample_seed(self._seed, split, index, occasion, sample) for sample in range(samples))
        return GroupRequest(next(_group_ids), split, index, rollout_ids, seeds, sampling)

    async def _submit(self, requests: Sequence[GroupRequest]) -> None:
        """One message per replica, groups to the least loaded first."""
        by_replica: dict[int, list[GroupRequest]] = {}
        for request in requests:
            replica = min(range(len(self._load)), key=self._load.__getitem__)
            self._load[replica] += len(request.seeds)
            self._replica_of[request.group_id] = replica
            by_replica.setdefault(replica, []).append(request)
        await asyncio.gather(
            *(
                self._generator.call_rank("submit", parcel(part), replica=replica, deadline_seconds=60)
                for replica, part in by_replica.items()
            )
        )

    async def _forget(
        self, groups: Sequence[RolloutGroup], advantages: Mapping[int, float], step: int, record: bool = True
    ) -> None:
        """Tell each replica which rollouts it may let go of."""
        by_replica: dict[int, list[int]] = {}
        for group in groups:
            for rollout in group.rollouts:
                by_replica.setdefault(rollout.replica, []).append(rollout.id)
        await asyncio.gather(
            *(
                self._generator.call_rank(
                    "release",
                    ids,
                    {i: advantages[i] for i in ids if i in advantages},
                    step,
                    record,
                    replica=replica,
                    deadline_seconds=60,
                )
                for replica, ids in by_replica.items()
            )
        )

    async def _listen(self, replica: int) -> None:
        """Collect what one replica finishes. Waits for: its poll, which answers at least every POLL_SECONDS."""
        arrived = 0
        try:
            while True:
                answer: Finished = await self._generator.call_rank(
                    "finished",
                    arrived,
                    POLL_SECONDS,
                    replica=replica,
                    deadline_seconds=self.config.deadline_seconds,
                )
                self._generate_seconds[replica] += answer.generate_seconds
                self._reward_seconds[replica] += answer.reward_seconds
                arrived = answer.number
                for group in answer.groups:
                    if group.group_id not in self._replica_of:
                        continue  # told twice
                    self._load[self._replica_of.pop(group.group_id)] -= len(group.rollouts)
                    waiting = self._evaluations.pop(group.group_id, None)
                    if waiting is not None:
                        waiting.set_result(group)
                    else:
                        self._groups[group.group_id] = group
                        self.buffer.finish(group.group_id)
                self._news.set()
        except Exception as error:
            self._failure = self._failure or error
            self._news.set()

    async def _watch(self, processes: Processes) -> None:
        """End all waiting when a process of the mesh dies. Waits for: that, and does not keep it from others."""
        await asyncio.wait({processes.death})
        self._failure = self._failure or processes.death.exception()
        self._news.set()

    async def _until(self, done: Callable[[], bool], what: str) -> None:
        """Wait until `done()`. A failed generator ends the wait with its error, the deadline with what is missing."""
        limit = asyncio.timeout(self.config.deadline_seconds)
        try:
            async with limit:
                while not done():
                    if self._failure is not None:
                        raise self._failure
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            if not limit.expired():  # the failure was a deadline of its own, which says more
                raise
            busy = {r: n for r, n in enumerate(self._load) if n}
            raise DeadlineError(
                f"waited {self.config.deadline_seconds:g} s for {what}; rollouts outstanding by generator replica: "
                f"{busy}; {self.buffer}"
            ) from None


def sample_seed(seed: int, *path: object) -> int:
    """A 63-bit seed for the sample named by `path`; different paths never share a stream (BLAKE2b)."""
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _prompt_index(position: int, size: int | None, seed: int) -> int:
    """The position-th training prompt: in order for an endless task, else a seeded shuffle of each epoch."""
    if size is None:
        return position
    epoch, offset = divmod(position, size)
    return _epoch_order(size, seed, epoch)[offset]


@lru_cache(maxsize=2)
def _epoch_order(size: int, seed: int, epoch: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed} epoch {epoch}").shuffle(order)
    return order


def _spread(group: RolloutGroup) -> float:
    rewards = [reward for reward in group.rewards if reward is not None]
    return max(rewards) - min(rewards)
