"""`meshrl simulate PROGRAM`: the program and all of the controller, as they are, in virtual time against simulated
meshes. Tells what staleness, batch size and split between generators and learners would do, before any is rented."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import math
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from meshrl import virtual_time
from meshrl.actors.learner import LearnerConfig
from meshrl.actors.rollouts import RolloutsConfig
from meshrl.errors import UserError
from meshrl.metrics import StepReport
from meshrl.programs.config import EvaluationConfig, MeshSizes, ProgramConfig
from meshrl.programs.loading import load_program
from meshrl.programs.sft import WarmUpConfig
from meshrl.programs.simulated import LearnerModel, SimulatedSession
from meshrl.programs.simulated_generator import GeneratorModel
from meshrl.rollout import SamplingParams
from meshrl.run import Program, config_type


@dataclass(frozen=True)
class SimulationConfig:
    """What is simulated. Where several values are given, every combination is."""

    generators: tuple[int, ...] = (48,)
    """Generator replicas."""
    learners: tuple[int, ...] = (16,)
    """Learner processes."""
    processes: int = 0
    """Learners are what the generators leave of so many processes, to try splits of them. 0: `learners` counts."""
    staleness: tuple[int, ...] = (0, 1, 2)
    """Steps that generation may run ahead (S)."""
    prompts_per_step: tuple[int, ...] = (128,)
    """Groups of a batch (P)."""
    group_size: int = 16
    """Samples of each prompt."""
    steps: int = 12
    """Optimizer steps. The first S + 1 fill the slots and are not measured, so more than that."""
    refills: int = 0
    """Groups that may be generated for each batch in place of some with equal rewards. 0: batches get smaller."""
    rollouts_per_generator: int = 0
    """Most rollouts outstanding at a replica. 0: no bound."""
    microbatch_tokens: int | None = 32_768
    """Most tokens of one forward pass; longer rollouts are left out. None: a rank's share in one pass."""
    failure_seconds: float = 0.0
    """Mean time between failures of one generator replica. 0: none fails."""
    replacement_seconds: float = 120.0
    """From a failure until another process has taken its place."""
    seed: int = 0
    generator: GeneratorModel = field(default_factory=GeneratorModel)
    learner: LearnerModel = field(default_factory=LearnerModel)

    def __post_init__(self) -> None:
        if self.steps <= max(self.staleness) + 1:
            raise UserError(
                f"steps is {self.steps}: the first S + 1 = {max(self.staleness) + 1} fill the slots, so "
                f"{max(self.staleness) + 2} or more"
            )

    def scenarios(self) -> list[Scenario]:
        """Every combination.

        Raises:
            UserError: the generators leave no process to the learners.
        """
        learners = (0,) if self.processes else self.learners
        made = []
        for generators, given, groups, staleness in itertools.product(
            self.generators, learners, self.prompts_per_step, self.staleness
        ):
            rest = given or self.processes - generators
            if rest < 1:
                raise UserError(f"{generators} generators of {self.processes} processes leave no learner")
            made.append(Scenario(generators, rest, groups, staleness))
        return made


@dataclass(frozen=True)
class Scenario:
    """One combination."""

    generators: int
    learners: int
    prompts_per_step: int
    staleness: int


@dataclass(frozen=True)
class Outcome:
    """What came of one. Seconds are virtual unless they say otherwise; rates and shares are of the measured steps,
    after the first S + 1."""

    scenario: Scenario
    steps: int
    seconds_per_step: float
    response_tokens_per_second: float
    """Trained on."""
    rollouts_per_second: float
    """Trained on."""
    generator_idle: float
    """Share of replica-time in which no sample ran."""
    slots_used: float
    """Share of the replicas' slots in which a sample ran."""
    learner_idle: float
    """Share of time in which no step was trained."""
    phases: dict[str, float]
    """Seconds of a step by phase, as the program reports them."""
    staleness: dict[int, int]
    """Rollouts trained on in all steps, by the versions that their oldest token was behind."""
    ledger: dict[str, Any]
    """In rollouts, of all steps: admitted, trained, dropped by reason, live."""
    balanced: bool
    """Whether the ledger adds up, in groups and in rollouts."""
    peak_outstanding: int
    """Most rollouts being generated or graded at once."""
    deaths: int
    """Generator replicas that failed."""
    messages_per_rollout: float
    """Calls of the controller to generators, for each rollout that they finished."""
    controller_ms_per_rollout: float
    """Processor time of everything but the simulated actors, event loop included, for each rollout finished."""
    total_ms_per_rollout: float
    """With them: a bound from above."""
    wall_seconds: float
    """Real ones."""


