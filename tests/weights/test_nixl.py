"""NIXL: an owner that dies is named in time, an idle agent costs nothing, what is closed is gone."""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from meshrl.weights.errors import ArenaUnreachable, TransferFailed
from meshrl.weights.host import HostProcess
from meshrl.weights.nixl import NixlHandle, NixlLink, NixlOffer
from meshrl.weights.wire import Piece, Stretch

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["torch", "meshrl.weights.transfer"])

SIZE = 1 << 20


def owner(pipe: Connection) -> None:
    """Offers two slots: one of ones, one of twos."""
    slots = [torch.full((SIZE,), value, dtype=torch.uint8) for value in (1, 2)]
    offer = NixlOffer(slots, [Stretch(0, SIZE)])
    pipe.send((offer.handle, HostProcess.current()))
    while (value := pipe.recv()) is not None:
        slots[0].fill_(value)
        pipe.send("filled")


@pytest.fixture
def offered() -> Iterator[tuple[Any, Connection, NixlHandle, HostProcess]]:
    here, there = processes.Pipe()
    process = processes.Process(target=owner, args=(there,), daemon=True)
    process.start()
    there.close()
    assert here.poll(120)
    yield process, here, *here.recv()
    process.kill()
    process.join(30)


def fetch(link: NixlLink, slot: int, seconds: float = 30) -> None:
    link.begin(slot)
    link.finish(time.monotonic() + seconds, lambda: None)


def test_slots_are_read_as_they_are_at_each_fetch(
    offered: tuple[Any, Connection, NixlHandle, HostProcess],
) -> None:
    _, pipe, handle, process = offered
    landing = torch.zeros(8, 100)
    pieces = [Piece(0, torch.float32, landing[:4]), Piece(4096, torch.float32, landing[4:, 10:20])]
    link = NixlLink(handle, process, pieces)
    for slot, value in ((0, 1), (1, 2), (0, 1)):
        fetch(link, slot)
        expected = torch.full((4,), value, dtype=torch.uint8).view(torch.float32)
        assert torch.equal(landing[:4], expected.expand(4, 100))
        assert torch.equal(landing[4:, 10:20], expected.expand(4, 10)) and not landing[4:, 20:].any()
    pipe.send(7)
    assert pipe.recv() == "filled"
    fetch(link, 0)
    assert landing.view(torch.uint8)[0, 0] == 7
    link.close()
    link.close()


def test_two_links_to_one_owner_do_not_end_each_other(
    offered: tuple[Any, Connection, NixlHandle, HostProcess],
) -> None:
    _, _, handle, process = offered
    landings = [torch.zeros(100, dtype=torch.uint8) for _ in range(2)]
    links = [NixlLink(handle, process, [Piece(0, torch.uint8, landing)]) for landing in landings]
    links[0].close()
    fetch(links[1], 1)
    assert (landings[1] == 2).all() and not landings[0].any()


def test_an_owner_that_was_killed_is_named_before_the_deadline(
    offered: tuple[Any, Connection, NixlHandle, HostProcess],
) -> None:
    process, _, handle, named = offered
    landing = torch.zeros(SIZE, dtype=torch.uint8)
    link = NixlLink(handle, named, [Piece(0, torch.uint8, landing)])
    fetch(link, 0)
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    # UCX reads shared memory of a dead process without noticing; then it is the lease that tells.
    try:
        fetch(link, 1, seconds=2)
    except TransferFailed as error:
        assert f"learner process {process.pid} on " in str(error)
    with pytest.raises((ArenaUnreachable, TransferFailed), match=f"learner process {process.pid} on "):
        fetch(NixlLink(handle, named, [Piece(0, torch.uint8, landing)]), 0, seconds=2)


def test_a_lost_owner_ends_the_wait_and_the_link_can_be_used_again(
    offered: tuple[Any, Connection, NixlHandle, HostProcess],
) -> None:
    _, _, handle, process = offered
    landing = torch.zeros(SIZE, dtype=torch.uint8)
    link = NixlLink(handle, process, [Piece(0, torch.uint8, landing)])
    link.begin(0)
    with pytest.raises(TransferFailed, match=f"learner {process} by NIXL: not in time"):
        link._state = "PROC"
        link.finish(time.monotonic() - 1, lambda: None)
    fetch(link, 1)
    assert (landing == 2).all()


def test_an_idle_agent_does_not_spin(offered: tuple[Any, Connection, NixlHandle, HostProcess]) -> None:
    _, pipe, handle, process = offered
    link = NixlLink(handle, process, [Piece(0, torch.uint8, torch.zeros(64, dtype=torch.uint8))])
    fetch(link, 0)

    def used(pid: int) -> float:
        fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def own() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    before, theirs = own(), used(process.pid)
    assert not pipe.poll(2.0)  # two seconds in which nothing happens
    assert own() - before < 0.4 and used(process.pid) - theirs < 0.4


def test_an_interpreter_ends_in_order_with_links_and_offers_open() -> None:
    code = (
        "import torch; from meshrl.weights.nixl import *; from meshrl.weights.wire import *;"
        "slot = torch.ones(64, dtype=torch.uint8); offer = NixlOffer([slot], [Stretch(0, 64)]);"
        "link = NixlLink(offer.handle, HostProcess.current(), [Piece(0, torch.uint8, torch.zeros_like(slot))]);"
        "link.begin(0); link.finish(time.monotonic() + 30, lambda: None); print('done')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout.strip()) == (0, "done"), ended.stderr
