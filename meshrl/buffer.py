"""The rollout buffer: slots, the staleness bound and the ledger. A pure state machine over group ids; it owns
no task.

    admitted → generating → rewarding → ready → taken → released
        ↑__________|____________|_________|                        `requeue`: its generator died

Let P be the groups of a step and S the bound. There are (S + 1)·P slots. A group holds one from its admission
until the weights trained on it have reached the generators. With t batches taken and r of them released, the
generators hold version r and the next batch trains version t, so t − r batches hold P slots each. A group
admitted now has at most (S + 1)·P − (t − r)·P − 1 groups before it in the queue and, taken in order, is
trained at version r + S or sooner: **no group is trained on more than S versions after the one it was
admitted under.** S = 0 is synchronous.

A group that goes back to `admitted` keeps its place and the version it was admitted under, so the bound counts
the time that was lost. What happens is told in any order, except that versions only grow: groups stand in order
of admission, hence of version, and every question below is answered by looking at the first P that are ready.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """Where a live group is."""

    ADMITTED = "admitted"
    """Waiting for a generator."""
    GENERATING = "generating"
    REWARDING = "rewarding"
    READY = "ready"
    TAKEN = "taken"


_AT_GENERATOR = (State.GENERATING, State.REWARDING)


@dataclass(frozen=True)
class Ledger:
    """What became of everything admitted: `admitted == trained + sum(dropped.values()) + live`."""

    admitted: int
    trained: int
    dropped: dict[str, int]
    """By reason."""
    live: int
    """Admitted, generating, rewarding, ready or taken."""

    @property
    def balanced(self) -> bool:
        """Whether it adds up."""
        return self.admitted == self.trained + sum(self.dropped.values()) + self.live


@dataclass
class _Group:
    place: int
    """Groups before it, from the first one on."""
    version: int
    """Of the generators when it was admitted."""
    rollouts: int
    """Those not left out."""
    state: State = State.ADMITTED


class RolloutBuffer:
    """Decides when a group may be admitted, which is generated next and which make the next batch.

    Every call looks at a number of groups that grows with the logarithm of the live ones, `take` and `release` at P.
    """

    def __init__(self, groups_per_step: int, max_staleness: int = 0) -> None:
        """
        Args:
            groups_per_step: groups of a batch (P), >= 1.
            max_staleness: versions that training may be ahead of a group's sampling (S). 0: synchronous.

        Raises:
            ValueError: an argument is out of range.
        """
        if groups_per_step < 1:
            raise ValueError(f"groups_per_step={groups_per_step}: at least 1 is needed")
        if max_staleness < 0:
            raise ValueError(f"max_staleness={max_staleness}: 0 is synchronous, less is impossible")
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self._groups: dict[int, _Group] = {}
        self._states: Counter[State] = Counter()
        self._queue: list[tuple[int, int]] = []  # (place, id) of groups that wait for a generator: a heap
        self._ready: list[tuple[int, int]] = []  # (place, id), sorted
        self._first_place: dict[int, int] = {}  # of the groups admitted under a version
        self._waiting_under: Counter[int] = Counter()  # groups not taken, by version
        self._trained = [0, 0]  # groups, rollouts
        self._admitted = [0, 0]
        self._dropped: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self._live_rollouts = 0
        self._batches_taken = self._batches_released = 0

    @property
    def slots(self) -> int:
        """(S + 1)·P."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def free(self) -> int:
        """Groups that may be admitted now."""
        # A batch holds all of its P slots until released, also for groups dropped out of it: a group admitted
        # in their stead would be one version too old when its turn comes.
        batches = (self._batches_taken - self._batches_released) * self.groups_per_step
        return self.slots - batches - self._waiting

    @property
    def ready(self) -> int:
        """Groups that `take` would hand out now: P, or 0 where too few are ready or an older one must not be
        overtaken."""
        return self.groups_per_step if self._may_take() else 0

    @property
    def version(self) -> int:
        """Batches released: the version that generators sample with, counted from this buffer's start."""
        return self._batches_released

    @property
    def ledger(self) -> Ledger:
        """In groups."""
        return Ledger(self._admitted[0], self._trained[0], dict(self._dropped[0]), len(self._groups))

    @property
    def rollout_ledger(self) -> Ledger:
        """In rollouts: also counts those that are left out of a group which is trained on."""
        return Ledger(self._admitted[1], self._trained[1], dict(self._dropped[1]), self._live_rollouts)

    def count(self, state: State) -> int:
        """Live groups in this state."""
        return self._states[state]

    def is_ready(self, group_id: int) -> bool:
        """Whether the group is live and ready."""
        group = self._groups.get(group_id)
        return group is not None and group.state is State.READY

    def admit(self, group_id: int, rollouts: int = 1) -> None:
        """A group takes a slot, and waits for a generator.

        Raises:
            ValueError: the id was live already, or no slot is free.
        """
        if group_id in self._groups:
            raise ValueError(f"group {group_id} is already {self._groups[group_id].state.value}")
        if self.free == 0:
            raise ValueError(f"group {group_id}: no slot is free; release the batch taken first. {self}")
        place, version = self._admitted[0], self._batches_released
        self._groups[group_id] = _Group(place, version, rollouts)
        self._states[State.ADMITTED] += 1
        self._first_place.setdefault(version, place)
        self._waiting_under[version] += 1
        heapq.heappush(self._queue, (place, group_id))
        self._admitted[0] += 1
        self._admitted[1] += rollouts
        self._live_rollouts += rollouts
        self._check()

    def next_to_generate(self) -> int | None:
        """The group that has waited longest for a generator; None: no group waits."""
        while self._queue:
            place, group_id = self._queue[0]
            group = self._groups.get(group_id)
            if group is not None and group.state is State.ADMITTED and group.place == place:
                return group_id
            heapq.heappop(self._queue)  # dropped while it waited
        return None

    def start(self, group_id: int) -> None:
        """A generator works on it.

        Raises:
            ValueError: it was not waiting for one.
        """
        self._move(self._expect(group_id, State.ADMITTED), State.GENERATING)

    def grade(self, group_id: int) -> None:
        """It is generated, and being graded. Some callers never hear of this and go straight on to `finish`.

        Raises:
            ValueError: it was not being generated.
        """
        self._move(self._expect(group_id, State.GENERATING), State.REWARDING)

    def finish(self, group_id: int) -> None:
        """A group is generated and graded.

        Raises:
            ValueError: it was not at a generator.
        """
        group = self._expect(group_id, *_AT_GENERATOR)
        self._move(group, State.READY)
        insort(self._ready, (group.place, group_id))

    def requeue(self, group_id: int) -> None:
        """Its generator died, and with it what was generated: it waits for another one, before all younger groups.

        Raises:
            ValueError: it was not at a generator, nor ready.
        """
        group = self._expect(group_id, *_AT_GENERATOR, State.READY)
        if group.state is State.READY:
            self._unready(group, group_id)
        self._move(group, State.ADMITTED)
        heapq.heappush(self._queue, (group.place, group_id))

    def take(self) -> list[int]:
        """The next batch: the P groups that were admitted first among the ready, in that order.

        A slower group is overtaken only where it can still be trained on within the bound (with S = 0 never).

        Raises:
            ValueError: there is no batch yet; `ready` tells.
        """
        if not self._may_take():
            raise ValueError(f"no batch is ready: wait until `ready` is {self.groups_per_step}. {self}")
        batch = [group_id for _, group_id in self._ready[: self.groups_per_step]]
        del self._ready[: self.groups_per_step]
        for group_id in batch:
            group = self._groups[group_id]
            staleness = self._batches_taken - group.version
            assert staleness <= self.max_staleness, (
                f"group {group_id} would be {staleness} versions old: {self}"
            )
            self._leave_queue(group)
            self._move(group, State.TAKEN)
        self._batches_taken += 1
        self._check()
        return batch

    def release(self, group_ids: Iterable[int]) -> None:
        """The weights trained on the oldest batch taken have reached the generators; these groups were
        trained on.

        Call once a batch, with the groups not dropped; also when that is none.

        Raises:
            ValueError: no batch is out, or a group was not taken.
        """
        if self._batches_taken == self._batches_released:
            raise ValueError(f"no batch is out: take one before releasing it. {self}")
        groups = {group_id: self._expect(group_id, State.TAKEN) for group_id in group_ids}
        for group_id, group in groups.items():
            self._trained[0] += 1
            self._trained[1] += group.rollouts
            self._forget(group_id, group)
        if self._waiting_under[self._batches_released] == 0:  # nor will any be admitted under it
            del self._waiting_under[self._batches_released]
            self._first_place.pop(self._batches_released, None)
        self._batches_released += 1
        self._check()

    def drop(self, group_id: int, reason: str) -> None:
        """A live group will not be trained on, for a reason that the ledger keeps.

        Its slot is free at once, or with its batch if it was taken.

        Raises:
            ValueError: the group is not live.
        """
        group = self._expect(group_id, *State)
        if group.state is State.READY:
            self._unready(group, group_id)
        if group.state is not State.TAKEN:
            self._leave_queue(group)
        self._dropped[0][reason] += 1
        self._dropped[1][reason] += group.rollouts
        self._forget(group_id, group)
        self._check()

    def leave_out(self, group_id: int, rollouts: int, reason: str) -> None:
        """So many rollouts of a taken group will not be trained on. Where none is left, the group is dropped.

        Raises:
            ValueError: the group is not taken, or has fewer rollouts.
        """
        group = self._expect(group_id, State.TAKEN)
        if not 0 <= rollouts <= group.rollouts:
            raise ValueError(f"group {group_id} has {group.rollouts} rollouts, not {rollouts} to leave out")
        if rollouts == group.rollouts:
            self.drop(group_id, reason)
            return
        group.rollouts -= rollouts
        self._live_rollouts -= rollouts
        self._dropped[1][reason] += rollouts
        self._check()

    def __str__(self) -> str:
        ledger = self.ledger
        live = ", ".join(f"{self._states[state]} {state.value}" for state in State)
        dropped = "; ".join(f"{reason}: {count}" for reason, count in sorted(ledger.dropped.items()))
        return (
            f"buffer of {self.slots} slots ({self.free} free): {ledger.admitted} admitted = "
            f"{ledger.trained} trained + {sum(ledger.dropped.values())} dropped ({dropped or 'none'}) + "
            f"{ledger.live} live ({live})"
        )

    @property
    def _waiting(self) -> int:
        """Groups that hold a slot of their own: live and not taken."""
        return len(self._groups) - self._states[State.TAKEN]

    def _may_take(self) -> bool:
        """Whether P groups are ready, and the rest, taken in order from the next batch on, stays within the bound.

        Among the rest, the last group admitted under a version is the one that waits longest: one look for each
        version, of which there are at most S + 2.
        """
        size = self.groups_per_step
        if len(self._ready) < size:
            return False
        older = 0  # groups of the rest up to a version
        for version in sorted(self._first_place):
            older += self._waiting_under[version] - self._in_batch(version)
            last_trains = self._batches_taken + 1 + (older - 1) // size
            if older > 0 and last_trains - version > self.max_staleness:
                return False
        return True

    def _in_batch(self, version: int) -> int:
        """Groups of the next batch that were admitted under a version."""
        first = self._first_place[version]
        later = min((p for v, p in self._first_place.items() if v > version), default=self._admitted[0])
        batch_size = self.groups_per_step
        start = bisect_left(self._ready, (first,), hi=batch_size)
        return bisect_left(self._ready, (later,), hi=batch_size) - start

    def _leave_queue(self, group: _Group) -> None:
        self._waiting_under[group.version] -= 1
        if self._waiting_under[group.version] == 0:
            del self._waiting_under[group.version]
            if group.version < self._batches_released:  # none will be admitted under it any more
                del self._first_place[group.version]

    def _unready(self, group: _Group, group_id: int) -> None:
        del self._ready[bisect_left(self._ready, (group.place, group_id))]

    def _move(self, group: _Group, state: State) -> None:
        self._states[group.state] -= 1
        self._states[state] += 1
        group.state = state

    def _forget(self, group_id: int, group: _Group) -> None:
        self._states[group.state] -= 1
        self._live_rollouts -= group.rollouts
        del self._groups[group_id]

    def _expect(self, group_id: int, *states: State) -> _Group:
        group = self._groups.get(group_id)
        if group is None:
            raise ValueError(
                f"group {group_id} is not live: never admitted, or already trained or dropped. {self}"
            )
        if group.state not in states:
            wanted = " or ".join(state.value for state in states)
            raise ValueError(f"group {group_id} is {group.state.value}, wanted {wanted}. {self}")
        return group

    def _check(self) -> None:
        assert self.ledger.balanced and self.rollout_ledger.balanced, str(self)
        assert 0 <= self.free <= self.slots, str(self)
