"""Which generator replica takes the next group: by load, with prefix affinity. A pure state machine."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable

REMEMBERED_PREFIXES = 65_536
"""Prefixes whose replica is known; the one used longest ago is forgotten first."""


class Placement:
    """Loads of generator replicas, in rollouts, and where each prefix was generated last.

    A group goes to the replica with the fewest rollouts (of equals the first). Where its prefix was generated
    before, it goes there again, since that engine may still have the prefix cached, unless that replica is full or
    has more rollouts than the least loaded one by over `affinity_rollouts`. A choice takes time that grows with the
    logarithm of the replicas.

    >>> placement = Placement(replicas=2, capacity=16)
    >>> [placement.place("a", 8), placement.place("b", 8), placement.place("a", 8), placement.place("c", 16)]
    [0, 1, 0, None]
    """

    def __init__(self, replicas: int, capacity: int = 0, affinity_rollouts: int = 8) -> None:
        """
        Args:
            replicas: generator replicas, all alive.
            capacity: most rollouts outstanding at a replica, though a group larger than that goes to an idle one.
                0: no bound.
            affinity_rollouts: how much more load than the least is borne for a prefix that may be cached.
        """
        self.capacity = capacity
        self.affinity_rollouts = affinity_rollouts
        self._load = [0] * replicas
        self._alive = [True] * replicas
        self._by_load = [
            (0, replica) for replica in range(replicas)
        ]  # a heap; entries that are outdated are skipped
        self._home: OrderedDict[Hashable, int] = OrderedDict()

    @property
    def alive(self) -> list[int]:
        """Replicas that take groups."""
        return [replica for replica, alive in enumerate(self._alive) if alive]

    def is_alive(self, replica: int) -> bool:
        """Whether it takes groups."""
        return self._alive[replica]

    @property
    def loads(self) -> list[int]:
        """Rollouts outstanding, by replica."""
        return list(self._load)

    def place(self, prefix: Hashable, rollouts: int) -> int | None:
        """The replica that takes a group of so many rollouts, which now count there; None: all are full or dead."""
        least = self._least_loaded()
        if least is None:
            return None
        home = self._home.get(prefix)
        near = self._load[least] + self.affinity_rollouts
        if home is None or not self._alive[home] or self._load[home] > near or not self._fits(home, rollouts):
            home = least
        if not self._fits(home, rollouts):
            return None
        self._home[prefix] = home
        self._home.move_to_end(prefix)
        if len(self._home) > REMEMBERED_PREFIXES:
            self._home.popitem(last=False)
        self._set(home, self._load[home] + rollouts)
        return home

    def done(self, replica: int, rollouts: int) -> None:
        """So many rollouts are outstanding no longer; nothing of a replica that is dead."""
        if self._alive[replica]:
            self._set(replica, self._load[replica] - rollouts)

    def lose(self, replica: int) -> None:
        """The replica died, and what was outstanding there with it."""
        self._alive[replica] = False
        self._load[replica] = 0

    def restore(self, replica: int) -> None:
        """Another process took its place: idle, with nothing cached."""
        self._alive[replica] = True
        self._home = OrderedDict((prefix, home) for prefix, home in self._home.items() if home != replica)
        self._set(replica, 0)

    def _fits(self, replica: int, rollouts: int) -> bool:
        load = self._load[replica]
        return self.capacity == 0 or load == 0 or load + rollouts <= self.capacity

    def _set(self, replica: int, load: int) -> None:
        self._load[replica] = load
        heapq.heappush(self._by_load, (load, replica))
        if len(self._by_load) > 64 + 4 * len(self._load):  # mostly outdated
            self._by_load = [(self._load[r], r) for r in self.alive]
            heapq.heapify(self._by_load)

    def _least_loaded(self) -> int | None:
        while self._by_load:
            load, replica = self._by_load[0]
            if self._alive[replica] and self._load[replica] == load:
                return replica
            heapq.heappop(self._by_load)
        return None
