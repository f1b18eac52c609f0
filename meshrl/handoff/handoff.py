"""From generator docks to learner docks, without passing through the controller.

The controller names rollouts; bridges beside the actors move their columns. Advantages are ordinary tensor
code of the program that runs on the learner mesh, by Monarch's tensor engine: the controller issues
operations and sees no value.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from monarch import remote
from monarch.actor import as_endpoint
from monarch.common.tensor import Tensor as EngineTensor
from monarch.mesh_controller import RemoteException
from torch import Tensor

from meshrl.handoff.collectives import Backend, Bridge, Shipment, accept_advantages
from meshrl.handoff.dock import Ticket
from meshrl.mesh import Replica, RoleMesh
from meshrl.packing import assign
from meshrl.rollout import RolloutGroup, RolloutHandle
from meshrl.worker import RemoteError, WorkerDied

CAUSE_SECONDS = 2.0
"""After one end of a handoff failed, how long the others are given to say why."""

_numbers = itertools.count(1)
_accept = remote(accept_advantages, propagate=lambda advantages, ticket, count: None)


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
        sources: Sequence[Replica],
        target: Replica,
        *,
        data_parallel: int,
        tensor_parallel: int,
        microbatch_tokens: int | None,
        deadline_seconds: float,
    ) -> None:
        """Use `Handoff.connect`."""
        self._sources = sources
        self._target = target
        self.data_parallel = data_parallel
        self.tensor_parallel = tensor_parallel
        self.microbatch_tokens = microbatch_tokens
        self.deadline_seconds = deadline_seconds

    @classmethod
    async def connect(
        cls,
        *,
        source: RoleMesh,
        target: RoleMesh,
        data_parallel: int | None = None,
        tensor_parallel: int = 1,
        microbatch_tokens: int | None = None,
        deadline_seconds: float = 60.0,
        backend: Backend = "gloo",
    ) -> Handoff:
        """Put bridges beside the actors, link them, and start the tensor engine on the learner mesh.

        Call after the learners' own process group is up: the tensor engine sets RANK and WORLD_SIZE in its
        processes.

        Args:
            source: generators; any number of replicas of one process.
            target: learners; one replica of data_parallel * tensor_parallel processes, tensor-parallel ranks
                innermost.
            data_parallel: None: all ranks that tensor parallelism leaves.
            microbatch_tokens: most tokens of a micro-batch; longer rollouts are dropped and named by the
                ticket. None: a rank's share is one micro-batch, whatever its size.
            deadline_seconds: longest wait of any one handoff.
            backend: "nccl" needs a GPU for each process of both meshes.

        Raises:
            ValueError: the meshes do not fit.
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
        name = f"handoff_bridge_{next(_numbers)}"
        sources = (await source.spawn_beside(Bridge, name)).replicas
        bridge = (await target.spawn_beside(Bridge, name)).replicas[0]
        opened = sources[0].actors.open_store.call(deadline_seconds)
        ((address,),) = await _answers(
            [(sources[0], opened)], deadline_seconds, "the handoff's store to open"
        )
        settings = (len(sources), len(sources) + learners, deadline_seconds, backend)
        await _answers(
            [
                (end, end.actors.join.call(address, first, *settings))
                for first, end in enumerate([*sources, bridge])
            ],
            deadline_seconds,
            f"{source.name} and {target.name} to link up",
        )
        handoff = cls(
            sources,
            bridge,
            data_parallel=data_parallel,
            tensor_parallel=tensor_parallel,
            microbatch_tokens=microbatch_tokens,
            deadline_seconds=deadline_seconds,
        )
        # The first operation starts the engine: done here, a failure is one of connecting, and no step pays for it.
        with handoff.tensors():
            accepted = _accept.call(torch.zeros(0), Ticket(0, 0, 0, 0), 0)
        await _answers([(bridge, accepted)], deadline_seconds, f"the tensor engine to start on {target.name}")
        return handoff

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

    async def __call__(
        self, groups: Sequence[RolloutGroup], *, advantages: Tensor | Sequence[float]
    ) -> Ticket:
        """Put the groups' columns and advantages into the learners' docks; when it returns, they are there.

        Waits for: each generator replica sending its part, each learner rank docking its share.

        Args:
            groups: taken from the buffer; columns stay in the generators' docks until released there. None at
                all gives a ticket for an empty batch, which learners skip.
            advantages: float `[rollouts]` in the order of the groups: a tensor of the learner mesh, or plain
                values.

        Returns:
            The ticket that a learner's step redeems.

        Raises:
            ValueError: advantages of another length, or not finite.
            RemoteError: the tensor code that makes the advantages failed on the learner mesh.
            NotDocked: a rollout is not where its handle says.
            WorkerDied: a process of either mesh is gone.
            DeadlineError: a rank did not answer in `deadline_seconds`.
        """
        shipment = plan_shipment(
            groups, next(_numbers), self.data_parallel, self.tensor_parallel, self.microbatch_tokens
        )
        count = len(shipment.rollout_ids)
        shape = tuple(advantages.shape) if isinstance(advantages, Tensor) else (len(advantages),)
        if shape != (count,):
            raise ValueError(f"advantages have shape {list(shape)}, the groups have {count} rollouts")
        if not isinstance(advantages, EngineTensor):
            values = advantages.tolist() if isinstance(advantages, Tensor) else list(advantages)
            advantages, _ = self._scores(values, [])
        holders = sorted({shipment.replicas[p] for rank in shipment.ranks for part in rank for p in part})
        sources = [self._sources[replica] for replica in holders]
        bridge, ticket = self._target, shipment.ticket
        with self.tensors():
            accepted = _accept.call(advantages, ticket, count)
        refusals, *_ = await _answers(
            [(bridge, accepted)]
            + [(source, source.actors.send.call(shipment)) for source in sources]
            + [(bridge, bridge.actors.receive.call(shipment))],
            self.deadline_seconds,
            f"{ticket} to arrive from generator replicas {holders}",
        )
        for refusal in filter(None, refusals):
            raise ValueError(refusal)
        return ticket

    def _scores(self, rewards: Sequence[float], groups: Sequence[int]) -> tuple[Tensor, Tensor]:
        shapes = len(rewards), len(groups)
        scores = as_endpoint(
            self._target.actors.scores,
            propagate=lambda: (torch.empty(shapes[0]), torch.empty(shapes[1], dtype=torch.int64)),
        )
        with self.tensors():
            return scores.rref(rewards, groups)


