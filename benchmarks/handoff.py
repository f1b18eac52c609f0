"""From generator docks to learner docks, and what passes through the controller: `python -m benchmarks.handoff`.

Two cases have as many rollouts, and 16 times the tokens. `handoff` is what programs use: the controller names
rollouts, bridges move their columns. References, in the same run, do the same with messages of actors: generators
answer with their columns, the controller gives each learner rank its share as an argument. `messages` sends each column
of each rollout as the tensor that it is; `packed messages` sends a rank's share as one string of bytes, which is the
most that this way can do. `tokens_per_second_over_messages` is over the faster of the two.

A round is all that a step does with rollouts between taking and training: plan, advantages, transport, docking. Bytes
are those of all messages that the controller pickles or unpickles meanwhile, CPU time is that of its process.
Operations of the tensor engine, which hold no data, are not among the messages. What arrives is compared with what was
sent, bit by bit, once for each row.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import monarch._src.actor.pickle as pickling
import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from meshrl.advantages import group_relative
from meshrl.handoff.collectives import pack, unpack
from meshrl.handoff.dock import DockedBatch, Ticket, dock
from meshrl.handoff.handoff import Handoff
from meshrl.handoff.schema import DOCKED
from meshrl.handoff.shipment import Shipment, plan_shipment
from meshrl.mesh import RoleMesh
from meshrl.parcel import parcel
from meshrl.rollout import RolloutGroup, RolloutHandle
from meshrl.session import Session
from meshrl.worker import Worker, endpoint

GROWTH = 16
"""Tokens of the longer case over those of the shorter."""
PROMPT_TOKENS = 16
HANDOFF = "handoff"
WARM_UPS = 3
DEADLINE_SECONDS = 120.0

Columns = Mapping[str, Tensor]
Share = tuple[Ticket, list[int], list[int], list[float]]
"""What a learner rank is to be told of its rollouts besides their columns: ids, lengths, advantages."""


@dataclass(frozen=True)
class HandoffBenchmark:
    """Time what brings rollouts from generators to learners."""

    rollouts: int = 256
    """Of one step."""
    group_size: int = 8
    response_tokens: int = 256
    """Mean of the shorter case."""
    generators: int = 2
    """Generator replicas."""
    learners: int = 2
    """Learner ranks."""
    repeats: int = 20
    """Rounds of each row, after warm-ups; its figures are their medians."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object per row in place of the table."""


@dataclass(frozen=True)
class Round:
    """What one handoff took."""

    seconds: float
    controller_cpu_seconds: float
    controller_bytes: int


@dataclass
class Traffic:
    """Messages of this process, counted as they are pickled and unpickled."""

    bytes: int = 0

    def count(self) -> None:
        """Count from now on. Call before the first message: Monarch looks its pickling functions up once."""
        dump, loads = pickling.torch_dump, pickling.torch_loads

        def counting_dump(value: Any, buffer: Any) -> None:
            before = len(buffer)
            dump(value, buffer)
            self.bytes += len(buffer) - before

        def counting_loads(data: Any) -> Any:
            self.bytes += len(data)
            return loads(data)

        pickling.torch_dump, pickling.torch_loads = counting_dump, counting_loads


class BenchmarkGenerator(Worker):
    """Holds rollouts; of the other ways: answers with them."""

    @endpoint
    async def fill(self, handles: Sequence[RolloutHandle]) -> None:
        """Dock those that are this replica's."""
        for handle in handles:
            if handle.replica == self.replica:
                dock().put(handle.id, made_up(handle.id, handle.tokens))

    @endpoint
    async def release(self, rollout_ids: Sequence[int]) -> None:
        dock().release(rollout_ids)

    @endpoint
    async def columns(self, rollout_ids: Sequence[int]) -> list[Columns]:
        return [dock().get(rollout_id) for rollout_id in rollout_ids]

    @endpoint
    async def packed(self, parts: Sequence[Sequence[int]]) -> list[bytes]:
        """For each learner rank the columns of these rollouts, end to end."""
        docked = ([dock().get(rollout_id) for rollout_id in part] for part in parts)
        return [pack(part).numpy().tobytes() if part else b"" for part in docked]


