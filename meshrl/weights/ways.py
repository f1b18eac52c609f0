"""Opening the ways from a learner mesh to a generator mesh: who needs what, and by which transport it gets it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshrl.weights.arena import WeightsConfig
from meshrl.weights.errors import TransportUnavailable
from meshrl.weights.host import HostProcess
from meshrl.weights.layout import Layout, join
from meshrl.weights.plan import Plan, plan
from meshrl.weights.transport import candidates
from meshrl.weights.workers import Place

if TYPE_CHECKING:
    from meshrl.mesh import Replica, RoleMesh

_CONNECT_SECONDS = 120.0


@dataclass(frozen=True)
class Ways:
    """A learner mesh and a generator mesh, connected. Readers are generator processes, by replica, then rank."""

    plan: Plan
    needed: tuple[Place, ...]
    """What each reader needs."""
    transports: tuple[str | None, ...]
    """By which each reader reads; None: its process is dead."""
    connection: str
    """Names these ways: messages about others are refused."""


async def open_ways(
    source: RoleMesh,
    target: RoleMesh,
    config: WeightsConfig,
    note: Callable[[str], None],
    before: Ways | None = None,
) -> Ways:
    """Plan what every reader takes from which rank of `source`, and let each connect by the first transport that works.

    Args:
        before: ways between the same meshes. Readers whose process is dead now keep their part in the plan, since a
            reader's number is its place in the mesh. None: all are alive.

    Raises:
        LayoutError: the learner's ranks do not hold what a generator needs.
        TransportUnavailable: there is no way from some learner rank to some generator.
    """
    held: list[Place] = await source.call("weights_held", deadline_seconds=_CONNECT_SECONDS)
    layout = join([place.layout for place in held])
    alive = (
        target.replicas if before is None else [r for r in target.replicas if not r.processes.death.done()]
    )
    needed = await _needed(target, alive, layout, before)
    wanted = join([place.layout for place in needed])
    made = await asyncio.to_thread(plan, layout, wanted)
    for rank in range(wanted.ranks):  # what is wrong is to show before what works is closed
        wanted.tensors(rank)
    readers = [place.process for place in needed]
    connection = uuid.uuid4().hex
    await source.call(
        "open_arena", layout, wanted, readers, config, connection, deadline_seconds=_CONNECT_SECONDS
    )
    transports = await _connect(source, target, alive, wanted, readers, config, note, connection)
    return Ways(made, tuple(needed), tuple(transports), connection)


def reader_numbers(target: RoleMesh, replica: Replica) -> range:
    """The readers of one replica."""
    position = next(i for i, each in enumerate(target.replicas) if each is replica)
    first = sum(each.size for each in target.replicas[:position])
    return range(first, first + replica.size)


async def _needed(
    target: RoleMesh, alive: Sequence[Replica], layout: Layout, before: Ways | None
) -> list[Place]:
    needed = list(before.needed) if before else [None] * target.size
    answers = await asyncio.gather(
        *(replica.call("weights_needed", layout, deadline_seconds=_CONNECT_SECONDS) for replica in alive)
    )
    for replica, places in zip(alive, answers, strict=True):
        for number, place in zip(reader_numbers(target, replica), places, strict=True):
            needed[number] = place
    return [place for place in needed if place is not None]


async def _connect(
    source: RoleMesh,
    target: RoleMesh,
    alive: Sequence[Replica],
    wanted: Layout,
    readers: Sequence[HostProcess],
    config: WeightsConfig,
    note: Callable[[str], None],
    connection: str,
) -> list[str | None]:
    transports: list[str | None] = [None] * len(readers)
    living = [number for replica in alive for number in reader_numbers(target, replica)]
    learners = [r.processes.name(rank) for r in source.replicas for rank in range(r.size)]
    failures: list[str] = []
    for transport in candidates(config.transport):
        unconnected = [number for number in living if transports[number] is None]
        if not unconnected:
            break
        offers = await source.call("offer_weights", transport, deadline_seconds=_CONNECT_SECONDS)
        if refused := [offer for offer in offers if isinstance(offer, str)]:
            failures.append(refused[0])
            continue
        arguments = wanted, offers, unconnected, connection, learners
        answers = await asyncio.gather(
            *(
                replica.call("connect_weights", *arguments, deadline_seconds=_CONNECT_SECONDS)
                for replica in alive
            )
        )
        for number, answer in zip(living, [one for part in answers for one in part], strict=True):
            if number not in unconnected:
                continue
            if answer is None:
                transports[number] = transport
            else:
                failures.append(f"{transport}: {answer}")
    lost = [str(readers[number]) for number in living if transports[number] is None]
    if lost:
        raise TransportUnavailable(f"no way for weights to {' and '.join(lost)}: {'; '.join(failures)}")
    if failures:
        taken = ", ".join(dict.fromkeys(transports[number] or "" for number in living))
        note(f"weights travel by {taken}, since a preferred way does not work: {failures[0]}")
    return transports
