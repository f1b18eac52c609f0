"""Which rollout goes to which data-parallel rank and micro-batch: one pure function."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Assignment:
    """Where each rollout of a batch is trained on. Positions index the `lengths` that `assign` was given."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    """`ranks[rank][microbatch]` lists positions, ascending. Every rank has as many micro-batches; some may be
    empty."""
    dropped: tuple[int, ...]
    """Positions of rollouts that are longer than a micro-batch may be."""

    @property
    def microbatches(self) -> int:
        """Micro-batches of each rank."""
        return len(self.ranks[0])


def assign(
    lengths: Sequence[int],
    ranks: int,
    microbatch_tokens: int | None = None,
    attention_tokens: float | None = None,
) -> Assignment:
    """Balance rollouts over data-parallel ranks by cost, then fill micro-batches.

    A rollout of n tokens costs n + n² / attention_tokens: what every layer does with each token, and attention, which
    grows with the square. Costliest first, each rollout goes to the rank with the least cost (Graham 1969), so that
    **two ranks differ by at most the cost of the costliest rollout.** Micro-batches: first fit, longest first. Then
    ranks with fewer micro-batches get empty ones.

    Invariants: every position is in exactly one micro-batch or in `dropped`, whole; no micro-batch holds more
    than `microbatch_tokens` tokens; every rank has as many micro-batches; the answer depends on the arguments alone.

    Args:
        lengths: tokens of each rollout, >= 1.
        ranks: data-parallel ranks, >= 1.
        microbatch_tokens: most tokens of a micro-batch; longer rollouts are dropped. None: one micro-batch a
            rank, any size.
        attention_tokens: the length at which attention costs as much as everything else. None: tokens alone count.

    Raises:
        ValueError: an argument is out of range.

    >>> assign([5, 3, 3, 9], ranks=2, microbatch_tokens=8)
    Assignment(ranks=(((0,),), ((1, 2),)), dropped=(3,))

    At a length of 4, attention costs as much as the rest: 9 tokens cost 29, four times 4 tokens 32.

    >>> assign([9, 4, 4, 4, 4], ranks=2, attention_tokens=4).ranks
    (((0,),), ((1, 2, 3, 4),))
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: at least one data-parallel rank is needed")
    if microbatch_tokens is not None and microbatch_tokens < 1:
        raise ValueError(f"microbatch_tokens={microbatch_tokens}: must be at least 1, or None for no bound")
    if attention_tokens is not None and not attention_tokens > 0:
        raise ValueError(
            f"attention_tokens={attention_tokens}: must be above 0, or None to count tokens alone"
        )
    if any(length < 1 for length in lengths):
        bad = next(i for i, length in enumerate(lengths) if length < 1)
        raise ValueError(f"rollout at position {bad} has {lengths[bad]} tokens: at least 1 is needed")
    capacity = sum(lengths) if microbatch_tokens is None else microbatch_tokens
    longest_first = sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))
    members: list[list[int]] = [[] for _ in range(ranks)]
    least = [(0.0, rank) for rank in range(ranks)]  # a heap of cost and rank
    for position in longest_first:
        length = lengths[position]
        if length <= capacity:
            cost, rank = least[0]
            members[rank].append(position)
            cost += length + (length * length / attention_tokens if attention_tokens else 0)
            heapq.heapreplace(least, (cost, rank))
    bins = [_first_fit(part, lengths, capacity) for part in members]
    count = max(len(part) for part in bins)
    return Assignment(
        ranks=tuple(tuple(part + [()] * (count - len(part))) for part in bins),
        dropped=tuple(i for i, length in enumerate(lengths) if length > capacity),
    )


def _first_fit(positions: Sequence[int], lengths: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """Each position into the first bin with room, in the order given."""
    bins: list[list[int]] = []
    room: list[int] = []
    for position in positions:
        length = lengths[position]
        place = next((i for i, left in enumerate(room) if left >= length), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(capacity)
        bins[place].append(position)
        room[place] -= length
    return [tuple(sorted(part)) for part in bins]
