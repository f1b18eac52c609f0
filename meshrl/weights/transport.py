"""Ways for weights to travel: what works here, and which one is taken."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from meshrl.weights import memfd
from meshrl.weights.arena import ArenaAddress, Reader, Writer
from meshrl.weights.errors import WeightsError
from meshrl.weights.layout import Layout


@dataclass(frozen=True)
class TransportStatus:
    """One way, and whether meshrl can take it on this machine."""

    name: str
    available: bool
    """Whether meshrl can send weights this way, here and now."""
    reason: str


def available_transports() -> list[TransportStatus]:
    """Every way that meshrl knows of, the preferred one first. Probes only; starts nothing."""
    return [
        TransportStatus(memfd.NAME, *memfd.available()),
        TransportStatus("nixl", False, _nixl()),
        TransportStatus("rdma", False, _rdma()),
    ]


def choose_transport() -> str:
    """Name of the first way that is available.

    Raises:
        WeightsError: there is none.
    """
    statuses = available_transports()
    for status in statuses:
        if status.available:
            return status.name
    reasons = "; ".join(f"{status.name}: {status.reason}" for status in statuses)
    raise WeightsError(f"no way for weights to travel on this machine: {reasons}")


def make_writer(transport: str, layout: Layout) -> Writer:
    """The arena of this rank.

    Args:
        layout: of this rank alone.

    Raises:
        WeightsError: unknown transport, or not enough memory.
    """
    return _entry(_WRITERS, transport)(layout)


def open_reader(address: ArenaAddress, layout: Layout, rank: int) -> Reader:
    """The arena at this address, which is that of `rank` in `layout`.

    Raises:
        ArenaUnreachable: it cannot be opened from here.
    """
    return _entry(_READERS, address.transport)(address, layout, rank)


T = TypeVar("T")

_WRITERS: dict[str, Callable[[Layout], Writer]] = {memfd.NAME: memfd.MemfdWriter}
_READERS: dict[str, Callable[[ArenaAddress, Layout, int], Reader]] = {memfd.NAME: memfd.MemfdReader}


def _entry(table: dict[str, T], transport: str) -> T:
    if transport not in table:
        raise WeightsError(f"no transport {transport!r}; there is {', '.join(table)}")
    return table[transport]


def _nixl() -> str:
    if importlib.util.find_spec("nixl") or importlib.util.find_spec("nixl_cu12"):
        return "installed, but meshrl does not send weights through it yet"
    return "not installed, and meshrl does not send weights through it yet"


def _rdma() -> str:
    devices = Path("/dev/infiniband")
    found = "ibverbs devices found" if devices.is_dir() and any(devices.iterdir()) else "no ibverbs device"
    return f"{found}; meshrl does not send weights through Monarch RDMA yet"
