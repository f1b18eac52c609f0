"""Seconds that weights take from learner to generators, by every transport: `python -m benchmarks.weights`.

Two learner processes hold FSDP2 shards (DTensors cut by rows). One generator process takes every tensor whole
(TP1), or two take half of the columns each (TP2). Reference: between the pulls each generator process copies as
many bytes as it takes from one place in memory to another, on one core, all processes at once as in a pull;
`pull_over_memcpy` is that time over the pull's, so 1.0 is as fast as memory and more is better.

The same work is also done in three other ways, all awaited to their end by the training loop: `gather and
messages` gathers whole tensors on the learner, and the generator fetches them as answers of an actor; `gloo
broadcast` gathers them and broadcasts one after the other; `rdma per tensor` reads each shard through a Monarch
`RDMABuffer` of its own, with Monarch's own settings.

What arrives is compared with what was sent, bit by bit, once for each row.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshrl.mesh import RoleMesh
from meshrl.session import Session
from meshrl.weights import rdma
from meshrl.weights.broadcast import PublishesWeights, ReceivesWeights, WeightBroadcast, WeightsConfig
from meshrl.weights.digests import Digests
from meshrl.weights.errors import TransportUnavailable
from meshrl.weights.layout import Layout
from meshrl.weights.tensors import local
from meshrl.weights.transport import Transport
from meshrl.worker import Worker, call, endpoint

Shape = tuple[int, int]
Case = Literal["large", "small"]
OtherWay = Literal["gather and messages", "gloo broadcast", "rdma per tensor"]
Way = Literal["memfd", "nixl", "rdma", "tcp", OtherWay]

CASES: dict[Case, tuple[str, list[Shape]]] = {
    "large": ("268 MB in 4 tensors", [(4096, 4096)] * 4),
    "small": ("61 MB in 300 tensors", [(256, 200)] * 300),
}
"""Label and shapes, float32."""
LEARNERS = 2
WARM_UPS = 2
MEMCPY_REPEATS = 3
"""After each pull."""
DIGEST_TURNS = 3
DEADLINE_SECONDS = 120.0
MESSAGE_BYTES = 1 << 26
"""Tensors that together have so many bytes go in one message."""


@dataclass(frozen=True)
class WeightsBenchmark:
    """Time weights on their way from 2 learner processes to 1 and to 2 generator processes."""

    repeats: int = 9
    """Times that each row is measured, after 2 warm-ups; medians are shown."""
    transports: tuple[Way, ...] = get_args(Way)
    """What to measure; with memfd, the price of digests too."""
    cases: tuple[Case, ...] = get_args(Case)
    """`large`: 268 MB in 4 tensors; `small`: 61 MB in 300 tensors."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object per row in place of the table."""


@dataclass(frozen=True)
class Round:
    """Seconds of one broadcast; the controller's clock where nothing else is said."""

    publish: float
    """Slowest learner rank's copy, by its own clock; of the other ways: gathering."""
    pull: float
    """Slowest generator rank, by its own clock; of the other ways: all after gathering."""
    end_to_end: float
    blocked: float
    """Until the training loop could go on."""
    memcpy: float
    """Of as many bytes as each generator rank takes, all at once; the slowest, by its own clock."""


class Benchmarked(Worker):
    """Has whole tensors in memory, and can bring them from learner rank 0 to a generator by gloo."""

    whole: list[Tensor]

    @endpoint
    async def join_pair(self, store: str, rank: int) -> None:
        deadline = timedelta(seconds=DEADLINE_SECONDS)
        self.pair: Any = dist.ProcessGroupGloo(FileStore(store, 2), rank, 2, deadline)

    @endpoint
    async def broadcast_whole(self) -> None:
        await asyncio.to_thread(lambda: [self.pair.broadcast(tensor, 0).wait() for tensor in self.whole])


