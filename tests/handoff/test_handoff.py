"""The handoff on real processes: two generator replicas, two learner ranks."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from handoff_workers import Filler, Taker, columns, groups_of
from monarch._src.actor import actor_mesh
from torch import Tensor

from meshrl.advantages import group_relative
from meshrl.errors import UserError
from meshrl.handoff.dock import DockedBatch, NotDocked, Ticket
from meshrl.handoff.handoff import Handoff, HandoffConfig
from meshrl.handoff.schema import Column, columns_of, declared
from meshrl.losses import LossInputs, LossOutputs, TokenMean
from meshrl.mesh import RoleMesh
from meshrl.rollout import RolloutGroup
from meshrl.session import Session, SessionConfig
from meshrl.worker import RemoteError

SECONDS = 60


@dataclass(frozen=True)
class Meshes:
    runner: asyncio.Runner
    session: Session
    generator: RoleMesh
    learner: RoleMesh
    handoff: Handoff
    """Two data-parallel ranks."""
    tensor_parallel: Handoff
    """Two tensor-parallel ranks, beside the other on the same processes; micro-batches of at most 20 tokens."""

    def fill(self, groups: Sequence[RolloutGroup]) -> None:
        handles = [handle for group in groups for handle in group.rollouts]
        self.runner.run(self.generator.call("fill", handles, deadline_seconds=SECONDS))

    def release(self, groups: Sequence[RolloutGroup]) -> None:
        ids = [handle.id for group in groups for handle in group.rollouts]
        assert sum(self.runner.run(self.generator.call("release", ids, deadline_seconds=SECONDS))) == len(ids)

    def hand(
        self,
        groups: Sequence[RolloutGroup],
        advantages: Tensor | Sequence[float],
        handoff: Handoff | None = None,
    ) -> Ticket:
        async def hand() -> Ticket:
            return await (handoff or self.handoff)(groups, advantages=advantages)

        return self.runner.run(hand())

    def take(self, ticket: Ticket) -> list[DockedBatch]:
        return self.runner.run(self.learner.call("take", ticket, deadline_seconds=SECONDS))


@pytest.fixture(scope="module")
def meshes() -> Iterator[Meshes]:
    with asyncio.Runner() as runner:
        session = Session(SessionConfig(start_deadline_seconds=60))

        async def start() -> tuple[RoleMesh, RoleMesh, Handoff, Handoff]:
            await session.start()
            generator, learner = await asyncio.gather(
                session.spawn(Filler, replicas=2, name="generator"),
                session.spawn(Taker, procs=2, name="learner"),
            )
            first = await Handoff.connect(source=generator, target=learner)
            second = await Handoff.connect(
                source=generator,
                target=learner,
                tensor_parallel=2,
                config=HandoffConfig(microbatch_tokens=20),
            )
            return generator, learner, first, second

        try:
            yield Meshes(runner, session, *runner.run(start()))
        finally:
            runner.run(session.stop())


def docked(batch: DockedBatch) -> dict[int, tuple[dict[str, Tensor], float]]:
    """Columns and advantage of each rollout, by id."""
    rollouts, start = {}, 0
    for rollout_id, length, advantage in zip(
        batch.rollout_ids, batch.lengths, batch.rollout_columns["advantages"].tolist(), strict=True
    ):
        part = {name: values[start : start + length] for name, values in batch.columns.items()}
        rollouts[rollout_id] = part, advantage
        start += length
    assert all(values.shape == (start,) for values in batch.columns.values())
    return rollouts


def assert_arrived(groups: Sequence[RolloutGroup], wanted: Tensor, batches: Sequence[DockedBatch]) -> None:
    """Every rollout is on exactly one of these ranks, with its own columns and its own advantage."""
    handles = [handle for group in groups for handle in group.rollouts]
    arrived: dict[int, tuple[dict[str, Tensor], float]] = {}
    for batch in batches:
        part = docked(batch)
        assert not arrived.keys() & part.keys()
        arrived |= part
        assert batch.global_rollouts == len(handles)
        assert batch.global_tokens == sum(handle.response_tokens for handle in handles)
    assert arrived.keys() == {handle.id for handle in handles}
    for handle, advantage in zip(handles, wanted.tolist(), strict=True):
        part, value = arrived[handle.id]
        for name, values in columns(handle.id, handle.tokens).items():
            assert part[name].dtype == values.dtype and torch.equal(part[name], values)
        assert value == pytest.approx(advantage, abs=1e-6)


def expected(groups: Sequence[RolloutGroup]) -> Tensor:
    rewards = torch.tensor([handle.reward for group in groups for handle in group.rollouts])
    numbers = torch.tensor([n for n, group in enumerate(groups) for _ in group.rollouts])
    return group_relative(rewards, numbers)


def test_columns_and_advantages_arrive_bit_for_bit_on_one_rank_each(meshes: Meshes) -> None:
    groups = groups_of([4, 3, 5, 1, 4], replicas=2)
    meshes.fill(groups)
    rewards, numbers = meshes.handoff.rewards(groups)
    ticket = meshes.hand(groups, meshes.handoff.on_mesh(group_relative)(rewards, numbers))
    assert_arrived(groups, expected(groups), meshes.take(ticket))
    meshes.release(groups)


def test_operation_by_operation_gives_what_one_operation_gives(meshes: Meshes) -> None:
    groups = groups_of([4, 4, 2], replicas=2)
    meshes.fill(groups)
    with meshes.handoff.tensors():
        advantages = group_relative(*meshes.handoff.rewards(groups))
    assert_arrived(groups, expected(groups), meshes.take(meshes.hand(groups, advantages)))
    meshes.release(groups)


def test_tensor_parallel_ranks_get_the_same_rollouts_in_micro_batches(meshes: Meshes) -> None:
    groups = groups_of([4, 4], replicas=2)
    wanted = expected(groups)
    meshes.fill(groups)
    first, second = meshes.take(meshes.hand(groups, wanted.tolist(), meshes.tensor_parallel))
    assert_arrived(groups, wanted, [first])
    assert_arrived(groups, wanted, [second])
    assert first.rollout_ids == second.rollout_ids and first.microbatches == second.microbatches
    assert len(first.microbatches) > 1 and all(sum(rows.lengths) <= 20 for rows in first.rows())
    assert [p for rows in first.rows() for p in rows.positions] == list(range(len(first.rollout_ids)))
    meshes.release(groups)


def test_a_rollout_too_long_for_a_micro_batch_is_named_and_counts_nowhere(meshes: Meshes) -> None:
    long, *rest = groups_of([1, 3], replicas=2, response_tokens=5)
    long = replace(long, rollouts=tuple(replace(handle, response_tokens=50) for handle in long.rollouts))
    meshes.fill([long, *rest])
    ticket = meshes.hand([long, *rest], [9.0, 1.0, 2.0, 3.0], meshes.tensor_parallel)
    assert ticket.dropped == {long.rollouts[0].id: "too long"} and ticket.rollouts == 3
    assert_arrived(rest, torch.tensor([1.0, 2.0, 3.0]), meshes.take(ticket)[:1])
    meshes.release([long, *rest])


def test_a_rank_may_get_nothing_and_keeps_as_many_micro_batches(meshes: Meshes) -> None:
    groups = groups_of([1], replicas=2)
    meshes.fill(groups)
    batches = meshes.take(meshes.hand(groups, [0.5]))
    assert sorted(len(batch.rollout_ids) for batch in batches) == [0, 1]
    assert {len(batch.microbatches) for batch in batches} == {1}
    assert_arrived(groups, torch.tensor([0.5]), batches)
    meshes.release(groups)


def test_no_groups_give_an_empty_batch_on_every_rank(meshes: Meshes) -> None:
    rewards, numbers = meshes.handoff.rewards([])
    ticket = meshes.hand([], meshes.handoff.on_mesh(group_relative)(rewards, numbers))
    assert ticket.response_tokens == 0
    for batch in meshes.take(ticket):
        assert batch.global_tokens == 0 and batch.rollout_ids == [] and batch.microbatches == []


def test_controller_messages_do_not_grow_with_tokens(meshes: Meshes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts what each actor message is pickled to; tensor-engine operations name tensors and hold no data."""
    sent: list[int] = []
    pickle = actor_mesh.pickle

    def counting(*args: Any, **kwargs: Any) -> Any:
        state = pickle(*args, **kwargs)
        sent.append(len(state.buffer()))
        return state

    monkeypatch.setattr(actor_mesh, "pickle", counting)

    def bytes_sent(response_tokens: int) -> int:
        groups = groups_of([4, 4], replicas=2, response_tokens=response_tokens)
        meshes.fill(groups)
        sent.clear()
        rewards, numbers = meshes.handoff.rewards(groups)
        ticket = meshes.hand(groups, meshes.handoff.on_mesh(group_relative)(rewards, numbers))
        total = sum(sent)
        assert len(sent) >= 4  # scores, two sends, one receive
        assert_arrived(groups, expected(groups), meshes.take(ticket))
        meshes.release(groups)
        return total

    short, long = bytes_sent(10), bytes_sent(5000)
    # Integers of another width may take some bytes more; 8 rollouts of 4,990 more tokens would be 500 kB.
    assert long - short < 8 * 16


