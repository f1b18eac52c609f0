"""The rollout buffer: the ledger adds up and the staleness bound holds, whatever happens in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from meshrl.buffer import Ledger, RolloutBuffer, State


class Traffic(RuleBasedStateMachine):
    """Groups come, finish, fail, lose their generator and are trained on in any order that the buffer allows.

    Versions are counted here on their own: `trained` is that of the learner, `live` that of the generators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.buffer = RolloutBuffer(3, 2)
        self.next_group = 0
        self.trained = self.live = 0
        self.sampled_under: dict[int, int] = {}
        self.rollouts: dict[int, int] = {}
        self.queue: list[int] = []
        self.generating: list[int] = []
        self.ready: list[int] = []
        self.batches: list[list[int]] = []
        self.dropped = self.released = self.rollouts_dropped = self.rollouts_trained = 0

    @precondition(lambda self: self.buffer.free > 0)
    @rule(rollouts=st.integers(1, 3))
    def admit(self, rollouts: int) -> None:
        self.buffer.admit(self.next_group, rollouts)
        self.sampled_under[self.next_group] = self.live
        self.rollouts[self.next_group] = rollouts
        self.queue.append(self.next_group)
        self.next_group += 1

    @precondition(lambda self: self.queue)
    @rule()
    def start(self) -> None:
        longest_waiting = min(self.queue)
        assert self.buffer.next_to_generate() == longest_waiting
        self.buffer.start(longest_waiting)
        self.queue.remove(longest_waiting)
        self.generating.append(longest_waiting)

    @precondition(lambda self: self.generating)
    @rule(data=st.data(), graded=st.booleans())
    def finish(self, data: st.DataObject, graded: bool) -> None:
        group = self.generating.pop(data.draw(st.integers(0, len(self.generating) - 1)))
        if graded:
            self.buffer.grade(group)
        self.buffer.finish(group)
        self.ready.append(group)

    @precondition(lambda self: self.generating or self.ready)
    @rule(data=st.data())
    def lose_generator(self, data: st.DataObject) -> None:
        for group in data.draw(st.sets(st.sampled_from(self.generating + self.ready))):
            self.buffer.requeue(group)
            (self.ready if group in self.ready else self.generating).remove(group)
            self.queue.append(group)

    @precondition(lambda self: self.queue or self.generating or self.ready)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.queue + self.generating + self.ready))
        self.buffer.drop(group, "reward failed")
        for groups in (self.queue, self.generating, self.ready):
            if group in groups:
                groups.remove(group)
        self.dropped += 1
        self.rollouts_dropped += self.rollouts[group]

    @precondition(lambda self: self.buffer.ready > 0)
    @rule()
    def take(self) -> None:
        batch = self.buffer.take()
        assert batch == sorted(self.ready)[:3]
        for group in batch:
            assert self.trained - self.sampled_under[group] <= 2
        self.ready = [group for group in self.ready if group not in batch]
        self.trained += 1
        self.batches.append(batch)

    @precondition(lambda self: any(self.batches))
    @rule(data=st.data())
    def drop_taken(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from([batch for batch in self.batches if batch]))
        free = self.buffer.free
        group = batch[-1]
        gone = data.draw(st.integers(0, self.rollouts[group]))
        self.buffer.leave_out(group, gone, "too long")
        assert self.buffer.free == free  # its place in the batch is not given away
        self.rollouts_dropped += gone
        self.rollouts[group] -= gone
        if self.rollouts[group] == 0:
            batch.pop()
            self.dropped += 1

    @precondition(lambda self: self.batches)
    @rule()
    def release(self) -> None:
        batch = self.batches.pop(0)
        self.buffer.release(batch)
        self.released += len(batch)
        self.rollouts_trained += sum(self.rollouts[group] for group in batch)
        self.live += 1

    @invariant()
    def ledger_adds_up(self) -> None:
        ledger, rollouts = self.buffer.ledger, self.buffer.rollout_ledger
        assert ledger.balanced and rollouts.balanced
        assert ledger.admitted == self.next_group
        assert ledger.trained == self.released
        assert sum(ledger.dropped.values()) == self.dropped
        assert ledger.live == self.next_group - self.released - self.dropped
        assert sum(rollouts.dropped.values()) == self.rollouts_dropped
        assert rollouts.trained == self.rollouts_trained

    @invariant()
    def a_batch_is_there_exactly_when_the_rest_can_wait(self) -> None:
        """The rule as it is told: take the first P; the rest, in order, P at a time, must stay within the bound."""
        waiting = sorted(self.queue + self.generating + self.ready)
        batch = sorted(self.ready)[:3]
        rest = [group for group in waiting if group not in batch]
        in_time = all(
            self.trained + 1 + place // 3 - self.sampled_under[group] <= 2 for place, group in enumerate(rest)
        )
        assert (self.buffer.ready == 3) == (len(batch) == 3 and in_time)

    @invariant()
    def traffic_never_stands_still(self) -> None:
        """There is always room, a batch, a batch to release, or a group to wait for."""
        assert self.buffer.free or self.buffer.ready or self.batches or self.generating or self.queue


