"""What a learner is told and what it answers: settings, batches of supervised examples, updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from meshrl.errors import UserError
from meshrl.handoff.dock import DockedBatch, empty_columns
from meshrl.packing import assign
from meshrl.rollout import Task

if TYPE_CHECKING:
    from meshrl.actors.tokenizer import Tokenizer


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning rate over time."""

    learning_rate: float = 7e-4
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of Adam's two moving averages."""
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 10
    """Steps over which the learning rate rises linearly from 0; 0: none."""
    decay: Literal["none", "linear", "sqrt", "cosine"] = "none"
    """How the learning rate falls after that."""
    steps: int = 0
    """Step at which `decay` is over; 0: the last step of the program."""
    final_fraction: float = 0.0
    """Share of the learning rate that is left when `decay` is over."""


@dataclass(frozen=True)
class LearnerConfig:
    """How the policy is trained."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    tensor_parallel: int = 1
    """Processes that share each layer's matrices; must divide the heads and the learner processes. The other
    factor of the process count is data parallelism with sharded parameters (FSDP2)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of parameters and activations in forward and backward; master weights and gradient sums are float32."""
    max_gradient_norm: float = 1.0
    """Gradients with a larger 2-norm are scaled down to it; 0: never."""
    microbatch_tokens: int | None = None
    """Most tokens of one forward pass; longer rollouts are left out and counted. None: a rank's share in one pass."""
    initial_weights: Path | None = None
    """Hugging Face checkpoint directory to start from; None: random weights."""
    collective_timeout_seconds: float = 600.0
    """Longest wait for another rank within a step."""

    def __post_init__(self) -> None:
        if self.microbatch_tokens is not None and self.microbatch_tokens < 1:
            raise UserError(
                f"microbatch_tokens is {self.microbatch_tokens}: use 1 or more, or None for no bound"
            )


@dataclass(frozen=True)
class Update:
    """What one optimizer step did."""

    metrics: Mapping[str, float]
    """Means and maxima over the batch, all ranks together."""
    advantages: Mapping[int, float]
    """Advantage by rollout id, as it was trained on."""
    seconds: Mapping[str, float]
    """Where the time went, on rank 0."""


def supervised_batch(
    task: Task,
    tokenizer: Tokenizer,
    indices: range,
    *,
    max_tokens: int,
    rank: int,
    ranks: int,
    microbatch_tokens: int | None = None,
) -> DockedBatch:
    """One data-parallel rank's share of the task's supervised examples: prompt, answer, end token.

    Every rank makes the same assignment by itself, so no example is in a message. Trained tokens are those of the
    answer, and the end token.

    Raises:
        UserError: an example has no answer or does not fit the context.
    """
    rows, prompts = [], []
    for index in indices:
        example = task.supervised(index)
        if example.answer is None:
            raise UserError(f"supervised example {index} has no answer, so there is nothing to learn from it")
        prompt = tokenizer.encode(example.text)
        # Apart, as a generator would go on: the prompt's tokens never depend on the answer.
        row = [*prompt, *tokenizer.encode(example.answer), tokenizer.end_id]
        limit = min(max_tokens, microbatch_tokens or max_tokens)
        if not prompt or len(row) > limit:
            raise UserError(
                f"supervised example {index} has {len(prompt)} prompt tokens and {len(row)} in all: wanted at least "
                f"1, and at most {limit} (model context and learner.microbatch_tokens)"
            )
        rows.append(row)
        prompts.append(len(prompt))
    mine = assign([len(row) for row in rows], ranks, microbatch_tokens).ranks[rank]
    order = [position for microbatch in mine for position in microbatch]
    lengths = [len(rows[position]) for position in order]
    columns = empty_columns(sum(lengths))
    first = 0
    for position, length in zip(order, lengths, strict=True):
        columns["token_ids"][first : first + length] = torch.tensor(rows[position], dtype=torch.int32)
        columns["response_mask"][first + prompts[position] : first + length] = True
        first += length
    numbers = iter(range(len(order)))
    return DockedBatch(
        rollout_ids=[indices[position] for position in order],
        lengths=lengths,
        columns=columns,
        rollout_columns={},
        microbatches=[[next(numbers) for _ in microbatch] for microbatch in mine],
        global_tokens=sum(map(len, rows)) - sum(prompts),
        global_rollouts=len(rows),
    )
