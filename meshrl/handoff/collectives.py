"""Moving bytes between processes of two meshes: the link, and the actor that drives it.

Monarch's tensor engine runs tensor programs on one mesh; across meshes, and across ranks on a CPU, it needs a
process group of our own. `Link` is that group: gloo on CPU, NCCL where source and target each have a GPU,
behind the same two functions. It lives beside the learner's default process group and does not touch it.

`Bridge` is an actor on the same processes as the generator and learner actors, so it sees their docks. All of
its endpoints are synchronous: that is what lets the tensor engine order them among its own operations.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed
from monarch.actor import Actor, current_rank, endpoint
from torch import Tensor

from meshrl.handoff.dock import DockedBatch, NotDocked, Ticket, dock
from meshrl.handoff.schema import BYTES_PER_TOKEN, DOCKED, Column
from meshrl.handoff.shipment import Shipment
from meshrl.waiting import waiting

Backend = Literal["gloo", "nccl"]

_distributed: Any = torch.distributed  # the type stubs leave out stores, options and point-to-point calls


@dataclass(frozen=True)
class Address:
    """Where the store of a process group listens."""

    host: str
    port: int


class Link:
    """A process group of generator replicas (first) and learner ranks, for point-to-point messages of
    bytes."""

    def __init__(
        self, address: Address, rank: int, size: int, timeout_seconds: float, backend: Backend = "gloo"
    ) -> None:
        timeout = timedelta(seconds=timeout_seconds)
        # Processes of one host need no resolvable host name and no network interface but the loopback.
        local = address.host == socket.gethostname()
        host = "127.0.0.1" if local else address.host
        store = _distributed.TCPStore(host, address.port, is_master=False, timeout=timeout)
        if backend == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
            options = _distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = _distributed.ProcessGroupNCCL(store, rank, size, options)
        else:
            self.device = torch.device("cpu")
            gloo = _distributed.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = timeout
            options._devices = [
                gloo.create_device(hostname="127.0.0.1") if local else gloo.create_default_device()
            ]
            self._group = gloo(store, rank, size, options)

    def send(self, buffers: Mapping[int, Tensor], tag: int) -> None:
        """Send each rank its uint8 `[bytes]`. Waits for: all of them being received."""
        works = [self._group.send([buffer.to(self.device)], rank, tag) for rank, buffer in buffers.items()]
        for work in works:
            work.wait()

    def receive(self, sizes: Mapping[int, int], tag: int) -> dict[int, Tensor]:
        """uint8 `[bytes]` from each rank. Waits for: their `send` with the same tag."""
        buffers = {
            rank: torch.empty(size, dtype=torch.uint8, device=self.device) for rank, size in sizes.items()
        }
        works = [self._group.recv([buffer], rank, tag) for rank, buffer in buffers.items()]
        for work in works:
            work.wait()
        return buffers


def pack(rollouts: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Per-token columns of some rollouts as one uint8 `[tokens * BYTES_PER_TOKEN]`: column by column, end to
    end."""
    parts = [torch.cat([columns[c.name] for columns in rollouts]).view(torch.uint8) for c in DOCKED]
    return torch.cat(parts)


def unpack(buffer: Tensor, tokens: int) -> dict[str, Tensor]:
    """The flat columns `[tokens]` that `pack` put into the buffer, as views of it."""
    columns, start = {}, 0
    for column in DOCKED:
        end = start + tokens * column.bytes
        columns[column.name] = buffer[start:end].view(column.dtype)
        start = end
    return columns


