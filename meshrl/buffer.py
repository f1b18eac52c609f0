"""The rollout buffer: slots, the staleness bound and the ledger. A pure state machine over group ids; it owns
no task.

Let P be the groups of a step and S the bound. There are (S + 1)·P slots. A group holds one from its admission
until the weights trained on it have reached the generators. With t batches taken and r of them released, the
generators hold version r and the next batch trains version t, so t − r batches hold P slots each. A group
admitted now has at most (S + 1)·P − (t − r)·P − 1 groups before it in the queue and, taken in order, is
trained at version r + S or sooner: **no group is trained on more than S versions after the one it was
admitted under.** S = 0 is synchronous.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """Where a live group is."""

    GENERATING = "generating"
    READY = "ready"
    TAKEN = "taken"


@dataclass(frozen=True)
class Ledger:
    """What became of every group admitted: `admitted == trained + sum(dropped.values()) + live`."""

    admitted: int
    trained: int
    dropped: dict[str, int]
    """Groups by reason."""
    live: int
    """Generating, ready or taken."""


@dataclass
class _Group:
    admitted_version: int
    state: State = State.GENERATING


class RolloutBuffer:
    """Decides when a group may be admitted and which groups make the next batch."""

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
        self._groups: dict[int, _Group] = {}  # live ones, in order of admission
        self._admitted = self._trained = 0
        self._dropped: Counter[str] = Counter()
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
        return self.slots - batches - len(self._waiting())

    @property
    def ready(self) -> int:
        """Groups that `take` would hand out now: P, or 0 where too few are ready or an older one must not be
        overtaken."""
        return len(self._next())

    @property
    def version(self) -> int:
        """Batches released: the version that generators sample with, counted from this buffer's start."""
        return self._batches_released

    @property
    def ledger(self) -> Ledger:
        return Ledger(self._admitted, self._trained, dict(self._dropped), len(self._groups))

    def admit(self, group_id: int) -> None:
        """A group is being generated.

        Raises:
            ValueError: the id was live already, or no slot is free.
        """
        if group_id in self._groups:
            raise ValueError(f"group {group_id} is already {self._groups[group_id].state.value}")
        if self.free == 0:
            raise ValueError(f"group {group_id}: no slot is free; release the batch taken first. {self}")
        self._groups[group_id] = _Group(self._batches_released)
        self._admitted += 1
        self._check()

    def finish(self, group_id: int) -> None:
        """A group is generated and graded.

        Raises:
            ValueError: it was not being generated.
        """
        self._expect(group_id, State.GENERATING).state = State.READY

    def take(self) -> list[int]:
        """The next batch: the P groups that were admitted first among the ready, in that order.

        A slower group is overtaken only where it can still be trained on within the bound (with S = 0 never).

        Raises:
            ValueError: there is no batch yet; `ready` tells.
        """
        batch = self._next()
        if not batch:
            raise ValueError(f"no batch is ready: wait until `ready` is {self.groups_per_step}. {self}")
        for group_id in batch:
            group = self._groups[group_id]
            staleness = self._batches_taken - group.admitted_version
            assert staleness <= self.max_staleness, (
                f"group {group_id} would be {staleness} versions old: {self}"
            )
            group.state = State.TAKEN
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
        group_ids = list(dict.fromkeys(group_ids))
        for group_id in group_ids:
            self._expect(group_id, State.TAKEN)
        for group_id in group_ids:
            del self._groups[group_id]
        self._trained += len(group_ids)
        self._batches_released += 1
        self._check()

    def drop(self, group_id: int, reason: str) -> None:
        """A live group will not be trained on, for a reason that the ledger keeps.

        Its slot is free at once, or with its batch if it was taken.

        Raises:
            ValueError: the group is not live.
        """
        self._expect(group_id, *State)
        del self._groups[group_id]
        self._dropped[reason] += 1
        self._check()

    def __str__(self) -> str:
        states = Counter(group.state.value for group in self._groups.values())
        live = ", ".join(f"{states[state.value]} {state.value}" for state in State)
        dropped = "; ".join(f"{reason}: {count}" for reason, count in sorted(self._dropped.items())) or "none"
        return (
            f"buffer of {self.slots} slots ({self.free} free): {self._admitted} admitted = "
            f"{self._trained} trained + {self._dropped.total()} dropped ({dropped}) + "
            f"{len(self._groups)} live ({live})"
        )

    def _waiting(self) -> list[int]:
        return [group_id for group_id, group in self._groups.items() if group.state is not State.TAKEN]

    def _next(self) -> list[int]:
        waiting = self._waiting()
        batch = [i for i in waiting if self._groups[i].state is State.READY][: self.groups_per_step]
        if len(batch) < self.groups_per_step:
            return []
        taken = set(batch)
        # Taken in order from the next batch on, the rest must still be within the bound.
        rest = [self._groups[i].admitted_version for i in waiting if i not in taken]
        for position, admitted_version in enumerate(rest):
            trained_at = self._batches_taken + 1 + position // self.groups_per_step
            if trained_at - admitted_version > self.max_staleness:
                return []
        return batch

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
        ledger = self.ledger
        assert ledger.admitted == ledger.trained + sum(ledger.dropped.values()) + ledger.live, str(self)
        assert 0 <= self.free <= self.slots, str(self)
