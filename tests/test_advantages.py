"""Right values of advantages (numbers: cases 5 to 8)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.advantages import Moments, group_relative, whiten, zero_variance


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
