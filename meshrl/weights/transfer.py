"""One learner rank publishes, one generator rank pulls: the two ends of a broadcast, without actors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from meshrl.weights.arena import ArenaAddress
from meshrl.weights.errors import LayoutError
from meshrl.weights.layout import Layout, join, layout_of, signature
from meshrl.weights.plan import Copy, Plan, plan
from meshrl.weights.transport import choose_transport, make_writer, open_reader


@dataclass(frozen=True)
class WeightSource:
    """What a generator must know of one learner rank."""

    layout: Layout
    """Of this rank alone."""
    address: ArenaAddress


class Publisher:
    """A learner rank's end: keeps an arena with the last two versions of its shards.

    >>> publisher = Publisher({"weight": torch.ones(2, 3)})
    >>> publisher.publish(1, {"weight": torch.zeros(2, 3)})
    """

    def __init__(self, named: Mapping[str, Tensor], transport: str | None = None) -> None:
        """
        Args:
            named: the rank's tensors, whole or DTensors; says the layout, nothing is published yet.
            transport: how to share the arena; None: the best that is available.

        Raises:
            WeightsError: not enough memory, or no transport.
            LayoutError: see `layout_of`.
        """
        self._layout = layout_of(named)
        self._signature = signature(named)
        self._writer = make_writer(transport or choose_transport(), self._layout)

    @property
    def source(self) -> WeightSource:
        return WeightSource(self._layout, self._writer.address)

    def publish(self, version: int, named: Mapping[str, Tensor], deadline_seconds: float = 30.0) -> None:
        """Copy the tensors out as `version`. They may change as soon as this returns.

        Waits for: readers of the version before the last, which this one replaces.

        Raises:
            LayoutError: the tensors are not those that this publisher was made for.
            ArenaBusy: a reader did not finish before the deadline.
            VersionUnavailable: `version` is not above the last one.
        """
        if signature(named) != self._signature:
            raise LayoutError(
                f"the weights have changed their layout since the generators were connected: "
                f"{_difference(self._layout, layout_of(named))}; connect again"
            )
        self._writer.publish(version, named, deadline_seconds)


@dataclass(frozen=True)
class PullReport:
    """What one pull did."""

    version: int
    bytes: int
    """Taken from learner ranks; equal to the bytes needed."""
    seconds: float


class Subscriber:
    """A generator rank's end: pulls versions into memory of its own, each whole and verified or not at all.

    The tensors that `pull` returns are views of one staging area and hold until the next pull: take a copy,
    as an engine that folds or fuses weights does anyway.
    """

    def __init__(
        self, sources: Sequence[WeightSource], target: Callable[[Layout], tuple[Layout, int]] | None = None
    ) -> None:
        """
        Args:
            sources: every learner rank, in rank order.
            target: given the learner's layout, says what each target rank needs (at most one box of a
                parameter) and which rank this is; None: one rank that needs everything whole.

        Raises:
            LayoutError: the learner does not hold what is needed.
            ArenaUnreachable: a learner rank's arena cannot be opened.
        """
        self.layout = join([source.layout for source in sources])
        needs, rank = target(self.layout) if target else (self.layout.whole(), 0)
        self.plan: Plan = plan(self.layout, needs)
        self._rank = rank
        boxes = self.plan.target.ranks[rank]
        if len({box.parameter for box in boxes}) < len(boxes):
            raise LayoutError(
                "a target rank may hold one box of a parameter; give each box a name of its own"
            )
        # Filled with zeros once: pages that are touched for the first time copy several times slower.
        self._staging = torch.zeros(self.plan.target.positions(rank)[1], dtype=torch.uint8)
        self._arrived = self.plan.target.views(rank, self._staging)
        self._tensors = {box.parameter: tensor for box, tensor in zip(boxes, self._arrived, strict=True)}
        self._runs, self._strided = self.plan.runs(rank)
        self._checks = self._list_checks()
        needed = sorted({copy.source_rank for copy in self.plan.copies[rank]})
        self._readers = {r: open_reader(sources[r].address, self.layout, r) for r in needed}

    @property
    def bytes(self) -> int:
        """Bytes that each pull takes."""
        return self.plan.bytes(self._rank)

    def pull(self, version: int, deadline_seconds: float = 30.0) -> tuple[Mapping[str, Tensor], PullReport]:
        """Fetch a version.

        Returns:
            this rank's boxes by parameter name, valid until the next pull; and a report.

        Raises:
            VersionUnavailable: a learner rank does not hold it (any more).
            DigestMismatch: what arrived differs from what was published.
        """
        started = time.perf_counter()
        with ExitStack() as held:
            halves = {
                rank: reader.halves[held.enter_context(reader.reading(version, deadline_seconds))]
                for rank, reader in self._readers.items()
            }
            for run in self._runs:
                self._staging[run.target_start : run.target_start + run.bytes].copy_(
                    halves[run.source_rank].storage[run.source_start : run.source_start + run.bytes]
                )
            for copy in self._strided:
                source_box = self.layout.ranks[copy.source_rank][copy.source_box]
                source = halves[copy.source_rank].boxes[copy.source_box]
                self._landing(copy).copy_(source[source_box.slices(copy.region)])
            for rank, box, arrived in self._checks:
                half = halves[rank]
                half.check_box(box, half.boxes[box] if arrived is None else arrived.contiguous())
        return self._tensors, PullReport(version, self.bytes, time.perf_counter() - started)

    def _landing(self, copy: Copy) -> Tensor:
        """Where a copy goes, as a view of the staging area."""
        box = self.plan.target.ranks[self._rank][copy.target_box]
        return self._arrived[copy.target_box][box.slices(copy.region)]

    def _list_checks(self) -> list[tuple[int, int, Tensor | None]]:
        """(source rank, source box, what arrived) to verify after each pull.

        A box that was taken whole is verified as it arrived; one that was taken in part as it lies in the
        arena, once.
        """
        checks: dict[tuple[int, int, int], tuple[int, int, Tensor | None]] = {}
        for copy in self.plan.copies[self._rank]:
            box = self.layout.ranks[copy.source_rank][copy.source_box]
            if copy.region == box:
                key, arrived = (copy.source_rank, copy.source_box, copy.target_box), self._landing(copy)
            else:
                key, arrived = (copy.source_rank, copy.source_box, -1), None
            checks[key] = (copy.source_rank, copy.source_box, arrived)
        return list(checks.values())


def _difference(before: Layout, now: Layout) -> str:
    """The first thing that two layouts of one rank do not share, in words."""
    old = {box.parameter: (box, before.parameters[box.parameter]) for box in before.ranks[0]}
    new = {box.parameter: (box, now.parameters[box.parameter]) for box in now.ranks[0]}
    for name in old.keys() | new.keys():
        if old.get(name) != new.get(name):
            return f"{name} was {old.get(name, 'absent')} and is {new.get(name, 'absent')}"
    return "the order of the parameters"
