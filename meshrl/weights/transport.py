"""Ways for weights to travel: what works here, and in which order they are tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from meshrl.weights import memfd, nixl, rdma, tcp
from meshrl.weights.errors import TransportUnavailable
from meshrl.weights.host import HostProcess
from meshrl.weights.memfd import MemoryFile
from meshrl.weights.service import ServiceAddress
from meshrl.weights.wire import Link, Offer, Piece, Stretch

Transport = Literal["auto", "memfd", "nixl", "rdma", "tcp"]

IN_ORDER = (memfd.NAME, nixl.NAME, rdma.NAME, tcp.NAME)
"""The preferred one first."""

_AVAILABLE: dict[str, Callable[[], tuple[bool, str]]] = {
    memfd.NAME: memfd.available,
    nixl.NAME: nixl.available,
    rdma.NAME: rdma.available,
    tcp.NAME: tcp.available,
}
_LINKS: dict[str, Callable[[Any, HostProcess, Sequence[Piece]], Link]] = {
    memfd.NAME: memfd.MemfdLink,
    nixl.NAME: nixl.NixlLink,
    rdma.NAME: rdma.RdmaLink,
    tcp.NAME: tcp.TcpLink,
}


@dataclass(frozen=True)
class TransportStatus:
    """One way, and whether it can be taken on this machine."""

    name: str
    available: bool
    reason: str


def available_transports() -> list[TransportStatus]:
    """Every way that there is, the preferred one first. Probes only; starts nothing."""
    return [TransportStatus(name, *_AVAILABLE[name]()) for name in IN_ORDER]


def candidates(wanted: Transport) -> tuple[str, ...]:
    """What to try, in order: the one that is wanted, or all.

    >>> candidates("nixl"), candidates("auto")
    (('nixl',), ('memfd', 'nixl', 'rdma', 'tcp'))
    """
    return IN_ORDER if wanted == "auto" else (wanted,)


def make_offer(
    transport: str,
    slots: Sequence[Tensor],
    files: Sequence[MemoryFile] | None,
    stretches: Sequence[Stretch],
    service: ServiceAddress,
) -> Offer:
    """Let these slots be read.

    Args:
        slots: uint8 `[bytes]` each.
        files: the memory files that they are; None where they are other memory.

    Raises:
        TransportUnavailable: not here, or not these slots.
    """
    works, reason = _AVAILABLE[transport]()
    if not works:
        raise TransportUnavailable(f"{transport}: {reason}")
    if transport == memfd.NAME:
        if files is None:
            raise TransportUnavailable("memfd: weights are published on a GPU, whose memory is not a file")
        return memfd.MemfdOffer(files)
    if transport == nixl.NAME:
        return nixl.NixlOffer(slots, stretches)
    if transport == rdma.NAME:
        return rdma.RdmaOffer(slots, stretches)
    return tcp.TcpOffer(service)


def make_link(transport: str, handle: Any, owner: HostProcess, pieces: Sequence[Piece]) -> Link:
    """Make ready to read these pieces.

    Raises:
        TransportUnavailable: not here.
        ArenaUnreachable, TransferFailed: not from that owner.
    """
    works, reason = _AVAILABLE[transport]()
    if not works:
        raise TransportUnavailable(f"{transport}: {reason}")
    return _LINKS[transport](handle, owner, pieces)
