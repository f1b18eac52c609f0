"""Token and turn advantages against plain loops in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshrl.token_advantages import gae, turn_level

ROLLOUTS = st.lists(
    st.lists(
        st.tuples(st.booleans(), st.integers(-4, 4).map(float), st.integers(-4, 4).map(float)), max_size=8
    ),
    min_size=1,
    max_size=4,
)
"""For each token: whether the policy wrote it, reward, value."""


@given(ROLLOUTS, st.sampled_from([1.0, 0.9]), st.sampled_from([1.0, 0.95, 0.0]))
def test_gae_is_that_of_a_loop_over_the_policys_own_tokens(rows, discount: float, trace: float) -> None:
    wanted: list[float] = []
    for tokens in rows:
        own = [i for i, (of_policy, _, _) in enumerate(tokens) if of_policy]
        rewards = [0.0] * len(own)
        for i, (_, reward, _) in enumerate(tokens):
            if own:
                rewards[max(sum(j <= i for j in own) - 1, 0)] += reward
        advantages, following = [0.0] * len(tokens), 0.0
        for k in reversed(range(len(own))):
            next_value = tokens[own[k + 1]][2] if k + 1 < len(own) else 0.0
            following = rewards[k] + discount * next_value - tokens[own[k]][2] + discount * trace * following
            advantages[own[k]] = following
        wanted += advantages
    flat = [token for tokens in rows for token in tokens]
    mask = torch.tensor([of_policy for of_policy, _, _ in flat], dtype=torch.bool)
    rewards = torch.tensor([reward for _, reward, _ in flat])
    values = torch.tensor([value for _, _, value in flat])
    poisoned = torch.where(mask, values, math.nan)
    advantages, returns = gae(rewards, poisoned, mask, list(map(len, rows)), discount=discount, trace=trace)
    torch.testing.assert_close(advantages, torch.tensor(wanted), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(returns, torch.where(mask, advantages + values, 0.0))


def test_a_reward_after_the_last_word_of_the_policy_is_kept_and_values_bridge_what_a_tool_wrote() -> None:
    mask = torch.tensor([False, True, False, False, True, False])
    rewards = torch.tensor([0.0, 0.0, 0.5, 0.0, 0.0, 1.0])
    values = torch.tensor([9.0, 0.25, 9.0, 9.0, 0.75, 9.0])
    advantages, _ = gae(rewards, values, mask, [6], discount=0.5, trace=0.0)
    assert advantages.tolist() == pytest.approx([0, 0.5 + 0.5 * 0.75 - 0.25, 0, 0, 1.0 - 0.75, 0])


TURNS = st.lists(
    st.tuples(st.integers(0, 1), st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=4)),
    min_size=1,
    max_size=5,
)
"""Group and rewards of the turns of each rollout."""


@given(TURNS, st.sampled_from([1.0, 0.5]))
def test_a_turn_is_compared_with_the_same_turn_of_its_group(rows, discount: float) -> None:
    returns = [
        [sum(discount ** (j - i) * rewards[j] for j in range(i, len(rewards))) for i in range(len(rewards))]
        for _, rewards in rows
    ]
    wanted = []
    for (group, rewards), own in zip(rows, returns, strict=True):
        for i in range(len(rewards)):
            peers = [
                theirs[i]
                for (other, _), theirs in zip(rows, returns, strict=True)
                if other == group and i < len(theirs)
            ]
            equal = max(peers) - min(peers) < 1e-9
            wanted.append(0.0 if equal else own[i] - sum(peers) / len(peers))
    flat = [(reward, rollout, group) for rollout, (group, rewards) in enumerate(rows) for reward in rewards]
    rewards, rollouts, groups = (torch.tensor(values) for values in zip(*flat, strict=True))
    found = turn_level(rewards, rollouts, groups, discount=discount, normalize_std=False)
    torch.testing.assert_close(found, torch.tensor(wanted), atol=1e-5, rtol=1e-5)
