"""Two mix-ins for workers: the learner's, which publishes weights, and the generator's, which receives them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from meshrl.waiting import waiting
from meshrl.weights.arena import Arena, WeightsConfig, WeightSource
from meshrl.weights.errors import (
    ArenaUnreachable,
    LayoutError,
    TransferFailed,
    TransportUnavailable,
    WeightsError,
)
from meshrl.weights.host import HostProcess
from meshrl.weights.layout import Layout
from meshrl.weights.plan import plan
from meshrl.weights.tensors import layout_of
from meshrl.weights.transfer import PullReport, Subscriber
from meshrl.worker import Worker, endpoint

Result = TypeVar("Result")


@dataclass(frozen=True)
class Place:
    """What a rank holds or needs, and which process it is."""

    layout: Layout
    """Of this rank alone."""
    process: HostProcess


class PublishesWeights:
    """Mix-in of a worker whose weights others want; put it before `Worker` and write `weight_tensors`."""

    _arena: Arena | None = None
    _connection = ""
    _published_revision: int | None = None

    def weights_revision(self) -> int | None:
        """A number that changes with the weights, so that the same version can be given out again while they are the
        same. None: not known, so it never is."""
        return None

    async def between_changes(self, function: Callable[[], Result]) -> Result:
        """Run the function at a time when no weight changes; here at once, on a thread, so that this rank answers
        while it copies."""
        return await asyncio.to_thread(function)

    def weight_tensors(self) -> Mapping[str, Tensor]:
        """This rank's weights by name: whole or sharded (DTensor), the same names and shards always."""
        raise NotImplementedError(f"{type(self).__name__} must define weight_tensors()")

    @endpoint
    async def weights_held(self) -> Place:
        """What this rank has to give."""
        return Place(layout_of(self.weight_tensors()), HostProcess.current())

    @endpoint
    async def open_arena(
        self,
        source: Layout,
        target: Layout,
        readers: Sequence[HostProcess],
        config: WeightsConfig,
        connection: str,
    ) -> None:
        """Make the arena of this rank, new and empty, for this connection. Who was connected before must connect
        again."""
        self._connection = connection
        if self._arena is not None:
            self._arena.close()  # first, since its memory may be needed
            self._arena = None
        named, rank = self.weight_tensors(), _number(self)
        self._arena = await asyncio.to_thread(
            lambda: Arena(named, plan(source, target), rank, readers, config)
        )

    @endpoint
    async def offer_weights(self, transport: str) -> WeightSource | str:
        """How to read the arena by this transport; a text: why that cannot be."""
        try:
            return await asyncio.to_thread(self._opened.offer, transport)
        except TransportUnavailable as error:
            return str(error)

    @endpoint
    async def publish(self, version: int, connection: str) -> float:
        """Copy the weights into the arena as `version`; they may change once this returns.

        Returns:
            seconds it took.

        Raises:
            WeightsError: generators were connected since by another `WeightBroadcast`.
        """
        _check_connection(connection, self._connection)
        started = time.perf_counter()
        await self.between_changes(lambda: self._copy_out(version))
        return time.perf_counter() - started

    @endpoint
    async def publish_again(self, version: int, connection: str) -> bool:
        """Copy the weights out as the version that was published last, into an arena made since.

        Returns:
            whether they are still those of it; if not, nothing is published.
        """
        _check_connection(connection, self._connection)

        def again() -> bool:
            known = self._published_revision
            same = known is not None and known == self.weights_revision()
            if same:
                self._copy_out(version)
            return same

        return await self.between_changes(again)

    def _copy_out(self, version: int) -> None:
        self._opened.publish(version, self.weight_tensors())
        self._published_revision = self.weights_revision()

    @property
    def _opened(self) -> Arena:
        if self._arena is None:
            raise WeightsError("no one is connected: await WeightBroadcast.connect(...) before publishing")
        return self._arena