class BenchmarkLearner(PublishesWeights, Benchmarked):
    """Half of the rows of each tensor, sharded by FSDP2."""

    @endpoint
    async def setup(self, store: str) -> None:
        dist.init_process_group("gloo", store=FileStore(store, LEARNERS), rank=self.rank, world_size=LEARNERS)
        self.mesh = init_device_mesh("cpu", (LEARNERS,))

    @endpoint
    async def load(self, shapes: Sequence[Shape]) -> None:
        """Hold tensors of these shapes from now on."""
        self.whole = []
        layers = (torch.nn.Parameter(made_up(shape, number)) for number, shape in enumerate(shapes))
        self.module = torch.nn.ParameterList(layers)
        fully_shard(self.module, mesh=self.mesh)

    def weight_tensors(self) -> Mapping[str, Tensor]:
        return dict(self.module.named_parameters())

    @endpoint
    async def halve(self) -> None:
        """Change every weight, exactly: what arrived before is wrong from now on."""
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.mul_(0.5)

    @endpoint
    async def gather(self) -> None:
        """Bring whole tensors together on every rank."""
        self.whole = []
        shards: list[Any] = [parameter.detach() for parameter in self.module.parameters()]
        self.whole = await asyncio.to_thread(lambda: [shard.full_tensor() for shard in shards])

    @endpoint
    async def gathered(self, first: int, last: int) -> list[Tensor]:
        return self.whole[first:last]

    @endpoint
    async def register_each(self) -> list[Any]:
        """One `RDMABuffer` for each shard."""
        from monarch.rdma import RDMABuffer

        shards = [as_bytes(local(parameter)) for parameter in self.module.parameters()]
        return await asyncio.to_thread(lambda: [RDMABuffer(shard) for shard in shards])