TestTraffic = Traffic.TestCase


def filled(groups_per_step: int, max_staleness: int) -> RolloutBuffer:
    buffer = RolloutBuffer(groups_per_step, max_staleness)
    for group in range(buffer.slots):
        buffer.admit(group)
        buffer.start(group)
    return buffer


def test_ten_finished_and_four_taken_leaves_six() -> None:
    buffer = RolloutBuffer(4, 2)
    for group in range(10):
        buffer.admit(group)
        buffer.start(group)
        buffer.finish(group)
    buffer.release(buffer.take())
    assert (buffer.ledger.trained, buffer.ledger.live) == (4, 6)


def test_synchronous_groups_are_taken_whole_and_in_order_of_admission() -> None:
    buffer = filled(3, 0)
    for group in (2, 0):
        buffer.finish(group)
    assert buffer.ready == 0
    buffer.finish(1)
    assert buffer.take() == [0, 1, 2]
    assert buffer.free == 0  # nothing is generated until the weights trained on them are live
    buffer.release([0, 1, 2])
    assert buffer.free == 3


def test_a_slow_group_is_overtaken_while_it_may_be_and_no_longer() -> None:
    buffer = filled(2, 1)
    for group in (1, 2, 3):
        buffer.finish(group)
    assert buffer.take() == [1, 2]  # group 0 can still be trained on in the next step
    buffer.release([1, 2])
    for group in (4, 5):
        buffer.admit(group)
        buffer.start(group)
        buffer.finish(group)
    assert buffer.ready == 0  # three are ready, but after another step group 0 would be too old
    buffer.finish(0)
    assert buffer.take() == [0, 3]


def test_a_batch_all_dropped_is_released_and_frees_its_slots() -> None:
    buffer = filled(2, 0)
    buffer.finish(0)
    buffer.finish(1)
    for group in buffer.take():
        buffer.drop(group, "zero variance")
    buffer.release([])
    assert buffer.free == 2 and buffer.ledger.dropped == {"zero variance": 2}


def test_misuse_is_an_error_that_shows_the_ledger() -> None:
    buffer = filled(1, 0)
    with pytest.raises(ValueError, match="already generating"):
        buffer.admit(0)
    with pytest.raises(ValueError, match="no slot is free.*1 admitted = 0 trained"):
        buffer.admit(1)
    with pytest.raises(ValueError, match="no batch is ready"):
        buffer.take()
    with pytest.raises(ValueError, match="no batch is out"):
        buffer.release([0])
    buffer.finish(0)
    with pytest.raises(ValueError, match="is ready, wanted generating or rewarding"):
        buffer.finish(0)
    buffer.release(buffer.take())
    with pytest.raises(ValueError, match="not live"):
        buffer.drop(0, "late")
    for arguments, message in (((0, 0), "groups_per_step=0"), ((1, -1), "max_staleness=-1")):
        with pytest.raises(ValueError, match=message):
            RolloutBuffer(*arguments)


def test_a_group_whose_generator_died_is_generated_before_all_younger_ones() -> None:
    buffer = RolloutBuffer(2, 1)
    for group in range(4):
        buffer.admit(group)
    for group in (0, 1):
        buffer.start(group)
    buffer.finish(1)
    buffer.requeue(1)
    assert buffer.next_to_generate() == 1
    buffer.requeue(0)
    assert buffer.next_to_generate() == 0
    assert buffer.count(State.ADMITTED) == 4


def test_rollouts_left_out_of_a_group_are_counted_and_the_group_is_trained_on() -> None:
    buffer = RolloutBuffer(1, 0)
    buffer.admit(0, rollouts=8)
    buffer.start(0)
    buffer.finish(0)
    buffer.leave_out(buffer.take()[0], 3, "too long")
    assert not buffer.ledger.dropped
    buffer.release([0])
    assert buffer.rollout_ledger == Ledger(8, 5, {"too long": 3}, 0)
