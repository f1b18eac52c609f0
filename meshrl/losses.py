"""Losses: pure functions of a micro-batch's tensors, and how their tokens add up to one number.

A loss gives one value per token; an aggregation gives each token its weight from counts over the *whole*
batch, all ranks and micro-batches. So the sum of the weighted values is the same loss, with the same
gradient, however the batch was split: nothing averages an average.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here, far outside any clip, so that exp stays finite; no gradient flows beyond."""


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch, rollouts end to end. Values at masked tokens are never looked at and may be NaN."""

    logprobs: Tensor
    """float32 `[tokens]`: log-probability of each token under the policy being trained, with gradient."""
    mask: Tensor
    """bool `[tokens]`: tokens that are trained on (responses)."""
    sequence: Tensor
    """int64 `[tokens]`: which rollout of the micro-batch each token belongs to, from 0."""
    sequences: int
    """Rollouts of the micro-batch."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """What the loss asked for in its `columns`, each `[tokens]`; a value of a whole rollout stands at each of its
    tokens."""

    def column(self, name: str) -> Tensor:
        """A column, with 0 at masked tokens.

        Raises:
            ValueError: the batch has none of that name.
        """
        if name not in self.columns:
            have = ", ".join(sorted(self.columns)) or "none"
            raise ValueError(f"the loss needs the column {name!r}; this batch has {have}")
        return self.zeros_at_masked(self.columns[name])

    def zeros_at_masked(self, values: Tensor) -> Tensor:
        """`values` with 0 at masked tokens. Before any arithmetic: 0 · NaN would still be NaN."""
        return torch.where(self.mask, values, 0.0)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Mean of `values` `[tokens]` over each rollout's trained tokens: `[sequences]`; 0 for none."""
        sums = values.new_zeros(self.sequences).index_add(0, self.sequence, self.zeros_at_masked(values))
        return sums / self.sequence_tokens().clamp(min=1)

    def sequence_tokens(self) -> Tensor:
        """float32 `[sequences]`: trained tokens of each rollout."""
        counts = torch.zeros(self.sequences, device=self.mask.device)
        return counts.index_add(0, self.sequence, self.mask.float())


@dataclass(frozen=True)
class LossOutputs:
    """What a loss makes of a micro-batch."""

    per_token: Tensor
    """float32 `[tokens]`: loss of each token, 0 at masked ones."""
    sums: Mapping[str, Tensor]
    """Scalar metrics, each a sum over trained tokens; divided by the batch's token count they are means."""


@dataclass(frozen=True)
class GlobalCounts:
    """Counts over the whole batch: all data-parallel ranks, all micro-batches."""

    tokens: int
    """Trained tokens."""
    sequences: int
    """Rollouts."""


class Aggregation(Protocol):
    """How per-token losses add up."""

    def weights(self, inputs: LossInputs, counts: GlobalCounts) -> Tensor:
        """float32 `[tokens]`; `sum(per_token * weights)`, over all micro-batches and ranks, is the loss."""
        ...


@dataclass(frozen=True)
class TokenMean:
    """Every token counts the same (DAPO, arXiv:2503.14476)."""

    def weights(self, inputs: LossInputs, counts: GlobalCounts) -> Tensor:
        return inputs.mask.float() / max(counts.tokens, 1)


@dataclass(frozen=True)
class SequenceMean:
    """Every rollout counts the same: mean over its tokens, then over rollouts (GRPO, arXiv:2402.03300)."""

    def weights(self, inputs: LossInputs, counts: GlobalCounts) -> Tensor:
        own = inputs.sequence_tokens().clamp(min=1)[inputs.sequence]
        return inputs.mask.float() / own / max(counts.sequences, 1)


@dataclass(frozen=True)
class SequenceSum:
    """Sum over a rollout's tokens divided by a constant, mean over rollouts (Dr. GRPO, arXiv:2503.20783)."""

    constant: float
    """Usually the most tokens that a response may have."""

    def weights(self, inputs: LossInputs, counts: GlobalCounts) -> Tensor:
        return inputs.mask.float() / self.constant / max(counts.sequences, 1)


class Loss(Protocol):
    """Any picklable callable with an aggregation; it runs on every learner rank."""

    @property
    def aggregation(self) -> Aggregation: ...

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the schema that it reads besides the policy's own log-probabilities."""
        ...

    def __call__(self, inputs: LossInputs, /) -> LossOutputs: ...


