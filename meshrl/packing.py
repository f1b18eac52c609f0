"""Which rollout goes to which data-parallel rank and micro-batch: one pure function."""

from __future__ import annotations

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


def assign(lengths: Sequence[int], ranks: int, microbatch_tokens: int | None = None) -> Assignment:
    """Balance rollouts over data-parallel ranks by tokens, then fill micro-batches.

    Ranks: longest first, each to the rank with the fewest tokens (Graham 1969), so that two ranks differ by
    at most the longest rollout. Micro-batches: first fit, longest first. Then ranks with fewer micro-batches
    get empty ones.

    Invariants: every position is in exactly one micro-batch or in `dropped`, whole; no micro-batch holds more
    than `microbatch_tokens` tokens; the answer depends on the arguments alone.

    Args:
        lengths: tokens of each rollout, >= 1.
        ranks: data-parallel ranks, >= 1.
        microbatch_tokens: most tokens of a micro-batch; longer rollouts are dropped. None: one micro-batch a
            rank, any size.

    Raises:
        ValueError: an argument is out of range.

    >>> assign([5, 3, 3, 9], ranks=2, microbatch_tokens=8)
    Assignment(ranks=(((0,),), ((1, 2),)), dropped=(3,))
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: at least one data-parallel rank is needed")
    if microbatch_tokens is not None and microbatch_tokens < 1:
        raise ValueError(f"microbatch_tokens={microbatch_tokens}: must be at least 1, or None for no bound")
    if any(length < 1 for length in lengths):
        bad = next(i for i, length in enumerate(lengths) if length < 1)
        raise ValueError(f"rollout at position {bad} has {lengths[bad]} tokens: at least 1 is needed")
    capacity = sum(lengths) if microbatch_tokens is None else microbatch_tokens
    longest_first = sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))
    members: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for position in longest_first:
        if lengths[position] <= capacity:
            rank = loads.index(min(loads))
            members[rank].append(position)
            loads[rank] += lengths[position]
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
