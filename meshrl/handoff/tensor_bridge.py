"""Collectives as each process of a mesh sees them: the process groups, and the functions that the tensor engine runs.

`meshrl.handoff.tensors` issues them. They find their groups by number in this module, where the bridge, an actor in
the same process, put them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from socket import gethostname
from typing import Any, Literal

import torch
import torch.distributed
from monarch import remote
from monarch.actor import Actor, current_rank, endpoint
from torch import Tensor

from meshrl.handoff.collectives import Address, Backend, Link
from meshrl.worker import DeadlineError

Reduction = Literal["sum", "mean", "max", "min"]

_IN_VAIN = "waited for a peer in vain"

_distributed: Any = torch.distributed  # the type stubs leave out stores and options


def in_vain(error: BaseException | None) -> bool:
    """Whether an operation failed for want of another process, where the cause then is."""
    return isinstance(error, DeadlineError) or (error is not None and _IN_VAIN in str(error))


@dataclass(frozen=True)
class Seat:
    """A replica's place in a connection."""

    world: Address
    first: int
    """Rank of the replica's rank 0 among all ranks connected."""
    size: int
    """Ranks connected."""
    mesh: Address | None
    """Store of the group of this replica's own ranks; None: there is no such group."""
    mesh_size: int
    timeout_seconds: float
    backend: Backend


class Group(Link):
    """A link with collectives, for the ranks of one mesh on CPU."""

    collectives = 0
    """How many were done. One that is not the next is refused: where an operation failed before its collective, this
    rank would otherwise meet its peers in different ones."""

    def all_reduce(self, tensor: Tensor, op: Reduction) -> Tensor:
        options = _distributed.AllreduceOptions()
        operations = _distributed.ReduceOp
        options.reduceOp = {
            "sum": operations.SUM,
            "mean": operations.AVG,
            "max": operations.MAX,
            "min": operations.MIN,
        }[op]
        result = tensor.clone(memory_format=torch.contiguous_format)
        if result.numel():
            self._group.allreduce([result], options).wait()
        return result

    def all_gather(self, tensor: Tensor) -> Tensor:
        part = _bytes(tensor)
        gathered = part.new_empty(self._group.size() * part.numel())
        if gathered.numel():
            self._group._allgather_base(gathered, part).wait()
        return gathered.view(tensor.dtype).view(_gathered_shape(tensor, self._group.size()))

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        result = tensor.new_empty(_scattered_shape(tensor, self._group.size()))
        if result.numel():
            self._group._reduce_scatter_base(result, tensor.contiguous()).wait()
        return result


@dataclass(frozen=True)
class Joined:
    """What a process has of a connection."""

    rank: int
    """Within the replica."""
    world: Link
    mesh: Group | None


_joined: dict[int, Joined] = {}
"""By number of the groups."""


class Bridge(Actor):
    """Makes the process groups, beside the actors of a mesh.

    The operations themselves are functions that the tensor engine runs: an actor that is fed a tensor whose
    computation failed would wait for it for ever.
    """

    def __init__(self) -> None:
        self._stores: list[Any] = []

    @endpoint
    def open_store(self, timeout_seconds: float) -> Address:
        """A store for making a group through, on a free port of this host; open until this process joins again."""
        timeout = timedelta(seconds=timeout_seconds)
        self._stores.append(
            _distributed.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        )
        return Address(gethostname(), self._stores[-1].port)

    @endpoint
    def join(self, number: int, previous: int, seat: Seat) -> None:
        """Replace the groups. Waits for: every other rank joining."""
        _joined.pop(previous, None)
        rank = current_rank().rank
        mesh = seat.mesh and Group(seat.mesh, rank, seat.mesh_size, seat.timeout_seconds)
        world = Link(seat.world, seat.first + rank, seat.size, seat.timeout_seconds, seat.backend)
        _joined[number] = Joined(rank, world, mesh)
        self._stores = self._stores[-2:]  # the rest belong to groups before these


