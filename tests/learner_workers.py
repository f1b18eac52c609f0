"""A learner that shows its gradients."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from meshrl.actors.learner import Learner
from meshrl.actors.trainer import _whole
from meshrl.actors.training import Update
from meshrl.handoff.dock import Ticket, dock
from meshrl.losses import Loss
from meshrl.worker import endpoint


class ShowsGradients(Learner):
    """One supervised step up to the optimizer, which is left out."""

    @endpoint
    async def gradients(
        self, loss: Loss, first_index: int, examples: int
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Metrics, and whole gradients by parameter."""
        return await self._run(self._gradients, loss, range(first_index, first_index + examples))

    @endpoint
    async def gradients_of(
        self, loss: Loss, ticket: Ticket
    ) -> tuple[dict[str, float], dict[str, Tensor], dict[int, dict[str, Tensor]]]:
        """The same for a batch that was handed over; also its content by rollout."""
        batch = dock().take_batch(ticket)
        content, first = {}, 0
        for position, (rollout_id, length) in enumerate(zip(batch.rollout_ids, batch.lengths, strict=True)):
            content[rollout_id] = {n: v[first : first + length] for n, v in batch.columns.items()}
            content[rollout_id] |= {n: v[position] for n, v in batch.rollout_columns.items()}
            first += length
        metrics, gradients = await self._run(
            self._up_to_the_optimizer, lambda: self._trainer.step(batch, loss)
        )
        return metrics, gradients, content

    def _gradients(self, loss: Loss, indices: range) -> tuple[dict[str, float], dict[str, Tensor]]:
        return self._up_to_the_optimizer(lambda: self._supervised(loss, indices))

    def _up_to_the_optimizer(self, step: Callable[[], Update]) -> tuple[dict[str, float], dict[str, Tensor]]:
        trainer, kept = self._trainer, {}
        optimizer_step = trainer.optimizer.step

        def keep() -> None:
            for name, parameter in trainer.model.named_parameters():
                assert parameter.grad is not None, name
                kept[name] = _whole(parameter.grad).clone()

        trainer.optimizer.step = keep  # pyright: ignore[reportAttributeAccessIssue]
        try:
            update = step()
        finally:
            trainer.optimizer.step = optimizer_step
        return dict(update.metrics), kept
