"""The columns of a rollout, declared once: dock, wire and learner read this table.

A new per-token column is one more line of `COLUMNS` and a producer that docks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Column:
    """One value per token, or one per rollout, under one name."""

    name: str
    dtype: torch.dtype
    scope: Literal["token", "rollout"]
    """`token`: `[tokens]` over prompt and response; `rollout`: one value."""
    producer: Literal["generator", "program"]
    """Who makes it: the generator docks it when a rollout is finished, or the program computes it for a
    batch."""
    padding: int | float | bool
    """Value at prompt positions, and wherever a consumer pads."""

    @property
    def bytes(self) -> int:
        """Bytes of one value."""
        return self.dtype.itemsize


COLUMNS: tuple[Column, ...] = (
    Column("token_ids", torch.int32, "token", "generator", padding=0),
    Column("response_mask", torch.bool, "token", "generator", padding=False),
    Column("sampler_logprobs", torch.float32, "token", "generator", padding=0.0),
    Column("weight_version", torch.int32, "token", "generator", padding=-1),
    Column("advantages", torch.float32, "rollout", "program", padding=0.0),
)
"""`token_ids` holds the prompt, then the sampled ids verbatim (end token included); the others hold `padding`
at prompt positions. `response_mask` is true where a token was sampled, `sampler_logprobs` is in nats under
the sampling distribution, `weight_version` names the weights that sampled the token."""

DOCKED: tuple[Column, ...] = tuple(
    sorted((c for c in COLUMNS if c.scope == "token"), key=lambda column: -column.bytes)
)
"""The per-token columns, wide ones first: in this order they lie in one buffer with every column aligned to
its dtype."""

BYTES_PER_TOKEN: int = sum(column.bytes for column in DOCKED)


def check_columns(rollout_id: int, columns: Mapping[str, Tensor]) -> int:
    """The number of tokens of a rollout whose columns are right.

    Raises:
        ValueError: a column is missing, unknown, of another dtype or not `[tokens]` like the others.
    """
    wanted = {column.name for column in DOCKED}
    if set(columns) != wanted:
        raise ValueError(
            f"rollout {rollout_id}: columns missing {_names(wanted - set(columns))}, unknown "
            f"{_names(set(columns) - wanted)}; meshrl.handoff.schema declares them"
        )
    tokens = columns["token_ids"].numel()
    for column in DOCKED:
        value = columns[column.name]
        if value.dtype != column.dtype or value.shape != (tokens,):
            raise ValueError(
                f"rollout {rollout_id}: column {column.name} is {value.dtype} {list(value.shape)}, "
                f"wanted {column.dtype} [{tokens}]"
            )
    return tokens


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
