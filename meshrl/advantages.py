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