def simulate(program: Program, config: SimulationConfig, scenario: Scenario) -> Outcome:
    """Run a program from beginning to end in virtual time.

    Raises:
        UserError: the program's config is no `ProgramConfig`, or it does what is not simulated.
    """
    return virtual_time.run(_simulate(program, config, scenario))


@dataclass
class _Mark:
    """Where things stood."""

    at: float
    busy: float
    sample: float
    learner: float
    tokens: int
    rollouts: int


async def _simulate(program: Program, config: SimulationConfig, scenario: Scenario) -> Outcome:
    loop = asyncio.get_running_loop()
    wall, processor = time.perf_counter(), time.process_time()
    session = SimulatedSession(
        config.generator,
        config.learner,
        failure_seconds=config.failure_seconds,
        replacement_seconds=config.replacement_seconds,
        seed=config.seed,
    )
    reports: AsyncIterator[StepReport] = program(session, _program_config(program, config, scenario))
    phases: dict[str, float] = {}
    first = last = None
    async for report in reports:
        last = _Mark(
            at=loop.time(),
            busy=session.generator.busy_seconds(),
            sample=session.generator.sample_seconds(),
            learner=session.learner.busy_seconds,
            tokens=session.handoff.response_tokens,
            rollouts=session.handoff.staleness.total(),
        )
        if report.step <= scenario.staleness + 1:
            first = last
        else:
            for phase, seconds in report.seconds.items():
                phases[phase] = phases.get(phase, 0.0) + seconds
    processor = time.process_time() - processor
    wall = time.perf_counter() - wall
    assert first is not None and last is not None and session.rollouts is not None
    generator, buffer = session.generator, session.rollouts.buffer
    steps, seconds = config.steps - scenario.staleness - 1, last.at - first.at
    replica_seconds = scenario.generators * seconds
    finished = generator.finished_rollouts
    return Outcome(
        scenario=scenario,
        steps=steps,
        seconds_per_step=seconds / steps,
        response_tokens_per_second=(last.tokens - first.tokens) / seconds,
        rollouts_per_second=(last.rollouts - first.rollouts) / seconds,
        generator_idle=1 - (last.busy - first.busy) / replica_seconds,
        slots_used=(last.sample - first.sample) / replica_seconds / config.generator.slots,
        learner_idle=1 - (last.learner - first.learner) / seconds,
        phases={phase: total / steps for phase, total in phases.items()},
        staleness=dict(sorted(session.handoff.staleness.items())),
        ledger=dataclasses.asdict(buffer.rollout_ledger),
        balanced=buffer.ledger.balanced and buffer.rollout_ledger.balanced,
        peak_outstanding=generator.peak,
        deaths=generator.deaths,
        messages_per_rollout=generator.messages / finished,
        controller_ms_per_rollout=1e3 * (processor - session.actors.seconds) / finished,
        total_ms_per_rollout=1e3 * processor / finished,
        wall_seconds=wall,
    )


