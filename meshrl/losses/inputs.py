"""What a loss is given and what it makes of it, and how tokens add up to one number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


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
        return torch.where(self.mask, values, values.new_zeros(()))

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


def evaluate(loss: Loss, inputs: LossInputs) -> LossOutputs:
    """What the loss makes of the inputs.

    Raises:
        ValueError: that is not one value per token.
    """
    outputs = loss(inputs)
    if not isinstance(outputs, LossOutputs):
        raise ValueError(f"the loss {loss} answers with {type(outputs).__name__}: wanted LossOutputs")
    if outputs.per_token.shape != inputs.logprobs.shape:
        raise ValueError(
            f"the loss {loss} has per_token of shape {list(outputs.per_token.shape)}: wanted one value per token, "
            f"{list(inputs.logprobs.shape)}; its aggregation adds them up"
        )
    return outputs


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
