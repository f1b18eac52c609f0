"""Double-buffered memory that holds published versions: what a half contains, whatever memory it is made of.

A half is a header followed by the boxes of one rank. The header is the manifest: which arena, which boxes,
which version, the digest of each box, and a seal over all of it. A writer withdraws the version first and
writes the new one last, so a version is there whole or not at all; the seal tells a manifest that was torn
from one that was committed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor

from meshrl.weights.errors import DigestMismatch, LayoutError, VersionUnavailable
from meshrl.weights.layout import Layout, local

NO_VERSION = -1
_PAGE = 4096
_WORDS_BEFORE_DIGESTS = 4
_TOKEN, _FINGERPRINT, _VERSION, _SEAL = range(_WORDS_BEFORE_DIGESTS)


@dataclass(frozen=True)
class HostProcess:
    """A process and the host it runs on."""

    host: str
    boot: str
    """Differs between two boots of a host and between two hosts of one name."""
    pid: int

    @classmethod
    def current(cls) -> HostProcess:
        boot = Path("/proc/sys/kernel/random/boot_id")
        return cls(socket.gethostname(), boot.read_text().strip() if boot.exists() else "", os.getpid())

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class ArenaAddress:
    """All that a reader needs to open an arena."""

    transport: str
    owner: HostProcess
    token: int
    """Random number of the arena; whoever opens another arena by mistake sees it."""
    handles: tuple[int, ...]
    """One a half; what it means is the transport's business."""
    half_bytes: int


def header_bytes(boxes: int) -> int:
    """Bytes before the first box: the words of the manifest, rounded up to whole pages."""
    return -(-8 * (_WORDS_BEFORE_DIGESTS + boxes) // _PAGE) * _PAGE


def half_bytes(layout: Layout, rank: int) -> int:
    return header_bytes(len(layout.ranks[rank])) + layout.positions(rank)[1]


def digest(tensor: Tensor) -> int:
    """xxh3 of the elements of a contiguous tensor (64 bits)."""
    flat = tensor.reshape(-1)
    return xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


class Half:
    """One half of an arena, mapped into this process: its manifest and its boxes."""

    def __init__(self, memory: Tensor, layout: Layout, rank: int) -> None:
        """
        Args:
            memory: the half, uint8 `[half_bytes]`, shared with other processes.
            layout: of the learner; `rank` of it lies here.
        """
        boxes = len(layout.ranks[rank])
        start = header_bytes(boxes)
        self._words = memory[:start].view(torch.int64)[: _WORDS_BEFORE_DIGESTS + boxes].numpy()
        self._digests = self._words[_WORDS_BEFORE_DIGESTS:].view(np.uint64)
        self.storage = memory[start:]
        self.boxes = layout.views(rank, self.storage)
        """The boxes as tensors, in the layout's order."""
        self._names = [box.parameter for box in layout.ranks[rank]]
        self._fingerprint = layout.fingerprint(rank)

    @property
    def version(self) -> int:
        """Version that is committed here; `NO_VERSION` while one is being written, and before the first."""
        return int(self._words[_VERSION])

    def found(self, token: int) -> None:
        """Begin an empty half."""
        self._words[_TOKEN], self._words[_FINGERPRINT] = token, self._fingerprint
        self._words[_VERSION] = NO_VERSION

    def belongs_to(self, token: int) -> bool:
        return int(self._words[_TOKEN]) == token

    def write(self, version: int, named: Mapping[str, Tensor]) -> None:
        """Copy this rank's part of `named` in and commit it as `version`. A failure leaves the half empty."""
        self._words[_VERSION] = NO_VERSION
        for index, (name, box) in enumerate(zip(self._names, self.boxes, strict=True)):
            box.copy_(local(named[name]))
            self._digests[index] = digest(box)
        self._words[_SEAL] = self._seal(version)
        self._words[_VERSION] = version

    def check(self, version: int) -> None:
        """Make sure that `version` is committed here.

        Raises:
            VersionUnavailable: another one is, or none.
            LayoutError: the boxes are not those of the layout that this half was opened with.
            DigestMismatch: the manifest itself is damaged.
        """
        if self.version != version:
            raise VersionUnavailable(f"holds {describe_version(self.version)}, not version {version}")
        if int(self._words[_FINGERPRINT]) != self._fingerprint:
            raise LayoutError("the boxes of the arena are not those of the layout; connect again")
        if int(self._words[_SEAL]) != self._seal(version):
            raise DigestMismatch(f"the manifest of version {version} is damaged")

    def check_box(self, index: int, arrived: Tensor) -> None:
        """Compare a contiguous copy of a box with what was published.

        Raises:
            DigestMismatch: they differ.
        """
        published = int(self._digests[index])
        if digest(arrived) != published:
            raise DigestMismatch(
                f"{self._names[index]} of version {self.version} arrived with digest {digest(arrived):016x}, "
                f"published was {published:016x}"
            )

    def _seal(self, version: int) -> int:
        """Digest of the manifest: arena, boxes, version, digests (63 bits)."""
        head = self._words[[_TOKEN, _FINGERPRINT]].tobytes() + version.to_bytes(8, "little")
        return xxhash.xxh3_64_intdigest(head + self._digests.tobytes()) >> 1


class Writer(Protocol):
    """A learner rank's own arena: two halves, of which one may be written while the other is read."""

    @property
    def address(self) -> ArenaAddress: ...

    def publish(self, version: int, named: Mapping[str, Tensor], deadline_seconds: float) -> None:
        """Replace the older half by this version. Waits for: readers of that half.

        Raises:
            ArenaBusy: they did not let go before the deadline.
        """
        ...


class Reader(Protocol):
    """A learner rank's arena as a generator sees it."""

    owner: HostProcess

    @property
    def halves(self) -> Sequence[Half]: ...

    def reading(self, version: int, deadline_seconds: float) -> AbstractContextManager[int]:
        """Keep a version from being overwritten; gives the position of its half.

        Raises:
            VersionUnavailable: the arena does not hold it.
        """
        ...


def describe_version(version: int) -> str:
    return "no version" if version == NO_VERSION else f"version {version}"
