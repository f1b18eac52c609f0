"""The memory in which a learner rank keeps its last published versions, each whole or not there at all.

An arena has one slot more than versions to keep. Publishing copies into the slot of the oldest version, once
nobody reads that any more, and commits it by handing out its manifest last; the versions in the other slots
stay readable meanwhile. What each group of readers takes lies together and packed, in the dtype that travels.
"""

from __future__ import annotations

import math
import secrets
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
import xxhash
from torch import Tensor

from meshrl.errors import UserError
from meshrl.weights.digests import Digests, blocks_to_verify, digest
from meshrl.weights.errors import ArenaBusy, DigestMismatch, LayoutError, VersionUnavailable
from meshrl.weights.host import HostProcess, ip_addresses
from meshrl.weights.layout import Layout
from meshrl.weights.memfd import MemoryFile, check_memory
from meshrl.weights.plan import Cell, Plan
from meshrl.weights.service import ServiceAddress, SlotService, service_hosts
from meshrl.weights.tensors import difference, layout_of, local, signature
from meshrl.weights.transport import Transport, make_offer
from meshrl.weights.wire import Offer


@dataclass(frozen=True)
class WeightsConfig:
    """How weights travel from learner to generators."""

    transport: Transport = "auto"
    """`auto`: the first that works of memfd (one host), nixl, rdma (Monarch's RDMABuffer), tcp."""
    digests: Digests = "sampled"
    """What of each version is verified on arrival. `sampled`: blocks drawn anew each time, 1 to 2 % of a
    broadcast; `always`: every byte; `off`: nothing."""
    keep_versions: int = 1
    """Versions before the newest that can still be pulled; at least 1, since the last one may still be on its
    way while the next is published. Each takes memory of the learner's share of the weights."""
    deadline_seconds: float = 60.0
    """Longest wait for a publish, or for a pull, before it is an error that says who did not answer."""
    arena_device: Literal["cpu", "parameters"] = "cpu"
    """Where published versions lie. `parameters`: on the device of the weights, for nixl and rdma from GPU to
    GPU; memfd and tcp then cannot be used."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("transport", get_args(Transport)),
            ("digests", get_args(Digests)),
            ("arena_device", ("cpu", "parameters")),
        ):
            if getattr(self, name) not in choices:
                raise UserError(f"weights.{name} is {getattr(self, name)!r}: one of {', '.join(choices)}")
        if not isinstance(self.keep_versions, int) or self.keep_versions < 1:
            raise UserError(
                f"weights.keep_versions is {self.keep_versions}: the version before the newest may still be on its "
                "way to a generator, so at least 1"
            )
        if not 0 < self.deadline_seconds < math.inf:
            raise UserError(
                f"weights.deadline_seconds is {self.deadline_seconds:g}: it must be above 0 and finite"
            )


@dataclass(frozen=True)
class Manifest:
    """What a slot holds; handed to whoever leases it."""

    version: int
    fingerprint: int
    """Of the cells: what lies where."""
    digests: Digests
    values: tuple[int, ...]
    """Digest of each block that `blocks_to_verify` names for this version."""
    transports: tuple[str, ...]
    """By which the arena is being read."""

    def check(self, version: int, fingerprint: int, blocks: int) -> None:
        """
        Raises:
            VersionUnavailable: this is another version's.
            LayoutError: the slot is laid out for another plan.
            DigestMismatch: there are not as many digests as blocks.
        """
        if self.version != version:
            raise VersionUnavailable(f"has version {self.version} where version {version} should be")
        if self.fingerprint != fingerprint:
            raise LayoutError("has another layout than the one that was agreed on; connect again")
        if len(self.values) != blocks:
            raise DigestMismatch(f"has {len(self.values)} digests of version {version}, not {blocks}")


@dataclass(frozen=True)
class WeightSource:
    """All that a reader needs to read from one learner rank by one transport."""

    service: ServiceAddress
    transport: str
    handle: Any


class Arena:
    """A learner rank's end of a broadcast."""

    def __init__(
        self,
        named: Mapping[str, Tensor],
        plan: Plan,
        rank: int,
        readers: Sequence[HostProcess],
        config: WeightsConfig | None = None,
    ) -> None:
        """
        Args:
            named: this rank's tensors, whole or DTensors; nothing is published yet.
            plan: of the transfer; what is to be published is decided by it.
            rank: this rank in the plan's source.
            readers: every process that will read.

        Raises:
            WeightsError: not enough memory.
            LayoutError: the tensors are not those of the plan.
        """
        self.config = config or WeightsConfig()
        self.plan, self.rank = plan, rank
        self._layout, self._signature = layout_of(named), signature(named)
        self._cells, self._stretches = plan.cells(rank), plan.stretches(rank)
        self._fingerprint = fingerprint(self._cells)
        self._slices = _slices(plan, rank, self._layout, self._cells)
        count = self.config.keep_versions + 1
        self._files: list[MemoryFile] | None = None
        parameter_device = next(iter(named.values())).device if named else torch.device("cpu")
        if self.config.arena_device == "cpu" or parameter_device.type == "cpu":
            check_memory(count * plan.slot_bytes(rank))
            self._files = [MemoryFile(plan.slot_bytes(rank)) for _ in range(count)]
            self.slots = [file.memory for file in self._files]
            if parameter_device.type == "cuda":
                _pin(self.slots)
        else:
            size = max(plan.slot_bytes(rank), 1)
            self.slots = [torch.zeros(size, dtype=torch.uint8, device=parameter_device) for _ in range(count)]
        self.views = [[_view(slot, cell) for cell in self._cells] for slot in self.slots]
        """Each cell in each slot."""
        here = HostProcess.current()
        hosts = service_hosts(readers, here, ip_addresses())
        secret = secrets.token_bytes(16)
        self.service = SlotService(
            count, partial(_read, self.slots), secret=secret, local=hosts == ("127.0.0.1",)
        )
        # The service's threads know the slots and not the arena: one that is forgotten stops to listen.
        weakref.finalize(self, self.service.close)
        self._address = ServiceAddress(here, hosts, self.service.port, secret)
        self._offers: dict[str, Offer] = {}
        self._publishing = threading.Lock()

    def offer(self, transport: str) -> WeightSource:
        """Let this arena be read by a transport.

        Raises:
            TransportUnavailable: not this arena, or not here.
        """
        if transport not in self._offers:
            self._offers[transport] = make_offer(
                transport, self.slots, self._files, self._stretches, self._address
            )
        return WeightSource(self._address, transport, self._offers[transport].handle)

    @torch.no_grad()
    def publish(
        self, version: int, named: Mapping[str, Tensor], deadline_seconds: float | None = None
    ) -> None:
        """Copy the tensors out as `version`. They may change as soon as this returns.

        A failure leaves the versions before it whole and this one unpublished.

        Waits for: readers of the oldest version kept, which this one replaces.

        Raises:
            LayoutError: the tensors are not those that this arena was made for.
            ArenaBusy: a reader did not give its version back before the deadline; it is named.
            VersionUnavailable: `version` is not above the last one.
        """
        if signature(named) != self._signature:
            raise LayoutError(
                f"the weights have changed their layout since the generators were connected: "
                f"{difference(self._layout, layout_of(named))}; connect again"
            )
        deadline_seconds = deadline_seconds or self.config.deadline_seconds
        # One at a time: a publish whose caller has gone is still copying, and its slot is not free.
        if not self._publishing.acquire(timeout=deadline_seconds):
            raise ArenaBusy(f"cannot publish version {version}: the one before is still being copied")
        try:
            self._copy_out(version, named, deadline_seconds)
        finally:
            self._publishing.release()

    def _copy_out(self, version: int, named: Mapping[str, Tensor], deadline_seconds: float) -> None:
        slot = self.service.begin(version, deadline_seconds)
        views = self.views[slot]
        for cell, view, slices in zip(self._cells, views, self._slices, strict=True):
            view.copy_(local(named[cell.parameter])[slices])
        if self.slots[slot].device.type == "cuda":
            torch.cuda.synchronize(self.slots[slot].device)  # readers know no streams
        blocks = blocks_to_verify(self._cells, self._stretches, self.config.digests, version)
        values = tuple(digest(block.of(views[block.cell])) for block in blocks)
        manifest = Manifest(version, self._fingerprint, self.config.digests, values, tuple(self._offers))
        self.service.commit(slot, version, manifest)

    def close(self) -> None:
        """Stop to serve; memory goes when nobody has it mapped any more."""
        self.service.close()
        for offer in self._offers.values():
            offer.close()


