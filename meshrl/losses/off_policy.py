"""Off-policy correction: weights for tokens that another policy sampled than the one that is trained.

The sampler differs from the policy where weights are older, or where the engine computes otherwise than the learner.
The weight is w = policy / sampler, of the policy as it is, without gradient; the loss that it multiplies may have a
ratio of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from meshrl.losses.inputs import Aggregation, Loss, LossInputs, LossOutputs
from meshrl.losses.policy import MAX_LOG_RATIO, token_log_ratio


@dataclass(frozen=True)
class Correction:
    """How weights outside of some bounds are treated; see `truncated`, `masked` and `icepop`."""

    bounds: tuple[float, float]
    outside: Literal["truncate", "mask"]
    level: Literal["token", "sequence"]

    def weights(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """float32 `[tokens]` each, 0 at masked tokens and without gradient: as they are, and as they are used."""
        with torch.no_grad():
            log_ratio = token_log_ratio(inputs)
            if self.level == "sequence":
                sums = inputs.sequence_mean(log_ratio) * inputs.sequence_tokens()
                log_ratio = sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[inputs.sequence]
            plain = inputs.zeros_at_masked(log_ratio.exp())
            low, high = self.bounds
            if self.outside == "truncate":
                return plain, inputs.zeros_at_masked(plain.clamp(low, high))
            return plain, torch.where((plain >= low) & (plain <= high), plain, 0.0)


def truncated(cap: float = 2.0, level: Literal["token", "sequence"] = "token") -> Correction:
    """min(w, cap): truncated importance sampling (Ionides 2008; Yao et al. 2025 for rollout engines).

    Args:
        cap: largest weight.
        level: weight of each token, or of the whole response, the product of its tokens'.

    Raises:
        ValueError: the cap is below 1.
    """
    if cap < 1:
        raise ValueError(f"cap={cap}: a cap below 1 would cut tokens that are on policy")
    return Correction((0.0, cap), "truncate", level)


def masked(low: float = 0.5, high: float = 2.0, level: Literal["token", "sequence"] = "token") -> Correction:
    """w within the bounds, 0 outside: what is far off policy is not learned from.

    At the level of tokens this is the mask of IcePop (Ling team 2025, arXiv:2510.18855).

    Raises:
        ValueError: the bounds do not hold 1 between them.
    """
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"bounds ({low}, {high}): wanted 0 <= low <= 1 <= high, such as (0.5, 2)")
    return Correction((low, high), "mask", level)


def icepop(low: float = 0.5, high: float = 5.0) -> Correction:
    """`masked` for tokens, wider above than below: IcePop (arXiv:2510.18855), which leaves the bounds to the user."""
    return masked(low, high)


@dataclass(frozen=True)
class Corrected:
    """A loss whose tokens carry importance weights; see `corrected`."""

    loss: Loss
    correction: Correction

    @property
    def aggregation(self) -> Aggregation:
        return self.loss.aggregation

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.loss.columns, "sampler_logprobs")))

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        outputs = self.loss(inputs)
        plain, used = self.correction.weights(inputs)
        changed = inputs.zeros_at_masked((plain != used).float())
        sums = {
            "importance_weight_mean": plain.sum(),
            "importance_weight_square_mean": plain.square().sum(),
            "importance_weight_cut": changed.sum(),
        }
        return LossOutputs(outputs.per_token * used, {**outputs.sums, **sums})


def corrected(loss: Loss, correction: Correction) -> Corrected:
    """`loss`, each token's value times its importance weight.

    The metrics tell of the weights as they are before they are cut: their mean, the mean of their squares, whose ratio
    mean² / mean of squares is the effective sample size as a share of the tokens, and the share that was cut.

    >>> loss = corrected(reinforce_loss(), truncated(cap=2.0))                          # doctest: +SKIP
    """
    return Corrected(loss, correction)
