"""Which ways for weights there are, in which order, and why not the others."""

import subprocess
import sys

import pytest
import torch
from weight_ends import publisher

from meshrl.weights import transport
from meshrl.weights.errors import TransportUnavailable
from meshrl.weights.transport import available_transports, candidates


def test_every_transport_says_whether_it_can_be_used_and_why() -> None:
    statuses = available_transports()
    assert [status.name for status in statuses] == ["memfd", "nixl", "rdma", "tcp"]
    assert all(status.reason for status in statuses)
    assert statuses[0].available and statuses[-1].available


def test_one_that_is_asked_for_is_the_only_one_tried() -> None:
    assert candidates("rdma") == ("rdma",)
    assert candidates("auto")[0] == "memfd" and candidates("auto")[-1] == "tcp"


def test_one_that_does_not_work_here_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(transport._AVAILABLE, "memfd", lambda: (False, "no memory files here"))
    with pytest.raises(TransportUnavailable, match="memfd: no memory files here"):
        publisher({"w": torch.zeros(2)})


def test_no_library_of_a_transport_is_imported_before_it_is_used() -> None:
    code = (
        "import sys, meshrl.weights.transport;"
        "sys.exit(any(name.split('.')[0] in ('nixl', 'nixl_cu12', 'monarch') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
