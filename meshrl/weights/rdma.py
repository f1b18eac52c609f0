"""Slots read through Monarch's `RDMABuffer`: ibverbs where there is a device, else Monarch's own fallback over TCP.

A buffer can be read only whole, so there is one for each stretch of each slot: with packed cells that is one
for each group of readers. Offers and links must be made, and used, within an actor of Monarch.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from meshrl.weights.errors import TransferFailed, TransportUnavailable
from meshrl.weights.host import HostProcess
from meshrl.weights.wire import Arrivals, Piece, Stretch

NAME = "rdma"
_POLL_SECONDS = 0.05
"""How often to see whether the owner is still there."""
_LATE_SECONDS = 1.0
_FAST_FALLBACK: dict[str, Any] = {
    "rdma_tcp_fallback_parallelism": 2,
    "rdma_max_chunk_size_mb": 4,
    "message_ack_every_n_messages": 1,
}
"""Measured on one host: 1.1 to 1.8 GB/s with these, 0.5 without. Calls of actors take as long as before."""
_LONGEST_SECONDS = 3600
"""Monarch's own limit of a read; ours is the deadline of each fetch."""


@dataclass(frozen=True)
class RdmaHandle:
    """Buffers of the owner."""

    stretches: tuple[Stretch, ...]
    buffers: tuple[tuple[Any, ...], ...]
    """For each slot, one `RDMABuffer` a stretch."""


class RdmaOffer:
    """One registered buffer for each stretch of each slot."""

    def __init__(self, slots: Sequence[Tensor], stretches: Sequence[Stretch]) -> None:
        """
        Raises:
            TransportUnavailable: Monarch registers no memory here.
        """
        self._slots = slots  # registered memory must not move
        buffer = _buffers()
        try:
            made = tuple(tuple(buffer(_bytes(slot, stretch)) for stretch in stretches) for slot in slots)
        except Exception as error:
            raise TransportUnavailable(f"Monarch does not register the slots: {error}") from None
        self.handle = RdmaHandle(tuple(stretches), made)

    def close(self) -> None:
        for buffers in self.handle.buffers:
            for buffer in buffers:
                buffer.drop()
        self.handle = RdmaHandle((), ())


class RdmaLink:
    """Reads whole stretches: in place where they lie in memory as in the slot, else through scratch memory."""

    def __init__(self, handle: RdmaHandle, owner: HostProcess, pieces: Sequence[Piece]) -> None:
        _buffers()
        self._owner = owner
        self._arrivals: list[Arrivals] = []
        self._into: list[tuple[int, Tensor]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        for number, stretch in enumerate(handle.stretches):
            within = [piece for piece in pieces if 0 <= piece.start - stretch.start < stretch.bytes]
            if not within:
                continue
            arrivals = Arrivals(within)  # of one stretch: what goes over its end is another buffer's
            self._arrivals.append(arrivals)
            parts = arrivals.parts
            if parts[0].into.numel() == stretch.bytes:
                self._into.append((number, parts[0].into))
                continue
            scratch = torch.zeros(stretch.bytes, dtype=torch.uint8, device=parts[0].into.device)
            self._into.append((number, scratch))
            for part in parts:
                start = part.start - stretch.start
                self._copies.append((part.into, scratch[start : start + part.into.numel()]))
        self._buffers = handle.buffers
        self._reading: Any = None

    def begin(self, slot: int) -> None:
        from monarch.rdma import RDMAAction

        self._wait_for_late_read()
        action = RDMAAction()
        for number, into in self._into:
            action.read_remote(into, self._buffers[slot][number])
        self._reading = action.submit(timeout=_LONGEST_SECONDS)

    def finish(self, deadline: float, check_owner: Callable[[], None]) -> None:
        while True:
            try:
                self._reading.get(timeout=min(max(deadline - time.monotonic(), 0.001), _POLL_SECONDS))
                break
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise self._failed("not in time") from None
                check_owner()
            except Exception as error:
                self._reading = None
                raise self._failed(" ".join(str(error).split()) or repr(error)) from None
        self._reading = None
        for into, arrived in self._copies:
            into.copy_(arrived)
        for arrivals in self._arrivals:
            arrivals.scatter()

    def close(self) -> None:
        self._reading = None

    def _wait_for_late_read(self) -> None:
        """The bytes of a read that was given up still land when they come: after those of the next, were it
        begun."""
        reading, self._reading = self._reading, None
        if reading is None:
            return
        try:
            reading.get(timeout=_LATE_SECONDS)
        except TimeoutError:
            self._reading = reading
            raise self._failed("the read before has not ended yet") from None
        except Exception:  # it ended
            pass

    def _failed(self, why: str) -> TransferFailed:
        return TransferFailed(f"weights of learner {self._owner} by Monarch RDMA: {why}")


def available() -> tuple[bool, str]:
    """Whether Monarch reads memory of other processes here, and by what."""
    try:
        from monarch.rdma import get_rdma_backend
    except ImportError as error:
        return False, f"Monarch does not import: {error}"
    backend = get_rdma_backend()
    if backend == "none":
        return False, "no ibverbs device, and Monarch's TCP fallback is switched off"
    return True, "ibverbs" if backend == "ibverbs" else "Monarch's TCP fallback: no ibverbs device"


@cache
def _buffers() -> Any:
    """The class of buffers, with Monarch set up for it; it reads its settings when the first buffer is made."""
    import monarch
    import monarch.rdma

    if monarch.rdma.get_rdma_backend() == "tcp":
        # The fallback is reported by `available`, once.
        warnings.simplefilter("ignore", monarch.rdma.RDMATcpFallbackWarning)
        if "MONARCH_RDMA_TCP_FALLBACK_PARALLELISM" not in os.environ:
            monarch.configure(**_FAST_FALLBACK)
    return monarch.rdma.RDMABuffer


def _bytes(slot: Tensor, stretch: Stretch) -> Tensor:
    return slot[stretch.start : stretch.start + stretch.bytes]
