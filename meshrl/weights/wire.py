"""What every transport does: an owner offers the slots of its arena, a reader links to them and fetches.

A slot is a flat stretch of bytes; what a reader needs of it is fixed when the two are connected, so that
memory is registered and transfers are prepared once. Versions, leases and digests are not a transport's
business: it moves bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stretch:
    """Neighbouring bytes of a slot that the same readers take, all of them and nothing else."""

    start: int
    bytes: int


@dataclass(frozen=True)
class Piece:
    """Some values of a slot, and where a reader wants them."""

    start: int
    """Byte in the slot."""
    dtype: torch.dtype
    """Of the values as they lie in the slot, row-major."""
    landing: Tensor
    """Of their shape; with any strides and of any dtype: what differs is cast."""

    @property
    def bytes(self) -> int:
        """In the slot."""
        return self.landing.numel() * self.dtype.itemsize


class Offer(Protocol):
    """The owner's side: keeps the slots readable for as long as it lives."""

    @property
    def handle(self) -> Any:
        """All that a reader needs to link to them; can be pickled."""
        ...

    def close(self) -> None:
        """Let go of what was registered."""
        ...


class Link(Protocol):
    """The reader's side. After `begin` and `finish` every piece has landed; one transfer at a time."""

    def begin(self, slot: int) -> None:
        """Start to bring the pieces from this slot; returns at once."""
        ...

    def finish(self, deadline: float, check_owner: Callable[[], None]) -> None:
        """Wait until they have landed.

        Args:
            deadline: by `time.monotonic()`.
            check_owner: raises when the owner is gone; to be called while waiting.

        Raises:
            TransferFailed: it did not work, or not in time; the message names the owner.
        """
        ...

    def close(self) -> None:
        """Let go of what was registered."""
        ...


@dataclass(frozen=True)
class Part:
    """Neighbouring bytes of a slot and the memory, as contiguous, that they are brought to."""

    start: int
    into: Tensor
    """uint8 `[bytes]`."""


class Arrivals:
    """Where bytes arrive that come by a way that knows no strides and no dtypes.

    Pieces that lie in memory as they lie in the slot are brought in place; the others through scratch memory,
    from which `scatter` puts them where they belong.

    >>> landing = torch.zeros(2, 4)
    >>> arrivals = Arrivals([Piece(64, torch.float32, landing[:, :2])])
    >>> [(part.start, part.into.numel()) for part in arrivals.parts]
    [(64, 16)]
    >>> _ = arrivals.parts[0].into.view(torch.float32).copy_(torch.arange(4.0))
    >>> arrivals.scatter()
    >>> landing.tolist()
    [[0.0, 1.0, 0.0, 0.0], [2.0, 3.0, 0.0, 0.0]]
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.parts: list[Part] = []
        self._scattered: list[tuple[Tensor, Tensor]] = []
        for piece in sorted(pieces, key=lambda piece: piece.start):
            landing = piece.landing
            if landing.dtype == piece.dtype and landing.is_contiguous():
                into = landing.reshape(-1).view(torch.uint8)
            else:
                into = torch.zeros(piece.bytes, dtype=torch.uint8, device=landing.device)
                self._scattered.append((landing, into.view(piece.dtype).view(landing.shape)))
            self._append(piece.start, into)

    def scatter(self) -> None:
        """Once all parts have arrived: put those in scratch memory where they belong."""
        for landing, arrived in self._scattered:
            landing.copy_(arrived)

    def _append(self, start: int, into: Tensor) -> None:
        """Add a part, joined to the one before it where both continue it."""
        if self.parts:
            last = self.parts[-1]
            follows = last.start + last.into.numel() == start
            adjacent = last.into.data_ptr() + last.into.numel() == into.data_ptr()
            same_memory = last.into.untyped_storage().data_ptr() == into.untyped_storage().data_ptr()
            if follows and adjacent and same_memory:
                joined = last.into.as_strided((last.into.numel() + into.numel(),), (1,))
                self.parts[-1] = Part(last.start, joined)
                return
        self.parts.append(Part(start, into))
