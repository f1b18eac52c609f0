"""A generator rank's end of a broadcast: pulls versions into memory of its own, each whole and verified or not
at all."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshrl.weights.arena import Manifest, WeightSource, fingerprint
from meshrl.weights.digests import Block, blocks_to_verify, digest
from meshrl.weights.errors import ArenaUnreachable, DigestMismatch, WeightsError
from meshrl.weights.layout import allocate
from meshrl.weights.plan import Cell, Plan
from meshrl.weights.service import Caller
from meshrl.weights.transport import make_link
from meshrl.weights.wire import Link, Piece, Stretch

_RECEIPT_SECONDS = 1.0
"""For a learner rank to take a lease back; one that does not has lost it with the connection."""


@dataclass(frozen=True)
class PullReport:
    """What one pull did."""

    version: int
    bytes: int
    """Taken from learner ranks; equal to the bytes needed."""
    seconds: float
    transport: str


@dataclass
class _Owner:
    """A learner rank that this one reads from."""

    source: WeightSource
    link: Link
    cells: tuple[Cell, ...]
    """All that it publishes."""
    fingerprint: int
    landings: dict[int, Tensor]
    """Where those cells go that this rank takes, by position."""
    stretches: list[Stretch]
    caller: Caller | None = None


class Subscriber:
    """The tensors that `pull` returns are views of one staging area and hold until the next pull: take a copy, as
    an engine that folds or fuses weights does anyway."""

    def __init__(
        self, plan: Plan, rank: int, sources: Sequence[WeightSource], device: torch.device | str = "cpu"
    ) -> None:
        """
        Args:
            rank: this rank in the plan's target.
            sources: every learner rank, in rank order, by one transport.
            device: where the tensors are to be.

        Raises:
            ArenaUnreachable: a learner rank cannot be reached.
            TransportUnavailable: this way does not exist here.
        """
        self._rank = rank
        held = plan.target.tensors(rank)
        self._tensors = allocate(held, device)
        landing = {
            part.parameter: self._tensors[name][part.box.slices(part.box, part.at)]
            for name, tensor in held.items()
            for part in tensor.parts
        }
        self._owners: dict[int, _Owner] = {}
        try:
            for owner in plan.sources_of(rank):
                self._owners[owner] = self._connect(plan, owner, sources[owner], landing)
        except BaseException:
            self.close()
            raise
        self.bytes = int(plan.traffic[:, rank].sum())
        """That each pull takes."""
        self.transport = sources[0].transport

    def pull(self, version: int, deadline_seconds: float = 30.0) -> tuple[Mapping[str, Tensor], PullReport]:
        """Fetch a version.

        Waits for: every learner rank that something is taken from, one round trip and the transfer.

        Returns:
            this rank's tensors by name, valid until the next pull; and a report.

        Raises:
            VersionUnavailable: a learner rank does not hold it (any more).
            DigestMismatch: what arrived differs from what was published.
            ArenaUnreachable, TransferFailed: a learner rank, which is named, is gone or too slow.
        """
        started = time.perf_counter()
        deadline = time.monotonic() + deadline_seconds
        slots: dict[int, int] = {}
        try:
            manifests = self._lease(version, deadline, slots)
            blocks = {rank: self._check(rank, manifest, version) for rank, manifest in manifests.items()}
            for rank, owner in self._owners.items():
                owner.link.begin(slots[rank])
            for owner in self._owners.values():
                assert owner.caller is not None
                owner.link.finish(deadline, owner.caller.check_owner)
            for rank, manifest in manifests.items():
                self._verify(self._owners[rank], manifest.version, blocks[rank])
        finally:
            self._release(slots)
        return self._tensors, PullReport(version, self.bytes, time.perf_counter() - started, self.transport)

    def close(self) -> None:
        """Let go of all learner ranks."""
        for owner in self._owners.values():
            owner.link.close()
            self._hang_up(owner)

    def _connect(self, plan: Plan, rank: int, source: WeightSource, landing: Mapping[str, Tensor]) -> _Owner:
        cells = plan.cells(rank)
        landings = {}
        for number, cell in enumerate(cells):
            if self._rank in cell.readers:
                box = plan.target.parameters[cell.parameter].boxes[self._rank]
                assert box is not None
                landings[number] = landing[cell.parameter][box.slices(cell.box)]
        pieces = [Piece(cells[number].start, cells[number].dtype, into) for number, into in landings.items()]
        caller = Caller(source.service)
        try:
            link = make_link(source.transport, source.handle, source.service.owner, pieces)
        except BaseException:
            caller.close()
            raise
        return _Owner(source, link, cells, fingerprint(cells), landings, plan.stretches(rank), caller)

    def _lease(self, version: int, deadline: float, slots: dict[int, int]) -> dict[int, Manifest]:
        """Keep the version on every learner rank; fills `slots` as they answer."""
        failure: WeightsError | None = None
        asked = []
        for rank, owner in self._owners.items():
            try:
                owner.caller = owner.caller or Caller(owner.source.service)
                owner.caller.send("lease", version)
                asked.append(rank)
            except ArenaUnreachable as error:
                self._hang_up(owner)
                failure = failure or error
        manifests = {}
        for rank in asked:  # all answers are taken, so that no connection is left with one
            caller = self._owners[rank].caller
            assert caller is not None
            try:
                slots[rank], manifests[rank] = caller.receive(deadline)
            except ArenaUnreachable as error:
                self._hang_up(self._owners[rank])
                failure = failure or error
            except WeightsError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return manifests

    def _check(self, rank: int, manifest: Manifest, version: int) -> list[tuple[Block, int]]:
        """What to verify of the cells taken from a learner rank, with the digest of each."""
        owner = self._owners[rank]
        blocks = blocks_to_verify(owner.cells, owner.stretches, manifest.digests, version)
        try:
            manifest.check(version, owner.fingerprint, len(blocks))
        except WeightsError as error:
            raise type(error)(f"learner {owner.source.service.owner} {error}") from None
        pairs = zip(blocks, manifest.values, strict=True)
        return [(block, value) for block, value in pairs if block.cell in owner.landings]

    def _verify(self, owner: _Owner, version: int, blocks: Sequence[tuple[Block, int]]) -> None:
        for block, published in blocks:
            cell = owner.cells[block.cell]
            arrived = digest(block.of(owner.landings[block.cell]).to(cell.dtype))
            if arrived != published:
                raise DigestMismatch(
                    f"{cell.parameter} of version {version} from learner {owner.source.service.owner} arrived "
                    f"with digest {arrived:016x}, published was {published:016x}"
                )

    def _release(self, slots: Mapping[int, int]) -> None:
        """Give back what was leased. One that does not take it back has lost it with the connection."""
        for rank, slot in slots.items():
            owner = self._owners[rank]
            try:
                if owner.caller is not None:
                    owner.caller.send("release", slot)
            except WeightsError:
                self._hang_up(owner)
        for rank in slots:
            owner = self._owners[rank]
            try:
                if owner.caller is not None:
                    owner.caller.receive(time.monotonic() + _RECEIPT_SECONDS)
            except WeightsError:
                self._hang_up(owner)

    @staticmethod
    def _hang_up(owner: _Owner) -> None:
        if owner.caller is not None:
            owner.caller.close()
        owner.caller = None
