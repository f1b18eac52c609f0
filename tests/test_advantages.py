"""Right values of advantages (numbers: cases 5 to 8)."""

import math
from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.advantages import (
    Moments,
    group_relative,
    leave_one_out,
    maximum_likelihood,
    optimal_baseline,
    pass_at_k,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    whiten,
    zero_variance,
)


def test_known_values():
    advantages = group_relative(torch.tensor([1.0, 0, 0, 1]), torch.zeros(4, dtype=torch.int64), epsilon=1e-6)
    torch.testing.assert_close(advantages, torch.tensor([1.0, -1, -1, 1]) * 0.866024, atol=1e-6, rtol=0)


def test_groups_of_unequal_size_in_any_order():
    rewards, groups = torch.tensor([1.0, 0, 0, 0, 1, 1, 1]), torch.tensor([4, 4, 4, 4, 9, 9, 9])
    expected = torch.tensor([1.5, -0.5, -0.5, -0.5, 0, 0, 0])
    for order in (torch.arange(7), torch.tensor([6, 0, 3, 4, 1, 2, 5])):
        advantages = group_relative(rewards[order], groups[order], epsilon=1e-6)
        torch.testing.assert_close(advantages, expected[order], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "rewards", [[0.3], [0.7000001, 0.7, 0.7], [1000.1, 1000.1, 1000.1], [0.0] * 8, [-2.0] * 3]
)
@pytest.mark.parametrize("normalize_std", [True, False])
def test_no_signal_is_made_from_rounding(rewards, normalize_std):
    values, groups = torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.int64)
    advantages = group_relative(values, groups, normalize_std=normalize_std, epsilon=1e-6)
    assert torch.equal(advantages, torch.zeros(len(rewards)))
    assert zero_variance(values, groups).all()


def test_without_normalisation_only_the_mean_goes():
    rewards, groups = torch.tensor([3.0, 1.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1])
    assert group_relative(rewards, groups, normalize_std=False).tolist() == [1.0, -1.0, 0.0, 0.0]
    assert zero_variance(rewards, groups).tolist() == [False, False, True, True]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-3, 3, width=32)), min_size=1, max_size=30))
def test_equals_group_by_group_arithmetic(rows):
    groups = torch.tensor([g for g, _ in rows])
    rewards = torch.tensor([r for _, r in rows], dtype=torch.float32)
    advantages = group_relative(rewards, groups, epsilon=0.1)
    for group in groups.unique():
        own = rewards[groups == group].double()
        if len(own) > 1 and own.std() > 1e-4:
            expected = (own - own.mean()) / (own.std() + 0.1)
            torch.testing.assert_close(advantages[groups == group].double(), expected, atol=1e-4, rtol=1e-4)


@settings(deadline=None, max_examples=50)
@given(values=st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=40), ranks=st.integers(1, 4))
def test_whitening_does_not_depend_on_the_split(values, ranks):
    whole = torch.tensor(values, dtype=torch.float64) + 1e3
    mask = torch.ones(len(values), dtype=torch.bool)
    parts = [whole[rank::ranks] for rank in range(ranks)]
    moments = Moments.of(parts[0], torch.ones_like(parts[0], dtype=torch.bool))
    for part in parts[1:]:
        moments = moments + Moments.of(part, torch.ones_like(part, dtype=torch.bool))
    expected = whiten(whole, Moments.of(whole, mask))
    for rank in range(ranks):
        torch.testing.assert_close(whiten(parts[rank], moments), expected[rank::ranks], atol=1e-6, rtol=1e-6)


def test_whitening_ignores_what_is_masked():
    values, mask = torch.tensor([1.0, torch.nan, 3.0]), torch.tensor([True, False, True])
    assert whiten(values, Moments.of(values, mask))[mask].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


GROUPS = st.lists(
    st.lists(st.tuples(st.sampled_from([0.0, 1.0, 0.25, -1.0]), st.integers(1, 40)), min_size=1, max_size=6),
    min_size=1,
    max_size=4,
)
"""Reward and length of each rollout, by group."""