def test_a_missing_rollout_is_an_error_at_once_and_the_next_handoff_works(meshes: Meshes) -> None:
    groups = groups_of([2, 2], replicas=2)
    meshes.fill(groups[:1])
    with pytest.raises(NotDocked, match=rf"rollout {groups[1].rollouts[0].id} is not docked here"):
        meshes.hand(groups, [0.0] * 4)
    meshes.fill(groups[1:])
    assert_arrived(groups, torch.ones(4), meshes.take(meshes.hand(groups, [1.0] * 4)))
    meshes.release(groups)


def test_a_handle_that_disagrees_with_the_dock_is_an_error(meshes: Meshes) -> None:
    (group,) = groups_of([2], replicas=1)
    meshes.fill([group])
    wrong = replace(
        group, rollouts=tuple(replace(h, response_tokens=h.response_tokens + 1) for h in group.rollouts)
    )
    with pytest.raises(ValueError, match="tokens in the dock, its handle says"):
        meshes.hand([wrong], [0.0, 0.0])
    meshes.release([group])


def test_bad_advantages_are_refused_with_the_reason(meshes: Meshes) -> None:
    groups = groups_of([2], replicas=2)
    meshes.fill(groups)
    with pytest.raises(ValueError, match="shape \\[3\\], the groups have 2 rollouts"):
        meshes.hand(groups, [0.0] * 3)
    with pytest.raises(ValueError, match=r"positions \[1\] of the batch's 2 are not finite"):
        meshes.hand(groups, [0.0, float("nan")])
    rewards, numbers = meshes.handoff.rewards(groups)
    with pytest.raises(ValueError, match="came out as \\[1\\]"):
        meshes.hand(groups, meshes.handoff.on_mesh(lambda rewards, groups: rewards[:1])(rewards, numbers))
    assert_arrived(groups, torch.ones(2), meshes.take(meshes.hand(groups, [1.0, 1.0])))
    meshes.release(groups)


