"""A batch of one training step, as the controller sees it: handles, counts, times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from meshrl.handoff.dock import Ticket
from meshrl.handoff.shipment import TOO_LONG
from meshrl.rollout import RolloutGroup, RolloutHandle

ZERO_VARIANCE = "zero variance"
REWARD_FAILED = "reward failed"


@dataclass(frozen=True)
class Batch:
    """Groups of one training step; `groups` shrinks when some are dropped."""

    groups: tuple[RolloutGroup, ...]
    taken: tuple[RolloutGroup, ...]
    """All groups that the batch started with."""
    generate_seconds: float
    """Time that engines spent on steps since the batch before, evaluations aside (the slowest replica)."""
    reward_seconds: float
    """Time that engines stood still because groups were being graded (the slowest replica)."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Groups dropped, by reason; also those that others were generated in place of."""
    docked_rollouts: int = 0
    """Rollouts whose columns generators held when the batch was taken."""
    max_staleness: int = 0
    """Versions that a token may be older than the weights that it trains."""

    @property
    def rollouts(self) -> tuple[RolloutHandle, ...]:
        return tuple(rollout for group in self.groups for rollout in group.rollouts)

    def note(self, ticket: Ticket) -> str:
        """What a person should be told of the batch once it is handed over; empty: nothing."""
        if any(rollout.id not in ticket.dropped for rollout in self.rollouts):
            return ""
        reasons = [f"{count} groups {reason}" for reason, count in self.dropped.items()]
        left_out = Counter(ticket.dropped.values())
        reasons += [f"{count} rollouts {reason}" for reason, count in sorted(left_out.items())]
        return f"nothing to train on: {', '.join(reasons)}; the weights stay as they are"

    def without(self, group_ids: Iterable[int], reason: str) -> Batch:
        """The batch without these groups."""
        gone = set(group_ids)
        counts = Counter(self.dropped) + Counter({reason: len(gone)})
        groups = tuple(group for group in self.groups if group.group_id not in gone)
        return replace(self, groups=groups, dropped=dict(counts))

    def metrics(self, version: int, ticket: Ticket) -> dict[str, float]:
        """Means over all rollouts taken, and what was dropped.

        Args:
            version: of the weights that the batch trains.
            ticket: of its handoff, which names the rollouts that were left out.

        Raises:
            RuntimeError: a token that was trained on is older than `max_staleness` allows.
        """
        self._check_staleness(version, ticket)
        rollouts = [rollout for group in self.taken for rollout in group.rollouts]
        graded = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        left_out = Counter(ticket.dropped.values())
        count = max(len(rollouts), 1)
        return {
            "reward": sum(graded) / max(len(graded), 1),
            "accuracy": sum(reward >= 1 for reward in graded) / max(len(graded), 1),
            "response_tokens": sum(r.response_tokens for r in rollouts),
            "response_tokens_mean": sum(r.response_tokens for r in rollouts) / count,
            "truncated": sum(r.stop_reason == "length" for r in rollouts) / count,
            "staleness_mean": sum(version - r.oldest_version for r in rollouts) / count,
            "staleness_max": max((version - r.oldest_version for r in rollouts), default=0),
            "groups_trained": sum(any(r.id not in ticket.dropped for r in g.rollouts) for g in self.groups),
            "docked_rollouts": self.docked_rollouts,
            "rollouts_too_long": left_out.pop(TOO_LONG, 0),
            **{f"rollouts_{_underscored(reason)}": n for reason, n in left_out.items()},
            **{f"dropped_{_underscored(reason)}": n for reason, n in self.dropped.items()},
        }

    def _check_staleness(self, version: int, ticket: Ticket) -> None:
        """The buffer proves the bound by counting; this looks at what the tokens themselves say."""
        for rollout in self.rollouts:
            if version - rollout.oldest_version > self.max_staleness and rollout.id not in ticket.dropped:
                raise RuntimeError(
                    f"rollout {rollout.id} of generator replica {rollout.replica} has tokens of version "
                    f"{rollout.oldest_version}, and version {version} was trained on them: more than max_staleness "
                    f"{self.max_staleness}. Is the replica pinned to a version, or were weights published besides?"
                )


def teaches_nothing(group: RolloutGroup) -> str | None:
    """Why a group has no advantage to train on; None: it has."""
    rewards = [reward for reward in group.rewards if reward is not None]
    if len(rewards) < len(group.rollouts):
        return REWARD_FAILED
    return ZERO_VARIANCE if max(rewards) - min(rewards) <= 1e-6 else None


def _underscored(reason: str) -> str:
    return reason.replace(" ", "_")
