"""Placement: load first, a cached prefix where that costs little, nothing for the dead."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from meshrl.scheduling import Placement


@given(
    replicas=st.integers(1, 6),
    capacity=st.sampled_from([0, 8, 20]),
    events=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8), st.integers(0, 9)), max_size=80),
)
def test_loads_are_counted_no_capacity_is_passed_and_the_dead_get_nothing(
    replicas: int, capacity: int, events: list[tuple[int, int, int]]
) -> None:
    placement = Placement(replicas, capacity, affinity_rollouts=4)
    outstanding: list[tuple[int, int]] = []
    dead: set[int] = set()
    for prefix, rollouts, event in events:
        if event < 6:
            before = placement.loads
            replica = placement.place(prefix, rollouts)
            living = [r for r in range(replicas) if r not in dead]
            room = [r for r in living if not capacity or not before[r] or before[r] + rollouts <= capacity]
            assert (replica is None) == (not room or min(living, key=before.__getitem__) not in room)
            if replica is not None:
                assert replica in room
                assert before[replica] <= min(before[r] for r in living) + 4
                outstanding.append((replica, rollouts))
        elif event < 8 and outstanding:
            placement.done(*outstanding.pop(prefix % len(outstanding)))
        elif event == 8:
            replica = prefix % replicas
            placement.lose(replica)
            dead.add(replica)
            outstanding = [entry for entry in outstanding if entry[0] != replica]
        elif dead:
            placement.restore(dead.pop())
        loads = Counter[int]()
        for replica, rollouts in outstanding:
            loads[replica] += rollouts
        assert placement.loads == [loads[r] for r in range(replicas)]
        assert placement.alive == [r for r in range(replicas) if r not in dead]


def test_a_prefix_goes_back_to_its_replica_while_that_is_hardly_busier() -> None:
    placement = Placement(2, affinity_rollouts=8)
    assert [placement.place("a", 8), placement.place("b", 8)] == [0, 1]
    assert placement.place("b", 8) == 1  # as busy as the other: the prefix decides
    assert placement.place("b", 8) == 1  # 8 rollouts busier, which is borne
    assert placement.place("b", 8) == 0  # 16 busier, which is not


def test_a_replica_that_was_started_again_has_nothing_cached() -> None:
    placement = Placement(2)
    assert [placement.place("a", 1), placement.place("b", 1)] == [0, 1]
    placement.lose(1)
    assert placement.place("b", 1) == 0
    placement.restore(1)
    assert placement.loads == [2, 0]
    assert placement.place("c", 1) == 1


def test_a_group_larger_than_the_capacity_goes_to_an_idle_replica() -> None:
    placement = Placement(1, capacity=4)
    assert placement.place("a", 8) == 0
    assert placement.place("b", 1) is None
    placement.done(0, 8)
    assert placement.place("b", 1) == 0
