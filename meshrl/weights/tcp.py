"""Weights as plain messages over the connection of the leases: slow, simple, there wherever two hosts can
connect. The other transports are tested against it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from meshrl.weights.errors import ArenaUnreachable, TransferFailed
from meshrl.weights.host import HostProcess
from meshrl.weights.service import Caller, ServiceAddress
from meshrl.weights.wire import Arrivals, Piece

NAME = "tcp"
MESSAGE_BYTES = 1 << 22
"""Within one message silence is noticed, the deadline is looked at between two."""


class TcpOffer:
    """The service that hands out leases sends bytes too."""

    def __init__(self, service: ServiceAddress) -> None:
        self.handle = service

    def close(self) -> None:
        pass


class TcpLink:
    """Asks for each part in messages of limited size, and waits for one after the other."""

    def __init__(self, handle: ServiceAddress, owner: HostProcess, pieces: Sequence[Piece]) -> None:
        """
        Raises:
            ArenaUnreachable: the owner cannot be called.
        """
        self._handle, self._owner = handle, owner
        self._arrivals = Arrivals(pieces)
        self._caller: Caller | None = Caller(handle)
        self._slot = 0

    def begin(self, slot: int) -> None:
        self._slot = slot

    def finish(self, deadline: float, check_owner: Callable[[], None]) -> None:
        try:
            self._caller = self._caller or Caller(self._handle)
            for part in self._arrivals.parts:
                for begin in range(0, part.into.numel(), MESSAGE_BYTES):
                    into = part.into[begin : begin + MESSAGE_BYTES]
                    self._caller.send("read", self._slot, part.start + begin, into.numel())
                    landed = into if into.device.type == "cpu" else torch.empty(into.shape, dtype=into.dtype)
                    self._caller.receive_into(landed.numpy().data, deadline)
                    if landed is not into:
                        into.copy_(landed)
        except ArenaUnreachable as error:
            # An answer may still be on its way: the next fetch starts on a connection of its own.
            self.close()
            late = "not in time" if time.monotonic() >= deadline else "it did not come across"
            raise TransferFailed(f"weights of learner {self._owner} by tcp: {late}: {error}") from None
        self._arrivals.scatter()

    def close(self) -> None:
        if self._caller is not None:
            self._caller.close()
        self._caller = None


def available() -> tuple[bool, str]:
    """It always is."""
    return True, "plain messages; slow, for where nothing else works"
