"""What this process waits for, and what it is doing: a registry that can be read at any moment.

    with waiting("a batch of finished groups", unblocked_by=["generator[0]"], deadline_seconds=600):
        await news.wait()

An entry stands inside the one around it (of the same task, or of the task that started this one), so that a report
can tell the innermost, which is what is really waited for. An entry costs a few microseconds; whatever is dear, such as
`details`, is asked only when somebody looks.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from typing import Any, Literal

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


# Each use of it is one step of the interpreter, so threads need no lock.
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
        self._who = _task_or_thread()
        self._started = time.monotonic()
        self._token = _around.set(self.number)
        _entries[self.number] = self
        return self

    def __exit__(self, *_: object) -> None:
        del _entries[self.number]
        if self._token is not None:
            try:
                _around.reset(self._token)
            except ValueError:  # closed by another task than it was opened in, as generators may be
                pass

    def now(self) -> Wait:
        """As it is now. Where a function of it fails, the details say so: a report of trouble must come about."""
        details, names = "", self._unblocked_by
        try:
            details = self._details() if self._details else ""
            names = tuple(names() if callable(names) else names)
        except Exception as error:
            names = () if callable(names) else tuple(names)
            details = details or f"its details failed: {type(error).__name__}: {error}"
        return Wait(
            number=self.number,
            inside=self.inside,
            who=self._who.name if isinstance(self._who, threading.Thread) else self._who.get_name(),
            what=self._what,
            kind=self._kind,
            unblocked_by=names,
            seconds=time.monotonic() - self._started,
            deadline_seconds=self._deadline_seconds,
            details=details,
        )


def waits() -> tuple[Wait, ...]:
    """All entries of this process, the oldest first."""
    return tuple(entry.now() for entry in list(_entries.values()))


def innermost(entries: Sequence[Wait], within: str | None = None) -> list[Wait]:
    """Entries that nothing stands inside of, the longest first; none that is idle, or inside something idle.

    A wait that does not know who ends it is taken to be ended by whom the entry around it waits for.

    Args:
        within: only those inside work of this name, or that work itself, idle ones too; None: all.

    >>> outer = Wait(0, None, "grpo", "a batch", "wait", (), 9.0, None, "")
    >>> inner = Wait(1, 0, "grpo", "submit on generator[0]", "wait", ("generator[0]",), 8.0, 60.0, "")
    >>> [wait.what for wait in innermost([outer, inner])]
    ['submit on generator[0]']
    """
    by_number = {entry.number: entry for entry in entries}
    with_something_inside = {entry.inside for entry in entries}

    def outwards(entry: Wait | None) -> Iterator[Wait]:
        while entry is not None:
            yield entry
            entry = None if entry.inside is None else by_number.get(entry.inside)

    found: list[Wait] = []
    for entry in entries:
        around = list(outwards(entry))
        if within is None:
            wanted = all(each.kind != "idle" for each in around)
        else:
            wanted = any((each.kind, each.what) == ("work", within) for each in around)
        if entry.number in with_something_inside or not wanted:
            continue
        if entry.kind == "wait":
            names = next((each.unblocked_by for each in around if each.unblocked_by), ())
            entry = replace(entry, unblocked_by=names)
        found.append(entry)
    return sorted(found, key=lambda entry: -entry.seconds)


def _task_or_thread() -> asyncio.Task[Any] | threading.Thread:
    try:
        return asyncio.current_task() or threading.current_thread()
    except RuntimeError:  # no loop runs
        return threading.current_thread()
