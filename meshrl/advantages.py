"""Advantages: pure tensor functions, which run as they are on ordinary tensors and on the tensor engine.

For the engine's sake they use few operators, read no value on the caller's side, and no shape depends on
data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 1e-6
"""Rewards of a group that differ by no more than this share of their size (or of 1) count as equal."""


def group_relative(
    rewards: Tensor, groups: Tensor, *, normalize_std: bool = True, epsilon: float = 1e-4
) -> Tensor:
    """How much better a rollout did than its group: (reward - mean) / (std + epsilon).

    Source: GRPO, arXiv:2402.03300, section 4.1.2. The standard deviation is the unbiased one. A group of one,
    or one whose rewards are equal up to rounding, gets 0. Groups may differ in size and lie in any order.

    Args:
        rewards: float32 `[rollouts]`.
        groups: int64 `[rollouts]`; equal numbers mark rollouts of one group.
        normalize_std: False: only subtract the mean (Dr. GRPO, arXiv:2503.20783).

    Returns:
        float32 `[rollouts]`.

    >>> group_relative(torch.tensor([1., 0., 0., 1.]), torch.tensor([0, 0, 0, 0]), epsilon=1e-6)
    tensor([ 0.8660, -0.8660, -0.8660,  0.8660])
    """
    mean, deviation, std = _group_statistics(rewards, groups)
    signal = std > ROUNDING * (1 + mean.abs())
    scaled = deviation / (std + epsilon) if normalize_std else deviation
    return torch.where(signal, scaled, 0.0)


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """How much better a rollout did than the others of its group on average: r - mean of the others.

    Source: RLOO, Ahmadian et al. 2024, arXiv:2402.14740. It equals n / (n - 1) times the deviation from the mean
    of the group. A group of one gets 0.

    Args:
        rewards: float32 `[rollouts]`.
        groups: int64 `[rollouts]`.

    Returns:
        float32 `[rollouts]`.

    >>> leave_one_out(torch.tensor([1., 0., 0., 1.]), torch.tensor([0, 0, 0, 0]))
    tensor([ 0.6667, -0.6667, -0.6667,  0.6667])
    """
    mean, deviation, std = _group_statistics(rewards, groups)
    size = (groups[:, None] == groups).sum(1)
    signal = std > ROUNDING * (1 + mean.abs())
    return torch.where(signal, deviation * size / (size - 1).clamp(min=1), 0.0)


def reinforce_plus_plus(rewards: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """How much better a rollout did than the whole batch: (reward - mean) / (std + epsilon) over all rollouts.

    Source: REINFORCE++, Hu et al. 2025, arXiv:2501.03262. The batch's rewards are all here, so it is the same on
    any number of ranks. The KL term of the paper's reward is left to the caller.

    Args:
        rewards: float32 `[rollouts]`.

    Returns:
        float32 `[rollouts]`; 0 where all rewards are equal.
    """
    return _whitened(rewards, epsilon)


def reinforce_plus_plus_baseline(rewards: Tensor, groups: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """The deviation from the group's mean, divided by the standard deviation of all deviations of the batch.

    Source: REINFORCE++ with baseline, Hu et al. 2025, arXiv:2501.03262. Unlike with `group_relative`, a group with
    small differences gets small advantages.

    Args:
        rewards: float32 `[rollouts]`.
        groups: int64 `[rollouts]`.

    Returns:
        float32 `[rollouts]`; 0 for a group of equal rewards, whose rollouts still count in the standard deviation.
    """
    mean, deviation, std = _group_statistics(rewards, groups)
    signal = std > ROUNDING * (1 + mean.abs())
    return torch.where(signal, _whitened(torch.where(signal, deviation, 0.0), epsilon), 0.0)


def remax(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """How much better a rollout did than the greedy response to its prompt.

    Source: ReMax, Li et al. 2023, arXiv:2310.10505.

    Args:
        rewards: float32 `[rollouts]`.
        greedy_rewards: float32 `[rollouts]`: reward of the greedy response to each rollout's prompt.

    Returns:
        float32 `[rollouts]`.
    """
    return rewards - greedy_rewards


def optimal_baseline(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """The reward less the mean of its group in which each rollout counts by its length.

    Source: OPO, Hao et al. 2025, arXiv:2505.23585: the baseline of least variance where the squared norm of a
    rollout's gradient grows with its length.

    Args:
        rewards: float32 `[rollouts]`.
        groups: int64 `[rollouts]`.
        lengths: `[rollouts]`: response tokens, >= 1.

    Returns:
        float32 `[rollouts]`.

    >>> optimal_baseline(torch.tensor([1., 0.]), torch.tensor([0, 0]), torch.tensor([1, 3]))
    tensor([ 0.7500, -0.2500])
    """
    weights = (groups[:, None] == groups).to(rewards.dtype) * lengths.to(rewards.dtype)
    deviation = rewards - weights @ rewards / weights.sum(1)
    mean, _, std = _group_statistics(rewards, groups)
    return torch.where(std > ROUNDING * (1 + mean.abs()), deviation, 0.0)


def maximum_likelihood(rewards: Tensor, groups: Tensor) -> Tensor:
    """(reward - mean) / mean of the group: the gradient of log pass rate instead of the pass rate, up to order n.

    Source: MaxRL, Tajwar et al. 2026, arXiv:2602.02710. For rewards of 0 and 1.

    Args:
        rewards: float32 `[rollouts]`, >= 0.
        groups: int64 `[rollouts]`.

    Returns:
        float32 `[rollouts]`; 0 for a group without any reward, or of equal rewards.

    >>> maximum_likelihood(torch.tensor([1., 0., 0., 0.]), torch.tensor([0, 0, 0, 0]))
    tensor([ 3., -1., -1., -1.])
    """
    mean, deviation, std = _group_statistics(rewards, groups)
    signal = (std > ROUNDING * (1 + mean.abs())) & (mean > 0)
    return torch.where(signal, deviation / torch.where(mean > 0, mean, 1.0), 0.0)


def pass_at_k(rewards: Tensor, groups: Tensor, k: int, *, epsilon: float = 1e-6) -> Tensor:
    """Group-relative advantages of the best of k: how much a rollout adds to the chance that one of k succeeds.

    Source: Pass@k training, Chen et al. 2025, arXiv:2508.10751 (its analytical form). Over all ways to draw k of the
    group's n rollouts, m of which fail, the mean reward is R = 1 - C(m, k) / C(n, k) and its standard deviation
    s = sqrt(R (1 - R)). A rollout that succeeded is only in draws of reward 1: (1 - R) / s. One that failed is in draws
    of which the others must succeed: (1 - R - C(m - 1, k - 1) / C(n - 1, k - 1)) / s.

    Args:
        rewards: float32 `[rollouts]`; above 0 is success.
        groups: int64 `[rollouts]`.
        k: rollouts drawn, >= 1. 1 is group-relative with the biased standard deviation.

    Returns:
        float32 `[rollouts]`; 0 where every draw has the same reward, and for groups smaller than k.

    Raises:
        ValueError: k is below 1.

    >>> pass_at_k(torch.tensor([1., 0., 0., 0.]), torch.tensor([0, 0, 0, 0]), k=2)
    tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """
    if k < 1:
        raise ValueError(f"k={k}: at least 1 rollout is drawn")
    together = groups[:, None] == groups
    success = rewards > 0
    size = together.sum(1)
    failures = (together & ~success).sum(1)
    all_fail = _choose_ratio(failures, size, k)
    std = (all_fail * (1 - all_fail)).sqrt()
    others_fail = _choose_ratio(failures - 1, size - 1, k - 1)
    advantage = torch.where(success, all_fail, all_fail - others_fail)
    signal = (size >= k) & (std > epsilon)
    return torch.where(signal, advantage / torch.where(signal, std, 1.0), 0.0).to(rewards.dtype)


def zero_variance(rewards: Tensor, groups: Tensor) -> Tensor:
    """bool `[rollouts]`: the rollout's group has one member or equal rewards, hence nothing to learn from."""
    mean, _, std = _group_statistics(rewards, groups)
    return std <= ROUNDING * (1 + mean.abs())