def fingerprint(cells: Sequence[Cell]) -> int:
    """A number that two ranks share only if they see the same cells at the same places (64 bits)."""
    rows = [(cell.parameter, cell.box, str(cell.dtype), cell.start) for cell in cells]
    return xxhash.xxh3_64_intdigest(repr(rows).encode())


def _view(slot: Tensor, cell: Cell) -> Tensor:
    return slot[cell.start : cell.start + cell.bytes].view(cell.dtype).view(cell.box.shape)


def _slices(plan: Plan, rank: int, held: Layout, cells: Sequence[Cell]) -> list[tuple[slice, ...]]:
    """Where each cell lies in this rank's tensor of the parameter."""
    found = []
    for cell in cells:
        box = plan.source.parameters[cell.parameter].boxes[rank]
        mine = held.parameters.get(cell.parameter)
        if mine is None or box is None or mine.boxes[0] != box:
            raise LayoutError(
                f"rank {rank} holds {mine.boxes[0] if mine else 'nothing'} of {cell.parameter}, the plan says {box}"
            )
        found.append(box.slices(cell.box))
    return found


def _read(slots: Sequence[Tensor], request: str, slot: int, start: int, size: int) -> memoryview:
    """Bytes of a slot, for the transport that sends them."""
    assert request == "read"
    return slots[slot][start : start + size].cpu().numpy().data


def _pin(slots: Sequence[Tensor]) -> None:
    """Page-lock host memory, so that copies from a GPU run at the full rate of the bus."""
    runtime: Any = torch.cuda.cudart()
    for slot in slots:
        runtime.cudaHostRegister(slot.data_ptr(), slot.numel(), 0)
