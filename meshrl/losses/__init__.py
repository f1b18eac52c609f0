"""Losses: pure functions of a micro-batch's tensors, and how their tokens add up to one number.

A loss gives one value per token; an aggregation gives each token its weight from counts over the *whole*
batch, all ranks and micro-batches. So the sum of the weighted values is the same loss, with the same
gradient, however the batch was split: nothing averages an average.
"""

from meshrl.losses.inputs import (
    Aggregation,
    GlobalCounts,
    Loss,
    LossInputs,
    LossOutputs,
    SequenceMean,
    SequenceSum,
    TokenMean,
    cross_entropy,
    evaluate,
)
from meshrl.losses.kl import KLEstimator, kl_per_token, with_kl
from meshrl.losses.off_policy import corrected, icepop, masked, truncated
from meshrl.losses.policy import (
    cispo_loss,
    dppo_loss,
    gmpo_loss,
    policy_loss,
    reinforce_loss,
    sapo_loss,
)

__all__ = [
    "Aggregation",
    "GlobalCounts",
    "KLEstimator",
    "Loss",
    "LossInputs",
    "LossOutputs",
    "SequenceMean",
    "SequenceSum",
    "TokenMean",
    "cispo_loss",
    "corrected",
    "cross_entropy",
    "dppo_loss",
    "evaluate",
    "gmpo_loss",
    "icepop",
    "kl_per_token",
    "masked",
    "policy_loss",
    "reinforce_loss",
    "sapo_loss",
    "truncated",
    "with_kl",
]