def plan_shipment(
    groups: Sequence[RolloutGroup],
    number: int,
    data_parallel: int,
    tensor_parallel: int = 1,
    microbatch_tokens: int | None = None,
) -> Shipment:
    """Which rollout goes where. Pure.

    Rollouts that no micro-batch can hold are named by the ticket's `dropped` and count in no total.
    """
    rollouts: list[RolloutHandle] = [rollout for group in groups for rollout in group.rollouts]
    assignment = assign([rollout.tokens for rollout in rollouts], data_parallel, microbatch_tokens)
    dropped = set(assignment.dropped)
    kept = [rollout for position, rollout in enumerate(rollouts) if position not in dropped]
    return Shipment(
        ticket=Ticket(
            number=number,
            rollouts=len(kept),
            response_tokens=sum(rollout.response_tokens for rollout in kept),
            microbatches=assignment.microbatches,
            dropped=tuple(rollouts[position].id for position in assignment.dropped),
        ),
        rollout_ids=tuple(rollout.id for rollout in rollouts),
        replicas=tuple(rollout.replica for rollout in rollouts),
        lengths=tuple(rollout.tokens for rollout in rollouts),
        ranks=assignment.ranks,
        tensor_parallel=tensor_parallel,
    )


async def _answers(
    calls: Sequence[tuple[Replica, Any]], deadline_seconds: float, what: str
) -> list[list[Any]]:
    """Answers of each call's ranks. Of several failures a `WorkerDied` is raised, else the first in `calls`.

    Waits for: every call, or one failure and, a moment longer, the others: where one end of the link fails, so does the
    other, and the cause is worth more than the consequence.
    """
    tasks = [
        asyncio.ensure_future(replica.processes.answer(future, deadline_seconds, what))
        for replica, future in calls
    ]
    try:
        _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if waiting:
            await asyncio.wait(waiting, timeout=CAUSE_SECONDS)
        failures = [error for task in tasks if task.done() and (error := task.exception()) is not None]
        # A dead process is the cause of whatever its peers complain about.
        for error in sorted(failures, key=lambda error: not isinstance(error, WorkerDied)):
            raise error
        return [[value for _, value in task.result()] for task in tasks]
    except RemoteException as error:
        raise RemoteError(
            f"tensor code of the program failed on rank {error.rank} of the learner mesh:\n{error}"
        ) from None
    finally:
        for task in tasks:
            task.cancel()
