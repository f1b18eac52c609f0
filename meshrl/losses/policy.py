"""Policy losses: how strongly each token is pushed, by its advantage and by how far the policy is from the sampler.

All of them see the ratio of the policy being trained to the one that sampled the token, which is 1 everywhere on
policy: there their gradients are all that of REINFORCE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from meshrl.losses.inputs import Aggregation, LossInputs, LossOutputs, SequenceMean, TokenMean

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here, far outside any clip, so that exp stays finite; no gradient flows beyond."""

COLUMNS = ("sampler_logprobs", "advantages")


def token_log_ratio(inputs: LossInputs) -> Tensor:
    """log(policy / sampler) of each token `[tokens]`, 0 at masked ones, cut at ±MAX_LOG_RATIO."""
    # Masked tokens are taken out of both terms before they meet: inf - inf would be NaN.
    difference = inputs.zeros_at_masked(inputs.logprobs) - inputs.column("sampler_logprobs")
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True)
class Reinforce:
    """-A · log π; see `reinforce_loss`."""

    aggregation: Aggregation
    columns: tuple[str, ...] = ("advantages",)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        per_token = -inputs.column("advantages") * inputs.zeros_at_masked(inputs.logprobs)
        return LossOutputs(per_token, {})


def reinforce_loss(aggregation: Aggregation | None = None) -> Reinforce:
    """-A · log π (Williams 1992): no ratio and no clip, so for data that is on policy, or corrected (`corrected`).

    Args:
        aggregation: None: `TokenMean()`.
    """
    return Reinforce(aggregation or TokenMean())


