"""Settings of rollouts: how many, how far ahead, what becomes of those that are no use."""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.errors import UserError


@dataclass(frozen=True)
class RolloutsConfig:
    """How many rollouts, how far ahead of training, and what becomes of those that are no use."""

    prompts_per_step: int = 32
    """Groups in one batch (P)."""
    group_size: int = 8
    """Samples of each prompt."""
    max_staleness: int = 0
    """Steps that generation may run ahead (S). 0: synchronous, exactly on-policy, reproducible."""
    refills: int = 0
    """Groups that may be generated for each batch in place of some that teach nothing: equal rewards, or a reward
    that failed (dynamic sampling, DAPO). 0: none; such groups then make the batch smaller."""
    empty_batches_in_a_row: int = 0
    """This many batches without anything to train on, one after another, end the run. 0: never; each is a step that
    leaves the weights as they are, and says so."""
    rollouts_per_generator: int = 0
    """Most rollouts outstanding at one generator replica; more wait at the controller for whichever has room first, the
    longest waiting first. 0: no bound, groups are spread as soon as they are admitted."""
    affinity_rollouts: int = 8
    """A prompt that comes again goes to the replica that had it before, whose engine may have it cached, unless that
    has so many more rollouts outstanding than the least busy one. 0: only if it is among the least busy."""
    deadline_seconds: float = 600.0
    """Longest wait for a batch or an evaluation before it is an error."""

    def __post_init__(self) -> None:
        if self.prompts_per_step < 1:
            raise UserError(f"prompts_per_step is {self.prompts_per_step}: a batch needs at least 1 prompt")
        if self.group_size < 2:
            raise UserError(
                f"group_size is {self.group_size}: a rollout is compared with its group, so 2 or more"
            )
        if self.max_staleness < 0:
            raise UserError(f"max_staleness is {self.max_staleness}: 0 is synchronous, less is impossible")
        if not self.deadline_seconds > 0:
            raise UserError(f"deadline_seconds is {self.deadline_seconds}: use more than 0")
        for name in ("refills", "empty_batches_in_a_row", "rollouts_per_generator", "affinity_rollouts"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}: use 0 or more")