@dataclass(frozen=True)
class PolicyLoss:
    """Clipped policy-gradient loss; see `policy_loss`."""

    clip: tuple[float, float]
    ratio: Literal["token", "sequence"]
    aggregation: Aggregation
    columns: tuple[str, ...] = ("sampler_logprobs", "advantages")

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        low, high = self.clip
        advantages = inputs.column("advantages")
        # Masked tokens are taken out of both terms before they meet: inf - inf would be NaN.
        log_ratio = inputs.zeros_at_masked(inputs.logprobs) - inputs.column("sampler_logprobs")
        if self.ratio == "sequence":
            log_ratio = inputs.zeros_at_masked(inputs.sequence_mean(log_ratio)[inputs.sequence])
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        clipped = ratio.clamp(1 - low, 1 + high)
        per_token = -torch.minimum(ratio * advantages, clipped * advantages)
        with torch.no_grad():
            sums = {
                "ratio_mean": inputs.zeros_at_masked(ratio).sum(),
                # Only a clip that holds the gradient back counts: at the side that the advantage pushes to.
                "clip_fraction_low": ((ratio < 1 - low) & (advantages < 0)).float().sum(),
                "clip_fraction_high": ((ratio > 1 + high) & (advantages > 0)).float().sum(),
            }
        return LossOutputs(per_token, sums)


def policy_loss(
    clip: tuple[float, float] = (0.2, 0.28),
    ratio: Literal["token", "sequence"] = "token",
    aggregation: Aggregation | None = None,
) -> PolicyLoss:
    """Clipped surrogate, -min(ρ·A, clip(ρ, 1 - low, 1 + high)·A) (PPO, arXiv:1707.06347, eq. 7).

    Args:
        clip: how far below and above 1 the ratio may go; unequal bounds are DAPO's.
        ratio: ρ of each token, or of the whole response, length-normalised (GSPO, arXiv:2507.18071, eq. 7).
        aggregation: None: `TokenMean()` for token ratios, `SequenceMean()` for sequence ratios.

    Raises:
        ValueError: a bound is negative, or the lower one is above 1.
    """
    low, high = clip
    if not (0 <= low <= 1 and high >= 0):
        raise ValueError(
            f"clip={clip}: wanted (low, high) with 0 <= low <= 1 and high >= 0, such as (0.2, 0.28)"
        )
    if aggregation is None:
        aggregation = TokenMean() if ratio == "token" else SequenceMean()
    return PolicyLoss(clip, ratio, aggregation)


@dataclass(frozen=True)
class CrossEntropy:
    """Negative log-probability of the trained tokens; see `cross_entropy`."""

    aggregation: Aggregation
    columns: tuple[str, ...] = ()

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        return LossOutputs(-inputs.zeros_at_masked(inputs.logprobs), {})


def cross_entropy(aggregation: Aggregation | None = None) -> CrossEntropy:
    """Supervised loss on the tokens of the mask; `aggregation` None: `TokenMean()`."""
    return CrossEntropy(aggregation or TokenMean())


KLEstimator = Literal["k1", "k2", "k3", "ratio_k1", "ratio_k3"]


def kl_per_token(
    logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator, *, as_loss: bool = False
) -> Tensor:
    """Estimate of KL(policy ‖ reference) from tokens that the policy sampled, shaped like `logprobs`.

    Schulman's estimators (http://joschu.net/blog/kl-approx.html), with r = log policy - log reference:
    k1 = r, k2 = r²/2, k3 = e^-r - 1 + r. Differentiating an estimate is not estimating the derivative: as
    losses, `k2` and the two with the policy's own ratio in front have the gradient of KL, k3 a biased one.

    Args:
        as_loss: the result will be differentiated.

    Raises:
        ValueError: `k1` as a loss, since its expected gradient is zero.
    """
    difference = logprobs - reference_logprobs
    # Value 1, gradient that of the log-probability.
    ratio = (logprobs - logprobs.detach()).exp()
    match estimator:
        case "k1":
            if as_loss:
                raise ValueError("k1 as a loss has an expected gradient of 0: use ratio_k1, or k2")
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return torch.expm1(-difference) + difference
        case "ratio_k1":
            return ratio * difference
        case "ratio_k3":
            return ratio * (torch.expm1(-difference) + difference)
    raise ValueError(f"unknown KL estimator {estimator!r}: k1, k2, k3, ratio_k1 or ratio_k3")