class BenchmarkLearner(Worker):
    """Has rollouts docked; of the other ways: is given them."""

    @endpoint
    async def dock_columns(self, share: Share, columns: Sequence[Columns]) -> None:
        dock().put_batch(share[0], batch_of(share, columns))

    @endpoint
    async def dock_packed(self, share: Share, parts: Sequence[tuple[int, bytes]]) -> None:
        columns = [unpack(torch.frombuffer(bytearray(packed), dtype=torch.uint8), n) for n, packed in parts]
        dock().put_batch(share[0], batch_of(share, columns))

    @endpoint
    async def check(self, ticket: Ticket, wanted: Mapping[int, float]) -> list[int]:
        """Rollouts of the batch. Raises where one is not what its generator docked, or has another advantage."""
        batch = dock().take_batch(ticket)
        advantages = batch.rollout_columns["advantages"].tolist()
        start = 0
        for rollout_id, length, advantage in zip(batch.rollout_ids, batch.lengths, advantages, strict=True):
            for name, values in made_up(rollout_id, length).items():
                if not torch.equal(batch.columns[name][start : start + length], values):
                    raise AssertionError(f"column {name} of rollout {rollout_id} arrived wrong")
            if abs(advantage - wanted[rollout_id]) > 1e-6:
                raise AssertionError(f"rollout {rollout_id} has {advantage}, wanted {wanted[rollout_id]}")
            start += length
        return batch.rollout_ids


def main() -> None:
    """Run and print."""
    benchmark = tyro.cli(HandoffBenchmark, description=__doc__)
    rows = asyncio.run(measure(benchmark))
    if benchmark.json:
        for row in rows:
            print(json.dumps(row))
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(
        title=f"{benchmark.generators} generator to {benchmark.learners} learner processes, medians"
    )
    for name in names:
        table.add_column(name.replace("_", " "))
    for row in rows:
        cells = [row.get(name, "–") for name in names]
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console(width=200).print(table)


async def measure(benchmark: HandoffBenchmark) -> list[dict[str, Any]]:
    """All rows: both cases, each way."""
    traffic = Traffic()
    traffic.count()
    session = Session()
    session.on_note = session.on_log = tell
    async with session:
        generator, learner = await asyncio.gather(
            session.spawn(BenchmarkGenerator, replicas=benchmark.generators, name="generator"),
            session.spawn(BenchmarkLearner, procs=benchmark.learners, name="learner"),
        )
        handoff = await Handoff.connect(source=generator, target=learner, note=tell)
        ways = Ways(generator, learner, handoff)
        rows: list[dict[str, Any]] = []
        for growth in (1, GROWTH):
            tokens = benchmark.response_tokens * growth
            groups = groups_of(benchmark, tokens)
            handles = handles_of(groups)
            await generator.call("fill", handles, deadline_seconds=DEADLINE_SECONDS)
            rounds = await ways.rounds(groups, traffic, benchmark.repeats)
            await generator.call("release", [h.id for h in handles], deadline_seconds=DEADLINE_SECONDS)
            rows += rows_of(f"{benchmark.rollouts} rollouts of {tokens} tokens", groups, rounds)
    return with_growth(rows)