class ReceivesWeights:
    """Mix-in of a worker that uses a learner's weights; put it before `Worker` and write `swap_weights`."""

    _connection = ""
    _source: Layout | None = None
    _subscriber: Subscriber | None = None
    _learners: tuple[str, ...] = ()
    _pulling: asyncio.Lock | None = None
    weights_device: torch.device | str = "cpu"
    """Where the weights are to arrive."""

    async def swap_weights(self, named: Mapping[str, Tensor], version: int) -> None:
        """Use these weights; return when they are in use and `named` is not: the next pull overwrites it."""
        raise NotImplementedError(f"{type(self).__name__} must define swap_weights(named, version)")

    def weights_target(self, source: Layout) -> Layout:
        """What this worker needs of the learner's weights, as one rank; here everything, whole.

        A rank of a tensor-parallel engine that fuses q, k and v would answer with, for each layer,
        `source.split({"wq": 0, "wk": 0, "wv": 0, "wo": 1}, self.world_size).fused("qkv", ["wq", "wk", "wv"])
        .of_rank(self.rank)`.
        """
        return source.whole()

    @endpoint
    async def weights_needed(self, source: Layout) -> Place:
        """Ask the worker what it needs of what the learner has."""
        self._source = source
        target = self.weights_target(source)
        if not isinstance(target, Layout):
            raise LayoutError(
                f"weights_target of {type(self).__name__} answers with {target!r}, not a Layout"
            )
        if target.ranks != 1:
            raise LayoutError(
                f"weights_target of {type(self).__name__} answers for {target.ranks} ranks where one is asked: "
                "end it with .of_rank(self.rank)"
            )
        return Place(target, HostProcess.current())

    @endpoint
    async def connect_weights(
        self,
        target: Layout,
        sources: Sequence[WeightSource],
        unconnected: Sequence[int],
        connection: str,
        learners: Sequence[str],
    ) -> str | None:
        """Open the learner ranks' arenas.

        Args:
            target: what all readers need.
            unconnected: numbers of those readers that are to try; the others have a way already.
            learners: names of the ranks that have the arenas.

        Returns:
            None: connected. A text: why it cannot be by this transport.
        """
        number, source = _number(self), self._source
        if number not in unconnected:
            return None
        assert source is not None
        try:
            subscriber = await asyncio.to_thread(
                lambda: Subscriber(plan(source, target), number, sources, self.weights_device)
            )
        except (ArenaUnreachable, TransferFailed, TransportUnavailable) as error:
            return str(error)
        self._pulling = self._pulling or asyncio.Lock()
        async with self._pulling:
            before, self._subscriber, self._connection = self._subscriber, subscriber, connection
            self._learners = tuple(learners)
            if before is not None:
                before.close()
        return None

    @endpoint
    async def pull_weights(self, version: int, deadline_seconds: float, connection: str) -> PullReport:
        """Fetch `version`, verify it, and have it used. On any error the old weights stay in use.

        Raises:
            WeightsError: another `WeightBroadcast` was connected since; besides, what `Subscriber.pull` raises.
        """
        if self._subscriber is None or self._pulling is None:
            raise WeightsError(
                "not connected to a learner: await WeightBroadcast.connect(...) before pulling"
            )
        async with self._pulling:
            _check_connection(connection, self._connection)
            with waiting("weights", unblocked_by=self._learners, deadline_seconds=deadline_seconds):
                named, report = await asyncio.to_thread(self._subscriber.pull, version, deadline_seconds)
            await self.swap_weights(named, version)
        return report


def _check_connection(asked: str, current: str) -> None:
    """Versions of one `WeightBroadcast` mean nothing to another."""
    if asked != current:
        raise WeightsError(
            "this WeightBroadcast is not in use: "
            + ("generators were connected by another one since" if current else "connect first")
            + "; learners and generators serve the one that was connected last"
        )


def _number(worker: object) -> int:
    """Which rank of all replicas this is."""
    assert isinstance(worker, Worker)
    return worker.replica * worker.world_size + worker.rank
