"""Why nothing moves: who waits for whom, across all processes of a run, down to whom all wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshrl.waiting import Wait, innermost, waits

if TYPE_CHECKING:
    from meshrl.mesh import Replica, RoleMesh

ANSWER_SECONDS = 2.0
"""A rank that has not said by then what it is doing is told of as not answering."""


@dataclass(frozen=True)
class Node:
    """Somebody who waits, or whom others wait for."""

    text: str
    below: tuple[Node, ...] = ()
    """Whom it waits for."""

    def lines(self, depth: int = 0) -> Iterator[str]:
        """Itself and all below, indented."""
        mark = "" if self.below or depth == 0 else "   <- all of the above wait for this"
        yield f"{'  ' * (depth + 1)}{self.text}{mark}"
        for node in self.below:
            yield from node.lines(depth + 1)

    def roots(self) -> Iterator[str]:
        """Those at the end of the chains."""
        if not self.below:
            yield self.text
        for node in self.below:
            yield from node.roots()


@dataclass(frozen=True)
class Why:
    """The waits-for graph of a run, as trees: what the controller waits for at the top, the longest wait first."""

    state: str
    waiting: tuple[Node, ...] = field(default=())

    @property
    def roots(self) -> tuple[str, ...]:
        """Whom everything finally waits for."""
        return tuple(dict.fromkeys(root for node in self.waiting for root in node.roots()))

    def __str__(self) -> str:
        return "\n".join([self.state, *(line for node in self.waiting for line in node.lines())])

    __repr__ = __str__


Answer = Sequence[Wait] | str
"""What a rank is about, or why it cannot say."""


def explain(controller: Sequence[Wait], ranks: Mapping[str, Answer]) -> tuple[Node, ...]:
    """The trees, from what each process said. Pure.

    Args:
        controller: entries of the controller's process.
        ranks: by name, such as `generator[0]`.
    """
    return tuple(
        Node(
            _wait("the controller" if wait.who.startswith("Task-") else wait.who, wait),
            _below(wait, ranks, ()),
        )
        for wait in innermost(controller)
    )


async def ask(meshes: Sequence[RoleMesh]) -> tuple[Node, ...]:
    """Ask everybody. Never longer than ANSWER_SECONDS, and never an error: who is dead or stopped is told of."""
    own = waits()
    ranks = [(replica, rank) for mesh in meshes for replica in mesh.replicas for rank in range(replica.size)]
    answers = await asyncio.gather(*(_answer(replica, rank) for replica, rank in ranks))
    names = [replica.processes.name(rank) for replica, rank in ranks]
    return explain(own, dict(zip(names, answers, strict=True)))


async def _answer(replica: Replica, rank: int) -> Answer:
    processes = replica.processes
    if processes.death.done():
        return f"is dead: {processes.death.exception()}"
    try:
        return await replica.call_rank("waits", rank=rank, deadline_seconds=ANSWER_SECONDS)
    except TimeoutError:
        return f"does not answer (process {processes.by_rank.get(rank)} is stopped, or busy in one long call)"
    except Exception as error:
        return f"cannot be asked: {error}"


def _below(wait: Wait, ranks: Mapping[str, Answer], above: tuple[str, ...]) -> tuple[Node, ...]:
    return tuple(
        _rank(name, ranks[name], ranks, above)
        for name in wait.unblocked_by
        if name in ranks and name not in above
    )


def _rank(name: str, answer: Answer, ranks: Mapping[str, Answer], above: tuple[str, ...]) -> Node:
    """What a rank is about: its longest wait, or its longest work where it waits for nobody."""
    if isinstance(answer, str):
        return Node(f"{name} {answer}")
    entries = innermost(answer)
    entries = [entry for entry in entries if entry.kind == "wait"] or entries
    if not entries:
        return Node(f"{name} has nothing to do")
    wait = entries[0]
    return Node(_wait(name, wait), _below(wait, ranks, (*above, name)))


def _wait(who: str, wait: Wait) -> str:
    verb = "waits for" if wait.kind == "wait" else "is in"
    text = f"{who} {verb} {wait.what} for {wait.seconds:.1f} s"
    if wait.deadline_seconds is not None:
        text += f" of at most {wait.deadline_seconds:g} s"
    if any(name not in wait.what for name in wait.unblocked_by):
        text += f", unblocked by {', '.join(wait.unblocked_by)}"
    return f"{text} ({wait.details})" if wait.details else text
