"""Simulated meshes: actors that answer as the real ones do and take the time that a model says, on the clock of the
event loop (see `meshrl.virtual_time`). What drives them, from dispatch to packing, is the real controller code."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from meshrl.actors.learner import LearnerMesh
from meshrl.actors.rollouts import Rollouts
from meshrl.actors.training import Update
from meshrl.errors import UserError
from meshrl.handoff.dock import Ticket
from meshrl.handoff.handoff import Handoff, HandoffConfig
from meshrl.handoff.schema import Column, declared
from meshrl.handoff.shipment import Shipment
from meshrl.losses import Loss
from meshrl.mesh import Replica, RoleMesh
from meshrl.programs.config import ProgramConfig
from meshrl.programs.simulated_generator import GeneratorModel, ProcessorTime, SimulatedReplica, uniform
from meshrl.programs.start import PROVIDES, Parts
from meshrl.rollout import Prompt, Split
from meshrl.weights.broadcast import WeightBroadcast


@dataclass(frozen=True)
class LearnerModel:
    """How long training takes. The defaults are of the same model as the generator's, a learner process an accelerator:
    8 billion parameters, 6 floating-point operations each and token, at 400 Tflop/s."""

    step_seconds: float = 3.0
    """Of each step, whatever its size: optimizer, collectives."""
    tokens_per_second: float = 8000.0
    """Of one data-parallel rank, prompt and response tokens. Ranks wait for the heaviest at each micro-batch."""
    attention_tokens: float = 32_000.0
    """Length at which attention costs as much as everything else."""
    handoff_seconds: float = 0.1
    """Of each handoff, whatever its size."""
    handoff_tokens_per_second: float = 50e6
    """All ranks together."""
    publish_seconds: float = 0.3
    """Training stands still for this long while weights are copied out."""
    pull_seconds: float = 2.0
    """From then until every generator uses them."""

    def __post_init__(self) -> None:
        for name in ("tokens_per_second", "attention_tokens", "handoff_tokens_per_second"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} is {getattr(self, name)}: it must be above 0")

    def seconds(self, shipment: Shipment) -> float:
        """Of a step on what was shipped."""
        ranks, lengths = shipment.ranks, shipment.lengths
        heaviest = (
            max(sum(lengths[p] * (1 + lengths[p] / self.attention_tokens) for p in part) for part in parts)
            for parts in zip(*ranks, strict=True)
        )
        return self.step_seconds + sum(heaviest) / self.tokens_per_second


@dataclass(frozen=True)
class EndlessTask:
    """Prompts without text: nobody reads them."""

    tokenizer: str = "bytes"
    train_size: int | None = None
    heldout_size: int = 0

    def prompt(self, split: Split, index: int) -> Prompt:
        return Prompt(index, split, "")

    def supervised(self, index: int) -> Prompt:
        return Prompt(index, "train", "")


class SimulatedSession:
    """Stands for a session in `meshrl.programs.start.start`. Use in a running event loop of virtual time."""

    def __init__(
        self,
        generator: GeneratorModel,
        learner: LearnerModel,
        *,
        failure_seconds: float = 0.0,
        replacement_seconds: float = 60.0,
        seed: int = 0,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """
        Args:
            failure_seconds: mean time between failures of one generator replica. 0: none fails.
            replacement_seconds: from a failure until another process has taken its place.
        """
        self.directory: Path | None = None
        self.note = note
        self.actors = ProcessorTime()
        self.rollouts: Rollouts | None = None
        self._models = generator, learner
        self._failures = failure_seconds, replacement_seconds, seed

    def parts(self, config: ProgramConfig) -> Parts:
        """Simulated meshes, as many processes as the config says."""
        generator_model, learner_model = self._models
        self.generator = SimulatedGenerators(
            generator_model, config.meshes.generator, self.actors, *self._failures
        )
        self.weights = SimulatedWeights(self.generator, learner_model, config.weights.keep_versions)
        self.handoff = SimulatedHandoff(self.generator, self.weights, learner_model, config)
        self.learner = SimulatedLearner(self.handoff, learner_model, self.actors)

        async def revive(replica: int) -> None:
            await self.generator.replace(replica, lambda: self.weights.arrived)
            await self.handoff.relink()

        parts = _Parts(
            task=EndlessTask(),
            optimizer=config.learner.optimizer,
            learner=cast(LearnerMesh, self.learner),
            generator=cast(RoleMesh, self.generator),
            reward=RoleMesh("reward", []),
            weights=cast(WeightBroadcast, self.weights),
            handoff=self.handoff,
            revive=revive,
            note=self.note,
        )
        return replace(parts, session=self)


@dataclass(frozen=True)
class _Parts(Parts):
    session: SimulatedSession | None = None

    def rollouts(self, config: ProgramConfig) -> Rollouts:
        rollouts = super().rollouts(config)
        if self.session is not None:
            self.session.rollouts = rollouts
        return rollouts


class SimulatedGenerators:
    """Stands for the generator mesh in front of dispatch."""

    def __init__(
        self,
        model: GeneratorModel,
        replicas: int,
        actors: ProcessorTime,
        failure_seconds: float,
        replacement_seconds: float,
        seed: int,
    ) -> None:
        self.name = "generator"
        self.messages = 0
        """Calls answered, of all replicas."""
        self.finished_rollouts = 0
        self.outstanding = self.peak = 0
        """Rollouts asked for and not finished: now, and at most so far."""
        self.deaths = 0
        self._model, self._actors = model, actors
        self._failure_seconds, self._replacement_seconds, self._seed = (
            failure_seconds,
            replacement_seconds,
            seed,
        )
        self._numbers = itertools.count(1)
        self._gone: list[SimulatedReplica] = []
        self.replicas = [self._make(replica, version=0) for replica in range(replicas)]

    async def call_rank(
        self,
        endpoint: str,
        *arguments: Any,
        replica: int,
        rank: int = 0,
        deadline_seconds: float | None = None,
    ) -> Any:
        """As `RoleMesh.call_rank`; every answer comes well before its deadline.

        Raises:
            WorkerDied: the replica is dead, or died meanwhile.
        """
        self.messages += 1
        return await self.replicas[replica].answer(endpoint, *arguments)

    def use(self, version: int) -> None:
        """All tokens from now on are sampled by these weights."""
        for replica in self.replicas:
            replica.version = version

    async def replace(self, replica: int, version: Callable[[], int]) -> None:
        """Another process takes the place of a dead one, with the weights that are live by then."""
        await asyncio.sleep(self._replacement_seconds)
        self._gone.append(self.replicas[replica])
        self.replicas[replica] = self._make(replica, version())

    def count(self, outstanding: int) -> None:
        """So many more rollouts are outstanding."""
        self.outstanding += outstanding
        self.peak = max(self.peak, self.outstanding)

    def busy_seconds(self) -> float:
        """Replica-seconds in which samples ran."""
        return sum(replica.busy_seconds() for replica in self.replicas + self._gone)

    def sample_seconds(self) -> float:
        """Seconds that samples ran, all together."""
        return sum(replica.sample_seconds() for replica in self.replicas + self._gone)

    def _make(self, replica: int, version: int) -> SimulatedReplica:
        number = next(self._numbers)
        made = SimulatedReplica(self._model, self, replica, number, version, self._actors)
        if self._failure_seconds > 0:
            lives = self._model.exponential(self._failure_seconds, uniform(self._seed, "death", number))
            asyncio.get_running_loop().call_later(lives, made.die)
        return made


class SimulatedWeights:
    """Stands for a `WeightBroadcast`: a version is in use everywhere some time after it was published."""

    def __init__(self, generator: SimulatedGenerators, model: LearnerModel, keep_versions: int) -> None:
        self.published = self.arrived = 0
        self._generator, self._model, self._keep_versions = generator, model, keep_versions
        self._arrivals: dict[int, asyncio.Task[None]] = {}

    async def publish(self) -> int:
        """Waits for: the learner's copy, into the place of a version that has arrived."""
        version = self.published + 1
        in_the_way = self._arrivals.pop(version - self._keep_versions - 1, None)
        if in_the_way is not None:
            await in_the_way
        await asyncio.sleep(self._model.publish_seconds)
        self.published = version
        self._arrivals[version] = asyncio.create_task(self._pull(version), name=f"pull {version}")
        return version

    async def arrival(self, version: int) -> None:
        """Waits for: every generator uses it."""
        await asyncio.shield(self._arrivals[version])

    async def broadcast(self) -> int:
        version = await self.publish()
        await self.arrival(version)
        return version

    async def _pull(self, version: int) -> None:
        await asyncio.sleep(self._model.pull_seconds)
        self.arrived = version
        self._generator.use(version)


