"""From generator docks to learner docks, without passing through the controller.

The controller names rollouts; bridges beside the actors move their columns. Advantages are ordinary tensor
code of the program that runs on the learner mesh, by Monarch's tensor engine: the controller issues
operations and sees no value.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from monarch import remote
from monarch.actor import as_endpoint
from monarch.common.tensor import Tensor as EngineTensor
from torch import Tensor

from meshrl.handoff.answers import CAUSE_SECONDS, answers_of
from meshrl.handoff.collectives import Address, Backend, Bridge, Shipment, accept_columns
from meshrl.handoff.dock import Ticket
from meshrl.handoff.schema import BY_NAME, Column, check_needs, columns_of, declared
from meshrl.handoff.shipment import GENERATOR_DIED, plan_shipment
from meshrl.losses import Loss
from meshrl.mesh import Replica, RoleMesh
from meshrl.rollout import RolloutGroup
from meshrl.worker import WorkerDied

_numbers = itertools.count(1)
_accept = remote(accept_columns, propagate=lambda values, columns, ticket, count: None)


@dataclass(frozen=True)
class HandoffConfig:
    """How rollouts are cut into the learners' micro-batches, and how long that may take."""

    microbatch_tokens: int | None = None
    """Most tokens of a micro-batch; longer rollouts are left out, and named by the ticket. None: a rank's share is one
    micro-batch, whatever its size."""
    attention_tokens: float | None = None
    """Length at which attention costs a learner as much as everything else; ranks are balanced by it. None: by tokens
    alone."""
    deadline_seconds: float = 60.0
    """Longest wait of any one handoff."""
    backend: Backend = "gloo"
    """"nccl" needs a GPU for each process of both meshes."""


