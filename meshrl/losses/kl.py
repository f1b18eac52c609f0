"""Estimates of the divergence between two policies, from tokens that one of them sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from meshrl.losses.inputs import Aggregation, Loss, LossInputs, LossOutputs

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


@dataclass(frozen=True)
class KLPenalised:
    """A loss and a KL penalty; see `with_kl`."""

    loss: Loss
    coefficient: float
    estimator: KLEstimator

    @property
    def aggregation(self) -> Aggregation:
        return self.loss.aggregation

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.loss.columns, "reference_logprobs")))

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        outputs = self.loss(inputs)
        policy, reference = inputs.zeros_at_masked(inputs.logprobs), inputs.column("reference_logprobs")
        kl = inputs.zeros_at_masked(kl_per_token(policy, reference, self.estimator, as_loss=True))
        sums = {**outputs.sums, "reference_kl_mean": kl.detach().sum()}
        return LossOutputs(outputs.per_token + self.coefficient * kl, sums)


def with_kl(loss: Loss, coefficient: float, estimator: KLEstimator = "k2") -> KLPenalised:
    """`loss`, plus a penalty on how far the policy is from a reference, token by token.

    Needs the column `reference_logprobs`; a program in which nothing makes it is refused at its start.

    Args:
        coefficient: weight of the penalty; >= 0.
        estimator: see `kl_per_token`; `k2` and the ratio-weighted ones have the gradient of KL.

    Raises:
        ValueError: the coefficient is negative, or the estimator is `k1`.
    """
    if coefficient < 0:
        raise ValueError(f"coefficient={coefficient}: a negative one would push the policy away")
    if estimator == "k1":
        raise ValueError("k1 as a loss has an expected gradient of 0: use ratio_k1, or k2")
    return KLPenalised(loss, coefficient, estimator)
