"""Arenas in memory files of one host: the owner makes them, peers of the same user map them, nothing outlives
the owner.

Each half is a memfd of its own. A reader holds a shared lock on the half while it copies, a writer an
exclusive one while it replaces it. The kernel drops the lock of a process that dies, so a killed reader never
blocks the learner.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from meshrl.weights.arena import (
    NO_VERSION,
    ArenaAddress,
    Half,
    HostProcess,
    describe_version,
    half_bytes,
)
from meshrl.weights.errors import ArenaBusy, ArenaUnreachable, VersionUnavailable, WeightsError
from meshrl.weights.layout import Layout

NAME = "memfd"
_RETRY_SECONDS = 0.001


class MemfdWriter:
    """The arena of one learner rank; allocated at once, so that a shortage of memory shows here."""

    def __init__(self, layout: Layout) -> None:
        """
        Args:
            layout: of this rank alone (`layout_of`).

        Raises:
            WeightsError: not enough memory.
        """
        size = half_bytes(layout, 0)
        _check_memory(2 * size)
        self._descriptors = [_allocate(size) for _ in range(2)]
        for descriptor in self._descriptors:
            weakref.finalize(self, os.close, descriptor)
        self._halves = [
            Half(_map(descriptor, size, writable=True), layout, 0) for descriptor in self._descriptors
        ]
        token = secrets.randbits(63)
        for half in self._halves:
            half.found(token)
        self.address = ArenaAddress(NAME, HostProcess.current(), token, tuple(self._descriptors), size)

    def publish(self, version: int, named: Mapping[str, Tensor], deadline_seconds: float) -> None:
        newest = max(half.version for half in self._halves)
        if version <= newest:
            raise VersionUnavailable(f"version {version} cannot follow version {newest}: versions go up")
        index = min(range(2), key=lambda i: self._halves[i].version)
        half, descriptor = self._halves[index], self._descriptors[index]
        if not _lock(descriptor, fcntl.LOCK_EX, deadline_seconds):
            raise ArenaBusy(
                f"cannot publish version {version}: after {deadline_seconds:g} s {_lock_holders(descriptor)} "
                f"still read {describe_version(half.version)}"
            )
        try:
            half.write(version, named)
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)


class MemfdReader:
    """A learner rank's arena, opened by its address and mapped read-only."""

    def __init__(self, address: ArenaAddress, layout: Layout, rank: int) -> None:
        """
        Args:
            layout: of all learner ranks; `rank` of it is the owner's.

        Raises:
            ArenaUnreachable: the owner is dead, another user's, or on another host.
        """
        self.owner = address.owner
        here = HostProcess.current()
        if address.owner.boot != here.boot:
            raise ArenaUnreachable(
                f"memfd shares memory within one host, but the learner is {address.owner} and this is {here}"
            )
        self._descriptors = [_open(address, handle) for handle in address.handles]
        for descriptor in self._descriptors:
            weakref.finalize(self, os.close, descriptor)
        expected = half_bytes(layout, rank)
        found = {os.fstat(descriptor).st_size for descriptor in self._descriptors}
        if found != {expected}:
            raise ArenaUnreachable(
                f"the arena of {address.owner} has halves of {sorted(found)} bytes, its layout needs "
                f"{expected}: the process is another one by now, or its layout has changed; connect again"
            )
        memories = [_map(descriptor, expected, writable=False) for descriptor in self._descriptors]
        self.halves = [Half(memory, layout, rank) for memory in memories]
        if not all(half.belongs_to(address.token) for half in self.halves):
            raise ArenaUnreachable(f"{address.owner} holds another arena by now; connect again")

    @contextmanager
    def reading(self, version: int, deadline_seconds: float) -> Iterator[int]:
        for index, (half, descriptor) in enumerate(zip(self.halves, self._descriptors, strict=True)):
            if half.version != version or version == NO_VERSION:
                continue
            if not _lock(descriptor, fcntl.LOCK_SH, deadline_seconds):
                raise ArenaBusy(
                    f"version {version} of {self.owner}: {_lock_holders(descriptor)} has been writing "
                    f"to it for {deadline_seconds:g} s"
                )
            try:
                half.check(version)
                yield index
                return
            except WeightsError as error:
                raise type(error)(f"learner {self.owner}: {error}") from None
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        versions = sorted({half.version for half in self.halves} - {NO_VERSION})
        held = " and ".join(map(describe_version, versions)) or "nothing yet"
        raise VersionUnavailable(f"learner {self.owner} does not hold version {version} but {held}")


def available() -> tuple[bool, str]:
    """Whether arenas can be shared here, and why or why not."""
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


def _allocate(size: int) -> int:
    descriptor = os.memfd_create("meshrl-weights")
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        raise _shortage(2 * size, error.strerror or "refused") from None
    return descriptor


def _check_memory(needed: int) -> None:
    """Refuse what cannot fit: the system would not say no to it, but kill a process later."""
    free = available_memory()
    if free is not None and needed > free:
        raise _shortage(needed, f"{free / 2**30:.1f} GiB are free")


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


def _shortage(needed: int, why: str) -> WeightsError:
    return WeightsError(
        f"no memory for the weights: the arena of this rank needs {needed / 2**30:.1f} GiB, {why}; "
        "use a smaller model, more learner ranks, or a machine with more memory"
    )


def _map(descriptor: int, size: int, *, writable: bool) -> Tensor:
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapping = mmap.mmap(descriptor, size, prot=protection)
    with warnings.catch_warnings():
        # torch warns that it cannot keep tensors from writing to read-only memory; nobody here does.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapping, dtype=torch.uint8)


def _open(address: ArenaAddress, handle: int) -> int:
    path = f"/proc/{address.owner.pid}/fd/{handle}"
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ArenaUnreachable(f"learner {address.owner} is dead or has closed its arena: {path}") from None
    except PermissionError:
        raise ArenaUnreachable(
            f"{path} may not be opened: memfd needs learner and generator ({HostProcess.current()}, "
            f"user {os.getuid()}) to be the same user's"
        ) from None
    except OSError as error:
        raise ArenaUnreachable(
            f"learner {address.owner} has something else at {path}: {error.strerror}"
        ) from None


def _lock(descriptor: int, kind: int, deadline_seconds: float) -> bool:
    """Take a lock on a half; False if others kept theirs past the deadline."""
    end = time.monotonic() + deadline_seconds
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(_RETRY_SECONDS)


def _lock_holders(descriptor: int) -> str:
    """Who has a lock on this file, in words."""
    inode = os.fstat(descriptor).st_ino
    try:
        with open("/proc/locks") as locks:
            rows = [line.split() for line in locks]
    except OSError:
        return "a process"
    pids = sorted(
        {row[4] for row in rows if row[1] == "FLOCK" and row[5].split(":")[-1] == str(inode)}, key=int
    )
    return f"process {' and '.join(pids)}" if pids else "a process"
