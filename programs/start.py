"""What programs begin with: the meshes of the three roles, brought up together and connected."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from meshrl.actors.generator import Generator, GeneratorSetup
from meshrl.actors.learner import LearnerMesh, OptimizerConfig
from meshrl.actors.models import architecture, attention_tokens, load_tokenizer
from meshrl.actors.reward import Reward, RewardSetup
from meshrl.actors.rollouts import Rollouts
from meshrl.errors import UserError
from meshrl.handoff.handoff import Handoff, HandoffConfig
from meshrl.handoff.schema import check_needs, columns_of, declared
from meshrl.losses import Loss
from meshrl.programs.config import ProgramConfig
from meshrl.programs.tasks import check_prompts, default_reward, parse_task
from meshrl.rollout import Task
from meshrl.session import RoleMesh, Session, WorkerDied
from meshrl.weights.broadcast import WeightBroadcast

PROVIDES = ("advantages",)
"""Columns that programs make for each batch."""


@dataclass(frozen=True)
class Parts:
    """Live meshes and the paths between them."""

    task: Task
    optimizer: OptimizerConfig
    """Of the program's own phase."""
    learner: LearnerMesh
    generator: RoleMesh
    reward: RoleMesh
    weights: WeightBroadcast
    """Learner → generators."""
    handoff: Handoff
    """Generator docks → learner docks."""
    revive: Callable[[int], Awaitable[None]]
    """Brings up another process in place of a generator replica that died."""
    note: Callable[[str], None]
    """Tells a person what happens."""

    def rollouts(self, config: ProgramConfig) -> Rollouts:
        """Generation for one phase of the program; an async context."""
        return Rollouts(
            self.generator,
            self.task,
            config.sampling,
            config.rollouts,
            seed=config.seed,
            reward=self.reward,
            revive=self.revive,
            note=self.note,
        )


@runtime_checkable
class BringsParts(Protocol):
    """A session that has parts of its own, such as simulated ones."""

    def parts(self, config: ProgramConfig) -> Parts: ...


async def start(
    session: Session | BringsParts, config: ProgramConfig, steps: int, loss: Loss | None = None
) -> Parts:
    """Spawn learner, generator and reward meshes at once, then connect them.

    Args:
        session: one that brings parts of its own, such as a simulated one, is asked for those.
        steps: optimizer steps of the program; a learning rate that decays does so over them, unless the config says.
        loss: what rollouts will be trained with; a column that it needs and nothing makes is an error before anything
            starts. None: rollouts are not trained on.

    Raises:
        UserError: the config or the loss asks for what cannot be.
    """
    check_needs(loss, columns_of(loss), declared(PROVIDES))
    if isinstance(session, BringsParts):
        return session.parts(config)
    optimizer = config.learner.optimizer
    if optimizer.decay != "none" and 0 < optimizer.steps < steps:
        raise UserError(
            f"learner.optimizer.steps is {optimizer.steps}: the learning rate decays over as many steps as the program "
            f"has, {steps}, or more; 0 takes those of the program"
        )
    optimizer = replace(optimizer, steps=optimizer.steps or steps)
    task = parse_task(config.task, data=config.data, seed=config.seed)
    tokenizer = load_tokenizer(task.tokenizer)
    context = architecture(config.model, tokenizer.vocab_size).max_tokens
    check_prompts(task, tokenizer.encode, context, config.sampling.max_tokens)
    rollouts = session.directory / "rollouts" if session.directory else None
    generator_setup = GeneratorSetup(config.generator, config.model, task, rollouts)
    learner, generator, reward = await asyncio.gather(
        LearnerMesh.spawn(
            session,
            replace(config.learner, optimizer=optimizer),
            config.model,
            task,
            procs=config.meshes.learner,
            seed=config.seed,
            temperature=config.sampling.temperature,
        ),
        session.spawn(
            Generator,
            generator_setup,
            replicas=config.meshes.generator,
        ),
        session.spawn(
            Reward, RewardSetup(config.reward, default_reward(task)), replicas=config.meshes.reward
        ),
    )
    await generator.call("connect_reward", reward.handles, deadline_seconds=60)
    weights, handoff = await asyncio.gather(
        WeightBroadcast.connect(
            source=learner.mesh,
            target=generator,
            config=config.weights,
            outlive_generators=True,
            note=session.note,
        ),
        Handoff.connect(
            source=generator,
            target=learner.mesh,
            config=HandoffConfig(
                config.learner.microbatch_tokens, attention_tokens(config.model, tokenizer.vocab_size)
            ),
            tensor_parallel=config.learner.tensor_parallel,
            loss=loss,
            provides=PROVIDES,
            note=session.note,
        ),
    )
    for row in session.describe():
        session.note(f"{row}")
    session.note(
        f"weights travel by {', '.join(dict.fromkeys(weights.transports))}: "
        f"{weights.bytes_per_broadcast / 1e6:,.1f} MB a version"
    )
    session.note(
        f"task {config.data or config.task}, tokenizer {task.tokenizer} ({tokenizer.vocab_size} tokens)"
    )
    restarts = config.meshes.generator_restarts
    revive = Revival(session, generator, generator_setup, reward, weights, handoff, restarts)
    return Parts(task, optimizer, learner, generator, reward, weights, handoff, revive, session.note)


class Revival:
    """Brings a generator replica back after its process died: a new one, connected like the old, with the newest
    weights. One at a time."""

    def __init__(
        self,
        session: Session,
        generator: RoleMesh,
        setup: GeneratorSetup,
        reward: RoleMesh,
        weights: WeightBroadcast,
        handoff: Handoff,
        restarts: int,
    ) -> None:
        """
        Args:
            restarts: times that this may be done.
        """
        self._session, self._generator, self._setup, self._reward = session, generator, setup, reward
        self._weights, self._handoff = weights, handoff
        self._restarts = restarts
        self._lock = asyncio.Lock()

    async def __call__(self, replica: int) -> None:
        """
        Raises:
            RuntimeError: it was done as often as it may be.
        """
        async with self._lock:
            while True:
                if self._restarts == 0:
                    raise RuntimeError(
                        "no generator process that dies is started again any more (meshes.generator_restarts)"
                    )
                self._restarts -= 1
                try:
                    await self._bring_up(replica)
                    return
                except WorkerDied:  # the new one too?
                    if not self._generator.replicas[replica].processes.death.done():
                        raise

    async def _bring_up(self, replica: int) -> None:
        made = await self._session.respawn(self._generator, replica, self._setup)
        await made.call("connect_reward", self._reward.handles, deadline_seconds=60)
        await self._handoff.relink()
        await self._weights.reconnect()
        self._session.note(
            f"generator replica {replica} is back, process {made.pids[0]}; {self._restarts} restarts are left"
        )


async def finish(session: Session, parts: Parts) -> None:
    """Write the policy as a Hugging Face checkpoint to `final/` in the run directory."""
    if session.directory is not None:
        await parts.learner.export(session.directory / "final")
