"""What this process waits for, and what it is doing: a registry that can be read at any moment.

    with waiting("a batch of finished groups", unblocked_by=["generator[0]"], deadline_seconds=600):
        await news.wait()

An entry stands inside the one around it (of the same task, or of the task that started this one), so that a report
can tell the innermost, which is what is really waited for. Adding and removing one takes about a microsecond.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Literal

Kind = Literal["wait", "work", "idle"]


@dataclass(frozen=True)
class Wait:
    """One entry, as it is at the moment of asking."""

    number: int
    inside: int | None
    """Number of the entry around it; None: it is outermost."""
    who: str
    """Name of the task."""
    what: str
    kind: Kind
    """`wait`: for others. `work`: it is done here, unless something stands inside it. `idle`: it waits for something to
    do, which is no trouble."""
    unblocked_by: tuple[str, ...]
    """Names of the ranks that can end it, such as `generator[0]`; empty: not known."""
    seconds: float
    """Since it began."""
    deadline_seconds: float | None
    """After which it is an error. None: it has none of its own."""
    details: str


_lock = threading.Lock()
_entries: dict[int, waiting] = {}
_numbers = itertools.count()
_around: ContextVar[int | None] = ContextVar("meshrl_waiting", default=None)


class waiting:  # noqa: N801  (read as a statement)
    """Context in which something is waited for, or done."""

    __slots__ = (
        "_deadline_seconds",
        "_details",
        "_kind",
        "_started",
        "_token",
        "_unblocked_by",
        "_what",
        "_who",
        "inside",
        "number",
    )

    def __init__(
        self,
        what: str,
        *,
        kind: Kind = "wait",
        unblocked_by: Sequence[str] | Callable[[], Sequence[str]] = (),
        deadline_seconds: float | None = None,
        details: Callable[[], str] | None = None,
    ) -> None:
        """
        Args:
            unblocked_by: names of ranks; a function is asked when somebody looks.
            details: more to say, asked when somebody looks.
        """
        self._what = what
        self._kind: Kind = kind
        self._unblocked_by, self._deadline_seconds, self._details = unblocked_by, deadline_seconds, details
        self._token: Token[int | None] | None = None

    def __enter__(self) -> waiting:
        self.number = next(_numbers)
        self.inside = _around.get()
        self._who = _task_name()
        self._started = time.monotonic()
        self._token = _around.set(self.number)
        with _lock:
            _entries[self.number] = self
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            del _entries[self.number]
        if self._token is not None:
            try:
                _around.reset(self._token)
            except ValueError:  # closed by another task than it was opened in, as generators may be
                pass

    def now(self) -> Wait:
        """As it is now."""
        names = self._unblocked_by
        return Wait(
            number=self.number,
            inside=self.inside,
            who=self._who,
            what=self._what,
            kind=self._kind,
            unblocked_by=tuple(names() if callable(names) else names),
            seconds=time.monotonic() - self._started,
            deadline_seconds=self._deadline_seconds,
            details=self._details() if self._details else "",
        )


def waits() -> tuple[Wait, ...]:
    """All entries of this process, the oldest first."""
    with _lock:
        entries = list(_entries.values())
    return tuple(entry.now() for entry in entries)


def innermost(entries: Sequence[Wait]) -> list[Wait]:
    """Entries that nothing stands inside of, the longest first; none that is idle, or inside something idle.

    >>> outer = Wait(0, None, "grpo", "a batch", "wait", (), 9.0, None, "")
    >>> inner = Wait(1, 0, "grpo", "submit on generator[0]", "wait", ("generator[0]",), 8.0, 60.0, "")
    >>> [wait.what for wait in innermost([outer, inner])]
    ['submit on generator[0]']
    """
    by_number = {entry.number: entry for entry in entries}
    with_something_inside = {entry.inside for entry in entries}

    def idle(entry: Wait) -> bool:
        around = by_number.get(entry.inside) if entry.inside is not None else None
        return entry.kind == "idle" or (around is not None and idle(around))

    found = [entry for entry in entries if entry.number not in with_something_inside and not idle(entry)]
    return sorted(found, key=lambda entry: -entry.seconds)


def _task_name() -> str:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.current_thread().name if task is None else task.get_name()
