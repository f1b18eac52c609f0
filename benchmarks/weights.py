"""Seconds that weights take from a learner to a generator, by every transport: `python -m benchmarks.weights`.

Two learner processes hold shards (FSDP2, so DTensors cut by rows); one generator takes everything whole (TP1),
or two take half of the columns each (TP2). Reference: between the pulls, each generator process copies as many
bytes as it pulls from one place in memory to another, on one core, all processes at once as in a pull;
`pull_over_memcpy` is that time over the pull's, so 1.0 is as fast as memory and more is better.

`blocked_seconds` is how long a training loop that awaits `publish` stands still. Three other ways carry the same
work for comparison: gather on rank 0 and send whole tensors as messages; gather and broadcast them by gloo; read
each shard through a `RDMABuffer` of its own.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshrl.mesh import RoleMesh
from meshrl.session import Session
from meshrl.weights.broadcast import PublishesWeights, ReceivesWeights, WeightBroadcast, WeightsConfig
from meshrl.weights.digests import Digests
from meshrl.weights.errors import TransportUnavailable
from meshrl.weights.layout import Layout
from meshrl.weights.tensors import local
from meshrl.weights.transport import IN_ORDER, Transport
from meshrl.worker import Worker, call, endpoint

Shapes = list[tuple[int, int]]
Others = Literal["messages", "gloo", "rdma per tensor"]

CASES: dict[str, Shapes] = {
    "268 MB in 4 tensors": [(4096, 4096)] * 4,
    "61 MB in 300 tensors": [(256, 200)] * 300,
}
OTHERS: tuple[Others, ...] = ("messages", "gloo", "rdma per tensor")


@dataclass(frozen=True)
class WeightsBenchmark:
    """Time broadcasts of synthetic weights on real meshes: 2 learner processes, 1 or 2 generator processes."""

    repeats: int = 9
    """Broadcasts of each row; medians are shown."""
    transports: tuple[Transport, ...] = cast("tuple[Transport, ...]", IN_ORDER)
    """Ways to measure."""
    others: bool = True
    """Measure the three other ways too."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object per row in place of the table."""


class SyntheticLearner(PublishesWeights, Worker):
    """Half of the rows of each tensor."""

    @endpoint
    async def setup(self, setup: tuple[str, Shapes]) -> None:
        store, shapes = setup
        dist.init_process_group(
            "gloo", store=FileStore(store, self.world_size), rank=self.rank, world_size=self.world_size
        )
        mesh = init_device_mesh("cpu", (self.world_size,))
        self.named = {
            f"layers.{number}.weight": distribute_tensor(values(shape, number), mesh, [Shard(0)])
            for number, shape in enumerate(shapes)
        }

    def weight_tensors(self) -> Mapping[str, Tensor]:
        return self.named

    @endpoint
    async def gather(self) -> None:
        """Whole tensors on every rank."""
        self.whole = await asyncio.to_thread(lambda: [t.full_tensor() for t in self.named.values()])

    @endpoint
    async def whole_tensor(self, number: int) -> Tensor:
        return self.whole[number]

    @endpoint
    async def join_gloo(self, store: str) -> None:
        self.group = gloo(store, self.rank)

    @endpoint
    async def send_by_gloo(self) -> None:
        await asyncio.to_thread(lambda: [self.group.broadcast(tensor, 0).wait() for tensor in self.whole])

    @endpoint
    async def register_each(self) -> list[Any]:
        from monarch.rdma import RDMABuffer

        flat = [local(tensor).view(torch.uint8).flatten() for tensor in self.named.values()]
        return await asyncio.to_thread(lambda: [RDMABuffer(tensor) for tensor in flat])


