"""Which slot of an arena holds which version, and who reads it: a pure state machine.

A reader leases a version before it reads and gives it back afterwards; a slot that is leased is not replaced.
"""

from __future__ import annotations

from meshrl.weights.errors import VersionUnavailable


class Leases:
    """Slots, the version in each, and their readers.

    >>> leases = Leases(2)
    >>> leases.commit(leases.oldest, 1)
    >>> leases.lease(1, "reader")
    0
    >>> leases.commit(leases.oldest, 2)
    >>> leases.oldest, leases.readers(leases.oldest)
    (0, ['reader'])
    """

    def __init__(self, slots: int) -> None:
        self._versions: list[int | None] = [None] * slots
        self._readers: list[dict[object, int]] = [{} for _ in range(slots)]

    @property
    def newest(self) -> int | None:
        """The latest version that was committed; None before the first."""
        return max((v for v in self._versions if v is not None), default=None)

    @property
    def oldest(self) -> int:
        """The slot whose turn it is to be replaced."""
        return min(range(len(self._versions)), key=lambda slot: _order(self._versions[slot]))

    def readers(self, slot: int) -> list[object]:
        """Who reads it now."""
        return list(self._readers[slot])

    def version(self, slot: int) -> int | None:
        return self._versions[slot]

    def withdraw(self, slot: int) -> None:
        """From now on nobody may lease it."""
        self._versions[slot] = None

    def commit(self, slot: int, version: int) -> None:
        """From now on this version may be leased."""
        self._versions[slot] = version

    def lease(self, version: int, reader: object) -> int:
        """The slot that holds this version, kept for the reader.

        Raises:
            VersionUnavailable: none does.
        """
        if version not in self._versions:
            held = " and ".join(f"version {v}" for v in sorted(v for v in self._versions if v is not None))
            raise VersionUnavailable(f"does not hold version {version} but {held or 'nothing yet'}")
        slot = self._versions.index(version)
        self._readers[slot][reader] = self._readers[slot].get(reader, 0) + 1
        return slot

    def release(self, slot: int, reader: object) -> None:
        """Give one lease back."""
        count = self._readers[slot].pop(reader, 0)
        if count > 1:
            self._readers[slot][reader] = count - 1


def _order(version: int | None) -> int:
    return -1 if version is None else version
