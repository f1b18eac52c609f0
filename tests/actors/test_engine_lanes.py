"""Grouping lanes of like length."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshrl.actors.engines.lanes import Arrangement, arrange

lengths_of_lanes = st.lists(st.integers(1, 2000), min_size=1, max_size=70)


def after_moves(lengths: np.ndarray, plan: Arrangement) -> np.ndarray:
    moved = lengths.copy()
    moved[list(plan.targets)] = lengths[list(plan.sources)]
    return moved


def cost(lengths: np.ndarray, cuts: tuple[int, ...], span_cost: float) -> float:
    return sum(
        span_cost + int(lengths[start:stop].max()) * (stop - start)
        for start, stop in zip(cuts[:-1], cuts[1:], strict=True)
    )


@given(lengths_of_lanes, st.floats(0, 2000))
def test_an_arrangement_keeps_every_lane_and_covers_them_in_order(
    values: list[int], span_cost: float
) -> None:
    plan = arrange(np.array(values), span_cost)
    assert sorted(plan.sources) == sorted(plan.targets)
    assert len(set(plan.sources)) == len(plan.sources)
    assert plan.cuts[0] == 0 and plan.cuts[-1] == len(values)
    assert all(a < b for a, b in zip(plan.cuts[:-1], plan.cuts[1:], strict=True))


@given(lengths_of_lanes, st.floats(0, 2000))
def test_an_arrangement_never_costs_more_than_one_span(values: list[int], span_cost: float) -> None:
    lengths = np.array(values)
    plan = arrange(lengths, span_cost)
    whole = cost(lengths, (0, len(values)), span_cost)
    assert cost(after_moves(lengths, plan), plan.cuts, span_cost) <= whole + 1e-6


def test_no_lane_moves_twice_and_none_without_need() -> None:
    lengths = np.array([500, 10, 10, 10, 10, 10, 10, 500])
    plan = arrange(lengths, span_cost=400)
    assert plan.targets == (1, 7) and plan.sources == (7, 1)
    assert after_moves(lengths, plan).tolist() == [500, 500, 10, 10, 10, 10, 10, 10]
    assert plan.cuts == (0, 2, 8)


def test_like_lengths_stay_as_they_are_in_one_span() -> None:
    assert arrange(np.array([50, 60, 55, 52] * 16), span_cost=700) == Arrangement((), (), (0, 64))