@dataclass(frozen=True)
class PolicyLoss:
    """Clipped policy-gradient loss; see `policy_loss`."""

    clip: tuple[float, float]
    ratio: Literal["token", "sequence"]
    dual_clip: float | None
    aggregation: Aggregation
    columns: tuple[str, ...] = COLUMNS

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        low, high = self.clip
        advantages = inputs.column("advantages")
        log_ratio = token_log_ratio(inputs)
        if self.ratio == "sequence":
            log_ratio = inputs.zeros_at_masked(inputs.sequence_mean(log_ratio)[inputs.sequence])
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - low, 1 + high)
        gain = torch.minimum(ratio * advantages, clipped * advantages)
        if self.dual_clip is not None:
            gain = torch.where(advantages < 0, torch.maximum(gain, self.dual_clip * advantages), gain)
        per_token = -gain
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
    dual_clip: float | None = None,
    aggregation: Aggregation | None = None,
) -> PolicyLoss:
    """Clipped surrogate, -min(ρ·A, clip(ρ, 1 - low, 1 + high)·A) (PPO, arXiv:1707.06347, eq. 7).

    Args:
        clip: how far below and above 1 the ratio may go; unequal bounds are DAPO's.
        ratio: ρ of each token, or of the whole response, length-normalised (GSPO, arXiv:2507.18071, eq. 7).
        dual_clip: a token of negative advantage loses at most this many times it, however large its ratio (Ye et al.
            2020, arXiv:1912.09729; they take 3). None: no such bound.
        aggregation: None: `TokenMean()` for token ratios, `SequenceMean()` for sequence ratios.

    Raises:
        ValueError: a bound is negative, the lower one is above 1, or `dual_clip` is not above 1.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip}: must be above 1, or None for no bound")
    if aggregation is None:
        aggregation = TokenMean() if ratio == "token" else SequenceMean()
    return PolicyLoss(_checked(clip), ratio, dual_clip, aggregation)


@dataclass(frozen=True)
class ClippedWeight:
    """CISPO; see `cispo_loss`."""

    clip: tuple[float, float]
    aggregation: Aggregation
    columns: tuple[str, ...] = COLUMNS

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        low, high = self.clip
        advantages = inputs.column("advantages")
        ratio = token_log_ratio(inputs).detach().exp()
        weight = ratio.clamp(1 - low, 1 + high)
        per_token = -weight * advantages * inputs.zeros_at_masked(inputs.logprobs)
        sums = {
            "ratio_mean": inputs.zeros_at_masked(ratio).sum(),
            "clip_fraction_low": inputs.zeros_at_masked((ratio < 1 - low).float()).sum(),
            "clip_fraction_high": inputs.zeros_at_masked((ratio > 1 + high).float()).sum(),
        }
        return LossOutputs(per_token, sums)


def cispo_loss(
    clip: tuple[float, float] = (1.0, 0.28), aggregation: Aggregation | None = None
) -> ClippedWeight:
    """-sg(clip(ρ, 1 - low, 1 + high)) · A · log π: every token keeps a gradient, whose weight is bounded.

    Source: CISPO, MiniMax-M1, arXiv:2506.13585. `sg` stops the gradient.

    Args:
        clip: how far below and above 1 the weight may go. A low of 1: no lower bound, as in the paper.
        aggregation: None: `TokenMean()`.

    Raises:
        ValueError: a bound is negative, or the lower one is above 1.
    """
    return ClippedWeight(_checked(clip), aggregation or TokenMean())


@dataclass(frozen=True)
class GeometricMean:
    """GMPO; see `gmpo_loss`."""

    clip: tuple[float, float]
    aggregation: Aggregation
    columns: tuple[str, ...] = COLUMNS

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        low, high = self.clip
        advantages = inputs.column("advantages")
        log_ratio = token_log_ratio(inputs)
        # The pessimistic one of ratio and clipped ratio, as in the clipped surrogate, by the sign of the advantage.
        held = torch.where(advantages >= 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-low))
        ratio = inputs.sequence_mean(held).exp()[inputs.sequence]
        per_token = -inputs.zeros_at_masked(ratio) * advantages
        with torch.no_grad():
            sums = {
                "ratio_mean": inputs.zeros_at_masked(ratio).sum(),
                "clip_fraction_low": ((log_ratio < -low) & (advantages < 0)).float().sum(),
                "clip_fraction_high": ((log_ratio > high) & (advantages > 0)).float().sum(),
            }
        return LossOutputs(per_token, sums)


def gmpo_loss(
    clip: tuple[float, float] = (0.4, 0.4), aggregation: Aggregation | None = None
) -> GeometricMean:
    """-A · exp(mean over tokens of the clipped log-ratios): the geometric mean of the tokens' ratios, for each rollout.

    Source: GMPO, Zhao et al. 2025, arXiv:2507.20673. All tokens of a rollout have one advantage.

    Args:
        clip: how far log-ratios may go below and above 0: e^±0.4 is a ratio of 0.67 to 1.49.
        aggregation: None: `SequenceMean()`.

    Raises:
        ValueError: a bound is negative.
    """
    low, high = clip
    if low < 0 or high < 0:
        raise ValueError(f"clip={clip}: wanted (low, high) of log-ratios, both >= 0, such as (0.4, 0.4)")
    return GeometricMean(clip, aggregation or SequenceMean())


@dataclass(frozen=True)
class SoftGate:
    """SAPO; see `sapo_loss`."""

    temperature: tuple[float, float]
    aggregation: Aggregation
    columns: tuple[str, ...] = COLUMNS

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        advantages = inputs.column("advantages")
        ratio = token_log_ratio(inputs).exp()
        positive, negative = self.temperature
        steepness = torch.where(advantages > 0, positive, negative)
        gate = torch.sigmoid(steepness * (ratio - 1)) * 4 / steepness
        sums = {"ratio_mean": inputs.zeros_at_masked(ratio.detach()).sum()}
        return LossOutputs(-inputs.zeros_at_masked(gate) * advantages, sums)


def sapo_loss(
    temperature: tuple[float, float] = (1.0, 1.05), aggregation: Aggregation | None = None
) -> SoftGate:
    """-A · 4/τ · sigmoid(τ (ρ - 1)): a smooth gate in place of the clip, steepest at a ratio of 1.

    Its slope there is 1. Source: SAPO, Gao et al. 2025, arXiv:2511.20347.

    Args:
        temperature: τ of tokens with positive, and with negative advantage; a larger one closes sooner.
        aggregation: None: `TokenMean()`.

    Raises:
        ValueError: one is not above 0.
    """
    if min(temperature) <= 0:
        raise ValueError(f"temperature={temperature}: both must be above 0, such as (1.0, 1.05)")
    return SoftGate(temperature, aggregation or TokenMean())


Divergence = Literal["total_variation", "kl"]


@dataclass(frozen=True)
class DivergenceMask:
    """DPPO; see `dppo_loss`."""

    threshold: float
    divergence: Divergence
    aggregation: Aggregation
    columns: tuple[str, ...] = COLUMNS

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        advantages = inputs.column("advantages")
        ratio = token_log_ratio(inputs).exp()
        with torch.no_grad():
            policy = inputs.zeros_at_masked(inputs.logprobs).exp()
            sampler = inputs.column("sampler_logprobs").exp()
            far = _divergence(policy, sampler, self.divergence) > self.threshold
            leaving = ((advantages > 0) & (ratio > 1)) | ((advantages < 0) & (ratio < 1))
            kept = ~(far & leaving)
            sums = {
                "ratio_mean": inputs.zeros_at_masked(ratio).sum(),
                "masked_fraction": inputs.zeros_at_masked((~kept).float()).sum(),
            }
        return LossOutputs(-inputs.zeros_at_masked(ratio) * advantages * kept, sums)


def dppo_loss(
    threshold: float = 0.2,
    divergence: Divergence = "total_variation",
    aggregation: Aggregation | None = None,
) -> DivergenceMask:
    """-ρ · A, without the tokens whose probability has moved too far and would be pushed farther.

    Source: DPPO, arXiv:2602.04879, with the binary divergence (the token against all others). How far is told by a
    divergence instead of the ratio, which is large for rare tokens that hardly matter.

    Args:
        threshold: of the divergence; `total_variation`: |π - μ| of the token; `kl`: KL(μ, π) in nats.
        aggregation: None: `TokenMean()`.

    Raises:
        ValueError: the threshold is negative.
    """
    if threshold < 0:
        raise ValueError(f"threshold={threshold}: must be at least 0")
    return DivergenceMask(threshold, divergence, aggregation or TokenMean())


def _divergence(policy: Tensor, sampler: Tensor, kind: Divergence) -> Tensor:
    if kind == "total_variation":
        return (policy - sampler).abs()
    tiny = torch.finfo(policy.dtype).tiny
    others, other_sampler = (1 - policy).clamp(min=tiny), (1 - sampler).clamp(min=tiny)
    return (
        sampler * (sampler.clamp(min=tiny) / policy.clamp(min=tiny)).log()
        + other_sampler * (other_sampler / others).log()
    )


def _checked(clip: tuple[float, float]) -> tuple[float, float]:
    low, high = clip
    if not (0 <= low <= 1 and high >= 0):
        raise ValueError(
            f"clip={clip}: wanted (low, high) with 0 <= low <= 1 and high >= 0, such as (0.2, 0.28)"
        )
    return clip