class Bridge(Actor):
    """One end of a link, beside the actors whose dock it reads or fills."""

    def __init__(self) -> None:
        self._store: Any = None
        self._link: Link | None = None

    @endpoint
    def open_store(self, timeout_seconds: float) -> Address:
        """Open the store that the link is made through, on a free port of this host."""
        timeout = timedelta(seconds=timeout_seconds)
        self._store = _distributed.TCPStore(
            "0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timeout
        )
        return Address(socket.gethostname(), self._store.port)

    @endpoint
    def join(self, address: Address, first: int, size: int, timeout_seconds: float, backend: Backend) -> None:
        """Join a link, leaving the one before; this mesh has the ranks from `first` on. Waits for: every other rank
        joining."""
        self._link = None
        self._rank = first + current_rank().rank
        self._link = Link(address, self._rank, size, timeout_seconds, backend)

    @endpoint
    def leave(self) -> None:
        """Leave the link: whoever waits for this rank fails, and what it waits for is given up."""
        self._link = None

    def scores(self, rewards: Sequence[float], groups: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Plain values as tensors: float32 and int64. One message for both; `torch.tensor` takes two and is slower."""
        return torch.tensor(rewards, dtype=torch.float32), torch.tensor(groups, dtype=torch.int64)

    def exact(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Plain values as a tensor."""
        return torch.tensor(values, dtype=dtype)

    @endpoint
    def send(self, shipment: Shipment) -> None:
        """Send this replica's docked rollouts to the learner ranks that train on them.

        Raises:
            NotDocked: a rollout is not here. The receivers are told, so that they do not wait for it.
        """
        assert self._link is not None
        failure: Exception | None = None
        buffers = {}
        for data_rank in range(len(shipment.ranks)):
            part = shipment.part(data_rank, shipment.sources[self._rank])
            if not part:
                continue
            try:
                payload = pack([self._docked(shipment, position) for position in part])
            except (NotDocked, ValueError) as error:
                failure = failure or error
                payload = torch.zeros(_size(shipment, part) - 1, dtype=torch.uint8)
            # One byte more says whether the rest is good: a receiver that waits is never left without an
            # answer.
            buffer = torch.cat([payload, torch.tensor([failure is None], dtype=torch.uint8)])
            buffers |= dict.fromkeys(shipment.learners(data_rank), buffer)
        with waiting("sending rollouts to the learners", kind="work"):
            self._link.send(buffers, shipment.ticket.number)
        if failure is not None:
            raise failure

    @endpoint
    def receive(self, shipment: Shipment) -> None:
        """Receive this learner rank's rollouts into its dock.

        Raises:
            NotDocked: a replica could not send its part.
        """
        assert self._link is not None or not shipment.sources
        data_rank = current_rank().rank // shipment.tensor_parallel
        parts = {rank: shipment.part(data_rank, replica) for rank, replica in enumerate(shipment.sources)}
        sizes = {rank: _size(shipment, part) for rank, part in parts.items() if part}
        buffers: dict[int, Tensor] = {}
        if self._link is not None and sizes:
            with waiting("receiving rollouts from the generators", kind="work"):
                buffers = self._link.receive(sizes, shipment.ticket.number)
        for rank, buffer in buffers.items():
            if not buffer[-1]:
                replica = shipment.sources[rank]
                raise NotDocked(f"generator replica {replica} could not send its part of {shipment.ticket}")
        parts_received = [(parts[rank], buffer[:-1]) for rank, buffer in buffers.items()]
        batch = _batch(shipment, data_rank, _merge(shipment, data_rank, parts_received))
        dock().put_batch(shipment.ticket, batch, shipment.order(data_rank))

    def _docked(self, shipment: Shipment, position: int) -> dict[str, Tensor]:
        rollout_id, tokens = shipment.rollout_ids[position], shipment.lengths[position]
        columns = dock().get(rollout_id)
        held = columns["token_ids"].numel()
        if held != tokens:
            raise ValueError(f"rollout {rollout_id} has {held} tokens in the dock, its handle says {tokens}")
        return columns


def _size(shipment: Shipment, part: Sequence[int]) -> int:
    """Bytes of the message that holds these rollouts, the last byte included."""
    return sum(shipment.lengths[position] for position in part) * BYTES_PER_TOKEN + 1


def _merge(
    shipment: Shipment, data_rank: int, received: Sequence[tuple[Sequence[int], Tensor]]
) -> dict[str, Tensor]:
    """A data rank's columns, put together from what each replica sent (positions, bytes)."""
    if len(received) == 1:  # one replica sent all, in the right order
        ((part, buffer),) = received
        return unpack(buffer, sum(shipment.lengths[position] for position in part))
    pieces: dict[int, dict[str, Tensor]] = {}
    for part, buffer in received:
        sizes = [shipment.lengths[position] for position in part]
        split = {name: values.split(sizes) for name, values in unpack(buffer, sum(sizes)).items()}
        for i, position in enumerate(part):
            pieces[position] = {name: values[i] for name, values in split.items()}
    order = shipment.order(data_rank)
    return {
        column.name: torch.cat(
            [torch.empty(0, dtype=column.dtype), *(pieces[position][column.name] for position in order)]
        )
        for column in DOCKED
    }


def _batch(shipment: Shipment, data_rank: int, columns: dict[str, Tensor]) -> DockedBatch:
    """A data rank's share, its per-rollout columns still to come."""
    order = shipment.order(data_rank)
    microbatches, first = [], 0
    for microbatch in shipment.ranks[data_rank]:
        microbatches.append(list(range(first, first + len(microbatch))))
        first += len(microbatch)
    return DockedBatch(
        rollout_ids=[shipment.rollout_ids[position] for position in order],
        lengths=[shipment.lengths[position] for position in order],
        columns=columns,
        rollout_columns={},
        microbatches=microbatches,
        global_tokens=shipment.ticket.response_tokens,
        global_rollouts=shipment.ticket.rollouts,
    )


def accept_columns(
    values: Sequence[Tensor], columns: Sequence[Column], ticket: Ticket, count: int
) -> str | None:
    """Dock per-rollout columns of a batch of `count` rollouts. Run by the tensor engine, after what they are made by.

    Not an endpoint: an actor that is fed a tensor whose computation failed waits for it for ever.

    Returns:
        What is wrong with them. Not raised: an error in the tensor engine loses its type.
    """
    for column, value in zip(columns, values, strict=True):
        if value.shape != (count,):
            return f"{column.name} came out as {list(value.shape)}, the batch has {count} rollouts"
        bad = (~value.isfinite()).nonzero().flatten().tolist()
        if bad:
            return f"{column.name} at positions {bad[:8]} of the batch's {count} are not finite"
    docked = {column.name: value.to(column.dtype) for column, value in zip(columns, values, strict=True)}
    dock().put_rollout_columns(ticket, docked)
    return None