@dataclass(frozen=True)
class _Learners:
    """As much of a process group as a handoff looks at."""

    processes: Any = field(default_factory=lambda: _NeverDies())


class _NeverDies:
    def __init__(self) -> None:
        self.death: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class SimulatedHandoff(Handoff):
    """The handoff as it is, with its plan; only nothing is shipped."""

    def __init__(
        self,
        generator: SimulatedGenerators,
        weights: SimulatedWeights,
        model: LearnerModel,
        config: ProgramConfig,
    ) -> None:
        super().__init__(
            cast(RoleMesh, generator),
            cast(Replica, _Learners()),
            HandoffConfig(config.learner.microbatch_tokens, model.attention_tokens),
            data_parallel=config.meshes.learner // config.learner.tensor_parallel,
            tensor_parallel=config.learner.tensor_parallel,
            provides=declared(PROVIDES),
            rewards=False,
            note=lambda _: None,
        )
        self.shipments: dict[int, Shipment] = {}
        """Under way to the learner, by the number of their ticket."""
        self.staleness: Counter[int] = Counter()
        """Rollouts handed over, by the versions that their oldest token is behind."""
        self.response_tokens = 0
        self._generators, self._weights, self._model = generator, weights, model
        self._link_up()

    async def relink(self) -> None:
        self._link_up()

    def on_mesh(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Zeros: values are made on the learners, none of which is here."""
        return lambda first, *_, **__: torch.zeros_like(first)

    async def __call__(self, groups: Sequence[Any], **columns: Tensor | Sequence[float]) -> Ticket:
        ticket = await super().__call__(groups, **columns)
        for group in groups:
            for rollout in group.rollouts:
                if rollout.id not in ticket.dropped:
                    self.staleness[self._weights.published - rollout.oldest_version] += 1
        self.response_tokens += ticket.response_tokens
        return ticket

    async def _ship(self, shipment: Shipment, values: Mapping[Any, Tensor]) -> None:
        tokens = sum(shipment.lengths[p] for rank in shipment.ranks for part in rank for p in part)
        await asyncio.sleep(self._model.handoff_seconds + tokens / self._model.handoff_tokens_per_second)
        self.shipments[shipment.ticket.number] = shipment

    def _scores(self, rewards: Sequence[float], groups: Sequence[int]) -> tuple[Tensor, Tensor]:
        return torch.tensor(rewards, dtype=torch.float32), torch.tensor(groups, dtype=torch.int64)

    def _plain(self, column: Column, value: Tensor | Sequence[float]) -> Tensor:
        return value if isinstance(value, Tensor) else column.values(list(value))

    def _link_up(self) -> None:
        self._bridges = {
            number: cast(Replica, replica)
            for number, replica in enumerate(self._generators.replicas)
            if not replica.death.done()
        }


class SimulatedLearner:
    """Stands for a `LearnerMesh`."""

    def __init__(self, handoff: SimulatedHandoff, model: LearnerModel, actors: ProcessorTime) -> None:
        self.busy_seconds = 0.0
        self._handoff, self._model, self._actors = handoff, model, actors

    async def step(self, loss: Loss, ticket: Ticket) -> Update:
        """Waits for: the time that the heaviest ranks need."""
        with self._actors:
            seconds = self._model.seconds(self._handoff.shipments.pop(ticket.number))
        if ticket.response_tokens == 0:  # as the real one, which skips an empty batch
            seconds = 0.0
        await asyncio.sleep(seconds)
        self.busy_seconds += seconds
        return Update({"loss": 0.0}, {}, {"train": seconds})

    async def supervised_step(self, *_: Any) -> NoReturn:
        """
        Raises:
            UserError: always.
        """
        raise UserError("the program trains on supervised examples, which is not simulated: only on rollouts")

    reset_optimizer = supervised_step