def fail(rewards: Tensor, groups: Tensor) -> Tensor:
    raise LookupError("a bug in the program")


def test_tensor_code_that_fails_on_the_mesh_is_told_and_the_next_handoff_works(meshes: Meshes) -> None:
    groups = groups_of([2, 2], replicas=2)
    meshes.fill(groups)
    rewards, numbers = meshes.handoff.rewards(groups)
    with pytest.raises(RemoteError, match="a bug in the program"):
        meshes.hand(groups, meshes.handoff.on_mesh(fail)(rewards, numbers))
    advantages = meshes.handoff.on_mesh(group_relative)(rewards, numbers)
    assert_arrived(groups, expected(groups), meshes.take(meshes.hand(groups, advantages)))
    meshes.release(groups)


def test_a_ticket_is_redeemed_once(meshes: Meshes) -> None:
    groups = groups_of([2], replicas=2)
    meshes.fill(groups)
    ticket = meshes.hand(groups, [0.0, 0.0])
    meshes.take(ticket)
    with pytest.raises(NotDocked, match="use each ticket once"):
        meshes.take(ticket)
    meshes.release(groups)


class NeedsLengths:
    """A loss that reads a column of the program's own."""

    aggregation = TokenMean()
    columns = ("length_weight", "rewards")

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        return LossOutputs(inputs.column("length_weight") * inputs.logprobs, {})


def test_a_loss_whose_column_nobody_makes_is_an_error_at_the_start(meshes: Meshes) -> None:
    async def connect(provides: Sequence[str | Column]) -> Handoff:
        return await Handoff.connect(
            source=meshes.generator, target=meshes.learner, loss=NeedsLengths(), provides=provides
        )

    with pytest.raises(UserError, match="needs the column 'length_weight' .no column of that name"):
        meshes.runner.run(connect(["advantages"]))
    with pytest.raises(UserError, match="there is no column 'length_weight'; the schema has advantages"):
        meshes.runner.run(connect(["length_weight"]))
    for provides, message in (
        (["advantages", "advantages"], "'advantages' is provided twice"),
        ([Column("sampler_logprobs", torch.float32, "rollout")], "is made by the generator"),
        ("advantages", "wanted a list of columns"),
    ):
        with pytest.raises(UserError, match=message):
            declared(provides)
    for loss in (lambda inputs: inputs, SimpleNamespace(columns="advantages")):
        with pytest.raises(UserError, match="must say which columns it reads"):
            columns_of(loss)