class Ways:
    """The handoff, and the messages that it is compared with."""

    def __init__(self, generator: RoleMesh, learner: RoleMesh, handoff: Handoff) -> None:
        self.generator, self.learner, self.handoff = generator, learner, handoff
        self._number = 0

    async def rounds(
        self, groups: Sequence[RolloutGroup], traffic: Traffic, repeats: int
    ) -> dict[str, list[Round]]:
        """Rounds of each way. They take turns, since the speed of a shared machine drifts."""
        ways: dict[str, Callable[[Sequence[RolloutGroup]], Awaitable[Ticket]]] = {
            "messages": self.messages,
            "packed messages": self.packed_messages,
            HANDOFF: self.hand,
        }
        rounds: dict[str, list[Round]] = {name: [] for name in ways}
        for number in range(WARM_UPS + repeats):
            for name, way in ways.items():
                before = time.perf_counter(), time.process_time(), traffic.bytes
                ticket = await way(groups)
                after = time.perf_counter(), time.process_time(), traffic.bytes
                if number == 0:
                    await self.check(groups, ticket)
                elif number >= WARM_UPS:
                    seconds, cpu, sent = (b - a for a, b in zip(before, after, strict=True))
                    rounds[name].append(Round(seconds, cpu, int(sent)))
            tell(f"round {number + 1} of {WARM_UPS + repeats}")
        return rounds

    async def hand(self, groups: Sequence[RolloutGroup]) -> Ticket:
        """As the programs do."""
        rewards, numbers = self.handoff.rewards(groups)
        advantages = self.handoff.on_mesh(group_relative)(rewards, numbers)
        return await self.handoff(groups, advantages=advantages)

    async def messages(self, groups: Sequence[RolloutGroup]) -> Ticket:
        """Every column of every rollout is a tensor in a message."""
        handles, shipment = handles_of(groups), self._plan(groups)
        held = [[h.id for h in handles if h.replica == replica] for replica in shipment.sources]
        answers = await self._ask("columns", held)
        columns: dict[int, Columns] = {}
        for ids, answer in zip(held, answers, strict=True):
            columns |= zip(ids, answer, strict=True)
        order = [shipment.order(rank) for rank in range(self.learner.size)]
        shares = [share(shipment, groups, positions) for positions in order]
        return await self._tell("dock_columns", [(s, [columns[i] for i in s[1]]) for s in shares])

    async def packed_messages(self, groups: Sequence[RolloutGroup]) -> Ticket:
        """What a generator holds for a learner rank is one string of bytes in a message."""
        shipment, ranks = self._plan(groups), range(self.learner.size)
        parts = {(r, g): shipment.part(r, g) for r in ranks for g in shipment.sources}
        ids = [[[shipment.rollout_ids[p] for p in parts[r, g]] for r in ranks] for g in shipment.sources]
        answers = await self._ask("packed", ids)
        calls = []
        for rank in ranks:
            found = [(parts[rank, source], answers[source][rank]) for source in shipment.sources]
            order = [position for part, _ in found for position in part]
            sizes = [(sum(shipment.lengths[p] for p in part), packed) for part, packed in found if part]
            calls.append((share(shipment, groups, order), sizes))
        return await self._tell("dock_packed", calls)

    async def check(self, groups: Sequence[RolloutGroup], ticket: Ticket) -> None:
        """Raises unless each rollout is on one learner rank, with its own columns and advantage."""
        ids = [handle.id for handle in handles_of(groups)]
        wanted = dict(zip(ids, advantages_of(groups).tolist(), strict=True))
        arrived = await self.learner.call("check", ticket, wanted, deadline_seconds=DEADLINE_SECONDS)
        if sorted(rollout_id for part in arrived for rollout_id in part) != sorted(ids):
            raise AssertionError("a rollout is missing, or is there twice")

    def _plan(self, groups: Sequence[RolloutGroup]) -> Shipment:
        self._number -= 1  # apart from those of the handoff
        sources = tuple(range(len(self.generator.replicas)))
        return plan_shipment(handles_of(groups), self._number, self.learner.size, sources=sources)

    async def _ask(self, name: str, arguments: Sequence[Any]) -> list[Any]:
        """Answers of each generator to an argument of its own."""
        calls = (
            self.generator.call_rank(name, parcel(each), replica=replica, deadline_seconds=DEADLINE_SECONDS)
            for replica, each in enumerate(arguments)
        )
        return await asyncio.gather(*calls)

    async def _tell(self, name: str, calls: Sequence[tuple[Share, Any]]) -> Ticket:
        """Give each learner rank its share and the columns of it."""
        told = (
            self.learner.call_rank(name, parcel(each), columns, rank=rank, deadline_seconds=DEADLINE_SECONDS)
            for rank, (each, columns) in enumerate(calls)
        )
        await asyncio.gather(*told)
        return calls[0][0][0]


def share(shipment: Shipment, groups: Sequence[RolloutGroup], positions: Sequence[int]) -> Share:
    """Of the rollouts at these positions, in this order."""
    ids, lengths = ([values[p] for p in positions] for values in (shipment.rollout_ids, shipment.lengths))
    return shipment.ticket, ids, lengths, advantages_of(groups)[positions].tolist()


