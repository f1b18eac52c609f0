"""The dock and the schema: what may be held, and what is held."""

from __future__ import annotations

import pytest
import torch
from handoff_workers import columns
from hypothesis import given
from hypothesis import strategies as st

from meshrl.handoff.collectives import pack, unpack
from meshrl.handoff.dock import Dock, DockedBatch, DockFull, NotDocked, Ticket, dock, empty_columns
from meshrl.handoff.schema import BYTES_PER_TOKEN, COLUMNS, DOCKED
from meshrl.handoff.shipment import plan_shipment
from meshrl.rollout import RolloutGroup, RolloutHandle


def test_bytes_are_bounded_and_freed_by_release() -> None:
    held = Dock(capacity_bytes=10 * BYTES_PER_TOKEN)
    held.put(1, columns(1, 6))
    with pytest.raises(
        DockFull, match=f"rollout 2 of {5 * BYTES_PER_TOKEN} bytes does not fit: 1 rollouts hold"
    ):
        held.put(2, columns(2, 5))
    assert (len(held), held.bytes) == (1, 6 * BYTES_PER_TOKEN)
    assert held.release([1, 2, 1]) == 1
    assert (len(held), held.bytes) == (0, 0)
    held.put(2, columns(2, 5))
    assert torch.equal(held.get(2)["token_ids"], columns(2, 5)["token_ids"])


def test_a_rollout_is_docked_once_and_a_missing_one_is_named() -> None:
    held = Dock()
    held.put(1, columns(1, 4))
    with pytest.raises(ValueError, match="rollout 1 is already docked"):
        held.put(1, columns(1, 4))
    with pytest.raises(NotDocked, match="rollout 7 is not docked here \\(1 others are\\)"):
        held.get(7)


@pytest.mark.parametrize("name", [column.name for column in DOCKED])
def test_columns_that_are_not_the_schemas_are_refused(name: str) -> None:
    right = columns(1, 4)
    for wrong, message in (
        ({k: v for k, v in right.items() if k != name}, f"columns missing {name}, unknown none"),
        (right | {"extra": right[name]}, "unknown extra"),
        (right | {name: right[name].to(torch.float64)}, f"column {name} is torch.float64"),
        (right | {name: right[name][:, None]}, f"column {name} is "),
        (right | {name: torch.cat([right[name]] * 2)}, "wanted"),
    ):
        with pytest.raises(ValueError, match=message):
            Dock().put(1, wrong)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_the_wire_holds_any_rollouts_bit_for_bit(lengths: list[int]) -> None:
    rollouts = [columns(i, length) for i, length in enumerate(lengths)]
    buffer = pack(rollouts)
    assert buffer.shape == (sum(lengths) * BYTES_PER_TOKEN,)
    received = unpack(buffer, sum(lengths))
    for column in DOCKED:
        assert torch.equal(received[column.name], torch.cat([rollout[column.name] for rollout in rollouts]))


def test_padding_is_of_each_columns_dtype() -> None:
    padding = empty_columns(3)
    assert padding.keys() == {column.name for column in COLUMNS if column.producer == "generator"}
    assert padding["weight_version"].tolist() == [-1, -1, -1] and not padding["response_mask"].any()


def test_a_batch_waits_for_both_halves_and_is_taken_once() -> None:
    held = Dock()
    batch = DockedBatch([8, 5], [1, 2], columns(0, 3), {}, [[0], [], [1]], 3, 4)
    for advantages_first in (True, False):
        ticket = Ticket(1, 4, 3, 3)
        halves = [
            lambda ticket=ticket: held.put_rollout_columns(
                ticket, {"advantages": torch.tensor([0.0, 10.0, 20.0, 30.0])}
            ),
            lambda ticket=ticket: held.put_batch(ticket, batch, [3, 1]),
        ]
        first, second = halves if advantages_first else reversed(halves)
        first()
        second()
        assert held.take_batch(ticket).rollout_columns["advantages"].tolist() == [30.0, 10.0]
        with pytest.raises(NotDocked):
            held.take_batch(ticket)
    held.put_batch(Ticket(2, 4, 3, 3), batch, [3, 1])
    with pytest.raises(NotDocked, match="Ticket\\(number=2"):
        held.take_batch(Ticket(2, 4, 3, 3))


def test_micro_batches_are_views_in_order() -> None:
    batch = DockedBatch(
        [8, 5, 6], [1, 2, 3], columns(0, 6), {"advantages": torch.arange(3.0)}, [[0, 1], [], [2]], 3, 3
    )
    rows = list(batch.rows())
    assert [list(row.positions) for row in rows] == batch.microbatches
    assert [row.lengths for row in rows] == [[1, 2], [], [3]]
    assert [row.columns["token_ids"].tolist() for row in rows] == [[0, 1, 2], [], [3, 4, 5]]
    assert [row.rollout_columns["advantages"].tolist() for row in rows] == [[0.0, 1.0], [], [2.0]]
    assert rows[0].columns["token_ids"].data_ptr() == batch.columns["token_ids"].data_ptr()


def test_the_process_has_one_dock() -> None:
    assert dock() is dock()


@given(st.lists(st.lists(st.integers(1, 30), max_size=5), max_size=6), st.integers(1, 3), st.integers(1, 3))
def test_a_shipment_sends_each_kept_rollout_once_from_where_it_lies(
    lengths: list[list[int]], replicas: int, data_parallel: int
) -> None:
    groups, rollout_id = [], 0
    for number, group in enumerate(lengths):
        handles = []
        for length in group:
            handles.append(
                RolloutHandle(rollout_id, number, number % replicas, 2, length, 0, 0, "stop", 0, reward=0.0)
            )
            rollout_id += 1
        groups.append(RolloutGroup(number, number, tuple(handles)))
    ordered = [handle for group in groups for handle in group.rollouts]
    gone = {position: "generator died" for position in range(0, len(ordered), 7)}
    shipment = plan_shipment(
        ordered, 1, data_parallel, microbatch_tokens=24, sources=range(replicas), gone=gone
    )
    handles = {handle.id: handle for handle in ordered}
    sent = []
    for rank in range(data_parallel):
        parts = [shipment.part(rank, replica) for replica in range(replicas)]
        assert sorted(sum(parts, [])) == sorted(shipment.order(rank))
        for replica, part in enumerate(parts):
            assert all(handles[shipment.rollout_ids[position]].replica == replica for position in part)
            sent += [shipment.rollout_ids[position] for position in part]
    assert sorted([*sent, *shipment.ticket.dropped]) == sorted(handles)
    assert shipment.ticket.rollouts == len(sent)
    assert shipment.ticket.response_tokens == sum(handles[i].response_tokens for i in sent)
