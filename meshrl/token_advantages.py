"""Advantages of single tokens and turns, for rewards that come on the way: pure tensor functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshrl.advantages import group_relative


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    *,
    discount: float = 1.0,
    trace: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the tokens that the policy sampled.

    A_t = δ_t + γλ A_{t+1}, δ_t = r_t + γ V_{t+1} - V_t (Schulman et al. 2015, arXiv:1506.02438), where t + 1 is
    the *next token of the policy*: what tools and users wrote in between is neither a step nor has it a value. A reward
    that stands on such a token belongs to the last token of the policy before it, or to the first where none is; so a
    reward on the last token of a rollout counts, whoever wrote that.

    Args:
        rewards: float32 `[tokens]`, rollouts end to end.
        values: float32 `[tokens]`: estimate of the return from each token on; looked at where `mask` is true only.
        mask: bool `[tokens]`: tokens of the policy.
        lengths: tokens of each rollout.
        discount: γ.
        trace: λ. 1: the return less the value; 0: one step.

    Returns:
        advantages and returns (advantage + value), float32 `[tokens]` each, 0 where `mask` is false.

    >>> advantages, returns = gae(
    ...     torch.tensor([0., 0., 1.]), torch.tensor([0.5, 9., 0.25]), torch.tensor([True, False, True]), [3], trace=1.0
    ... )
    >>> advantages, returns
    (tensor([0.5000, 0.0000, 0.7500]), tensor([1., 0., 1.]))
    """
    rollouts = len(lengths)
    rollout = torch.repeat_interleave(torch.arange(rollouts), torch.tensor(lengths, dtype=torch.int64))
    counts = torch.zeros(rollouts, dtype=torch.int64).index_add(0, rollout, mask.long())
    before = (counts.cumsum(0) - counts)[rollout]  # tokens of the policy in earlier rollouts
    step = (mask.long().cumsum(0) - 1 - before).clamp(min=0)  # which of the rollout's own a token belongs to
    longest = int(counts.max()) if rollouts else 0
    some = counts[rollout] > 0
    reward = rewards.new_zeros(rollouts, longest).index_put(
        (rollout[some], step[some]), rewards[some], accumulate=True
    )
    value = values.new_zeros(rollouts, longest)
    value[rollout[mask], step[mask]] = values[mask]
    advantage = torch.zeros_like(value)
    following = next_value = value.new_zeros(rollouts)
    for t in reversed(range(longest)):  # columns of longer rollouts come first; those of ended ones are 0
        there = t < counts
        delta = reward[:, t] + discount * next_value - value[:, t]
        following = torch.where(there, delta + discount * trace * following, 0.0)
        advantage[:, t] = following
        next_value = torch.where(there, value[:, t], 0.0)
    advantages = torch.zeros_like(rewards)
    advantages[mask] = advantage[rollout[mask], step[mask]]
    return advantages, torch.where(mask, advantages + torch.where(mask, values, 0.0), 0.0)


def turn_level(
    rewards: Tensor,
    rollouts: Tensor,
    groups: Tensor,
    *,
    discount: float = 1.0,
    normalize_std: bool = True,
    epsilon: float = 1e-4,
) -> Tensor:
    """Advantages of turns: each turn's return from then on, against the same turn of the other rollouts of its group.

    After turn-level credit, Zeng et al. 2025, arXiv:2505.11821, with the return from the turn on in place of the sum of
    a turn's own and the final reward. A turn that no other rollout of the group has reached gets 0.

    Args:
        rewards: float32 `[turns]`, of each rollout in the order in which they were taken.
        rollouts: int64 `[turns]`: equal numbers mark turns of one rollout.
        groups: int64 `[turns]`: group of each turn's rollout.
        discount: of a reward that comes one turn later.
        normalize_std: see `group_relative`.

    Returns:
        float32 `[turns]`.

    >>> turn_level(
    ...     torch.tensor([0., 1., 0., 0.]), torch.tensor([7, 7, 8, 8]), torch.tensor([0, 0, 0, 0]), normalize_std=False
    ... )
    tensor([ 0.5000,  0.5000, -0.5000, -0.5000])
    """
    turns = len(rewards)
    place = torch.arange(turns)
    same = rollouts[:, None] == rollouts
    number = (same & (place < place[:, None])).sum(1)  # turns of the rollout before this one
    distance = (number - number[:, None]).clamp(min=0)
    later = same & (place >= place[:, None])
    returns = torch.where(later, rewards * discount**distance, 0.0).sum(1)
    return group_relative(returns, groups * turns + number, normalize_std=normalize_std, epsilon=epsilon)