class Handoff:
    """The way of rollouts from a generator mesh to a learner mesh.

    >>> handoff = await Handoff.connect(source=generator, target=learner)          # doctest: +SKIP
    >>> rewards, groups = handoff.rewards(batch.groups)
    >>> advantages = handoff.on_mesh(group_relative)(rewards, groups)
    >>> ticket = await handoff(batch.groups, advantages=advantages)
    >>> update = await learner.step(policy_loss(), ticket)
    """

    def __init__(
        self,
        source: RoleMesh,
        target: Replica,
        config: HandoffConfig,
        *,
        data_parallel: int,
        tensor_parallel: int,
        provides: Sequence[Column],
        rewards: bool,
        note: Callable[[str], None],
    ) -> None:
        """Use `Handoff.connect`."""
        self.config = config
        self.data_parallel = data_parallel
        self.tensor_parallel = tensor_parallel
        self._source = source
        self._target = target
        self._bridges: dict[int, Replica] = {}  # by generator replica; those that are linked
        self._provides = {column.name: column for column in provides}
        self._rewards = rewards
        self._note = note
        self._lock = asyncio.Lock()

    @classmethod
    async def connect(
        cls,
        *,
        source: RoleMesh,
        target: RoleMesh,
        config: HandoffConfig | None = None,
        data_parallel: int | None = None,
        tensor_parallel: int = 1,
        loss: Loss | None = None,
        provides: Sequence[str | Column] = ("advantages",),
        note: Callable[[str], None] = print,
    ) -> Handoff:
        """Put bridges beside the actors, link them, and start the tensor engine on the learner mesh.

        Call after the learners' own process group is up: the tensor engine sets RANK and WORLD_SIZE in its
        processes.

        Args:
            source: generators; any number of replicas of one process.
            target: learners; one replica of data_parallel * tensor_parallel processes, tensor-parallel ranks
                innermost.
            data_parallel: None: all ranks that tensor parallelism leaves.
            loss: what will be trained with; a column that it needs and nothing makes is an error here. None: not known.
            provides: columns that the program makes for each batch, by name, or declared here. Those of rollouts
                are given to each handoff; those of tokens are added on the learner ranks (`Dock.put_column`).
            note: told when rollouts are left out because their generator died.

        Raises:
            ValueError: the meshes do not fit.
            UserError: the loss needs a column that nothing makes; an unknown column.
            DeadlineError: the bridges did not find each other in time.
        """
        if len(target.replicas) != 1:
            raise ValueError(f"{target.name} has {len(target.replicas)} replicas: a handoff wants one")
        several = [replica.size for replica in source.replicas if replica.size != 1]
        if several:
            raise ValueError(f"{source.name} has replicas of {several} processes: a handoff wants one each")
        learners = target.replicas[0].size
        data_parallel = data_parallel or learners // tensor_parallel
        if data_parallel * tensor_parallel != learners:
            raise ValueError(
                f"data_parallel={data_parallel} times tensor_parallel={tensor_parallel} is not the {learners} "
                f"processes of {target.name}"
            )
        columns = declared(provides)
        needed = columns_of(loss)
        check_needs(loss, needed, columns)
        bridge = (await target.spawn_beside(Bridge, _bridge_name())).replicas[0]
        handoff = cls(
            source,
            bridge,
            config or HandoffConfig(),
            data_parallel=data_parallel,
            tensor_parallel=tensor_parallel,
            provides=[column for column in columns if column.scope == "rollout"],
            rewards="rewards" in needed,
            note=note,
        )
        await handoff.relink()
        # The first operation starts the engine: done here, a failure is one of connecting, and no step pays for it.
        with handoff.tensors():
            accepted = _accept.call([torch.zeros(0)], [BY_NAME["advantages"]], Ticket(0, 0, 0, 0), 0)
        await answers_of(
            [(bridge, accepted)],
            handoff.config.deadline_seconds,
            f"the tensor engine to start on {target.name}",
        )
        return handoff

    async def relink(self) -> None:
        """Link the learners with the generator replicas that are alive now: after one died, or came back.

        Waits for: a handoff in progress, then each process of both meshes.
        """
        async with self._lock:
            await self._relink()

    async def _relink(self) -> None:
        while True:
            alive = {r: replica for r, replica in enumerate(self._source.replicas) if not _dead(replica)}
            try:
                await self._link(alive)
                return
            except WorkerDied:  # of fewer each time
                if _dead(self._target) or not any(_dead(replica) for replica in alive.values()):
                    raise

    async def _link(self, alive: Mapping[int, Replica]) -> None:
        deadline, target = self.config.deadline_seconds, self._target
        # Whoever still waits for a peer that is gone gives up when the others leave; who was joining, a little later.
        leaving = [(target, target.actors.leave.call())]
        await answers_of(leaving, deadline + CAUSE_SECONDS, "the learners to leave the old link")
        self._bridges = {
            number: bridge
            for number, bridge in self._bridges.items()
            if number in alive and bridge.processes is alive[number].processes
        }
        for number, replica in alive.items():
            if number not in self._bridges:
                beside = RoleMesh(self._source.name, [replica])
                self._bridges[number] = (await beside.spawn_beside(Bridge, _bridge_name())).replicas[0]
        bridges = [bridge for _, bridge in sorted(self._bridges.items())]
        if not bridges:
            return
        opened = bridges[0].actors.open_store.call(deadline)
        address: Address
        ((address,),) = await answers_of([(bridges[0], opened)], deadline, "the handoff's store to open")
        settings = (len(bridges) + target.size, deadline, self.config.backend)
        await answers_of(
            [
                (end, end.actors.join.call(address, first, *settings))
                for first, end in enumerate([*bridges, target])
            ],
            deadline,
            f"{self._source.name} and the learners to link up",
        )

    @contextmanager
    def tensors(self) -> Iterator[None]:
        """Within it, torch operations run on the learner mesh, the same on every rank.

        Tensors made here have shapes but no values on the controller: `.item()`, `.tolist()` and shapes that
        depend on data raise. Do not await within: the switch holds for the whole process.
        """
        with self._target.proc_mesh.activate():
            yield

    def on_mesh(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`function`, to be called with tensors of the learner mesh, as one operation there.

        Its code is ordinary tensor code, from a module or a cell, and may read values. Called within `tensors`,
        the same function gives the same tensor, at a message for each of its operations.

        >>> advantages = handoff.on_mesh(group_relative)(rewards, groups)               # doctest: +SKIP

        Returns:
            a function with the same arguments, whose result has shape and dtype of the first one.
        """
        operation = remote(function, propagate=lambda first, *_, **__: torch.empty_like(first))

        def call(*arguments: Any, **settings: Any) -> Tensor:
            with self.tensors():
                return operation(*arguments, **settings)

        return call

    def rewards(self, groups: Sequence[RolloutGroup]) -> tuple[Tensor, Tensor]:
        """Scores on the learner mesh: rewards float32 `[rollouts]`, and groups int64 `[rollouts]`, which
        number the group of each rollout from 0 in the order given.

        Raises:
            ValueError: a rollout has no reward.
        """
        values, numbers = [], []
        for number, group in enumerate(groups):
            for rollout in group.rollouts:
                if rollout.reward is None:
                    raise ValueError(
                        f"rollout {rollout.id} of group {group.group_id} has no reward "
                        f"({rollout.reward_error}): drop its group"
                    )
                values.append(rollout.reward)
                numbers.append(number)
        return self._scores(values, numbers)

    async def __call__(self, groups: Sequence[RolloutGroup], **columns: Tensor | Sequence[float]) -> Ticket:
        """Put the groups' columns into the learners' docks; when it returns, they are there.

        Waits for: each generator replica sending its part, each learner rank docking its share.

        A generator that dies takes its rollouts with it: they are left out, and the ticket says so.

        Args:
            groups: taken from the buffer; columns stay in the generators' docks until released there. None at
                all gives a ticket for an empty batch, which learners skip.
            columns: what the program makes of each rollout, such as `advantages=`: `[rollouts]` in the order of the
                groups, a tensor of the learner mesh or plain values.

        Returns:
            The ticket that a learner's step redeems.

        Raises:
            ValueError: a column is missing, unknown, of another length, or not finite.
            RemoteError: the tensor code that makes a column failed on the learner mesh.
            NotDocked: a rollout is not where its handle says.
            WorkerDied: a learner process is gone.
            DeadlineError: a rank did not answer in `deadline_seconds`.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        values = self._values(columns, len(rollouts))
        if self._rewards:
            rewards, _ = self.rewards(groups)
            values[BY_NAME["rewards"]] = rewards
        async with self._lock:
            while True:
                gone = {
                    position: GENERATOR_DIED
                    for position, rollout in enumerate(rollouts)
                    if not self._holds(rollout.replica, rollout.process_id)
                }
                shipment = plan_shipment(
                    rollouts,
                    next(_numbers),
                    self.data_parallel,
                    self.tensor_parallel,
                    self.config.microbatch_tokens,
                    self.config.attention_tokens,
                    sources=tuple(sorted(self._bridges)),
                    gone=gone,
                )
                try:
                    await self._ship(shipment, values)
                except WorkerDied:
                    if not any(_dead(bridge) for bridge in self._bridges.values()) or _dead(self._target):
                        raise
                    await self._relink()
                    continue
                if gone:
                    self._note(f"{len(gone)} of {len(rollouts)} rollouts are left out: their generator died")
                return shipment.ticket

    async def _ship(self, shipment: Shipment, values: Mapping[Column, Tensor]) -> None:
        holders = sorted({shipment.replicas[p] for rank in shipment.ranks for part in rank for p in part})
        sources = [self._bridges[replica] for replica in holders]
        bridge, ticket = self._target, shipment.ticket
        with self.tensors():
            accepted = _accept.call(list(values.values()), list(values), ticket, len(shipment.rollout_ids))
        refusals, *_ = await answers_of(
            [(bridge, accepted)]
            + [(source, source.actors.send.call(shipment)) for source in sources]
            + [(bridge, bridge.actors.receive.call(shipment))],
            self.config.deadline_seconds,
            f"{ticket} to arrive from generator replicas {holders}",
        )
        for refusal in filter(None, refusals):
            raise ValueError(refusal)

    def _values(self, columns: Mapping[str, Tensor | Sequence[float]], count: int) -> dict[Column, Tensor]:
        """What the program gave, as tensors of the learner mesh."""
        if set(columns) != set(self._provides):
            wanted = ", ".join(sorted(self._provides)) or "none"
            raise ValueError(
                f"the handoff was given the columns {', '.join(sorted(columns)) or 'none'}, it provides {wanted}: "
                "give each one, or name others in `provides` when connecting"
            )
        values = {}
        for name, value in columns.items():
            shape = tuple(value.shape) if isinstance(value, Tensor) else (len(list(value)),)
            if shape != (count,):
                raise ValueError(f"{name} have shape {list(shape)}, the groups have {count} rollouts")
            if not isinstance(value, EngineTensor):
                value = self._plain(self._provides[name], value)
            values[self._provides[name]] = value
        return values

    def _plain(self, column: Column, value: Tensor | Sequence[float]) -> Tensor:
        """Plain values, exactly, as a tensor of the learner mesh."""
        plain = value.tolist() if isinstance(value, Tensor) else list(value)
        column.values(plain)  # what it cannot hold is an error here
        shape, dtype = len(plain), column.dtype
        exact = as_endpoint(self._target.actors.exact, propagate=lambda: torch.empty(shape, dtype=dtype))
        with self.tensors():
            return exact.rref(plain, dtype)

    def _holds(self, replica: int, process_id: int) -> bool:
        """Whether the process that made a rollout is the one that is linked, and alive."""
        bridge = self._bridges.get(replica)
        return bridge is not None and not _dead(bridge) and process_id in (0, bridge.pids[0])

    def _scores(self, rewards: Sequence[float], groups: Sequence[int]) -> tuple[Tensor, Tensor]:
        shapes = len(rewards), len(groups)
        scores = as_endpoint(
            self._target.actors.scores,
            propagate=lambda: (torch.empty(shapes[0]), torch.empty(shapes[1], dtype=torch.int64)),
        )
        with self.tensors():
            return scores.rref(rewards, groups)


def _bridge_name() -> str:
    return f"handoff_bridge_{next(_numbers)}"


def _dead(replica: Replica) -> bool:
    return replica.processes.death.done()
