"""Collectives of a controller program: between the ranks of a mesh, and from one mesh to another.

Tensor code of the program runs on a mesh by Monarch's tensor engine; these functions are the operations in which
ranks meet. They read the same on CPU and on GPUs; `backend` names the path:

    gloo    a process group of our own, beside the learners' default one, driven by functions that the engine runs
    nccl    within a mesh Monarch's own `Tensor.reduce`; between meshes our own group, since Monarch's `to_mesh`
            moves a tensor only within one engine, and each replica, being a proc mesh, has an engine of its own.
            Written after Monarch 0.7's source: it has run on CPU only.

Operations are issued, not awaited: those of one mesh run there in program order, among ordinary torch operations.
What fails there is told by the next `fetch` that depends on it.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from monarch.common.tensor import Tensor as EngineTensor
from monarch.fetch import fetch_shard
from monarch.mesh_controller import RemoteException
from torch import Tensor

from meshrl.handoff import tensor_bridge
from meshrl.handoff.collectives import Address, Backend
from meshrl.handoff.tensor_bridge import Reduction
from meshrl.mesh import Replica, RoleMesh
from meshrl.worker import RemoteError

CAUSE_SECONDS = 1.0
"""How long a `fetch` waits before it looks for a cause elsewhere, and how long it looks."""


def all_reduce(tensor: Tensor, op: Reduction = "sum") -> Tensor:
    """Sum, mean or extreme over the ranks of the tensor's mesh, on each of them. No gradient flows through.

    Args:
        tensor: any shape, the same on each rank; numbers, and floating ones for a mean.

    Raises:
        ValueError: the tensor is of no connected mesh, or its dtype has no such reduction.
    """
    if op not in ("sum", "mean", "max", "min"):
        raise ValueError(f"all_reduce has no op={op!r}: take sum, mean, max or min")
    if op == "mean" and not tensor.is_floating_point():
        raise ValueError(f"there is no mean of {tensor.dtype}: convert it, or take the sum")
    tensors, end = _find(tensor)
    _no_booleans(tensor, "all_reduce")
    if tensors.backend == "nccl":
        return _native(tensor, "avg" if op == "mean" else op)
    return tensor_bridge.all_reduce(tensor, tensors._order(end), tuple(tensor.shape), op)


def all_gather(tensor: Tensor) -> Tensor:
    """Every rank's tensor, in the order of ranks, on each of them.

    Args:
        tensor: `[n, ...]`, the same shape on each rank.

    Returns:
        `[ranks * n, ...]`; of a tensor without dimensions `[ranks]`.

    Raises:
        ValueError: the tensor is of no connected mesh.
    """
    tensors, end = _find(tensor)
    if tensors.backend == "nccl":
        gathered = _native(tensor, "stack")
        return gathered.flatten(0, 1) if tensor.ndim else gathered
    return tensor_bridge.all_gather(tensor, tensors._order(end), tuple(tensor.shape), end.size)


def reduce_scatter(tensor: Tensor) -> Tensor:
    """The sum over ranks, rank i keeping the i-th of equal parts.

    Args:
        tensor: `[n, ...]`, the same shape on each rank; numbers.

    Returns:
        `[n / ranks, ...]`.

    Raises:
        ValueError: the tensor is of no connected mesh, or `n` is not a multiple of its ranks.
    """
    tensors, end = _find(tensor)
    _no_booleans(tensor, "reduce_scatter")
    if tensor.ndim == 0 or tensor.shape[0] % end.size:
        raise ValueError(
            f"reduce_scatter of shape {list(tensor.shape)} over {end.size} ranks: the first dimension must be a "
            "multiple of the ranks; pad it"
        )
    if tensors.backend == "nccl":
        return _native(tensor.unflatten(0, (end.size, tensor.shape[0] // end.size)), "sum", scatter=True)
    return tensor_bridge.reduce_scatter(tensor, tensors._order(end), tuple(tensor.shape), end.size)


def to_mesh(tensor: Tensor | Sequence[Tensor], mesh: RoleMesh | Replica) -> Tensor:
    """A tensor on another mesh. The source sends it; no rank of any other mesh takes part.

    From a mesh of as many ranks, rank i's tensor arrives on rank i. From a mesh of one rank, such as a generator
    replica, its tensor arrives on every rank. Several tensors, one of each replica `[n_r, ...]`, arrive end to end
    in the order given, `[sum of n_r, ...]`: what the replicas of a generator hold is then whole on every learner
    rank. A tensor that is on the mesh already is returned as it is.

    >>> rewards = to_mesh([rewards_of_replica_0, rewards_of_replica_1], learner)          # doctest: +SKIP

    Raises:
        ValueError: no connection joins the meshes, their sizes differ and the source has more than one rank,
            or the tensors cannot be laid end to end.
    """
    parts = [tensor] if isinstance(tensor, Tensor) else list(tensor)
    if not parts:
        raise ValueError("to_mesh got no tensors: give one of each replica")
    target = _one(mesh)
    tensors, _ = _find(parts[0], target)
    ends = [tensors._end_of(part) for part in parts]
    end = tensors._ends[target.processes]
    if ends == [end]:
        return parts[0]
    if end in ends or len(set(map(id, ends))) != len(ends):
        names = ", ".join(source.replica.processes.names() for source in ends)
        raise ValueError(f"to_mesh wants one tensor of each source, none of the target; got those of {names}")
    for part, source in zip(parts, ends, strict=True):
        if source.size not in (1, end.size):
            raise ValueError(
                f"{source.replica.processes.names()} has {source.size} ranks, {target.processes.names()} "
                f"{end.size}: to_mesh wants as many, or a source of one"
            )
        rows_differ_only = part.ndim > 0 and part.shape[1:] == parts[0].shape[1:]
        if part.dtype != parts[0].dtype or (len(parts) > 1 and not rows_differ_only):
            raise ValueError(
                "tensors of several replicas are laid end to end: "
                + ", ".join(f"{p.dtype} {list(p.shape)}" for p in parts)
                + " differ in more than the first dimension"
            )
    return tensors._move(parts, ends, end)


class MeshTensors:
    """Meshes whose tensor programs can meet.

    >>> tensors = await MeshTensors.connect(generator, learner)                            # doctest: +SKIP
    >>> with tensors.on(learner):
    ...     total = all_reduce(counts)
    >>> print(await tensors.fetch(total))

    Keep it: with the last reference to it the connection goes.
    """

    def __init__(self, ends: Sequence[End], deadline_seconds: float, backend: Backend) -> None:
        """Use `MeshTensors.connect`."""
        self._ends = {end.replica.processes: end for end in ends}
        self.deadline_seconds = deadline_seconds
        self.backend: Backend = backend
        self._number = 0
        self._issued = itertools.count(1)
        self._collectives: Counter[int] = Counter()
        self._sent: dict[int, Tensor] = {}

    @classmethod
    async def connect(
        cls, *meshes: RoleMesh, deadline_seconds: float = 60.0, backend: Backend = "gloo"
    ) -> MeshTensors:
        """Start the tensor engine on the meshes, and join their ranks by process groups of their own.

        Call after the learners' own process group is up: the tensor engine sets RANK and WORLD_SIZE in its
        processes. Connect again after a replica was replaced.

        Args:
            deadline_seconds: longest wait of an operation for its peers, and of a `fetch`.
            backend: "nccl" needs a GPU for each process; tensors are then made on it.

        Raises:
            ValueError: no meshes, or one of them twice.
            DeadlineError: the ranks did not find each other in time.
            WorkerDied: a process is gone.
        """
        names = [mesh.name for mesh in meshes]
        if not meshes or len(set(names)) != len(names):
            raise ValueError(f"connect wants different meshes, got {names}")
        number = next(_numbers)
        ends: list[End] = []
        first = 0
        for mesh in meshes:
            bridges = await mesh.spawn_beside(tensor_bridge.Bridge, f"tensor_bridge_{number}")
            for replica in bridges.replicas:
                # The first operation starts the engine; its result tells what the engine calls the mesh.
                with replica.proc_mesh.activate():
                    ends.append(End(replica, first, torch.zeros(())))
                first += replica.size
        tensors = cls(ends, deadline_seconds, backend)
        await tensors.reset()
        _living[number] = tensors
        return tensors

    async def reset(self) -> None:
        """Make the process groups anew: an operation that failed on one rank leaves its peers' torn.

        Tensors stay as they are; collectives issued before and not yet run fail.
        Waits for: every rank joining, and those that still wait for a peer to give up.

        Raises: as `connect`.
        """
        previous, self._number = self._number, next(_numbers)
        self._sent.clear()
        self._collectives.clear()
        ends, seconds = list(self._ends.values()), self.deadline_seconds

        async def store(end: End) -> Address:
            return await end.replica.call_rank("open_store", seconds, rank=0, deadline_seconds=seconds)

        grouped = [end for end in ends if end.size > 1 and self.backend == "gloo"]
        world, *inner = await asyncio.gather(store(ends[0]), *map(store, grouped))
        addresses = dict(zip((end.first for end in grouped), inner, strict=True))
        size = sum(end.size for end in ends)
        await asyncio.gather(
            *(
                end.replica.call(
                    "join",
                    self._number,
                    previous,
                    tensor_bridge.Seat(
                        world, end.first, size, addresses.get(end.first), end.size, seconds, self.backend
                    ),
                    deadline_seconds=seconds,
                )
                for end in ends
            )
        )
        ranks = [(end, rank) for end in ends for rank in range(end.size)]
        await asyncio.gather(*(self._value(end, end.anchor, rank) for end, rank in ranks))

    @contextmanager
    def on(self, mesh: RoleMesh | Replica) -> Iterator[None]:
        """Within it, torch operations run on each rank of that mesh, of which a role with several replicas has
        several: `tensors.on(generator.replicas[1])`.

        Tensors made here have shapes but no values on the controller: `.item()`, `.tolist()` and shapes that
        depend on data raise. Do not await within: the switch holds for the whole process.
        """
        replica = self._ends[self._known(_one(mesh)).processes].replica
        with torch.device("cuda" if self.backend == "nccl" else "cpu"), replica.proc_mesh.activate():
            yield

    async def fetch(self, tensor: Tensor, rank: int = 0) -> Tensor:
        """One rank's value of a tensor, on the controller: for looking at, as all of it travels in a message.

        Waits for: every rank of the mesh having come so far, whichever is asked.

        Raises:
            ValueError: the tensor is of no mesh connected here, or the mesh has no such rank.
            RemoteError: an operation that it depends on failed; says on which rank. Where ranks had to meet
                for it, `reset` before the next collective.
            WorkerDied: a process that it depends on is gone.
            DeadlineError: it was not there in `deadline_seconds`.
        """
        end = self._end_of(tensor)
        if not 0 <= rank < end.size:
            raise ValueError(f"{end.replica.processes.names()}: there is no rank {rank}")
        answer = asyncio.ensure_future(self._value(end, tensor, rank))
        try:
            while not answer.done():
                await asyncio.wait({answer}, timeout=CAUSE_SECONDS)
                # A peer's failure is worth more than what it did to this mesh.
                if not answer.done() or tensor_bridge.in_vain(answer.exception()):
                    await self._raise_cause_elsewhere(end, failed=answer.done())
            return answer.result()
        finally:
            answer.cancel()

    async def _value(self, end: End, tensor: Tensor, rank: int) -> Tensor:
        processes = end.replica.processes
        processes.check()
        what = f"a tensor {list(tensor.shape)} of {processes.name(rank)}"
        try:
            value = fetch_shard(tensor, gpus=rank)
            return await processes.answer(value, self.deadline_seconds, what)  # pyright: ignore[reportArgumentType]
        except RemoteException as error:
            raise RemoteError(
                f"tensor code of the program failed on {processes.name(error.rank)}:\n{error}"
            ) from None

    async def _raise_cause_elsewhere(self, end: End, failed: bool) -> None:
        """Raise the death of a process, or what kept another mesh from sending. After a failure wait for either."""
        sends = [
            asyncio.ensure_future(self._value(source, self._sent[source.first], 0))
            for source in self._ends.values()
            if source is not end and source.first in self._sent
        ]
        deaths = [source.replica.processes.death for source in self._ends.values()] if failed else []
        try:
            if sends or deaths:
                await asyncio.wait(
                    [*sends, *deaths], timeout=CAUSE_SECONDS, return_when=asyncio.FIRST_EXCEPTION
                )
            for source in self._ends.values() if failed else ():
                source.replica.processes.check()
            errors = [error for send in sends if send.done() and (error := send.exception()) is not None]
            for error in sorted(errors, key=tensor_bridge.in_vain):
                raise error
        finally:
            for send in sends:
                send.cancel()

    def _order(self, end: End) -> tuple[int, int]:
        """Which groups, and which of the collectives on this mesh: ranks that skipped one notice by it."""
        self._collectives[end.first] += 1
        return self._number, self._collectives[end.first]

    def _move(self, parts: Sequence[Tensor], ends: Sequence[End], target: End) -> Tensor:
        tag, origins = next(self._issued), []
        for part, source in zip(parts, ends, strict=True):
            # A send waits for the one before it, if only in name: so the last one tells of all that failed.
            before = [self._sent[source.first]] if source.first in self._sent else []
            route = (target.first, target.size, source.size == 1)
            sent = tensor_bridge.send(part, before, self._number, tuple(part.shape), *route, tag)
            self._sent[source.first] = sent
            origins.append((source.first, source.size == 1, part.numel() * part.dtype.itemsize))
        shape = tuple(parts[0].shape)
        if len(parts) > 1:
            shape = (sum(part.shape[0] for part in parts), *shape[1:])
        with self.on(target.replica):
            return tensor_bridge.receive(self._number, origins, shape, parts[0].dtype, tag)

    def _known(self, replica: Replica) -> Replica:
        if replica.processes not in self._ends:
            raise ValueError(f"{replica.processes.names()} is not connected here, only {self}")
        return replica

    def _end_of(self, tensor: Tensor) -> End:
        for end in self._ends.values():
            if isinstance(tensor, EngineTensor) and tensor.mesh is end.anchor.mesh:
                return end
        where = f"is of {tensor.mesh}" if isinstance(tensor, EngineTensor) else "is the controller's own"
        raise ValueError(f"a tensor {list(tensor.shape)} {where}; make it within tensors.on(…) of {self}")

    def __str__(self) -> str:
        return "; ".join(processes.names() for processes in self._ends)


_numbers = itertools.count(1)
_living: weakref.WeakValueDictionary[int, MeshTensors] = weakref.WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class End:
    """A replica in a connection."""

    replica: Replica
    """Its actors are bridges."""
    first: int
    """Rank of its rank 0 among all ranks connected."""
    anchor: Any
    """A tensor of its mesh."""

    @property
    def size(self) -> int:
        return self.replica.size


def _one(mesh: RoleMesh | Replica) -> Replica:
    if isinstance(mesh, Replica):
        return mesh
    if len(mesh.replicas) != 1:
        several = f"{mesh.name} has {len(mesh.replicas)} replicas, each a mesh of its own"
        raise ValueError(f"{several}: name one, as in {mesh.name}.replicas[0]")
    return mesh.replicas[0]


def _find(tensor: Tensor, target: Replica | None = None) -> tuple[MeshTensors, End]:
    """The latest connection that has the tensor's mesh, and the target if one is given."""
    reason = ValueError("no meshes are connected: keep what `MeshTensors.connect` returns")
    for _, tensors in sorted(_living.items(), reverse=True):
        try:
            if target is not None:
                tensors._known(target)
            return tensors, tensors._end_of(tensor)
        except ValueError as error:
            reason = error
    raise reason


def _no_booleans(tensor: Tensor, operation: str) -> None:
    if tensor.dtype == torch.bool:
        raise ValueError(f"{operation} of booleans: convert them, to int64 for a count")


def _native(tensor: Any, reduction: str, scatter: bool = False) -> Tensor:
    """Monarch's collective over all ranks of the tensor's mesh; with `scatter`, dimension 0 are the ranks."""
    with torch.no_grad():
        return tensor.reduce(tensor.mesh.names, reduction, scatter=scatter)