def batch_of(share: Share, columns: Sequence[Columns]) -> DockedBatch:
    """One micro-batch of what arrived, in pieces or whole."""
    ticket, ids, lengths, advantages = share
    return DockedBatch(
        rollout_ids=ids,
        lengths=lengths,
        columns={column.name: torch.cat([part[column.name] for part in columns]) for column in DOCKED},
        rollout_columns={"advantages": torch.tensor(advantages)},
        microbatches=[list(range(len(ids)))],
        global_tokens=ticket.response_tokens,
        global_rollouts=ticket.rollouts,
    )


def rows_of(
    case: str, groups: Sequence[RolloutGroup], rounds: Mapping[str, Sequence[Round]]
) -> list[dict[str, Any]]:
    """One row for each way, medians of its rounds."""
    tokens = sum(handle.tokens for handle in handles_of(groups))
    rows = [
        {
            "case": case,
            "way": way,
            "response_tokens": sum(handle.response_tokens for handle in handles_of(groups)),
            "tokens_per_second": round(tokens / statistics.median(each.seconds for each in found)),
            "milliseconds": 1e3 * statistics.median(each.seconds for each in found),
            "controller_cpu_ms": 1e3 * statistics.median(each.controller_cpu_seconds for each in found),
            "controller_bytes": round(statistics.median(each.controller_bytes for each in found)),
        }
        for way, found in rounds.items()
    ]
    fastest = max(row["tokens_per_second"] for row in rows if row["way"] != HANDOFF)
    for row in rows:
        if row["way"] == HANDOFF:
            row["tokens_per_second_over_messages"] = row["tokens_per_second"] / fastest
    return rows


def with_growth(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows; the handoff's of the longer case says what it is over that of the shorter."""
    short, long = (row for row in rows if row["way"] == HANDOFF)
    names = "controller_bytes", "controller_cpu_ms"
    growth = {f"{name}_growth_at_{GROWTH}x_tokens": long[name] / short[name] for name in names}
    return [row | growth if row is long else row for row in rows]


def groups_of(benchmark: HandoffBenchmark, response_tokens: int) -> list[RolloutGroup]:
    """Groups dealt to the generators in turn; lengths spread evenly from half to one and a half of the mean."""
    groups = []
    for number in range(benchmark.rollouts // benchmark.group_size):
        first = number * benchmark.group_size
        handles = tuple(
            RolloutHandle(
                id=rollout_id,
                group_id=number,
                replica=number % benchmark.generators,
                prompt_tokens=PROMPT_TOKENS,
                response_tokens=max(1, response_tokens * (8 + rollout_id * 5 % 17) // 16),
                oldest_version=0,
                newest_version=0,
                stop_reason="stop",
                seed=rollout_id,
                reward=float(rollout_id % 3 == 0),
            )
            for rollout_id in range(first, first + benchmark.group_size)
        )
        groups.append(RolloutGroup(number, number, handles))
    return groups


def handles_of(groups: Sequence[RolloutGroup]) -> list[RolloutHandle]:
    """All rollouts, in the order of the groups."""
    return [handle for group in groups for handle in group.rollouts]


def advantages_of(groups: Sequence[RolloutGroup]) -> Tensor:
    """float32 `[rollouts]`, made on the controller."""
    rewards = torch.tensor([handle.reward for handle in handles_of(groups)])
    return group_relative(rewards, torch.tensor([handle.group_id for handle in handles_of(groups)]))


def made_up(rollout_id: int, tokens: int) -> dict[str, Tensor]:
    """Columns of a rollout, `[tokens]` each, on every process the same."""
    position = torch.arange(tokens)
    sampled = position >= PROMPT_TOKENS
    return {
        "token_ids": (1000 * rollout_id + position).to(torch.int32),
        "response_mask": sampled,
        "sampler_logprobs": torch.where(sampled, -rollout_id - position / 1000, 0.0),
        "weight_version": torch.where(sampled, rollout_id % 5, -1).to(torch.int32),
    }


def tell(text: str) -> None:
    """To a person who waits: standard output holds the results alone."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
