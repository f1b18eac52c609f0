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
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from meshrl.weights.arena import Arena
from meshrl.weights.errors import LayoutError
from meshrl.weights.host import HostProcess
from meshrl.weights.layout import Box, Layout, Parameter, join
from meshrl.weights.plan import plan
from meshrl.weights.tensors import layout_of, local, weights_of
from meshrl.weights.transfer import Subscriber
from meshrl.weights.workers import Place

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
    arenas = []
    for case, named in {**sharded_models(), "by hand": placements_by_hand()}.items():
        layout = layout_of(named)
        full = {name: whole(tensor).clone() for name, tensor in named.items()}
        for name, held in layout.parameters.items():
            (box,) = held.boxes
            assert box is not None
            where = Box.whole(held.shape).slices(box)
            assert torch.equal(full[name][where], local(named[name])), (case, rank, name, box)
        pipe.send((case, Place(layout, HostProcess.current()), {n: t.tolist() for n, t in full.items()}))
        source, target, reader = pipe.recv()
        arena = Arena(named, plan(source, target), rank, [reader])
        arena.publish(1, named)
        arenas.append(arena)
        pipe.send(arena.offer("memfd"))
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
            case, full = answers[0][0], answers[0][2]
            source = join([place.layout for _, place, _ in answers])
            target = source.whole()
            for pipe in pipes:
                pipe.send((source, target, HostProcess.current()))
            subscriber = Subscriber(plan(source, target), 0, [receive(pipe) for pipe in pipes])
            arrived, report = subscriber.pull(1)
            assert {name: tensor.tolist() for name, tensor in arrived.items()} == full, case
            assert report.bytes == sum(tensor.nbytes for tensor in arrived.values())
            cases.append(case)
        assert cases == ["fsdp", "hsdp", "tp", "fsdp and tp", "by hand"]
    finally:
        for process in running:
            process.kill()
            process.join(30)


def receive(pipe: Connection) -> Any:
    assert pipe.poll(180), "a rank does not answer"
    return pipe.recv()


def whole_layout(**shapes: tuple[int, ...]) -> Layout:
    return Layout({n: Parameter(s, torch.float32, (Box.whole(s),)) for n, s in shapes.items()}, ranks=1)


@given(st.integers(0, 12), st.integers(1, 5), st.sampled_from([0, 1]))
def test_a_split_cuts_as_chunk_does(extent: int, ranks: int, dimension: int) -> None:
    shape = (extent, 3) if dimension == 0 else (3, extent)
    cut = whole_layout(w=shape, bias=(7,)).split({"w": dimension}, ranks)
    value = torch.arange(3 * extent).reshape(shape)
    pieces = [value[Box.whole(shape).slices(box)] for box in cut.parameters["w"].boxes if box is not None]
    chunks = value.chunk(ranks, dimension)
    assert all(torch.equal(piece, chunk) for piece, chunk in zip(pieces, chunks, strict=False))
    assert all(piece.numel() == 0 for piece in pieces[len(chunks) :]) and len(pieces) == ranks
    assert cut.parameters["bias"].boxes == (Box.whole((7,)),) * ranks


def test_ranks_taken_apart_and_joined_are_the_layout_again() -> None:
    layout = whole_layout(q=(8, 4), k=(4, 4), norm=(4,)).split({"q": 0, "k": 0}, 3).fused("qk", ["q", "k"])
    apart = [layout.of_rank(rank) for rank in range(3)]
    assert join(apart) == layout
    assert [one.tensors(0) for one in apart] == [layout.tensors(rank) for rank in range(3)]


def test_parameters_cut_alike_share_their_boxes_after_joining() -> None:
    layout = whole_layout(a=(8, 4), b=(8, 4)).split({"a": 0, "b": 0}, 2)
    joined = join([layout.of_rank(0), layout.of_rank(1)])
    assert joined.parameters["a"].boxes is joined.parameters["b"].boxes


def test_only_floats_are_cast_and_names_are_those_of_the_tensors() -> None:
    layout = whole_layout(a=(2,), b=(3,))
    flags = Parameter((4,), torch.bool, (Box.whole((4,)),))
    cast = Layout({**layout.parameters, "flags": flags}, 1).cast(torch.bfloat16).renamed({"a": "model.a"})
    held = cast.tensors(0)
    assert {name: tensor.dtype for name, tensor in held.items()} == {
        "model.a": torch.bfloat16,
        "b": torch.bfloat16,
        "flags": torch.bool,
    }


def test_what_cannot_be_is_refused_with_names() -> None:
    layout = whole_layout(a=(8, 4), b=(4, 3))
    with pytest.raises(LayoutError, match="cannot cut c along dimension 0: no such parameter"):
        layout.split({"c": 0}, 2)
    with pytest.raises(LayoutError, match=r"cannot cut a along dimension 2: \(8, 4\)"):
        layout.split({"a": 2}, 2)
    with pytest.raises(LayoutError, match="a, b differ in shape on rank 0: no tensor ab"):
        layout.fused("ab", ["a", "b"])
    with pytest.raises(LayoutError, match="cannot put c into ac: no such parameter"):
        layout.fused("ac", ["a", "c"])
    with pytest.raises(LayoutError, match="cannot rename c"):
        layout.renamed({"c": "d"})
    with pytest.raises(LayoutError, match="the parts of same .* leave a gap or overlap"):
        whole_layout(a=(2,), b=(2,)).renamed({"a": "same", "b": "same"}).tensors(0)


def test_ranks_that_disagree_on_a_parameter_cannot_be_joined() -> None:
    with pytest.raises(LayoutError, match=r"w is .*\(4,\).* on rank 0 and .*\(5,\).* on rank 1"):
        join([whole_layout(w=(4,)), whole_layout(w=(5,))])


def test_stages_that_hold_other_parameters_are_joined_and_a_gap_is_found_by_the_plan() -> None:
    stages = join([whole_layout(first=(4,)), whole_layout(second=(3,))])
    assert stages.parameters["first"].boxes == (Box.whole((4,)), None)
    assert plan(stages, stages.whole()).traffic.tolist() == [[16], [12]]
    fused = whole_layout(a=(2, 3), b=(2, 3)).fused("ab", ["a", "b"])
    both = join([fused, whole_layout(c=(1,)), fused])
    assert list(both.tensors(2)) == ["ab"] and list(both.tensors(1)) == ["c"]
    half = whole_layout(w=(4,)).split({"w": 0}, 2)
    with pytest.raises(LayoutError, match="source ranks hold 2 of the 4 elements of w"):
        plan(join([half.of_rank(0), whole_layout(v=(1,))]), whole_layout(w=(4,)))


def test_buffers_travel_if_a_checkpoint_would_hold_them() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    module.register_buffer("table", torch.ones(9), persistent=False)
    assert set(weights_of(module)) == set(module.state_dict())
