"""Layouts derived from DTensors: each rank's box is where its shard lies in the whole parameter."""

import multiprocessing
import os
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from meshrl.weights.errors import LayoutError
from meshrl.weights.layout import layout_of, local
from meshrl.weights.transfer import Publisher, Subscriber

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor.parallel", __name__])


def sharded_models() -> dict[str, dict[str, torch.Tensor]]:
    """Weights of one module under several parallelisms on 4 ranks; some dimensions do not divide evenly."""

    def module() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 7), torch.nn.Linear(7, 1))

    split = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    flat, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    models = {name: module() for name in ("fsdp", "hsdp", "tp", "fsdp and tp")}
    fully_shard(models["fsdp"], mesh=flat)
    fully_shard(models["hsdp"], mesh=grid)
    parallelize_module(models["tp"], grid["tp"], split)
    parallelize_module(models["fsdp and tp"], grid["tp"], split)
    fully_shard(models["fsdp and tp"], mesh=grid["dp"])
    weights = {name: dict(model.named_parameters()) for name, model in models.items()}
    return {name: {key: value.data for key, value in named.items()} for name, named in weights.items()}


def placements_by_hand() -> dict[str, torch.Tensor]:
    grid = init_device_mesh("cpu", (2, 2))
    value = torch.arange(5 * 6 * 3, dtype=torch.float32).reshape(5, 6, 3)
    every: list[tuple[Placement, Placement]] = [
        (a, b) for a in (Replicate(), Shard(0), Shard(2)) for b in (Replicate(), Shard(0), Shard(1))
    ]
    return {f"{a} {b}": distribute_tensor(value, grid, [a, b]) for a, b in every}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_rank(pipe: Connection, rank: int, store: str) -> None:
    """One of four ranks: compares boxes with shards, publishes, and sends what a reader must find."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=FileStore(store, 4), rank=rank, world_size=4, timeout=timedelta(seconds=60)
    )
    publishers = []
    for case, named in {**sharded_models(), "by hand": placements_by_hand()}.items():
        layout = layout_of(named)
        full = {name: whole(tensor).clone() for name, tensor in named.items()}
        for box in layout.ranks[0]:
            where = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            assert torch.equal(full[box.parameter][where], local(named[box.parameter])), (case, rank, box)
        publisher = Publisher(named)
        publisher.publish(1, named)
        publishers.append(publisher)
        pipe.send((case, publisher.source, {name: tensor.tolist() for name, tensor in full.items()}))
    partial = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (4,)), [Partial()])
    with pytest.raises(LayoutError, match="w is a partial sum"):
        layout_of({"w": partial})
    pipe.send("done")
    pipe.recv()


def test_boxes_of_every_sharding_are_where_their_shards_lie_and_make_up_the_whole(tmp_path: Path) -> None:
    pipes, running = [], []
    for rank in range(4):
        here, there = processes.Pipe()
        process = processes.Process(
            target=check_rank, args=(there, rank, str(tmp_path / "store")), daemon=True
        )
        process.start()
        there.close()
        pipes.append(here)
        running.append(process)
    try:
        cases = []
        while (answers := [receive(pipe) for pipe in pipes])[0] != "done":
            case, sources = answers[0][0], [source for _, source, _ in answers]
            full = answers[0][2]
            subscriber = Subscriber(sources)
            arrived, report = subscriber.pull(1)
            assert {name: tensor.tolist() for name, tensor in arrived.items()} == full, case
            assert report.bytes == sum(info.bytes for info in subscriber.layout.parameters.values())
            cases.append(case)
        assert cases == ["fsdp", "hsdp", "tp", "fsdp and tp", "by hand"]
    finally:
        for process in running:
            process.kill()
            process.join(30)


def receive(pipe: Connection) -> Any:
    assert pipe.poll(180), "a rank does not answer"
    return pipe.recv()
