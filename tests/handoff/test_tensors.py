"""Collectives on real processes: two generator replicas of one rank, two learner ranks."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from handoff_workers import Filler, Taker
from monarch import remote
from torch import Tensor

from meshrl.advantages import Moments, group_relative, whiten
from meshrl.handoff.tensors import MeshTensors, all_gather, all_reduce, reduce_scatter, to_mesh
from meshrl.mesh import Replica, RoleMesh
from meshrl.session import Session, SessionConfig, WorkerDied
from meshrl.worker import DeadlineError, RemoteError

DEADLINE_SECONDS = 20.0
SHAPES = [(4,), (2, 3), (6, 1, 5), (0,), (0, 3), (1000,)]
DTYPES = [torch.float32, torch.int64, torch.bfloat16]


@dataclass(frozen=True)
class Meshes:
    runner: asyncio.Runner
    generator: RoleMesh
    learner: RoleMesh
    tensors: MeshTensors

    @property
    def replicas(self) -> list[Replica]:
        return self.generator.replicas

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def fetch(self, tensor: Tensor, rank: int = 0) -> Tensor:
        return self.run(self.tensors.fetch(tensor, rank))

    def both(self, tensor: Tensor) -> list[Tensor]:
        return [self.fetch(tensor, rank) for rank in range(2)]

    def made(self, mesh: RoleMesh | Replica, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
        with self.tensors.on(mesh):
            return part(torch.zeros(()), shape, dtype, seed)


@pytest.fixture(scope="module")
def meshes() -> Iterator[Meshes]:
    with asyncio.Runner() as runner:
        session = Session(SessionConfig(start_deadline_seconds=60))

        async def start() -> tuple[RoleMesh, RoleMesh, MeshTensors]:
            await session.start()
            generator, learner = await asyncio.gather(
                session.spawn(Filler, replicas=2, name="generator"),
                session.spawn(Taker, procs=2, name="learner"),
            )
            tensors = await MeshTensors.connect(generator, learner, deadline_seconds=DEADLINE_SECONDS)
            return generator, learner, tensors

        try:
            yield Meshes(runner, *runner.run(start()))
        finally:
            runner.run(session.stop())


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int, rank: int) -> Tensor:
    """Whole numbers so small that no dtype rounds them; another part for each rank."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(-20, 20, shape, generator=generator).to(dtype)


