"""Assignments of rollouts to ranks and micro-batches, for any lengths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.packing import Assignment, assign

LENGTHS = st.lists(st.integers(1, 60), max_size=60)
RANKS = st.integers(1, 5)
TOKENS = st.none() | st.integers(1, 80)


@given(LENGTHS, RANKS, TOKENS)
def test_every_rollout_is_in_one_place_or_dropped_for_its_length(
    lengths: list[int], ranks: int, microbatch_tokens: int | None
) -> None:
    assignment = assign(lengths, ranks, microbatch_tokens)
    placed = [position for rank in assignment.ranks for microbatch in rank for position in microbatch]
    assert sorted([*placed, *assignment.dropped]) == list(range(len(lengths)))
    limit = microbatch_tokens or sum(lengths)
    assert set(assignment.dropped) == {i for i, length in enumerate(lengths) if length > limit}


@given(LENGTHS, RANKS, TOKENS)
def test_ranks_have_as_many_micro_batches_and_none_is_over_the_bound(
    lengths: list[int], ranks: int, microbatch_tokens: int | None
) -> None:
    assignment = assign(lengths, ranks, microbatch_tokens)
    assert len(assignment.ranks) == ranks
    assert {len(rank) for rank in assignment.ranks} == {assignment.microbatches}
    for rank in assignment.ranks:
        for microbatch in rank:
            assert list(microbatch) == sorted(microbatch)
            assert sum(lengths[i] for i in microbatch) <= (microbatch_tokens or sum(lengths))


@given(LENGTHS, RANKS, TOKENS, st.sampled_from([None, 1.0, 40.0]))
def test_ranks_differ_by_at_most_the_costliest_rollout(
    lengths: list[int], ranks: int, microbatch_tokens: int | None, attention_tokens: float | None
) -> None:
    def cost(position: int) -> float:
        square = lengths[position] ** 2 / attention_tokens if attention_tokens else 0
        return lengths[position] + square

    assignment = assign(lengths, ranks, microbatch_tokens, attention_tokens)
    loads = [sum(cost(i) for microbatch in rank for i in microbatch) for rank in assignment.ranks]
    costliest = max(map(cost, range(len(lengths))), default=0)
    assert max(loads) - min(loads) <= costliest + 1e-6


@given(LENGTHS, RANKS, st.integers(60, 80))
def test_micro_batches_are_at_most_twice_the_fewest_possible(
    lengths: list[int], ranks: int, microbatch_tokens: int
) -> None:
    """Two bins that first fit opened hold together more than one may: else it had not opened the second."""
    assignment = assign(lengths, ranks, microbatch_tokens)
    loads = [sum(lengths[i] for microbatch in rank for i in microbatch) for rank in assignment.ranks]
    fewest = -(-max(loads) // microbatch_tokens)
    assert assignment.microbatches <= max(2 * fewest, 0)


@given(LENGTHS, RANKS, TOKENS)
def test_the_same_arguments_give_the_same_answer(
    lengths: list[int], ranks: int, microbatch_tokens: int | None
) -> None:
    assert assign(lengths, ranks, microbatch_tokens) == assign(tuple(lengths), ranks, microbatch_tokens)


def test_without_a_bound_a_rank_has_one_micro_batch() -> None:
    assert assign([4, 4, 4], ranks=2).ranks == (((0, 2),), ((1,),))


def test_nothing_to_assign_is_no_micro_batch_on_any_rank() -> None:
    assert assign([], ranks=2, microbatch_tokens=8) == Assignment(ranks=((), ()), dropped=())


def test_more_ranks_than_rollouts_leaves_empty_micro_batches() -> None:
    assert assign([5], ranks=3, microbatch_tokens=8).ranks == (((0,),), ((),), ((),))


@pytest.mark.parametrize(
    ("lengths", "ranks", "microbatch_tokens", "message"),
    [([3], 0, 8, "ranks=0"), ([3], 1, 0, "microbatch_tokens=0"), ([3, 0], 1, 8, "position 1 has 0 tokens")],
)
def test_arguments_out_of_range_are_named(
    lengths: list[int], ranks: int, microbatch_tokens: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        assign(lengths, ranks, microbatch_tokens)
