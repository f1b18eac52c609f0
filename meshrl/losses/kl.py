"""Estimates of the divergence between two policies, from tokens that one of them sampled."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

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
