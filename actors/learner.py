"""The learner: a trainer on each process of one mesh, and the controller's handle on all of them."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from meshrl.actors.models import ModelConfig, export_hugging_face, load_tokenizer
from meshrl.actors.training import LearnerConfig, OptimizerConfig, Update, supervised_batch
from meshrl.handoff.dock import Ticket, dock
from meshrl.losses import Loss
from meshrl.rollout import Task
from meshrl.weights.workers import PublishesWeights
from meshrl.worker import Worker, endpoint

if TYPE_CHECKING:
    from meshrl.session import RoleMesh, Session

__all__ = ["Learner", "LearnerConfig", "LearnerMesh", "LearnerSetup", "OptimizerConfig", "Update"]

Result = TypeVar("Result")


@dataclass(frozen=True)
class LearnerSetup:
    """What `Learner.setup` needs."""

    config: LearnerConfig
    model: ModelConfig
    task: Task
    """Gives the tokenizer, and the examples of supervised steps."""
    seed: int
    store: tuple[str, int]
    """Host and port where the ranks meet, from `Learner.open_store`."""
    temperature: float = 1.0
    """Of the sampler; log-probabilities are computed under it."""


class Learner(PublishesWeights, Worker):
    """One rank. Every endpoint but `open_store` is collective: the controller calls it on all ranks."""

    @endpoint
    async def open_store(self, timeout_seconds: float = 60.0) -> tuple[str, int]:
        """On rank 0: open the store at a free port, and say where."""
        host = "127.0.0.1"  # all ranks of a learner are on one host so far
        self._store = TCPStore(
            host,
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=timeout_seconds),
        )
        return host, self._store.port

    @endpoint
    async def setup(self, setup: LearnerSetup) -> None:
        """Build this rank's share of the policy."""
        self._setup = setup
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="train")
        self._tokenizer = load_tokenizer(setup.task.tokenizer)
        await self._run(self._build)

    @endpoint
    async def step(self, loss: Loss, ticket: Ticket) -> Update:
        """Train on the batch that a handoff left in this process's dock."""
        batch = dock().take_batch(ticket)
        return await self._run(self._trainer.step, batch, loss, temperature=self._setup.temperature)

    @endpoint
    async def supervised_step(self, loss: Loss, first_index: int, examples: int) -> Update:
        """Train on the task's supervised examples from `first_index` on; each rank makes its own share."""
        return await self._run(self._supervised, loss, range(first_index, first_index + examples))

    @endpoint
    async def reset_optimizer(self, config: OptimizerConfig) -> None:
        """Begin anew with fresh moments and learning rate."""
        await self._run(self._trainer.reset_optimizer, config)

    @endpoint
    async def save(self, directory: Path) -> None:
        """Write weights and optimizer state."""
        await self._run(self._trainer.save, directory)

    @endpoint
    async def load(self, directory: Path) -> None:
        """Go on from what `save` wrote."""
        await self._run(self._trainer.load, directory)

    @endpoint
    async def export(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint: weights, config, tokenizer."""
        weights = await self._run(self._trainer.whole_weights)
        if self.rank == 0:
            export_hugging_face(weights, self._setup.model, self._tokenizer, directory)

    def weight_tensors(self) -> Mapping[str, Tensor]:
        return self._trainer.weight_tensors()

    def weights_revision(self) -> int:
        return self._trainer.revision

    async def between_changes(self, function: Callable[[], Result]) -> Result:
        return await self._run(function)

    def _build(self) -> None:
        from meshrl.actors.trainer import Trainer  # imports TorchTitan

        setup = self._setup
        store: Store | None = None
        if self.world_size > 1:
            timeout = datetime.timedelta(seconds=setup.config.collective_timeout_seconds)
            opened = (
                self._store if self.rank == 0 else TCPStore(*setup.store, is_master=False, timeout=timeout)
            )
            store = PrefixStore("learner", opened)
        self._trainer = Trainer(
            setup.model,
            setup.config,
            self._tokenizer.vocab_size,
            seed=setup.seed,
            rank=self.rank,
            world_size=self.world_size,
            store=store,
        )

    def _supervised(self, loss: Loss, indices: range) -> Update:
        trainer, setup = self._trainer, self._setup
        batch = supervised_batch(
            setup.task,
            self._tokenizer,
            indices,
            max_tokens=trainer.architecture.max_tokens,
            rank=trainer.data_parallel_rank,
            ranks=trainer.data_parallel,
            microbatch_tokens=setup.config.microbatch_tokens,
        )
        return trainer.step(batch, loss, supervised=True)

    async def _run(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """On the training thread, so that this rank answers while it computes; calls keep their order."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))


class LearnerMesh:
    """The learner as a program sees it: one step is one call, its answer the update of all ranks together."""

    def __init__(self, mesh: RoleMesh) -> None:
        """Use `LearnerMesh.spawn`."""
        self.mesh = mesh

    @classmethod
    async def spawn(
        cls,
        session: Session,
        config: LearnerConfig,
        model: ModelConfig,
        task: Task,
        *,
        procs: int = 1,
        seed: int = 0,
        temperature: float = 1.0,
    ) -> LearnerMesh:
        """Bring up the processes and build the policy on them."""
        mesh = await session.spawn(Learner, procs=procs)
        store = await mesh.call_rank("open_store", deadline_seconds=60)
        await mesh.call(
            "setup",
            LearnerSetup(config, model, task, seed, store, temperature),
            deadline_seconds=session.config.setup_deadline_seconds,
        )
        return cls(mesh)

    async def step(self, loss: Loss, ticket: Ticket) -> Update:
        """One optimizer step on a handed-over batch. Waits for: every learner rank."""
        return _together(await self.mesh.call("step", loss, ticket))

    async def supervised_step(self, loss: Loss, first_index: int, examples: int) -> Update:
        """One optimizer step on the task's supervised examples. Waits for: every learner rank."""
        return _together(await self.mesh.call("supervised_step", loss, first_index, examples))

    async def reset_optimizer(self, config: OptimizerConfig) -> None:
        """Fresh moments and learning rate."""
        await self.mesh.call("reset_optimizer", config)

    async def save(self, directory: Path) -> None:
        """Write weights and optimizer state."""
        await self.mesh.call("save", directory)

    async def load(self, directory: Path) -> None:
        """Go on from what `save` wrote."""
        await self.mesh.call("load", directory)

    async def export(self, directory: Path) -> None:
        """Write the policy as a Hugging Face checkpoint."""
        await self.mesh.call("export", directory)


def _together(updates: list[Update]) -> Update:
    """Metrics are the same on every rank; advantages are each rank's own."""
    advantages = {rollout: value for update in updates for rollout, value in update.advantages.items()}
    return Update(updates[0].metrics, advantages, updates[0].seconds)
