"""The words of the trade, typed: prompt, sampling parameters, rollout, handle, group.

Two views of the same thing. A `Rollout` holds text and tokens and lives only on generator and reward
processes. A `RolloutHandle` holds what the controller may know: ids, lengths, versions, score.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

Split = Literal["train", "heldout"]
StopReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Prompt:
    """One problem of a task, as text."""

    index: int
    """Position in its split; with `split` it names the prompt for good."""
    split: Split
    text: str
    answer: str | None = None
    """The right answer where the task has one; reward functions read it."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the task knows (the dataset row, say)."""


@runtime_checkable
class Task(Protocol):
    """Where prompts come from. Cheap to pickle, deterministic: the same index is the same prompt in every process.

    The controller names prompts by index only; generators turn an index into text where they run.
    """

    @property
    def tokenizer(self) -> str:
        """Name of the tokenizer that the task is written for: `arithmetic`, `bytes`, or a directory."""
        ...

    @property
    def train_size(self) -> int | None:
        """Number of training prompts; None: endless (any index >= 0 is a prompt)."""
        ...

    @property
    def heldout_size(self) -> int: ...

    def prompt(self, split: Split, index: int) -> Prompt: ...

    def supervised(self, index: int) -> Prompt:
        """The index-th example of the warm-up (its `answer` is the target); may follow an easier curriculum."""
        ...


@dataclass(frozen=True)
class SamplingParams:
    """How responses are sampled."""

    temperature: float = 1.0
    """0: greedy; logprobs are then those of temperature 1."""
    top_p: float = 1.0
    """1: no nucleus cut."""
    top_k: int = 0
    """0: no cut."""
    max_tokens: int = 64
    """Most tokens of a response, the end token included."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; the end token of the tokenizer always does."""
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class GroupRequest:
    """Ask for one group: several responses to one prompt."""

    group_id: int
    split: Split
    prompt_index: int
    rollout_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    """One per sample, never shared between two samples of a run."""
    sampling: SamplingParams


@dataclass(frozen=True)
class Rollout:
    """A finished response with its prompt: what a reward function is given."""

    id: int
    prompt: Prompt
    response: str
    """Decoded response, without the end token."""
    response_token_ids: tuple[int, ...]
    stop_reason: StopReason


@dataclass(frozen=True)
class RolloutHandle:
    """What the controller knows of a rollout: no token, no logprob, no text."""

    id: int
    group_id: int
    replica: int
    """Generator replica whose dock holds the columns."""
    prompt_tokens: int
    response_tokens: int
    oldest_version: int
    """Weight version of the first response token."""
    newest_version: int
    """Weight version of the last response token."""
    stop_reason: StopReason
    seed: int
    reward: float | None
    """None where grading failed; `reward_error` then says why."""
    reward_error: str | None = None
    process_id: int = 0
    """Of the generator process that holds the columns: another one in its place does not. 0: not known."""

    @property
    def tokens(self) -> int:
        """Prompt and response tokens together."""
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True)
class RolloutGroup:
    """All samples of one prompt, finished and graded."""

    group_id: int
    prompt_index: int
    rollouts: tuple[RolloutHandle, ...]

    @property
    def rewards(self) -> tuple[float | None, ...]:
        return tuple(r.reward for r in self.rollouts)
