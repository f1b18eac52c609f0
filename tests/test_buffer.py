"""The rollout buffer: the ledger adds up and the staleness bound holds, whatever happens in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from meshrl.buffer import RolloutBuffer


class Traffic(RuleBasedStateMachine):
    """Groups come, finish, fail and are trained on in any order that the buffer allows.

    Versions are counted here on their own: `trained` is that of the learner, `live` that of the generators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.buffer = RolloutBuffer(3, 2)
        self.next_group = 0
        self.trained = self.live = 0
        self.sampled_under: dict[int, int] = {}
        self.generating: list[int] = []
        self.batches: list[list[int]] = []
        self.dropped = self.released = 0

    @precondition(lambda self: self.buffer.free > 0)
    @rule()
    def admit(self) -> None:
        self.buffer.admit(self.next_group)
        self.sampled_under[self.next_group] = self.live
        self.generating.append(self.next_group)
        self.next_group += 1

    @precondition(lambda self: self.generating)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.buffer.finish(self.generating.pop(data.draw(st.integers(0, len(self.generating) - 1))))

    @precondition(lambda self: self.generating)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        group = self.generating.pop(data.draw(st.integers(0, len(self.generating) - 1)))
        self.buffer.drop(group, "reward failed")
        self.dropped += 1

    @precondition(lambda self: self.buffer.ready > 0)
    @rule()
    def take(self) -> None:
        batch = self.buffer.take()
        assert len(batch) == 3 and batch == sorted(batch)
        for group in batch:
            assert self.trained - self.sampled_under[group] <= 2
        self.trained += 1
        self.batches.append(batch)

    @precondition(lambda self: any(self.batches))
    @rule(data=st.data())
    def drop_taken(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from([batch for batch in self.batches if batch]))
        free = self.buffer.free
        self.buffer.drop(batch.pop(), "zero variance")
        assert self.buffer.free == free  # its place in the batch is not given away
        self.dropped += 1

    @precondition(lambda self: self.batches)
    @rule()
    def release(self) -> None:
        batch = self.batches.pop(0)
        self.buffer.release(batch)
        self.released += len(batch)
        self.live += 1

    @invariant()
    def ledger_adds_up(self) -> None:
        ledger = self.buffer.ledger
        assert ledger.admitted == self.next_group
        assert ledger.trained == self.released
        assert sum(ledger.dropped.values()) == self.dropped
        assert ledger.live == self.next_group - self.released - self.dropped

    @invariant()
    def traffic_never_stands_still(self) -> None:
        """There is always room, a batch, a batch to release, or a group to wait for."""
        assert self.buffer.free or self.buffer.ready or self.batches or self.generating


TestTraffic = Traffic.TestCase


def filled(groups_per_step: int, max_staleness: int) -> RolloutBuffer:
    buffer = RolloutBuffer(groups_per_step, max_staleness)
    for group in range(buffer.slots):
        buffer.admit(group)
    return buffer


def test_ten_finished_and_four_taken_leaves_six() -> None:
    buffer = RolloutBuffer(4, 2)
    for group in range(10):
        buffer.admit(group)
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
    with pytest.raises(ValueError, match="is ready, wanted generating"):
        buffer.finish(0)
    buffer.release(buffer.take())
    with pytest.raises(ValueError, match="not live"):
        buffer.drop(0, "late")
    for arguments, message in (((0, 0), "groups_per_step=0"), ((1, -1), "max_staleness=-1")):
        with pytest.raises(ValueError, match=message):
            RolloutBuffer(*arguments)
