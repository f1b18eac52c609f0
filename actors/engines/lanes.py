"""Which lanes of the cache attend together: pure arithmetic on lengths.

A batched product over lanes attends to as many positions as its longest lane. One long lane must not set the
price of all, so neighbouring lanes of like length are grouped into spans, and lanes are moved when that pays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_BLOCKS = 8
"""Spans start at multiples of an eighth of the lanes: enough to follow the lengths, few enough to try all
ways."""
_STEPS = 8
"""Decode steps over which a move must pay for itself: about as many as pass until the next admission."""
_MOVE_COST = 2.3
"""Copying one cached position, in units of attending to one; measured."""


@dataclass(frozen=True)
class Arrangement:
    """Lanes to move, then how to cut the lanes into spans."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    """Lane `sources[i]` moves to `targets[i]`, all at once: the same lanes in another order."""
    cuts: tuple[int, ...]
    """First lane of each span, then the number of lanes: (0, 24, 64)."""


def arrange(lengths: np.ndarray, span_cost: float) -> Arrangement:
    """The cheapest spans, moving lanes only where that saves more than it costs.

    Args:
        lengths: positions that each lane attends to, int64 `[lanes]`.
        span_cost: overhead of a span, in positions attended to by one lane.

    >>> arrange(np.array([9, 900, 9, 9]), span_cost=300)
    Arrangement(sources=(1, 0), targets=(0, 1), cuts=(0, 1, 4))
    >>> arrange(np.array([9, 10, 9, 9]), span_cost=300)
    Arrangement(sources=(), targets=(), cuts=(0, 4))
    """
    cuts, cost = _cut(lengths, span_cost)
    by_length = np.argsort(-lengths, kind="stable")
    sorted_cuts, sorted_cost = _cut(lengths[by_length], span_cost)
    if cost > sorted_cost:
        sources, targets = _moves(by_length, sorted_cuts)
        if (cost - sorted_cost) * _STEPS > _MOVE_COST * lengths[sources].sum():
            return Arrangement(tuple(sources.tolist()), tuple(targets.tolist()), sorted_cuts)
    return Arrangement((), (), cuts)


def _cut(lengths: np.ndarray, span_cost: float) -> tuple[tuple[int, ...], float]:
    """Cuts of least cost for lanes in this order, by dynamic programming over blocks of lanes."""
    lanes = len(lengths)
    block = -(-lanes // _BLOCKS)
    starts = [*range(0, lanes, block), lanes]
    longest = np.maximum.reduceat(lengths, starts[:-1]).tolist()
    best: list[tuple[float, int]] = [(0.0, 0)]  # cost of the first blocks, and where their last span starts
    for stop in range(1, len(starts)):
        options, most = [], 0
        for start in range(stop - 1, -1, -1):
            most = max(most, longest[start])
            options.append((best[start][0] + span_cost + most * (starts[stop] - starts[start]), start))
        best.append(min(options))
    cuts, at = [lanes], len(starts) - 1
    while at:
        at = best[at][1]
        cuts.append(starts[at])
    return tuple(reversed(cuts)), best[-1][0]


def _moves(by_length: np.ndarray, cuts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Fewest moves that bring each lane into its span: (sources, targets); order within a span does not
    matter."""
    span_of_rank = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
    span_wanted = np.empty_like(span_of_rank)
    span_wanted[by_length] = span_of_rank
    misplaced = np.flatnonzero(span_wanted != span_of_rank)
    # The misplaced lanes leave as many places in each span as there are lanes that want to go there.
    return misplaced[np.argsort(span_wanted[misplaced], kind="stable")], misplaced
