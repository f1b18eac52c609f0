"""The dock: columns held on a process between the actor that makes them and the actor that uses them.

Actors of one process share it, so data never rides in a message. On a generator it holds single rollouts by
id, on a learner rank whole batches by ticket. Thread-safe: every actor may run on a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from meshrl.handoff.schema import BY_NAME, BYTES_PER_TOKEN, DOCKED, check_columns


class DockFull(RuntimeError):
    """The dock's bytes are used up: rollouts are generated faster than they are released."""


class NotDocked(KeyError):
    """A rollout or a batch was asked for that is not held here."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Ticket:
    """Names a batch that lies in the learners' docks: what a controller passes on in place of data."""

    number: int
    """Unique in a run."""
    rollouts: int
    """Rollouts of the batch, over all data-parallel ranks."""
    response_tokens: int
    """Their response tokens. 0: nothing to train on."""
    microbatches: int
    """Micro-batches of each rank."""
    dropped: Mapping[int, str] = field(default_factory=dict, compare=False)
    """Rollouts that were left out, by id, and why: `too long` for a micro-batch, or their `generator died`."""


@dataclass(frozen=True)
class Microbatch:
    """The rows of one forward pass: a view of a `DockedBatch`."""

    positions: range
    """Positions into the batch's `rollout_ids`."""
    lengths: list[int]
    """Tokens of each rollout, prompt and response."""
    columns: dict[str, Tensor]
    """Per-token columns `[tokens of the micro-batch]`, rollouts end to end."""
    rollout_columns: dict[str, Tensor]
    """Per-rollout columns `[rollouts of the micro-batch]`, such as advantages."""

    def at(self, name: str, tokens: Tensor, rollout: Tensor) -> Tensor:
        """A column's values at some tokens, on their device.

        Args:
            tokens: int64 `[chosen]`: positions in the micro-batch.
            rollout: int64 `[chosen]`: which rollout of the micro-batch each belongs to.
        """
        if name in self.columns:
            return self.columns[name].to(tokens.device)[tokens]
        return self.rollout_columns[name].to(tokens.device)[rollout]


@dataclass(frozen=True)
class DockedBatch:
    """One learner rank's share of a batch. Ranks that differ only in tensor-parallel coordinate hold the same
    share."""

    rollout_ids: list[int]
    """In micro-batch order: each micro-batch is a run of neighbours."""
    lengths: list[int]
    """Tokens of each rollout, prompt and response."""
    columns: dict[str, Tensor]
    """Per-token columns of the schema, each flat `[tokens]`: the rollouts end to end."""
    rollout_columns: dict[str, Tensor]
    """Per-rollout columns, each `[rollouts]`, such as advantages."""
    microbatches: list[list[int]]
    """Positions into `rollout_ids`; as many on every rank, so some may be empty (collectives must stay in
    step)."""
    global_tokens: int
    """Response tokens of the batch over all data-parallel ranks: the denominator of a token mean. 0: nothing
    to train on."""
    global_rollouts: int
    """Rollouts of the batch over all data-parallel ranks."""

    @property
    def tokens(self) -> int:
        """Tokens held by this rank, prompts and responses."""
        return sum(self.lengths)

    def check(self, needed: Iterable[str]) -> None:
        """See that it has these columns.

        Raises:
            ValueError: one is missing; names all there are.
        """
        there = {*self.columns, *self.rollout_columns}
        missing = sorted(set(needed) - there)
        if missing:
            raise ValueError(
                f"the loss needs the column {missing[0]!r}, the batch has {', '.join(sorted(there))}: tell the "
                "handoff of the loss when connecting"
            )

    def rows(self) -> Iterator[Microbatch]:
        """The micro-batches as views, in order."""
        first = first_token = 0
        for positions in self.microbatches:
            lengths = self.lengths[first : first + len(positions)]
            last, last_token = first + len(positions), first_token + sum(lengths)
            yield Microbatch(
                range(first, last),
                lengths,
                {name: values[first_token:last_token] for name, values in self.columns.items()},
                {name: values[first:last] for name, values in self.rollout_columns.items()},
            )
            first, first_token = last, last_token


