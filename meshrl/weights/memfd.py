"""Slots in memory files of one host: the owner makes them, peers of the same user map them, nothing outlives
the owner and those that mapped them."""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshrl.weights.errors import ArenaUnreachable, WeightsError
from meshrl.weights.host import HostProcess
from meshrl.weights.wire import Piece

NAME = "memfd"


class MemoryFile:
    """Zeroed memory of this process that others can map; taken at once, so that a shortage shows here."""

    def __init__(self, size: int) -> None:
        """
        Raises:
            WeightsError: there is not so much.
        """
        self.size = max(size, 1)
        try:
            self.descriptor = os.memfd_create("meshrl-weights")
            weakref.finalize(self, os.close, self.descriptor)
            os.posix_fallocate(self.descriptor, 0, self.size)
            self.memory = _map(self.descriptor, self.size, writable=True)
        except OSError as error:
            raise shortage(self.size, error.strerror or "refused") from None
        """uint8 `[bytes]`."""


@dataclass(frozen=True)
class MemfdHandle:
    """Memory files of the owner, by descriptor; one a slot."""

    descriptors: tuple[int, ...]
    bytes: int


class MemfdOffer:
    """Slots that are memory files need nothing more."""

    def __init__(self, slots: Sequence[MemoryFile]) -> None:
        self.handle = MemfdHandle(tuple(slot.descriptor for slot in slots), slots[0].size)

    def close(self) -> None:
        pass


class MemfdLink:
    """An owner's slots, mapped read-only; a fetch is the copying and nothing else."""

    def __init__(self, handle: MemfdHandle, owner: HostProcess, pieces: Sequence[Piece]) -> None:
        """
        Raises:
            ArenaUnreachable: the owner is dead, another user's, or on another host.
        """
        here = HostProcess.current()
        if not owner.same_host(here):
            raise ArenaUnreachable(
                f"memfd shares memory within one host, but the learner is {owner} and this is {here} "
                "(containers with networks of their own count as hosts)"
            )
        self._copies: list[list[tuple[Tensor, Tensor]]] = []
        for descriptor in handle.descriptors:
            memory = _open(owner, descriptor, handle.bytes)
            self._copies.append([(piece.landing, _values(memory, piece)) for piece in pieces])
        self._slot = 0

    def begin(self, slot: int) -> None:
        self._slot = slot

    def finish(self, deadline: float, check_owner: Callable[[], None]) -> None:
        for landing, values in self._copies[self._slot]:
            landing.copy_(values)

    def close(self) -> None:
        self._copies = []


def available() -> tuple[bool, str]:
    """Whether memory can be shared here, and why or why not."""
    try:
        descriptor = os.memfd_create("meshrl-probe")
    except (AttributeError, OSError) as error:
        return False, f"the system makes no memory files ({error})"
    try:
        os.close(os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDONLY))
    except OSError as error:
        return False, f"/proc does not show the files of processes ({error.strerror})"
    finally:
        os.close(descriptor)
    return True, "memory shared by processes of one user on one host"


def check_memory(needed: int) -> None:
    """Refuse what cannot fit: the system would not say no to it, but kill a process later.

    Raises:
        WeightsError: fewer bytes are free.
    """
    free = available_memory()
    if free is not None and needed > free:
        raise shortage(needed, f"{free / 2**30:.1f} GiB are free")


def available_memory() -> int | None:
    """Bytes that a process may still get, by the system and its container; None: not known."""
    found = []
    try:
        rows = Path("/proc/meminfo").read_text().splitlines()
        found += [int(row.split()[1]) * 1024 for row in rows if row.startswith("MemAvailable:")]
    except OSError:
        pass
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(limit).read_text().strip()
        except OSError:
            continue
        found += [int(text)] if text.isdigit() else []
    return min(found, default=None)


def shortage(needed: int, why: str) -> WeightsError:
    return WeightsError(
        f"no memory for the weights: the arena of this rank needs {needed / 2**30:.1f} GiB, {why}; "
        "use a smaller model, more learner ranks, or a machine with more memory"
    )


def _values(memory: Tensor, piece: Piece) -> Tensor:
    stretch = memory[piece.start : piece.start + piece.bytes]
    return stretch.view(piece.dtype).view(piece.landing.shape)


def _map(descriptor: int, size: int, *, writable: bool) -> Tensor:
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapping = mmap.mmap(descriptor, size, prot=protection)
    with warnings.catch_warnings():
        # torch warns that it cannot keep tensors from writing to read-only memory; nobody here does.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapping, dtype=torch.uint8)


def _open(owner: HostProcess, number: int, size: int) -> Tensor:
    path = f"/proc/{owner.pid}/fd/{number}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ArenaUnreachable(f"learner {owner} is dead or has closed its arena: {path}") from None
    except PermissionError:
        raise ArenaUnreachable(
            f"{path} may not be opened: memfd needs learner and generator ({HostProcess.current()}, "
            f"user {os.getuid()}) to be the same user's"
        ) from None
    except OSError as error:
        raise ArenaUnreachable(f"learner {owner} has something else at {path}: {error.strerror}") from None
    try:
        found = os.fstat(descriptor).st_size
        if found != size:
            raise ArenaUnreachable(
                f"{path} has {found} bytes where the arena of learner {owner} has {size}: it is another process by now"
            )
        return _map(descriptor, size, writable=False)
    finally:
        os.close(descriptor)
