"""Groups on their way out of an engine: from samples to docked columns, texts to grade and handles."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from meshrl.actors.engines.engine import EngineRequest, FinishedSample
from meshrl.actors.recorder import RolloutRecord
from meshrl.actors.tokenizer import Tokenizer
from meshrl.handoff.dock import dock
from meshrl.rewards import Grade
from meshrl.rollout import GroupRequest, Prompt, Rollout, RolloutGroup, RolloutHandle


@dataclass
class GroupInProgress:
    """A group on its way through the engine."""

    request: GroupRequest
    prompt: Prompt
    prompt_ids: list[int]
    samples: list[FinishedSample | None]
    interrupted: dict[int, FinishedSample] = field(default_factory=dict)
    """Samples to go on with, by position."""

    def engine_request(self) -> EngineRequest:
        """What the engine is still to do."""
        missing = tuple(index for index, sample in enumerate(self.samples) if sample is None)
        request = self.request
        return EngineRequest(
            request.group_id,
            self.prompt_ids,
            request.seeds,
            request.sampling,
            dict(self.interrupted),
            missing,
        )

    @property
    def complete(self) -> bool:
        return all(sample is not None for sample in self.samples)

    @property
    def finished(self) -> list[FinishedSample]:
        """The samples that have come so far."""
        return [sample for sample in self.samples if sample is not None]


def dock_groups(groups: Sequence[GroupInProgress], tokenizer: Tokenizer) -> list[list[Rollout]]:
    """Dock the columns of complete groups, over prompt and response, `[tokens]` each.

    Columns are made for all rollouts at once and cut apart: one at a time would cost as much as decoding.

    Returns:
        the texts for the reward, by group.
    """
    tokens, logprobs, versions, lengths = [], [], [], []
    for group in groups:
        prompt = torch.tensor(group.prompt_ids, dtype=torch.int32)
        zeros, unsampled = torch.zeros(len(prompt)), torch.full_like(prompt, -1)
        for sample in group.finished:
            tokens += [prompt, sample.token_ids]
            logprobs += [zeros, sample.logprobs]
            versions += [unsampled, sample.versions]
            lengths.append(len(prompt) + len(sample.token_ids))
    version = torch.cat(versions)
    columns = {
        "token_ids": torch.cat(tokens),
        "response_mask": version >= 0,
        "sampler_logprobs": torch.cat(logprobs),
        "weight_version": version,
    }
    parts = zip(*(column.split(lengths) for column in columns.values()), strict=True)
    docked = []
    for group in groups:
        rollouts = []
        for rollout_id, sample in zip(group.request.rollout_ids, group.finished, strict=True):
            dock().put(rollout_id, dict(zip(columns, next(parts), strict=True)))
            ids = sample.token_ids.tolist()
            text = tokenizer.decode(ids[:-1] if ids[-1:] == [tokenizer.end_id] else ids)
            rollouts.append(Rollout(rollout_id, group.prompt, text, tuple(ids), sample.stop_reason))
        docked.append(rollouts)
    return docked


def graded_group(
    group: GroupInProgress, rollouts: Sequence[Rollout], grades: Sequence[Grade], replica: int
) -> tuple[RolloutGroup, list[RolloutRecord]]:
    """The handles for the controller, and what is recorded of each rollout."""
    records = []
    for rollout, seed, sample, grade in zip(
        rollouts, group.request.seeds, group.finished, grades, strict=True
    ):
        versions = sample.versions.tolist()
        handle = RolloutHandle(
            id=rollout.id,
            group_id=group.request.group_id,
            replica=replica,
            prompt_tokens=len(group.prompt_ids),
            response_tokens=len(versions),
            oldest_version=min(versions),
            newest_version=max(versions),
            stop_reason=sample.stop_reason,
            seed=seed,
            reward=grade.reward,
            reward_error=grade.error,
            process_id=os.getpid(),
        )
        records.append(
            RolloutRecord(
                handle=handle,
                prompt=group.prompt,
                response=rollout.response,
                token_ids=list(rollout.response_token_ids),
                sampler_logprobs=sample.logprobs.tolist(),
                versions=versions,
            )
        )
    handles = tuple(record.handle for record in records)
    return RolloutGroup(group.request.group_id, group.request.prompt_index, handles), records
