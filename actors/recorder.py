"""Rollouts on disk: one Parquet file per flush and replica, so that a killed run keeps all that it had flushed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet

from meshrl.rollout import Prompt, RolloutHandle

SCHEMA = arrow.schema(
    [
        ("step", arrow.int64()),
        ("rollout_id", arrow.int64()),
        ("group_id", arrow.int64()),
        ("prompt_index", arrow.int64()),
        ("prompt", arrow.string()),
        ("answer", arrow.string()),
        ("response", arrow.string()),
        ("token_ids", arrow.list_(arrow.int32())),
        ("sampler_logprobs", arrow.list_(arrow.float32())),
        ("weight_versions", arrow.list_(arrow.int32())),
        ("reward", arrow.float64()),
        ("reward_error", arrow.string()),
        ("advantage", arrow.float64()),
        ("stop_reason", arrow.string()),
        ("seed", arrow.int64()),
    ]
)
"""Token columns cover the response. `advantage` is null for a rollout that was dropped, not trained on."""


@dataclass(frozen=True)
class RolloutRecord:
    """All that is known of one rollout."""

    handle: RolloutHandle
    prompt: Prompt
    response: str
    token_ids: list[int]
    sampler_logprobs: list[float]
    versions: list[int]

    def line(self) -> str:
        """One readable line: `47+85= 231$  reward 1`."""
        answer = "" if self.prompt.answer is None else f"  (answer {self.prompt.answer})"
        grade = (
            f"reward {self.handle.reward:g}" if self.handle.reward is not None else self.handle.reward_error
        )
        return f"{self.prompt.text} {self.response}  {grade}{answer}"

    def row(self, step: int, advantage: float | None) -> dict[str, Any]:
        return {
            "step": step,
            "rollout_id": self.handle.id,
            "group_id": self.handle.group_id,
            "prompt_index": self.prompt.index,
            "prompt": self.prompt.text,
            "answer": self.prompt.answer,
            "response": self.response,
            "token_ids": self.token_ids,
            "sampler_logprobs": self.sampler_logprobs,
            "weight_versions": self.versions,
            "reward": self.handle.reward,
            "reward_error": self.handle.reward_error,
            "advantage": advantage,
            "stop_reason": self.handle.stop_reason,
            "seed": self.handle.seed,
        }


class RolloutRecorder:
    """Collects rows and writes `generator-<replica>-part-<number>.parquet` files."""

    def __init__(self, directory: Path, replica: int, rows_per_file: int = 4096) -> None:
        self._directory = directory
        self._replica = replica
        self._rows_per_file = rows_per_file
        self._rows: list[dict[str, Any]] = []
        self._parts = 0

    def add(self, records: Sequence[RolloutRecord], advantages: Mapping[int, float], step: int) -> None:
        """Take these rollouts of `step`; written when a file's worth has come together."""
        self._rows += [record.row(step, advantages.get(record.handle.id)) for record in records]
        if len(self._rows) >= self._rows_per_file:
            self.flush()

    def flush(self) -> None:
        """Write the rows collected so far; nothing where there are none."""
        if not self._rows:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        name = f"generator-{self._replica}-part-{self._parts:04d}.parquet"
        temporary = self._directory / f".{name}"
        parquet.write_table(arrow.Table.from_pylist(self._rows, schema=SCHEMA), temporary)
        temporary.rename(self._directory / name)
        self._rows = []
        self._parts += 1
