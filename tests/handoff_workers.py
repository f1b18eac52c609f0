"""Workers for tests of the handoff: one fills docks, one redeems tickets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshrl.handoff.dock import DockedBatch, dock
from meshrl.rollout import RolloutGroup, RolloutHandle
from meshrl.worker import Worker, endpoint

PROMPT_TOKENS = 3


class Filler(Worker):
    """Docks columns that can be told apart: every value is made from the rollout's id and the token's position."""

    vocabulary: int | None = None
    """Token ids are below it; None: any."""

    @endpoint
    async def fill(self, handles: Sequence[RolloutHandle]) -> None:
        for handle in handles:
            if handle.replica == self.replica:
                made = columns(handle.id, handle.tokens)
                if self.vocabulary is not None:
                    made["token_ids"] %= self.vocabulary
                dock().put(handle.id, made)

    @endpoint
    async def release(self, rollout_ids: Sequence[int]) -> int:
        return dock().release(rollout_ids)


class Taker(Worker):
    @endpoint
    async def take(self, ticket: object) -> DockedBatch:
        return dock().take_batch(ticket)  # pyright: ignore[reportArgumentType]


def columns(rollout_id: int, tokens: int) -> dict[str, torch.Tensor]:
    position = torch.arange(tokens)
    sampled = position >= PROMPT_TOKENS
    return {
        "token_ids": (1000 * rollout_id + position).to(torch.int32),
        "response_mask": sampled,
        "sampler_logprobs": torch.where(sampled, -rollout_id - position / 1000, 0.0),
        "weight_version": torch.where(sampled, rollout_id % 5, -1).to(torch.int32),
    }


def groups_of(
    sizes: Sequence[int], replicas: int, *, first_id: int = 0, response_tokens: int = 4
) -> list[RolloutGroup]:
    """Groups of these sizes, dealt to replicas in turn; rollout i has `response_tokens` + i % 3 response tokens."""
    groups, rollout_id = [], first_id
    for number, size in enumerate(sizes):
        handles = []
        for sample in range(size):
            handles.append(
                RolloutHandle(
                    id=rollout_id,
                    group_id=100 + number,
                    replica=number % replicas,
                    prompt_tokens=PROMPT_TOKENS,
                    response_tokens=response_tokens + rollout_id % 3,
                    oldest_version=0,
                    newest_version=0,
                    stop_reason="stop",
                    seed=rollout_id,
                    reward=float((number + sample) % 3 == 0),
                )
            )
            rollout_id += 1
        groups.append(RolloutGroup(100 + number, number, tuple(handles)))
    return groups
