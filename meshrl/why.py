"""Why nothing moves: who waits for whom, across all processes of a run, down to whom all wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from meshrl.waiting import Wait, innermost, waiting, waits

if TYPE_CHECKING:
    from meshrl.mesh import Replica

ANSWER_SECONDS = 2.0
"""A rank that has not said by then what it is doing is told of as not answering."""

NAMES_SHOWN = 4
"""Of more ranks, the first ones and the count are written."""


@dataclass(frozen=True)
class Node:
    """Somebody who waits, or whom others wait for."""

    text: str
    below: tuple[Node, ...] = ()
    """Whom it waits for; a rank stands below the first one that waits for it, and nowhere else."""
    root: bool = False
    """It waits for nobody: a chain ends here."""

    def lines(self, depth: int = 0) -> Iterator[str]:
        """Itself and all below, indented."""
        mark = "   <- the chain ends here" if self.root and depth else ""
        yield f"{'  ' * (depth + 1)}{self.text}{mark}"
        for node in self.below:
            yield from node.lines(depth + 1)

    def roots(self) -> Iterator[str]:
        """Those at the end of the chains."""
        if self.root:
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
        """Whom everything finally waits for, or which ranks wait for each other."""
        return tuple(dict.fromkeys(root for node in self.waiting for root in node.roots()))

    def __str__(self) -> str:
        return "\n".join([self.state, *(line for node in self.waiting for line in node.lines())])

    __repr__ = __str__


Answer = Sequence[Wait] | str
"""What a rank is about, or why it cannot say."""


async def ask(replicas: Sequence[Replica]) -> tuple[Node, ...]:
    """Ask everybody. Never longer than ANSWER_SECONDS, and never an error: who is dead or stopped is told of."""
    own = waits()
    ranks = [(replica, rank) for replica in replicas for rank in range(replica.size)]
    with waiting("what all are doing", kind="idle"):  # so that one report tells nothing of another
        answers = await asyncio.gather(*(_answer(replica, rank) for replica, rank in ranks))
    names = [replica.processes.name(rank) for replica, rank in ranks]
    addresses = {
        replica.address(rank): name
        for (replica, rank), name in zip(ranks, names, strict=True)
        if replica.actors is not None
    }
    return explain(own, dict(zip(names, answers, strict=True)), addresses)


async def _answer(replica: Replica, rank: int) -> Answer:
    processes = replica.processes
    process = f"process {processes.by_rank.get(rank, 'not known yet')}"
    if processes.death.done():
        return f"is dead: {_first_line(processes.death.exception())}"
    if not processes.host:
        return f"is starting ({process})"
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await replica.call_rank("waits", rank=rank, deadline_seconds=None)
    except TimeoutError:
        return f"does not answer ({process} is stopped, or busy in one long call)"
    except Exception as error:
        return f"cannot be asked: {_first_line(error)}"


def explain(
    controller: Sequence[Wait], ranks: Mapping[str, Answer], addresses: Mapping[str, str] | None = None
) -> tuple[Node, ...]:
    """The trees, from what each process said. Pure. At most a line for each entry.

    Args:
        controller: entries of the controller's process.
        ranks: by name, such as `generator[0]`.
        addresses: names by `meshrl.worker.address`, for waits whose process does not know the name.
    """
    graph = _Graph(ranks, addresses or {})
    trees = [
        graph.node("the controller" if wait.who.startswith("Task-") else wait.who, wait)
        for wait in innermost(controller)
    ]
    if len(stuck := graph.stuck()) > 1:
        trees.append(Node(f"{_some(stuck)} wait for each other", root=True))
    return tuple(trees)


class _Graph:
    """What ranks are about, as they are reached from the controller's waits. Each entry of a rank is told of once,
    however many wait for it."""

    def __init__(self, ranks: Mapping[str, Answer], addresses: Mapping[str, str]) -> None:
        self._ranks, self._addresses = ranks, addresses
        self._waits_for: dict[_Key, list[_Key]] = {}

    def node(self, who: str, wait: Wait, key: _Key | None = None) -> Node:
        """A wait, with those below it that were not reached before."""
        names = tuple(self._addresses.get(name, name) for name in wait.unblocked_by)
        wait = replace(wait, unblocked_by=names)
        below = {name: self._about(name, wait) for name in self._concerned(who, wait)}
        keys = {
            name: (name, about.number if isinstance(about, Wait) else None) for name, about in below.items()
        }
        if key is not None:
            self._waits_for[key] = list(keys.values())
        nodes, idle = [], []
        for name, about in below.items():
            if keys[name] in self._waits_for:
                continue
            self._waits_for[keys[name]] = []
            if isinstance(about, Wait):
                nodes.append(self.node(name, about, keys[name]))
            elif about is None:
                idle.append(name)
            else:
                nodes.append(Node(f"{name} {about}", root=True))
        if idle:
            nodes.append(
                Node(f"{_some(idle)} {'has' if len(idle) == 1 else 'have'} nothing to do", root=True)
            )
        above = ", told of above" if below and not nodes else ""
        return Node(_text(who, wait) + above, tuple(nodes), root=not below)

    def stuck(self) -> list[str]:
        """Ranks that wait for each other, with no way to one that waits for nobody."""
        waiting_for: dict[_Key, list[_Key]] = {key: [] for key in self._waits_for}
        for key, others in self._waits_for.items():
            for other in others:
                waiting_for[other].append(key)
        free = [key for key, others in self._waits_for.items() if not others]
        stuck = dict.fromkeys(self._waits_for)
        while free:
            if (key := free.pop()) in stuck:
                del stuck[key]
                free += waiting_for[key]
        # Without those that only wait for them.
        while outer := [key for key in stuck if not any(other in stuck for other in waiting_for[key])]:
            for key in outer:
                del stuck[key]
        return list(dict.fromkeys(name for name, _ in stuck))

    def _concerned(self, who: str, wait: Wait) -> list[str]:
        """Ranks that the wait is for, other than its own. Of those who were called and can say so, the ones that have
        not answered yet."""
        names = [name for name in dict.fromkeys(wait.unblocked_by) if name in self._ranks and name != who]
        serving = {name: self._innermost(name, _endpoint(wait)) for name in names}
        if not any(serving.values()):
            return names
        return [name for name in names if serving[name] or isinstance(self._ranks[name], str)]

    def _about(self, name: str, asked: Wait) -> Wait | str | None:
        """The longest wait of a rank, or its longest work where it waits for nobody; of what was asked of it where that
        can be told apart. None: nothing."""
        answer = self._ranks[name]
        if isinstance(answer, str):
            return answer
        entries = self._innermost(name, _endpoint(asked)) or self._innermost(name)
        return min(entries, key=lambda entry: _TELLING.index(entry.kind), default=None)

    def _innermost(self, name: str, within: str | None = None) -> list[Wait]:
        answer = self._ranks[name]
        return [] if isinstance(answer, str) else innermost(answer, within)


_TELLING = ("wait", "work", "idle")
"""Kinds of entries, those first that tell more."""

_Key = tuple[str, int | None]
"""A rank and the number of its entry; None: it is about nothing, or cannot say."""


def _endpoint(wait: Wait) -> str:
    """`step` of a wait for `step on learner[0]`, as calls are named."""
    return wait.what.split(" ", 1)[0]


def _text(who: str, wait: Wait) -> str:
    verb = "is in" if wait.kind == "work" else "waits for"
    text = f"{who} {verb} {wait.what} for {wait.seconds:.1f} s"
    if wait.deadline_seconds is not None:
        text += f" of at most {wait.deadline_seconds:g} s"
    if any(name not in wait.what for name in wait.unblocked_by):
        text += f", unblocked by {_some(wait.unblocked_by)}"
    return f"{text} ({wait.details})" if wait.details else text


def _some(names: Sequence[str]) -> str:
    if len(names) <= NAMES_SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[:NAMES_SHOWN])} … ({len(names)} in all)"


def _first_line(error: BaseException | None) -> str:
    return str(error).partition("\n")[0]