@remote(propagate=lambda anchor, shape, dtype, seed: torch.empty(shape, dtype=dtype))
def part(anchor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return values(shape, dtype, seed, int(os.environ["RANK"]))


@remote(propagate=lambda tensor, rank: torch.empty_like(tensor))
def fails_on(tensor: Tensor, rank: int) -> Tensor:
    if int(os.environ["RANK"]) == rank:
        raise LookupError("a bug in the program")
    return tensor


@remote(propagate=lambda tensor: torch.empty_like(tensor))
def first_row_only(tensor: Tensor) -> Tensor:
    return tensor[:1]


@remote(propagate=lambda tensor: torch.empty((), dtype=torch.bool))
def has_default_group(tensor: Tensor) -> Tensor:
    return torch.tensor(torch.distributed.is_initialized())


def same(tensor: Tensor, wanted: Tensor) -> bool:
    return tensor.dtype == wanted.dtype and torch.equal(tensor, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_collectives_give_what_plain_torch_gives(meshes: Meshes, dtype: torch.dtype) -> None:
    for seed, shape in enumerate(SHAPES):
        parts = torch.stack([values(shape, dtype, seed, rank) for rank in range(2)])
        mine = meshes.made(meshes.learner, shape, dtype, seed)
        for rank in range(2):
            assert same(meshes.fetch(all_reduce(mine), rank), parts.sum(0).to(dtype))
            assert same(meshes.fetch(all_reduce(mine, "max"), rank), parts.amax(0))
            assert same(meshes.fetch(all_reduce(mine, "min"), rank), parts.amin(0))
            assert same(meshes.fetch(all_gather(mine), rank), parts.flatten(0, 1))
            if dtype.is_floating_point:
                assert same(meshes.fetch(all_reduce(mine, "mean"), rank), parts.mean(0))
            if shape[0] % 2 == 0:
                assert same(meshes.fetch(reduce_scatter(mine), rank), parts.sum(0).to(dtype).chunk(2)[rank])
        gathered = all_gather(mine)
        assert gathered.shape == parts.flatten(0, 1).shape and gathered.dtype == dtype


def test_numbers_without_dimensions_and_masks_are_gathered(meshes: Meshes) -> None:
    mine = meshes.made(meshes.learner, (5,), torch.int64, 7)
    parts = [values((5,), torch.int64, 7, rank) for rank in range(2)]
    with meshes.tensors.on(meshes.learner):
        total, positive = all_gather(mine.sum()), all_gather(mine > 0)
    assert total.shape == (2,) and same(meshes.fetch(total, 1), torch.stack([p.sum() for p in parts]))
    assert same(meshes.fetch(positive, 1), torch.cat(parts) > 0)
    assert meshes.both(all_reduce(mine[0])) == [parts[0][0] + parts[1][0]] * 2


def test_a_layout_in_memory_changes_no_value(meshes: Meshes) -> None:
    mine = meshes.made(meshes.learner, (4, 6), torch.float32, 8)
    parts = [values((4, 6), torch.float32, 8, rank).T for rank in range(2)]
    with meshes.tensors.on(meshes.learner):
        turned = mine.T
    assert same(meshes.fetch(all_reduce(turned), 1), parts[0] + parts[1])
    assert same(meshes.fetch(all_gather(turned), 1), torch.cat(parts))
    assert same(meshes.fetch(reduce_scatter(turned), 1), (parts[0] + parts[1])[3:])


def test_a_mesh_of_one_rank_reads_the_same(meshes: Meshes) -> None:
    mine, wanted = meshes.made(meshes.replicas[1], (4,), torch.float32, 9), values((4,), torch.float32, 9, 0)
    for result in (all_reduce(mine), all_reduce(mine, "mean"), all_gather(mine), reduce_scatter(mine)):
        assert same(meshes.fetch(result), wanted)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
def test_replicas_parts_arrive_end_to_end_on_every_learner_rank(meshes: Meshes, dtype: torch.dtype) -> None:
    for seed, (rows, inner) in enumerate([((3, 5), ()), ((1, 4), (2, 3)), ((0, 2), ()), ((0, 0), (3,))]):
        shapes = [(n, *inner) for n in rows]
        parts = [
            meshes.made(replica, shape, dtype, 10 * seed + n)
            for n, (replica, shape) in enumerate(zip(meshes.replicas, shapes, strict=True))
        ]
        wanted = [values(shape, dtype, 10 * seed + n, 0) for n, shape in enumerate(shapes)]
        there = to_mesh(parts, meshes.learner)
        assert there.shape == (sum(rows), *inner) and there.dtype == dtype
        turned = to_mesh(parts[::-1], meshes.learner)
        for rank in range(2):
            assert same(meshes.fetch(there, rank), torch.cat(wanted))
            assert same(meshes.fetch(turned, rank), torch.cat(wanted[::-1]))


def test_one_replicas_tensor_arrives_on_every_rank_and_one_of_the_mesh_itself_stays(meshes: Meshes) -> None:
    mine = meshes.made(meshes.replicas[0], (2, 2), torch.float32, 3)
    there = to_mesh(mine, meshes.learner)
    assert all(same(value, values((2, 2), torch.float32, 3, 0)) for value in meshes.both(there))
    assert to_mesh(there, meshes.learner) is there
    back = to_mesh(mine, meshes.replicas[1])
    assert same(meshes.fetch(back), values((2, 2), torch.float32, 3, 0))
    with meshes.tensors.on(meshes.replicas[0]):
        scalar = mine.sum()
    assert meshes.both(to_mesh(scalar, meshes.learner)) == [values((2, 2), torch.float32, 3, 0).sum()] * 2


def test_the_default_process_group_is_left_to_the_learners(meshes: Meshes) -> None:
    mine = meshes.made(meshes.learner, (2,), torch.float32, 1)
    assert meshes.both(has_default_group(all_reduce(mine))) == [False, False]


def test_operations_keep_their_order_among_ordinary_ones(meshes: Meshes) -> None:
    """In place, so that a collective out of turn would see other values."""
    with meshes.tensors.on(meshes.learner):
        total = torch.ones(3)
        seen = []
        for _ in range(10):
            total.add_(1)
            seen.append(all_reduce(total))
            total.mul_(0).add_(seen[-1])
    wanted = torch.ones(3)
    for value in seen:
        wanted = (wanted + 1) * 2
        assert same(meshes.fetch(value, 1), wanted)
    with meshes.tensors.on(meshes.replicas[0]):
        sent = torch.zeros(2)
        arrived = []
        for _ in range(10):
            sent.add_(1)
            arrived.append(to_mesh(sent, meshes.learner))
    assert [meshes.fetch(value, 1)[0].item() for value in arrived] == list(range(1, 11))


def over_ranks(mine: Moments) -> Moments:
    """Moments of all ranks' values, on each rank."""
    count = all_reduce(mine.count)
    mean = all_reduce(mine.mean * mine.count) / count
    about_mean = mine.squared_deviation + mine.count * (mine.mean - mean).square()
    return Moments(count, mean, all_reduce(about_mean))


def test_whitening_over_ranks_is_whitening_of_the_whole(meshes: Meshes) -> None:
    parts = [values((50,), torch.float32, 4, rank) for rank in range(2)]
    whole = torch.cat(parts)
    mask = whole > -10
    mine = meshes.made(meshes.learner, (50,), torch.float32, 4)
    with meshes.tensors.on(meshes.learner):
        white = whiten(mine, over_ranks(Moments.of(mine, mine > -10)))
    wanted = whiten(whole, Moments.of(whole, mask))
    assert mask.any() and not mask.all()
    torch.testing.assert_close(torch.cat(meshes.both(white)), wanted, rtol=1e-5, atol=1e-6)


def test_groups_spread_over_replicas_get_the_advantages_of_one_process(meshes: Meshes) -> None:
    shapes = [(7,), (9,)]
    rewards = [
        meshes.made(r, s, torch.float32, 20 + n)
        for n, (r, s) in enumerate(zip(meshes.replicas, shapes, strict=True))
    ]
    groups = [
        meshes.made(r, s, torch.int64, 30 + n)
        for n, (r, s) in enumerate(zip(meshes.replicas, shapes, strict=True))
    ]
    there = to_mesh(rewards, meshes.learner), to_mesh(groups, meshes.learner)
    with meshes.tensors.on(meshes.learner):
        advantages = group_relative(there[0], there[1] % 3)
    wanted_rewards = torch.cat([values(s, torch.float32, 20 + n, 0) for n, s in enumerate(shapes)])
    wanted_groups = torch.cat([values(s, torch.int64, 30 + n, 0) for n, s in enumerate(shapes)]) % 3
    wanted = group_relative(wanted_rewards, wanted_groups)
    assert wanted.abs().max() > 0.1
    for value in meshes.both(advantages):
        torch.testing.assert_close(value, wanted, rtol=1e-6, atol=1e-6)


def test_what_cannot_be_is_refused_before_anything_is_sent(meshes: Meshes) -> None:
    mine = meshes.made(meshes.learner, (3,), torch.int64, 1)
    theirs = [meshes.made(replica, (3,), torch.int64, 1) for replica in meshes.replicas]
    wide = meshes.made(meshes.replicas[1], (3, 2), torch.int64, 1)
    with pytest.raises(ValueError, match=r"\[3\] over 2 ranks: the first dimension must be a multiple"):
        reduce_scatter(mine)
    with pytest.raises(ValueError, match="there is no mean of torch.int64"):
        all_reduce(mine, "mean")
    with pytest.raises(ValueError, match="op='product': take sum, mean, max or min"):
        all_reduce(mine, "product")  # pyright: ignore[reportArgumentType]
    with meshes.tensors.on(meshes.learner):
        mask = mine > 0
    with pytest.raises(ValueError, match="all_reduce of booleans: convert them"):
        all_reduce(mask)
    with pytest.raises(ValueError, match=r"a tensor \[2\] is the controller's own; make it within"):
        all_reduce(torch.ones(2))
    with pytest.raises(ValueError, match="is the controller's own"):
        meshes.fetch(torch.ones(2))
    with pytest.raises(ValueError, match="learner.* there is no rank 2"):
        meshes.fetch(mine, rank=2)
    with pytest.raises(ValueError, match="has 2 ranks, generator\\[0\\] 1: to_mesh wants as many"):
        to_mesh(mine, meshes.replicas[0])
    with pytest.raises(ValueError, match="generator has 2 replicas, each a mesh of its own: name one"):
        to_mesh(mine, meshes.generator)
    with pytest.raises(ValueError, match="differ in more than the first dimension"):
        to_mesh([theirs[0], wide], meshes.learner)
    with pytest.raises(ValueError, match="one tensor of each source, none of the target"):
        to_mesh([theirs[0], theirs[0]], meshes.learner)
    with pytest.raises(ValueError, match="to_mesh got no tensors"):
        to_mesh([], meshes.learner)
    with pytest.raises(ValueError, match=r"connect wants different meshes, got \['learner', 'learner'\]"):
        meshes.run(MeshTensors.connect(meshes.learner, meshes.learner))


def test_a_tensor_that_is_not_as_it_was_said_to_be_is_an_error_until_reset(meshes: Meshes) -> None:
    mine = meshes.made(meshes.learner, (4,), torch.float32, 1)
    with meshes.tensors.on(meshes.learner):
        short = first_row_only(mine)
    with pytest.raises(RemoteError, match=r"came out as \[1\], the program was told \[4\]"):
        meshes.fetch(all_reduce(short))
    meshes.run(meshes.tensors.reset())
    assert meshes.fetch(all_reduce(mine)).shape == (4,)


def test_a_failure_on_one_rank_is_named_and_never_mixes_collectives(meshes: Meshes) -> None:
    """Rank 0 skips a collective that rank 1 waits in: its next one must not be taken for it."""
    mine = meshes.made(meshes.learner, (4,), torch.float32, 1)
    with meshes.tensors.on(meshes.learner):
        lost = all_reduce(fails_on(mine, 0))
        after = all_reduce(mine)
        local = mine + 1
    with pytest.raises(RemoteError, match=r"failed on learner\[0\](.|\n)*a bug in the program"):
        meshes.fetch(lost, rank=1)
    with pytest.raises(RemoteError, match="an earlier collective failed on this rank: `reset`"):
        meshes.fetch(after, rank=0)
    meshes.run(meshes.tensors.reset())
    assert same(meshes.fetch(local, 0), values((4,), torch.float32, 1, 0) + 1)
    wanted = values((4,), torch.float32, 1, 0) + values((4,), torch.float32, 1, 1)
    assert all(same(value, wanted) for value in meshes.both(all_reduce(mine)))


def test_a_sender_that_fails_is_named_where_its_tensor_is_missed(meshes: Meshes) -> None:
    theirs = [meshes.made(replica, (3,), torch.float32, 1) for replica in meshes.replicas]
    with meshes.tensors.on(meshes.replicas[1]):
        bad = fails_on(theirs[1], 0)
    there = to_mesh([theirs[0], bad], meshes.learner)
    with pytest.raises(RemoteError, match=r"failed on generator\[1\](.|\n)*a bug in the program"):
        meshes.fetch(there)
    meshes.run(meshes.tensors.reset())
    assert meshes.fetch(to_mesh(theirs, meshes.learner)).shape == (6,)


@remote(propagate=lambda tensor, path: torch.empty_like(tensor))
def waits_for_writer(tensor: Tensor, path: str) -> Tensor:
    with open(path):
        return tensor


def test_a_value_that_does_not_come_meets_the_deadline(
    meshes: Meshes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    mine = meshes.made(meshes.replicas[0], (3,), torch.float32, 1)
    with meshes.tensors.on(meshes.replicas[0]):
        late = waits_for_writer(mine, str(pipe))
    with monkeypatch.context() as patch:
        patch.setattr(meshes.tensors, "deadline_seconds", 0.5)
        with pytest.raises(DeadlineError, match=r"waited 0.5 s for a tensor \[3\] of generator\[0\]"):
            meshes.fetch(late)
    with open(pipe, "w"):
        assert same(meshes.fetch(late), values((3,), torch.float32, 1, 0))


def test_a_dead_sender_is_named_and_the_learners_go_on_among_themselves(meshes: Meshes) -> None:
    """The last test of these meshes: it kills a generator."""
    theirs = [meshes.made(replica, (3,), torch.float32, 1) for replica in meshes.replicas]
    mine = meshes.made(meshes.learner, (2,), torch.float32, 1)
    os.kill(meshes.replicas[1].pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"generator\[1\].*SIGKILL"):
        meshes.fetch(to_mesh(theirs, meshes.learner))
    wanted = values((2,), torch.float32, 1, 0) + values((2,), torch.float32, 1, 1)
    assert all(same(value, wanted) for value in meshes.both(all_reduce(mine)))