def test_values_are_held_exactly_or_refused() -> None:
    count = Column("count", torch.int64, "rollout")
    assert count.values([2**40 + 1]).tolist() == [2**40 + 1]
    assert Column("share", torch.float64, "rollout").values([0.1]).tolist() == [0.1]
    for column, value in (
        (count, 0.5),
        (Column("flag", torch.bool, "rollout"), 0.7),
        (count, None),
        (count, "x"),
    ):
        with pytest.raises(ValueError, match=column.name):
            column.values([value])  # pyright: ignore[reportArgumentType]


def test_a_column_declared_by_the_program_and_the_rewards_arrive_with_their_rollouts(meshes: Meshes) -> None:
    async def connect() -> Handoff:
        return await Handoff.connect(
            source=meshes.generator,
            target=meshes.learner,
            loss=NeedsLengths(),
            provides=[Column("length_weight", torch.float32, "rollout")],
        )

    handoff = meshes.runner.run(connect())
    groups = groups_of([2, 3], replicas=2)
    meshes.fill(groups)

    async def hand(**columns: Any) -> Ticket:
        return await handoff(groups, **columns)

    with pytest.raises(ValueError, match="given the columns advantages, it provides length_weight"):
        meshes.runner.run(hand(advantages=[0.0] * 5))
    handles = [handle for group in groups for handle in group.rollouts]
    batches = meshes.take(meshes.runner.run(hand(length_weight=[1 / handle.tokens for handle in handles])))
    by_id = {handle.id: handle for handle in handles}
    assert sorted(i for batch in batches for i in batch.rollout_ids) == sorted(by_id)
    for batch in batches:
        batch.check(NeedsLengths.columns)
        mine = [by_id[rollout_id] for rollout_id in batch.rollout_ids]
        torch.testing.assert_close(
            batch.rollout_columns["length_weight"], torch.tensor([1 / handle.tokens for handle in mine])
        )
        assert batch.rollout_columns["rewards"].tolist() == [handle.reward for handle in mine]
        with pytest.raises(ValueError, match="needs the column 'values', the batch has length_weight, resp"):
            batch.check(["values"])
    meshes.release(groups)


def test_a_rollout_without_reward_is_named(meshes: Meshes) -> None:
    (group,) = groups_of([2], replicas=1)
    failed = replace(group.rollouts[1], reward=None, reward_error="timed out")
    with pytest.raises(ValueError, match=rf"rollout {failed.id} of group 100 has no reward \(timed out\)"):
        meshes.handoff.rewards([replace(group, rollouts=(group.rollouts[0], failed))])


def test_meshes_that_do_not_fit_are_refused(meshes: Meshes) -> None:
    async def connect(source: RoleMesh, target: RoleMesh, **settings: Any) -> None:
        await Handoff.connect(source=source, target=target, **settings)

    with pytest.raises(ValueError, match="generator has 2 replicas: a handoff wants one"):
        meshes.runner.run(connect(meshes.generator, meshes.generator))
    with pytest.raises(ValueError, match="replicas of \\[2\\] processes"):
        meshes.runner.run(connect(meshes.learner, meshes.learner))
    with pytest.raises(ValueError, match="times tensor_parallel=3 is not the 2 processes of learner"):
        meshes.runner.run(connect(meshes.generator, meshes.learner, tensor_parallel=3))


def test_a_generator_that_died_takes_only_its_own_rollouts_with_it(meshes: Meshes) -> None:
    """The last test of these meshes: it kills a generator."""
    groups = groups_of([2, 2], replicas=2)
    meshes.fill(groups)
    os.kill(meshes.generator.replicas[1].pids[0], signal.SIGKILL)
    for _ in range(2):  # in the midst of a handoff, then known from the start
        ticket = meshes.hand(groups, [1.0, 2.0, 3.0, 4.0])
        lost = {handle.id: "generator died" for handle in groups[1].rollouts}
        assert ticket.dropped == lost and ticket.rollouts == 2
        assert_arrived(groups[:1], torch.tensor([1.0, 2.0]), meshes.take(ticket))
    os.kill(meshes.generator.replicas[0].pids[0], signal.SIGKILL)
    ticket = meshes.hand(groups, [1.0, 2.0, 3.0, 4.0])
    assert len(ticket.dropped) == 4 and ticket.response_tokens == 0
    assert all(batch.global_tokens == 0 for batch in meshes.take(ticket))