def _group_statistics(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, deviation from it, and unbiased standard deviation of each rollout's group: `[rollouts]` each."""
    # Group numbers may be anything and their count unknown, so membership is a matrix: cheap for one batch.
    together = (groups[:, None] == groups).to(rewards.dtype)
    size = together.sum(1)
    mean = together @ rewards / size
    deviation = rewards - mean
    variance = together @ (deviation * deviation) / (size - 1).clamp(min=1)
    return mean, deviation, variance.sqrt()


@dataclass(frozen=True)
class Moments:
    """Count, mean and squared deviation of some values; those of two disjoint parts add up to the whole's."""

    count: Tensor
    mean: Tensor
    squared_deviation: Tensor
    """Sum of (value - mean)²."""

    @staticmethod
    def of(values: Tensor, mask: Tensor) -> Moments:
        """Moments of `values` where `mask` is true; what lies elsewhere may be NaN. Both of one shape."""
        count = mask.sum().to(values.dtype)
        mean = torch.where(mask, values, 0.0).sum() / count.clamp(min=1)
        return Moments(count, mean, torch.where(mask, values - mean, 0.0).square().sum())

    def __add__(self, other: Moments) -> Moments:
        """Moments of both parts together (Chan et al. 1979)."""
        count = self.count + other.count
        difference = other.mean - self.mean
        share = other.count / count.clamp(min=1)
        return Moments(
            count,
            self.mean + difference * share,
            self.squared_deviation + other.squared_deviation + difference.square() * self.count * share,
        )


def whiten(values: Tensor, moments: Moments, *, epsilon: float = 1e-8) -> Tensor:
    """(values - mean) / (std + epsilon), by the moments of the whole batch that `values` are part of."""
    std = (moments.squared_deviation / (moments.count - 1).clamp(min=1)).sqrt()
    return (values - moments.mean) / (std + epsilon)


def _whitened(values: Tensor, epsilon: float) -> Tensor:
    """(values - mean) / (std + epsilon); 0 where all are equal up to rounding."""
    moments = Moments.of(values, torch.ones_like(values, dtype=torch.bool))
    std = (moments.squared_deviation / (moments.count - 1).clamp(min=1)).sqrt()
    return torch.where(
        std > ROUNDING * (1 + moments.mean.abs()), whiten(values, moments, epsilon=epsilon), 0.0
    )


def _choose_ratio(part: Tensor, whole: Tensor, k: int) -> Tensor:
    """C(part, k) / C(whole, k), float64: the product of (part - i) / (whole - i). 0 where part < k."""
    ratio = torch.ones_like(part, dtype=torch.float64)
    for i in range(k):
        ratio = ratio * (part - i).clamp(min=0) / (whole - i).clamp(min=1)
    return ratio