def tensors_of(rows: list[list[tuple[float, int]]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards, group numbers and lengths, groups mixed up."""
    flat = [(reward, group, length) for group, rollouts in enumerate(rows) for reward, length in rollouts]
    order = sorted(range(len(flat)), key=lambda i: (i * 7919) % 101)
    rewards, groups, lengths = zip(*(flat[i] for i in order), strict=True)
    return torch.tensor(rewards), torch.tensor(groups), torch.tensor(lengths)


def by_group(
    rows: list[list[tuple[float, int]]], own: Callable[[list[float], list[int], int], float]
) -> list[float]:
    """`own(rewards of the group, lengths, position)` for each rollout, in float64, in the order of `tensors_of`."""
    _, groups, _ = tensors_of(rows)
    found = []
    flat = [(group, i) for group, rollouts in enumerate(rows) for i in range(len(rollouts))]
    order = sorted(range(len(flat)), key=lambda i: (i * 7919) % 101)
    for place in order:
        group, i = flat[place]
        rewards, lengths = [r for r, _ in rows[group]], [n for _, n in rows[group]]
        found.append(0.0 if len(set(rewards)) == 1 else own(rewards, lengths, i))
    assert [flat[place][0] for place in order] == groups.tolist()
    return found


def assert_equal(found: torch.Tensor, wanted: list[float]) -> None:
    torch.testing.assert_close(
        found.double(), torch.tensor(wanted, dtype=torch.float64), atol=2e-5, rtol=2e-5
    )


@given(GROUPS)
def test_leave_one_out_is_the_difference_from_the_mean_of_the_others(rows):
    rewards, groups, _ = tensors_of(rows)

    def own(of_group: list[float], _: list[int], i: int) -> float:
        others = of_group[:i] + of_group[i + 1 :]
        return of_group[i] - sum(others) / len(others)

    assert_equal(leave_one_out(rewards, groups), by_group(rows, own))


@given(GROUPS)
def test_the_optimal_baseline_weighs_by_length(rows):
    rewards, groups, lengths = tensors_of(rows)

    def own(of_group: list[float], lengths: list[int], i: int) -> float:
        return of_group[i] - sum(n * r for n, r in zip(lengths, of_group, strict=True)) / sum(lengths)

    assert_equal(optimal_baseline(rewards, groups, lengths), by_group(rows, own))


@given(GROUPS)
def test_maximum_likelihood_divides_by_the_pass_rate(rows):
    rows = [[(float(reward > 0), length) for reward, length in row] for row in rows]
    rewards, groups, _ = tensors_of(rows)

    def own(of_group: list[float], _: list[int], i: int) -> float:
        rate = sum(of_group) / len(of_group)
        return (of_group[i] - rate) / rate

    assert_equal(maximum_likelihood(rewards, groups), by_group(rows, own))


@given(GROUPS, st.integers(1, 4))
def test_pass_at_k_is_the_mean_advantage_of_the_draws_that_a_rollout_is_in(rows, k):
    """Every draw of k is enumerated; a draw's advantage is its deviation from the mean over all, in their std."""
    rows = [[(float(reward > 0), length) for reward, length in row] for row in rows]
    rewards, groups, _ = tensors_of(rows)

    def own(of_group: list[float], _: list[int], i: int) -> float:
        draws = list(combinations(range(len(of_group)), k))
        values = [max(of_group[j] for j in draw) for draw in draws]
        if len(set(values)) <= 1:
            return 0.0
        mean = sum(values) / len(values)
        std = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
        mine = [(value - mean) / std for draw, value in zip(draws, values, strict=True) if i in draw]
        return sum(mine) / len(mine)

    assert_equal(pass_at_k(rewards, groups, k), by_group(rows, own))


@given(GROUPS)
def test_reinforce_plus_plus_whitens_the_batch_and_its_baseline_the_deviations(rows):
    rewards, groups, _ = tensors_of(rows)

    def whitened(values: list[float]) -> list[float]:
        mean = sum(values) / len(values)
        std = math.sqrt(sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1))
        return [0.0 if std < 1e-6 else (value - mean) / std for value in values]

    assert_equal(reinforce_plus_plus(rewards), whitened(rewards.double().tolist()))
    deviations = by_group(rows, lambda of_group, _, i: of_group[i] - sum(of_group) / len(of_group))
    wanted = [
        a if d else 0.0 for a, d in zip(whitened(deviations), by_group(rows, lambda *_: 1.0), strict=True)
    ]
    assert_equal(reinforce_plus_plus_baseline(rewards, groups), wanted)


SHIFTED = {
    "group relative": group_relative,
    "leave one out": leave_one_out,
    "reinforce++": lambda rewards, groups: reinforce_plus_plus(rewards),
    "reinforce++ baseline": reinforce_plus_plus_baseline,
    "remax": lambda rewards, groups: remax(rewards, rewards[:1]),
    "optimal baseline": lambda rewards, groups: optimal_baseline(rewards, groups, torch.ones_like(groups)),
}


@pytest.mark.parametrize("name", SHIFTED)
@given(rows=GROUPS)
def test_a_shift_of_all_rewards_changes_nothing(rows, name):
    rewards, groups, _ = tensors_of(rows)
    torch.testing.assert_close(
        SHIFTED[name](rewards + 2.0, groups), SHIFTED[name](rewards, groups), atol=1e-4, rtol=1e-4
    )


def test_a_k_below_one_is_refused():
    with pytest.raises(ValueError, match="k=0"):
        pass_at_k(torch.zeros(2), torch.zeros(2, dtype=torch.int64), 0)
