"""What a generator engine must do.

An engine is an ordinary object: synchronous, used by one thread, told to move by its driver. The generator
actor owns the thread and calls `step` while the engine has work; between two steps it may submit, abort or
load weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from meshrl.rollout import SamplingParams, StopReason


@dataclass(frozen=True)
class FinishedSample:
    """One response, token by token as it was sampled. All tensors are on the CPU and own their memory."""

    group_id: int
    sample: int
    """Position of its seed in the request."""
    token_ids: torch.Tensor
    """Sampled ids verbatim, the end token included when there is one: int32 `[tokens]`."""
    logprobs: torch.Tensor
    """Log-probability of each token under the distribution it was drawn from, after temperature, top-k and
    top-p (temperature 0: under the plain softmax): float32 `[tokens]`."""
    versions: torch.Tensor
    """Weight version that sampled each token: int32 `[tokens]`."""
    stop_reason: StopReason
    """`stop`: end token, stop id or stop string; `length`: max_tokens or the end of the context; `abort`."""


@dataclass(frozen=True)
class EngineRequest:
    """Several samples of one prompt."""

    group_id: int
    """Names the group in `FinishedSample` and `abort`; never that of a group still in the engine."""
    prompt_token_ids: list[int]
    seeds: tuple[int, ...]
    """One per sample: as many samples as seeds. The same seed draws the same uniform numbers in any batch."""
    sampling: SamplingParams
    resumed: Mapping[int, FinishedSample] = field(default_factory=dict)
    """Samples that go on from where `abort` ended them, by position of their seed: their tokens, log-probabilities and
    versions stay as they are, and count towards `max_tokens`; the next ones are drawn from the weights as they are
    now, after a prefill with these. While the weights are the same, the sample ends as if nothing had been. Entries
    that `samples` leaves out are not used."""
    samples: tuple[int, ...] | None = None
    """Positions of the seeds that are wanted; None: all. The others came back before the group was aborted."""

    @property
    def indices(self) -> tuple[int, ...]:
        """The samples wanted."""
        return tuple(range(len(self.seeds))) if self.samples is None else self.samples


@dataclass(frozen=True)
class EngineStats:
    """Totals since the engine was made, and what it holds now."""

    running_samples: int
    """Samples that hold a slot now."""
    waiting_samples: int
    """Samples submitted and not yet admitted."""
    sampled_tokens: int
    """Drawn here: what a resumed sample had is not counted again."""
    prefilled_tokens: int
    """Prompt tokens run through the model; a group's prompt counts once, however many samples share it. A resumed
    sample with tokens has a prefill of its own: prompt and these."""
    decode_steps: int
    admissions: int
    """Prefill batches."""
    weight_version: int | None
    """None before the first `load_weights`."""
    cache_bytes: int
    """Memory of the key/value cache."""


class Engine(Protocol):
    """The contract of every engine."""

    def submit(self, request: EngineRequest) -> None:
        """Queue a group; its samples come back from later `step` calls, each when it is done.

        Raises:
            UserError: the prompt is empty or does not fit the context, a token id is outside the vocabulary,
                a sampling parameter makes no sense, or a resumed sample cannot go on. The engine is then as it was
                before.
        """
        ...

    def abort(self, group_id: int) -> list[FinishedSample]:
        """End a group now: its unfinished samples as far as they got, reason `abort` (unknown id: none)."""
        ...

    def step(self) -> list[FinishedSample]:
        """One admission or one decode step, returning the samples it finished; nothing to do: an empty list.

        Raises:
            RuntimeError: no weights have been loaded.
        """
        ...

    @property
    def idle(self) -> bool:
        """Whether nothing is running or waiting."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    def load_weights(self, named: Mapping[str, torch.Tensor], version: int) -> None:
        """Sample every later token with these weights (copied; the tensors may be reused at once).

        Samples that are running go on: what they have sampled and cached stays as the older weights made it,
        and their next tokens carry the new version.

        Raises:
            UserError: a tensor is missing or has the wrong shape; the old weights then stay whole.
        """
        ...