class SyntheticGenerator(ReceivesWeights, Worker):
    """Everything, or half of the columns of each tensor."""

    @endpoint
    async def setup(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.expected = [values(shape, number) for number, shape in enumerate(shapes)]
        self.whole = [torch.zeros(shape) for shape in shapes]

    def weights_target(self, source: Layout) -> Layout:
        return source.split({name: 1 for name in source.parameters}, self.world_size).of_rank(self.rank)

    async def swap_weights(self, named: Mapping[str, Tensor], version: int) -> None:
        self.arrived = named

    @endpoint
    async def check(self) -> None:
        """What arrived last by `WeightBroadcast` is right."""
        for number, (tensor, right) in enumerate(zip(self.arrived.values(), self.expected, strict=True)):
            if not torch.equal(tensor, right.chunk(self.world_size, 1)[self.rank]):
                raise AssertionError(f"tensor {number} arrived wrong")

    @endpoint
    async def check_whole(self) -> None:
        """What arrived last by another way is right."""
        for number, (tensor, right) in enumerate(zip(self.whole, self.expected, strict=True)):
            if not torch.equal(tensor, right):
                raise AssertionError(f"tensor {number} arrived wrong")
            tensor.zero_()

    @endpoint
    async def memcpy_seconds(self, repeats: int) -> float:
        """Median time to copy as many bytes as a pull takes, from one place in memory to another."""
        size = sum(rows * columns * 4 for rows, columns in self.shapes) // self.world_size
        source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        return statistics.median(seconds_of(lambda: target.copy_(source)) for _ in range(repeats))

    @endpoint
    async def receive_messages(self, learner: Any) -> None:
        for number in range(len(self.shapes)):
            self.whole[number].copy_(await call(learner, "whole_tensor", number, deadline_seconds=60))

    @endpoint
    async def join_gloo(self, store: str) -> None:
        self.group = gloo(store, 1)

    @endpoint
    async def receive_by_gloo(self) -> None:
        await asyncio.to_thread(lambda: [self.group.broadcast(tensor, 0).wait() for tensor in self.whole])

    @endpoint
    async def read_each(self, buffers: list[list[Any]]) -> None:
        for number, tensor in enumerate(self.whole):
            for part, rank in zip(tensor.chunk(len(buffers)), buffers, strict=True):
                await rank[number].read_into(part.view(torch.uint8).flatten(), timeout=60)


def main() -> None:
    """Run and print."""
    benchmark = tyro.cli(WeightsBenchmark, description=__doc__)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as stores:
        for number, (case, shapes) in enumerate(CASES.items()):
            for procs in (1, 2):
                print(f"{case}, TP{procs} …", file=sys.stderr, flush=True)
                store = str(Path(stores) / f"{number}-{procs}")
                rows += asyncio.run(measure(benchmark, case, shapes, procs, store))
    if benchmark.json:
        for row in rows:
            print(json.dumps(row))
        return
    table = Table(title="Weights, median seconds")
    for name in rows[0]:
        table.add_column(name.replace("_", " "))
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=200).print(table)


async def measure(
    benchmark: WeightsBenchmark, case: str, shapes: Shapes, procs: int, store: str
) -> list[dict[str, Any]]:
    """The rows of one case and one sharding of the generator."""
    session = Session()
    session.on_log = lambda line: print(line, file=sys.stderr)
    async with session:
        learner, generator = await asyncio.gather(
            session.spawn(SyntheticLearner, (store, shapes), procs=2),
            session.spawn(SyntheticGenerator, shapes, procs=procs),
        )
        rows = []
        ways: list[tuple[Transport, Digests]] = [(name, "sampled") for name in benchmark.transports]
        other_digests: tuple[Digests, ...] = ("off", "always")
        if "memfd" in benchmark.transports:
            for digests in other_digests:
                ways.append(("memfd", digests))
        for transport, digests in ways:
            try:
                found = await time_transport(learner, generator, transport, digests, benchmark.repeats)
            except TransportUnavailable as error:
                print(f"{transport} is not available: {error}", file=sys.stderr)
                continue
            rows.append({"case": case, "target": f"TP{procs}", **found})
        for way in OTHERS if benchmark.others and procs == 1 else ():
            found = await time_other(learner, generator, way, shapes, f"{store}-gloo", benchmark.repeats)
            rows.append({"case": case, "target": "TP1", **found})
        return rows