def _program_config(program: Program, config: SimulationConfig, scenario: Scenario) -> ProgramConfig:
    kind = config_type(program)
    names = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    if not issubclass(kind, ProgramConfig) or "steps" not in names:
        raise UserError(
            f"{kind.__name__} cannot be simulated: the program's config must be a ProgramConfig that has `steps`"
        )
    settings: dict[str, Any] = {
        "steps": config.steps,
        "seed": config.seed,
        "meshes": MeshSizes(generator=scenario.generators, learner=scenario.learners),
        "learner": LearnerConfig(microbatch_tokens=config.microbatch_tokens),
        "sampling": SamplingParams(max_tokens=config.generator.max_tokens),
        "rollouts": RolloutsConfig(
            prompts_per_step=scenario.prompts_per_step,
            group_size=config.group_size,
            max_staleness=scenario.staleness,
            refills=config.refills,
            rollouts_per_generator=config.rollouts_per_generator,
            deadline_seconds=math.inf,
        ),
        "evaluation": EvaluationConfig(prompts=0),
        "samples_every": 0,
    }
    if "warm_up" in names:
        settings["warm_up"] = WarmUpConfig(steps=0)
    return kind(**settings)


def main(name: str, flags: Sequence[str]) -> int:
    """The command; returns its exit code.

    Raises:
        UserError: no such program, or one that cannot be simulated.
    """
    import tyro

    options = dataclasses.make_dataclass(
        "Options",
        [
            ("config", tyro.conf.OmitArgPrefixes[SimulationConfig]),
            (
                "json",
                Annotated[
                    bool,
                    tyro.conf.FlagCreatePairsOff,
                    tyro.conf.arg(help="Print one JSON object per row in place of the table."),
                ],
                dataclasses.field(default=False),
            ),
        ],
        frozen=True,
    )
    program = load_program(name)
    description = (
        f"Run {name} in virtual time against simulated meshes; a row for each combination of values."
    )
    parsed: Any = tyro.cli(options, prog=f"meshrl simulate {name}", description=description, args=flags)
    outcomes = []
    for scenario in parsed.config.scenarios():
        outcome = simulate(program, parsed.config, scenario)
        outcomes.append(outcome)
        if parsed.json:
            print(json.dumps(dataclasses.asdict(outcome)), flush=True)
        else:
            print(f"simulated in {outcome.wall_seconds:.1f} s: {scenario}", file=sys.stderr, flush=True)
    if not parsed.json:
        show(outcomes)
    return 0


def show(outcomes: Sequence[Outcome]) -> None:
    """A table for a person, a column each."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    table.add_column("")
    for _ in outcomes:
        table.add_column(justify="right")
    for name, value in _ROWS.items():
        table.add_row(name, *map(value, outcomes))
    Console(soft_wrap=True, width=40 + 16 * len(outcomes)).print(table)


def _versions(outcome: Outcome) -> str:
    rollouts = max(sum(outcome.staleness.values()), 1)
    return " ".join(f"{versions}:{count / rollouts:.0%}" for versions, count in outcome.staleness.items())


def _dropped(outcome: Outcome) -> str:
    admitted = outcome.ledger["admitted"]
    return (
        ", ".join(f"{reason} {n / admitted:.0%}" for reason, n in outcome.ledger["dropped"].items()) or "none"
    )


_ROWS: dict[str, Callable[[Outcome], str]] = {
    "generator replicas": lambda each: f"{each.scenario.generators:,}",
    "learner processes": lambda each: f"{each.scenario.learners:,}",
    "groups per step (P)": lambda each: f"{each.scenario.prompts_per_step:,}",
    "max staleness (S)": lambda each: f"{each.scenario.staleness}",
    "seconds per step": lambda each: f"{each.seconds_per_step:.1f}",
    "trained tokens/s": lambda each: f"{each.response_tokens_per_second:,.0f}",
    "trained rollouts/s": lambda each: f"{each.rollouts_per_second:,.1f}",
    "generators idle": lambda each: f"{each.generator_idle:.0%}",
    "generator slots used": lambda each: f"{each.slots_used:.0%}",
    "learners idle": lambda each: f"{each.learner_idle:.0%}",
    "rollouts by staleness": _versions,
    "rollouts dropped": _dropped,
    "most in flight": lambda each: f"{each.peak_outstanding:,}",
    "replicas that died": lambda each: f"{each.deaths:,}",
    "controller CPU ms/rollout": lambda each: f"{each.controller_ms_per_rollout:.3f}",
    "… simulated actors too": lambda each: f"{each.total_ms_per_rollout:.3f}",
    "real seconds": lambda each: f"{each.wall_seconds:.1f}",
}
