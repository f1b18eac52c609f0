"""A learner that shows its gradients."""

from __future__ import annotations

from torch import Tensor

from meshrl.actors.learner import Learner
from meshrl.actors.trainer import _whole
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

    def _gradients(self, loss: Loss, indices: range) -> tuple[dict[str, float], dict[str, Tensor]]:
        trainer, kept = self._trainer, {}
        optimizer_step = trainer.optimizer.step

        def keep() -> None:
            for name, parameter in trainer.model.named_parameters():
                assert parameter.grad is not None, name
                kept[name] = _whole(parameter.grad).clone()

        trainer.optimizer.step = keep  # pyright: ignore[reportAttributeAccessIssue]
        try:
            update = self._supervised(loss, indices)
        finally:
            trainer.optimizer.step = optimizer_step
        return dict(update.metrics), kept
