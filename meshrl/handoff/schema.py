"""The columns of a rollout, declared once: dock, wire and learner read this table.

A new column is one more line of `COLUMNS` and a producer; a loss that names it in its `columns` finds it in its
inputs. A program may also declare one of its own, without touching this file: `Handoff.connect(provides=[Column(…)])`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from meshrl.errors import UserError

Producer = Literal["generator", "reward", "program", "reference", "critic"]


@dataclass(frozen=True)
class Column:
    """One value per token, or one per rollout, under one name."""

    name: str
    dtype: torch.dtype
    scope: Literal["token", "rollout"]
    """`token`: `[tokens]` over prompt and response; `rollout`: one value."""
    producer: Producer = "program"
    """Who makes it: the generator docks it when a rollout is finished, the reward mesh grades, the program computes it
    for a batch, a reference model or a critic adds it on the learner ranks."""
    padding: int | float | bool = 0
    """Value at prompt positions, and wherever a consumer pads."""

    @property
    def bytes(self) -> int:
        """Bytes of one value."""
        return self.dtype.itemsize

    def values(self, plain: Sequence[float]) -> Tensor:
        """Plain values as a tensor of its dtype.

        Raises:
            ValueError: they are no numbers, or the dtype cannot hold one.
        """
        try:
            made = torch.tensor(plain, dtype=self.dtype)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{self.name}: {error}") from None
        if not self.dtype.is_floating_point:
            for value, held in zip(plain, made.tolist(), strict=True):
                if value != held:
                    raise ValueError(f"{self.name} holds {self.dtype}, which cannot be {value}")
        return made


COLUMNS: tuple[Column, ...] = (
    Column("token_ids", torch.int32, "token", "generator", padding=0),
    Column("response_mask", torch.bool, "token", "generator", padding=False),
    Column("sampler_logprobs", torch.float32, "token", "generator", padding=0.0),
    Column("weight_version", torch.int32, "token", "generator", padding=-1),
    Column("rewards", torch.float32, "rollout", "reward", padding=0.0),
    Column("advantages", torch.float32, "rollout", "program", padding=0.0),
    Column("reference_logprobs", torch.float32, "token", "reference", padding=0.0),
    Column("values", torch.float32, "token", "critic", padding=0.0),
)
"""`token_ids` holds the prompt, then the sampled ids verbatim (end token included); the other token columns hold
`padding` at prompt positions. `response_mask` is true where a token was sampled, `sampler_logprobs` is in nats under
the sampling distribution, `weight_version` names the weights that sampled the token, `values` is the critic's estimate
of the return from the token on."""

BY_NAME: dict[str, Column] = {column.name: column for column in COLUMNS}

DOCKED: tuple[Column, ...] = tuple(
    sorted((c for c in COLUMNS if c.producer == "generator"), key=lambda column: -column.bytes)
)
"""The columns that generators dock, all of them per token, wide ones first: in this order they lie in one buffer with
every column aligned to its dtype."""

BYTES_PER_TOKEN: int = sum(column.bytes for column in DOCKED)


def declared(provides: Sequence[str | Column]) -> list[Column]:
    """Columns by name, or as declared on the spot.

    Raises:
        UserError: a name that the schema does not have, or one that somebody else makes, or twice.
    """
    if isinstance(provides, str):
        raise UserError(f"provides is {provides!r}: wanted a list of columns, [{provides!r}]")
    unknown = [name for name in provides if isinstance(name, str) and name not in BY_NAME]
    if unknown:
        raise UserError(
            f"there is no column {unknown[0]!r}; the schema has {', '.join(sorted(BY_NAME))}. Declare your own: "
            f"Column({unknown[0]!r}, torch.float32, 'rollout')"
        )
    columns = [BY_NAME[column] if isinstance(column, str) else column for column in provides]
    names = [column.name for column in columns]
    for name in names:
        known = BY_NAME.get(name)
        if known is not None and known.producer in ("generator", "reward"):
            raise UserError(
                f"the column {name!r} is made by the {known.producer}: a program cannot provide it"
            )
        if names.count(name) > 1:
            raise UserError(f"the column {name!r} is provided twice")
    return columns


def columns_of(loss: object) -> tuple[str, ...]:
    """The columns that a loss asks for; of None: none.

    Raises:
        UserError: it does not say, or not as a tuple.
    """
    if loss is None:
        return ()
    columns = getattr(loss, "columns", None)
    if not isinstance(columns, tuple | list):
        raise UserError(
            f"the loss {loss} must say which columns it reads: `columns = ('sampler_logprobs', 'advantages')`, or "
            f"`columns = ()`; it says {columns!r}"
        )
    return tuple(columns)


def check_needs(loss: object, needed: Iterable[str], provided: Iterable[Column]) -> None:
    """See that every column that a loss needs is made by somebody.

    Args:
        provided: what the program makes besides what generators dock and the reward mesh grades.

    Raises:
        UserError: one is not; names who would make it, and what there is.
    """
    made = {c.name for c in COLUMNS if c.producer in ("generator", "reward")} | {c.name for c in provided}
    for name in needed:
        if name in made:
            continue
        known = BY_NAME.get(name)
        who = "no column of that name is declared" if known is None else f"made by a {known.producer}"
        raise UserError(
            f"{loss} needs the column {name!r} ({who}), which nothing in this program makes; there are "
            f"{_names(made)}. Declare it in `provides` of the handoff and give it there, or take another loss"
        )


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