class Dock:
    """Holds columns until they are released."""

    def __init__(self, capacity_bytes: int = 4 * 2**30) -> None:
        self.capacity_bytes = capacity_bytes
        """Most bytes of rollout columns held at a time; a `put` beyond it is an error, never a silent
        loss."""
        self._lock = threading.Lock()
        self._rollouts: dict[int, dict[str, Tensor]] = {}
        self._batches: dict[Ticket | int, tuple[DockedBatch, Sequence[int] | None]] = {}
        self._rollout_columns: dict[Ticket | int, dict[str, Tensor]] = {}
        self._tokens = 0

    def put(self, rollout_id: int, columns: Mapping[str, Tensor]) -> None:
        """Hold a rollout's per-token columns, `[tokens]` each, as the schema declares them.

        Raises:
            ValueError: the columns are not those of the schema.
            DockFull: no room; the rollout is not held.
            ValueError: the id is already docked.
        """
        tokens = check_columns(rollout_id, columns)
        with self._lock:
            if rollout_id in self._rollouts:
                raise ValueError(f"rollout {rollout_id} is already docked")
            if (self._tokens + tokens) * BYTES_PER_TOKEN > self.capacity_bytes:
                raise DockFull(
                    f"rollout {rollout_id} of {tokens * BYTES_PER_TOKEN} bytes does not fit: "
                    f"{len(self._rollouts)} rollouts hold {self.bytes} of {self.capacity_bytes} bytes; "
                    "release trained rollouts, or allow fewer slots"
                )
            self._rollouts[rollout_id] = dict(columns)
            self._tokens += tokens

    def get(self, rollout_id: int) -> dict[str, Tensor]:
        """The columns of a rollout, which stay docked.

        Raises:
            NotDocked: no such rollout here.
        """
        with self._lock:
            if rollout_id not in self._rollouts:
                raise NotDocked(
                    f"rollout {rollout_id} is not docked here ({len(self._rollouts)} others are): it was "
                    "released, or another generator replica holds it"
                )
            return self._rollouts[rollout_id]

    def release(self, rollout_ids: Iterable[int]) -> int:
        """Let go of rollouts; the number that were held. Unknown ids are ignored: a release may be
        repeated."""
        with self._lock:
            gone = [self._rollouts.pop(i) for i in rollout_ids if i in self._rollouts]
            self._tokens -= sum(columns["token_ids"].numel() for columns in gone)
            return len(gone)

    def __len__(self) -> int:
        """Rollouts held."""
        return len(self._rollouts)

    @property
    def bytes(self) -> int:
        """Bytes of rollout columns held."""
        return self._tokens * BYTES_PER_TOKEN

    def put_batch(
        self, ticket: Ticket | int, batch: DockedBatch, positions: Sequence[int] | None = None
    ) -> None:
        """Hold a learner rank's share of a batch until `take_batch`.

        A batch that was put before and never taken (its step failed or was skipped) makes room: a learner trains
        on one batch at a time.

        Args:
            positions: where its rollouts stand in the whole batch; their per-rollout columns are then those of
                `put_rollout_columns`. None: the batch has its own.
        """
        with self._lock:
            self._batches = {ticket: (batch, positions)}

    def put_rollout_columns(self, ticket: Ticket | int, columns: Mapping[str, Tensor]) -> None:
        """Hold per-rollout columns of a whole batch, each `[rollouts of all ranks]`, before or after `put_batch`."""
        with self._lock:
            self._rollout_columns = {ticket: dict(columns)}

    def batch(self, ticket: Ticket | int) -> DockedBatch:
        """The rank's share of a batch, which stays here: for a reference model or a critic to look at.

        Raises:
            NotDocked: it has not arrived, or was taken.
        """
        with self._lock:
            return self._whole(ticket)

    def put_column(self, ticket: Ticket | int, name: str, values: Tensor) -> None:
        """Add a per-token column, `[tokens]` of this rank's share of a batch that has arrived.

        Raises:
            NotDocked: it has not, or was taken.
            ValueError: another shape, or not what the schema declares.
        """
        with self._lock:
            batch = self._whole(ticket)
            if values.shape != (batch.tokens,):
                raise ValueError(
                    f"column {name} is {list(values.shape)}, this rank's share of {ticket} has [{batch.tokens}] tokens"
                )
            declared = BY_NAME.get(name)
            if declared is not None and (declared.scope != "token" or declared.dtype != values.dtype):
                raise ValueError(
                    f"column {name} is declared as {declared.dtype} per {declared.scope}, not {values.dtype} per token"
                )
            batch.columns[name] = values

    def take_batch(self, ticket: Ticket | int) -> DockedBatch:
        """Hand out the batch and forget it.

        Raises:
            NotDocked: it has not arrived, or was taken before.
        """
        with self._lock:
            batch = self._whole(ticket)
            del self._batches[ticket]
            self._rollout_columns.pop(ticket, None)
            return batch

    def _whole(self, ticket: Ticket | int) -> DockedBatch:
        """The batch with its per-rollout columns."""
        batch, positions = self._batches.get(ticket, (None, None))
        if positions is not None:
            columns = self._rollout_columns.get(ticket)
            index = torch.tensor(positions, dtype=torch.int64)
            if batch is None or columns is None:
                batch = None
            else:
                own = {name: values[index] for name, values in columns.items()}
                batch = replace(batch, rollout_columns=own)
        if batch is None:
            raise NotDocked(
                f"{ticket} is not docked on this rank: await handoff(...) before the step, and use each ticket once"
            )
        return batch


def empty_columns(tokens: int) -> dict[str, Tensor]:
    """The columns that generators dock, of `tokens` positions, all padding."""
    return {column.name: torch.full((tokens,), column.padding, dtype=column.dtype) for column in DOCKED}


_dock = Dock()


def dock() -> Dock:
    """The dock of this process.

    Reached by a function, since an actor class defined in a notebook is pickled by value, with a copy of its
    globals.
    """
    return _dock