async def time_transport(
    learner: RoleMesh, generator: RoleMesh, transport: Transport, digests: Digests, repeats: int
) -> dict[str, Any]:
    """Medians over broadcasts, the first two not counted."""
    config = WeightsConfig(transport=transport, digests=digests)
    weights = await WeightBroadcast.connect(source=learner, target=generator, config=config)
    publish, pull, total, blocked, memcpy = [], [], [], [], []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        version = await weights.publish()
        blocked.append(time.perf_counter() - started)
        report = await weights.arrival(version)
        assert report is not None
        publish.append(report.publish_seconds)
        pull.append(report.pull_seconds)
        total.append(report.total_seconds)
        memcpy.append(max(await generator.call("memcpy_seconds", 3)))
    await generator.call("check")
    return _row(
        transport,
        digests,
        reference=statistics.median(memcpy),
        publish=_median(publish),
        pull=_median(pull),
        total=_median(total),
        blocked=_median(blocked),
        gigabytes=weights.bytes_per_broadcast / 1e9,
        ratio=weights.bytes_per_broadcast / weights.plan.bytes_needed,
    )


async def time_other(
    learner: RoleMesh, generator: RoleMesh, way: Others, shapes: Shapes, store: str, repeats: int
) -> dict[str, Any]:
    """The same work another way; training stands still all the while."""
    first = learner.replicas[0].actors.slice(gpus=0)
    if way == "gloo":
        await asyncio.gather(
            learner.call_rank("join_gloo", store, rank=0), generator.call("join_gloo", store)
        )
    buffers = await learner.call("register_each") if way == "rdma per tensor" else []
    before, pull, total, memcpy = [], [], [], []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        if way != "rdma per tensor":
            await learner.call("gather")
        before.append(time.perf_counter() - started)
        receiving: dict[Others, Callable[[], Awaitable[Any]]] = {
            "messages": lambda: generator.call("receive_messages", first),
            "gloo": lambda: asyncio.gather(
                learner.call_rank("send_by_gloo", rank=0), generator.call("receive_by_gloo")
            ),
            "rdma per tensor": lambda: generator.call("read_each", buffers),
        }
        await receiving[way]()
        total.append(time.perf_counter() - started)
        pull.append(total[-1] - before[-1])
        memcpy.append(max(await generator.call("memcpy_seconds", 3)))
        await generator.call("check_whole")
    return _row(
        way,
        "off",
        reference=statistics.median(memcpy),
        publish=_median(before),
        pull=_median(pull),
        total=_median(total),
        blocked=_median(total),
        gigabytes=sum(rows * columns * 4 for rows, columns in shapes) / 1e9,
        ratio=1.0,
    )


def _row(
    transport: str,
    digests: str,
    *,
    reference: float,
    publish: float,
    pull: float,
    total: float,
    blocked: float,
    gigabytes: float,
    ratio: float,
) -> dict[str, Any]:
    return {
        "transport": transport,
        "digests": digests,
        "publish_seconds": publish,
        "pull_seconds": pull,
        "end_to_end_seconds": total,
        "blocked_seconds": blocked,
        "gigabytes_per_second": gigabytes / pull,
        "memcpy_seconds": reference,
        "pull_over_memcpy": reference / pull,
        "bytes_moved_over_needed": ratio,
    }


def values(shape: tuple[int, int], number: int) -> Tensor:
    """The whole tensor of that number: on every process the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def gloo(store: str, rank: int) -> Any:
    """A group of learner rank 0 and the generator, beside whatever groups there are."""
    return dist.ProcessGroupGloo(FileStore(store, 2), rank, 2, timedelta(seconds=60))


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _median(seconds: list[float]) -> float:
    """The first two warm up: pages, connections."""
    return statistics.median(seconds[2:])


if __name__ == "__main__":
    main()
