"""Every sharding of a learner to every sharding of a generator, by every transport, bit for bit.

What arrives is compared with what it should be, cut out of the whole parameters by hand, and with what plain
messages bring.
"""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from sharded_learners import ModuleLearner
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from meshrl.mesh import RoleMesh
from meshrl.session import Session
from meshrl.weights.broadcast import ReceivesWeights, WeightBroadcast, WeightsConfig
from meshrl.weights.layout import Layout
from meshrl.weights.transport import IN_ORDER, Transport, available_transports
from meshrl.worker import Worker, endpoint

HALVES_OF_ROWS = (
    "q.weight",
    "k.weight",
    "v.weight",
    "q.bias",
    "gate.weight",
    "even_a.weight",
    "even_b.weight",
)
HALVES_OF_COLUMNS = ("q.weight", "k.weight", "v.weight", "o.weight", "gate.weight")


class Block(torch.nn.Module):
    """The matrices of an attention block, one that no number of ranks divides, and a buffer that must travel."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(10, rows, bias=rows == 12) for rows in (12, 6, 6))
        self.o = torch.nn.Linear(12, 10, bias=False)
        self.gate = torch.nn.Linear(10, 9, bias=False)
        self.norm = torch.nn.RMSNorm(10)
        # Halves that fill whole aligned places, so that they lie next to what other readers take too.
        self.even_a, self.even_b = (torch.nn.Linear(16, 4, bias=False) for _ in range(2))
        self.even_norm = torch.nn.RMSNorm(16)
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("table", torch.rand(100), persistent=False)


class ShardedLearner(ModuleLearner):
    """Holds the block, sharded as it is told."""

    @endpoint
    async def shard(self, how: str) -> None:
        torch.manual_seed(0)
        self.module = Block()
        if how == "1":
            return
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        if "tp2" in how:
            columns = {name: ColwiseParallel() for name in ("q", "k", "v", "gate")}
            parallelize_module(self.module, grid["inner"], {**columns, "o": RowwiseParallel()})
        if "fsdp2" in how:
            fully_shard(self.module, mesh=grid["outer"])
        if how == "hsdp":
            fully_shard(self.module, mesh=grid)
        if how == "fsdp4":
            fully_shard(self.module, mesh=init_device_mesh("cpu", (4,)))


class ShardedGenerator(ReceivesWeights, Worker):
    """One of two ranks, which wants what it is told to."""

    @endpoint
    async def setup(self, setup: None) -> None:
        pass

    @endpoint
    async def want(self, what: str, dtype: torch.dtype) -> None:
        self.what, self.dtype = what, dtype

    def weights_target(self, source: Layout) -> Layout:
        wanted = source.cast(self.dtype)
        if self.what == "whole":
            return wanted.whole()
        if self.what == "columns":
            return wanted.split(dict.fromkeys(HALVES_OF_COLUMNS, 1), 2).of_rank(self.rank)
        wanted = wanted.split(dict.fromkeys(HALVES_OF_ROWS, 0), 2)
        if self.what == "fused":
            wanted = wanted.fused("qkv", ["q.weight", "k.weight", "v.weight"])
        return wanted.renamed({"norm.weight": "model.norm.weight"}).of_rank(self.rank)

    async def swap_weights(self, named: Mapping[str, Tensor], version: int) -> None:
        self.weights = {name: tensor.clone() for name, tensor in named.items()}

    @endpoint
    async def in_use(self) -> dict[str, Tensor]:
        return self.weights


def expected(full: Mapping[str, Tensor], what: str, rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a generator rank should hold, cut out by hand."""
    cast = {name: tensor.to(dtype) for name, tensor in full.items()}
    if what == "whole":
        return cast
    if what == "columns":
        return {n: t.chunk(2, 1)[rank] if n in HALVES_OF_COLUMNS else t for n, t in cast.items()}
    held = {n: t.chunk(2)[rank] if n in HALVES_OF_ROWS else t for n, t in cast.items()}
    if what == "fused":
        held["qkv"] = torch.cat([held.pop(f"{name}.weight") for name in "qkv"])
    held["model.norm.weight"] = held.pop("norm.weight")
    return held


@dataclass
class Meshes:
    """Live meshes and the event loop that they belong to."""

    runner: asyncio.Runner
    learners: dict[int, RoleMesh]
    generator: RoleMesh

    def run(self, awaitable: Any) -> Any:
        return self.runner.run(awaitable)


@pytest.fixture(scope="module")
def meshes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Meshes]:
    stores = tmp_path_factory.mktemp("stores")
    session = Session()

    async def start() -> tuple[RoleMesh, RoleMesh, RoleMesh]:
        await session.start()
        return await asyncio.gather(
            session.spawn(ShardedLearner, str(Path(stores) / "one"), name="learner_of_one"),
            session.spawn(ShardedLearner, str(Path(stores) / "four"), procs=4),
            session.spawn(ShardedGenerator, procs=2),
        )

    with asyncio.Runner() as runner:
        try:
            one, four, generator = runner.run(start())
            yield Meshes(runner, {1: one, 4: four}, generator)
        finally:
            runner.run(session.stop())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("what", ["whole", "rows", "columns", "fused"])
@pytest.mark.parametrize("how", ["1", "fsdp2", "tp2", "fsdp2 tp2", "hsdp", "fsdp4"])
def test_what_arrives_is_what_was_to_arrive(meshes: Meshes, how: str, what: str, dtype: torch.dtype) -> None:
    learner = meshes.learners[1 if how == "1" else 4]
    meshes.run(learner.call("shard", how))
    meshes.run(meshes.generator.call("want", what, dtype))
    works = [status.name for status in available_transports() if status.available]
    assert set(works) == set(IN_ORDER)
    for transport in reversed(works):  # plain messages first
        weights = meshes.run(
            WeightBroadcast.connect(
                source=learner,
                target=meshes.generator,
                config=WeightsConfig(transport=cast(Transport, transport), digests="always"),
            )
        )
        assert weights.transports == (transport, transport)
        assert weights.bytes_per_broadcast == weights.plan.bytes_needed
        for version in (1, 2):
            assert meshes.run(weights.broadcast()) == version
            full = meshes.run(learner.call("full_weights"))[0]
            for rank, arrived in enumerate(meshes.run(meshes.generator.call("in_use"))):
                right = expected(full, what, rank, dtype)
                assert arrived.keys() == right.keys()
                for name, tensor in right.items():
                    assert arrived[name].dtype == dtype and torch.equal(arrived[name], tensor), (
                        transport,
                        name,
                    )
            meshes.run(learner.call("train"))
