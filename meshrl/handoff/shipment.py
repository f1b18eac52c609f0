"""Where the rollouts of one batch go: the plan that the controller makes and every bridge follows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshrl.handoff.dock import Ticket
from meshrl.packing import assign
from meshrl.rollout import RolloutHandle

TOO_LONG = "too long"
GENERATOR_DIED = "generator died"


@dataclass(frozen=True)
class Shipment:
    """Where the rollouts of one batch go: the same message for every bridge. Its size grows with rollouts,
    not tokens."""

    ticket: Ticket
    rollout_ids: tuple[int, ...]
    """In the order of the batch; the positions below index this order, and so do per-rollout columns."""
    replicas: tuple[int, ...]
    """Generator replica that holds each rollout."""
    sources: tuple[int, ...]
    """Replicas that are linked: the i-th has rank i of the link, learners come after them."""
    lengths: tuple[int, ...]
    """Tokens of each rollout, prompt and response."""
    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    """`ranks[data rank][microbatch]`: positions (see `meshrl.packing.Assignment`)."""
    tensor_parallel: int
    """Learner ranks that share a data rank, and so get the same rollouts: learner rank r has data rank
    r // tensor_parallel."""

    def order(self, data_rank: int) -> list[int]:
        """Positions of a data rank's rollouts, in micro-batch order."""
        return [position for microbatch in self.ranks[data_rank] for position in microbatch]

    def part(self, data_rank: int, replica: int) -> list[int]:
        """Those of them that one replica holds: what it sends, in this order."""
        return [position for position in self.order(data_rank) if self.replicas[position] == replica]

    def learners(self, data_rank: int) -> list[int]:
        """Ranks in the link of the learners that get a data rank's rollouts."""
        first = len(self.sources) + data_rank * self.tensor_parallel
        return list(range(first, first + self.tensor_parallel))


def plan_shipment(
    rollouts: Sequence[RolloutHandle],
    number: int,
    data_parallel: int,
    tensor_parallel: int = 1,
    microbatch_tokens: int | None = None,
    attention_tokens: float | None = None,
    *,
    sources: Sequence[int],
    gone: Mapping[int, str] | None = None,
) -> Shipment:
    """Which rollout goes where.

    Rollouts that no micro-batch can hold, and those that are gone, are named by the ticket's `dropped` and count in no
    total.

    Args:
        sources: generator replicas that are linked.
        gone: positions of rollouts that no generator holds any more, and why.
    """
    gone = gone or {}
    there = [position for position in range(len(rollouts)) if position not in gone]
    lengths = [rollouts[position].tokens for position in there]
    assignment = assign(lengths, data_parallel, microbatch_tokens, attention_tokens)
    left_out = {**gone, **{there[place]: TOO_LONG for place in assignment.dropped}}
    kept = [rollout for position, rollout in enumerate(rollouts) if position not in left_out]
    return Shipment(
        ticket=Ticket(
            number=number,
            rollouts=len(kept),
            response_tokens=sum(rollout.response_tokens for rollout in kept),
            microbatches=assignment.microbatches,
            dropped={rollouts[position].id: reason for position, reason in sorted(left_out.items())},
        ),
        rollout_ids=tuple(rollout.id for rollout in rollouts),
        replicas=tuple(rollout.replica for rollout in rollouts),
        sources=tuple(sources),
        lengths=tuple(rollout.tokens for rollout in rollouts),
        ranks=tuple(
            tuple(tuple(there[place] for place in microbatch) for microbatch in rank)
            for rank in assignment.ranks
        ),
        tensor_parallel=tensor_parallel,
    )
