"""Which ways for weights there are, and why not the others."""

import pytest
import torch

from meshrl.weights import memfd
from meshrl.weights.errors import WeightsError
from meshrl.weights.layout import layout_of
from meshrl.weights.transport import available_transports, choose_transport, make_writer


def test_every_transport_says_whether_it_can_be_used_and_why() -> None:
    statuses = available_transports()
    assert [status.name for status in statuses] == ["memfd", "nixl", "rdma"]
    assert all(status.reason for status in statuses)
    assert not any(status.available for status in statuses[1:])


def test_memory_files_are_chosen_where_they_work() -> None:
    assert memfd.available()[0]
    assert choose_transport() == "memfd"


def test_without_any_transport_the_reasons_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memfd, "available", lambda: (False, "no memory files here"))
    with pytest.raises(
        WeightsError, match="no way for weights .* memfd: no memory files here; nixl: .*; rdma: "
    ):
        choose_transport()


def test_an_unknown_transport_is_refused_with_those_that_exist() -> None:
    with pytest.raises(WeightsError, match="no transport 'pigeon'; there is memfd"):
        make_writer("pigeon", layout_of({"w": torch.zeros(2)}))