def _groups(number: int) -> Joined:
    if number not in _joined:
        raise LookupError("the process groups were made anew after this operation was issued: issue it again")
    return _joined[number]


@contextmanager
def _turn(order: tuple[int, int], tensor: Tensor, shape: Sequence[int]) -> Iterator[Group | None]:
    """The group of this mesh's ranks, for the one collective whose turn it is."""
    number, turn = order
    group = _groups(number).mesh
    if group is not None and turn != group.collectives + 1:
        raise RuntimeError("an earlier collective failed on this rank: `reset` the connection")
    _check_shape(tensor, shape)
    with _peers():
        yield group
    if group is not None:
        group.collectives = turn


@contextmanager
def _peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{_IN_VAIN}: {error}") from None


def _check_shape(tensor: Tensor, shape: Sequence[int]) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"a tensor came out as {list(tensor.shape)}, the program was told {list(shape)}: ranks can only meet with "
            "tensors of the shape that the controller knows"
        )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _gathered_shape(tensor: Tensor, ranks: int) -> tuple[int, ...]:
    return (ranks * tensor.shape[0], *tensor.shape[1:]) if tensor.ndim else (ranks,)


def _scattered_shape(tensor: Tensor, ranks: int) -> tuple[int, ...]:
    return (tensor.shape[0] // ranks, *tensor.shape[1:])


@remote(propagate=lambda tensor, order, shape, op: tensor.new_empty(shape))
def all_reduce(tensor: Tensor, order: tuple[int, int], shape: Sequence[int], op: Reduction) -> Tensor:
    with _turn(order, tensor, shape) as group, torch.no_grad():
        return group.all_reduce(tensor, op) if group else tensor.clone()


@remote(propagate=lambda tensor, order, shape, ranks: tensor.new_empty(_gathered_shape(tensor, ranks)))
def all_gather(tensor: Tensor, order: tuple[int, int], shape: Sequence[int], ranks: int) -> Tensor:
    with _turn(order, tensor, shape) as group, torch.no_grad():
        return group.all_gather(tensor) if group else tensor.clone().view(_gathered_shape(tensor, ranks))


@remote(propagate=lambda tensor, order, shape, ranks: tensor.new_empty(_scattered_shape(tensor, ranks)))
def reduce_scatter(tensor: Tensor, order: tuple[int, int], shape: Sequence[int], ranks: int) -> Tensor:
    with _turn(order, tensor, shape) as group, torch.no_grad():
        return group.reduce_scatter(tensor) if group else tensor.clone()


@remote(propagate=lambda tensor, before, number, shape, first, size, everywhere, tag: torch.zeros(()))
def send(
    tensor: Tensor,
    before: Sequence[Tensor],
    number: int,
    shape: Sequence[int],
    first: int,
    size: int,
    everywhere: bool,
    tag: int,
) -> Tensor:
    """Send to the target's ranks, which begin at `first`: to all of them, or to the one that has this rank."""
    joined = _groups(number)
    _check_shape(tensor, shape)
    receivers = range(first, first + size) if everywhere else [first + joined.rank]
    with _peers():
        joined.world.send({receiver: _bytes(tensor) for receiver in receivers}, tag)
    return torch.zeros(())


@remote(propagate=lambda number, origins, shape, dtype, tag: torch.empty(shape, dtype=dtype))
def receive(
    number: int, origins: Sequence[tuple[int, bool, int]], shape: Sequence[int], dtype: torch.dtype, tag: int
) -> Tensor:
    """Receive from each source (its first rank, whether it has only that one, bytes), end to end."""
    joined = _groups(number)
    sizes = {first if single else first + joined.rank: size for first, single, size in origins}
    with _peers():
        received = joined.world.receive(sizes, tag)
    return torch.cat([received[sender] for sender in sizes]).view(dtype).view(tuple(shape))