class BenchmarkGenerator(ReceivesWeights, Benchmarked):
    """Every tensor, or half of its columns."""

    @endpoint
    async def load(self, shapes: Sequence[Shape]) -> None:
        """Expect tensors of these shapes from now on."""
        whole = (made_up(shape, number) for number, shape in enumerate(shapes))
        self.expected = [tensor.chunk(self.world_size, 1)[self.rank].contiguous() for tensor in whole]
        elements = sum(tensor.numel() for tensor in self.expected)
        self.copied, self.copy = torch.ones(elements), torch.zeros(elements)
        self.whole = [torch.zeros_like(tensor) for tensor in self.expected]
        """Where the other ways bring them."""
        self.arrived: list[Tensor] = self.whole

    def weights_target(self, source: Layout) -> Layout:
        return source.split(dict.fromkeys(source.parameters, 1), self.world_size).of_rank(self.rank)

    async def swap_weights(self, named: Mapping[str, Tensor], version: int) -> None:
        self.arrived = list(named.values())

    @endpoint
    async def check(self, scale: float) -> None:
        """Raises unless the learner's first weights times `scale` are here, bit by bit."""
        for number, (tensor, expected) in enumerate(zip(self.arrived, self.expected, strict=True)):
            if not torch.equal(tensor.view(torch.int32), (expected * scale).view(torch.int32)):
                raise AssertionError(f"tensor {number} arrived wrong")

    @endpoint
    async def memcpy_seconds(self) -> float:
        """Median, to copy as many bytes as this rank takes, between two places whose pages are there."""
        repeats = timeit.repeat(lambda: self.copy.copy_(self.copied), number=1, repeat=MEMCPY_REPEATS)
        return statistics.median(repeats)

    @endpoint
    async def fetch_messages(self, learner: Any) -> None:
        each = max(1, MESSAGE_BYTES // self.whole[0].nbytes)
        for first in range(0, len(self.whole), each):
            landings = self.whole[first : first + each]
            answer = await call(learner, "gathered", first, first + each, deadline_seconds=DEADLINE_SECONDS)
            for landing, tensor in zip(landings, answer, strict=True):
                landing.copy_(tensor)

    @endpoint
    async def read_each(self, buffers: Sequence[Sequence[Any]]) -> None:
        """Each shard from its buffer: `[learner rank][tensor]`."""
        for number, landing in enumerate(self.whole):
            for part, held in zip(landing.chunk(len(buffers)), buffers, strict=True):
                await held[number].read_into(as_bytes(part), timeout=int(DEADLINE_SECONDS))


def main() -> None:
    """Run and print."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the workers inherit it
    benchmark = tyro.cli(WeightsBenchmark, description=__doc__)
    rows = asyncio.run(measure(benchmark))
    if benchmark.json:
        for row in rows:
            print(json.dumps(row))
        return
    columns = list(dict.fromkeys(name for row in rows for name in row if name != "unavailable"))
    table = Table(title="Weights from learner to generators, medians")
    for name in columns:
        table.add_column(name.replace("gigabytes_per_second", "GB/s").replace("_", " "))
    for row in rows:
        cells = [row.get(name, "–") for name in columns]
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console(width=200).print(table)
    for row in (row for row in rows if "unavailable" in row):
        print(f"{row['transport']} ({row['case']}, {row['target']}): {row['unavailable']}")


async def measure(benchmark: WeightsBenchmark) -> list[dict[str, Any]]:
    """All rows, by case and target. At most five processes at once, this one included."""
    others = [way for way in benchmark.transports if way in get_args(OtherWay)]
    transports = [way for way in benchmark.transports if way not in others]
    rows: list[dict[str, Any]] = []
    for processes in (1, 2) if transports else ():
        async with meshes(processes) as work:
            for case in benchmark.cases:
                await work.load(case)
                for transport in transports:
                    row = await work.time_transport(cast("Transport", transport), benchmark.repeats)
                    rows.append(row)
                    if (transport, case, processes) == ("memfd", "large", 1) and "unavailable" not in row:
                        rows += await work.time_digests(benchmark.repeats)
    if others:
        # In processes of their own: `rdma` changes Monarch's settings, which `rdma per tensor` takes as they are.
        async with meshes(1) as work:
            for case in benchmark.cases:
                await work.load(case)
                rows += [await work.time_other(cast("OtherWay", way), benchmark.repeats) for way in others]
    labels = [CASES[case][0] for case in benchmark.cases]
    return sorted(rows, key=lambda row: (labels.index(row["case"]), row["target"]))


@asynccontextmanager
async def meshes(processes: int) -> AsyncIterator[Work]:
    """Live meshes, with so many processes in the generator."""
    session = Session()
    session.on_note = session.on_log = tell
    with tempfile.TemporaryDirectory() as directory:
        store, pair = str(Path(directory) / "learners"), str(Path(directory) / "pair")
        async with session:
            tell(f"starting {LEARNERS} learner and {processes} generator processes")
            learner, generator = await asyncio.gather(
                session.spawn(BenchmarkLearner, store, procs=LEARNERS),
                session.spawn(BenchmarkGenerator, procs=processes),
            )
            pairs = enumerate((learner, generator))
            await asyncio.gather(*(mesh.call_rank("join_pair", pair, rank) for rank, mesh in pairs))
            yield Work(learner, generator)


class Work:
    """Meshes, and the tensors that they hold."""

    def __init__(self, learner: RoleMesh, generator: RoleMesh) -> None:
        self.learner, self.generator = learner, generator
        self.label, self.bytes = "", 0
        self.scale = 1.0
        """The learner's weights now over those that it began with."""

    async def load(self, case: Case) -> None:
        """Give both meshes the tensors of a case."""
        self.label, shapes = CASES[case]
        self.bytes = sum(4 * rows * columns for rows, columns in shapes)
        self.scale = 1.0
        await asyncio.gather(self.learner.call("load", shapes), self.generator.call("load", shapes))

    async def time_transport(self, transport: Transport, repeats: int) -> dict[str, Any]:
        """One row; of a transport that does not work here, why."""
        try:
            return self.row(transport, "sampled", *await self.broadcasts(transport, "sampled", repeats))
        except TransportUnavailable as error:
            return self.unavailable(transport, str(error))

    async def time_digests(self, repeats: int) -> list[dict[str, Any]]:
        """A row for each kind, by memfd. They take turns, since the speed of a shared machine drifts."""
        rounds: dict[Digests, list[Round]] = {"off": [], "sampled": [], "always": []}
        for kind in list(rounds) * DIGEST_TURNS:
            rounds[kind] += (await self.broadcasts("memfd", kind, -(-repeats // DIGEST_TURNS)))[0]
        work = {kind: statistics.median(r.publish + r.pull for r in found) for kind, found in rounds.items()}
        return [
            self.row("memfd", kind, found, 1.0) | {"over_digests_off": work[kind] / work["off"]}
            for kind, found in rounds.items()
        ]

    async def time_other(self, way: OtherWay, repeats: int) -> dict[str, Any]:
        """One row of another way; training stands still all the while."""
        rank_0 = self.learner.replicas[0].actors.slice(gpus=0)
        shards = way == "rdma per tensor"
        if shards and not rdma.available()[0]:
            return self.unavailable(way, rdma.available()[1])
        buffers = await self.learner.call("register_each") if shards else []

        async def once() -> Round:
            started = time.perf_counter()
            if not shards:
                await self.learner.call("gather")
            gathering = 0.0 if shards else time.perf_counter() - started
            if way == "gather and messages":
                await self.generator.call("fetch_messages", rank_0)
            elif way == "gloo broadcast":
                both = self.learner, self.generator
                await asyncio.gather(*(mesh.call_rank("broadcast_whole") for mesh in both))
            else:
                await self.generator.call("read_each", buffers)
            total = time.perf_counter() - started
            return Round(gathering, total - gathering, total, total, await self.memcpy())

        return self.row(way, "off", await self.checked(once, repeats), 1.0 if shards else float(LEARNERS))

    async def broadcasts(self, way: Transport, digests: Digests, repeats: int) -> tuple[list[Round], float]:
        """Connect, and broadcast as a training loop does; also bytes moved over bytes needed, by the plan."""
        weights = await WeightBroadcast.connect(
            source=self.learner, target=self.generator, config=WeightsConfig(way, digests), note=tell
        )

        async def once() -> Round:
            started = time.perf_counter()
            version = await weights.publish()
            blocked = time.perf_counter() - started
            report = await weights.arrival(version)
            seconds = report.publish_seconds, report.pull_seconds, report.total_seconds
            return Round(*seconds, blocked, await self.memcpy())

        return await self.checked(once, repeats), weights.bytes_per_broadcast / weights.plan.bytes_needed

    async def memcpy(self) -> float:
        return max(await self.generator.call("memcpy_seconds"))

    async def checked(self, once: Callable[[], Awaitable[Round]], repeats: int) -> list[Round]:
        """Rounds after warm-ups, of which the last brings new weights that are checked."""
        for number in range(WARM_UPS):
            if number == WARM_UPS - 1:
                await self.learner.call("halve")
                self.scale /= 2
            await once()
        await self.generator.call("check", self.scale)
        return [await once() for _ in range(repeats)]

    def row(self, way: str, digests: Digests, rounds: Sequence[Round], moved: float) -> dict[str, Any]:
        """Medians of the rounds."""
        row: dict[str, Any] = self.labels(way) | {"digests": digests}
        for field in fields(Round):
            row[f"{field.name}_seconds"] = statistics.median(getattr(one, field.name) for one in rounds)
        row["gigabytes_per_second"] = self.bytes / row["pull_seconds"] / 1e9
        row["pull_over_memcpy"] = row["memcpy_seconds"] / row["pull_seconds"]
        row["bytes_moved_over_needed"] = moved
        tell(f"{self.label} | {row['target']} | {way} | {digests}: pull {row['pull_seconds']:.3f} s")
        return row

    def unavailable(self, way: str, reason: str) -> dict[str, Any]:
        tell(f"{self.label} | {way} | not available: {reason}")
        return self.labels(way) | {"unavailable": reason}

    def labels(self, way: str) -> dict[str, str]:
        return {"case": self.label, "target": f"TP{self.generator.size}", "transport": way}


def made_up(shape: Shape, number: int) -> Tensor:
    """The whole tensor of that number: float32, on every process the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def as_bytes(tensor: Tensor) -> Tensor:
    """uint8 `[bytes]`: the same memory."""
    return tensor.view(-1).view(torch.uint8)


def tell(text: str) -> None:
    """To a person who waits: standard output holds the results alone."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
