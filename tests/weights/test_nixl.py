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
from meshrl.weights.nixl import NixlHandle, NixlLink, NixlOffer, available
from meshrl.weights.wire import Piece, Stretch

if not available()[0]:
    pytest.skip(available()[1], allow_module_level=True)

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["torch", "meshrl.weights.transfer"])

SIZE = 1 << 20


def owner(pipe: Connection, size: int = SIZE) -> None:
    """Offers two slots: one of ones, one of twos."""
    slots = [torch.full((size,), value, dtype=torch.uint8) for value in (1, 2)]
    offer = NixlOffer(slots, [Stretch(0, size)])
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


def test_a_way_that_does_not_work_shows_when_the_link_is_made(
    offered: tuple[Any, Connection, NixlHandle, HostProcess],
) -> None:
    process, _, handle, named = offered
    process.kill()
    process.join(30)
    pieces = [Piece(0, torch.uint8, torch.zeros(8, dtype=torch.uint8))]
    with pytest.raises(
        ArenaUnreachable, match=f"learner process {process.pid} on .* cannot be reached by NIXL"
    ):
        NixlLink(handle, named, pieces)


def test_a_fetch_that_was_not_finished_does_not_disturb_the_next(
    offered: tuple[Any, Connection, NixlHandle, HostProcess],
) -> None:
    _, _, handle, process = offered
    landing = torch.zeros(SIZE, dtype=torch.uint8)
    link = NixlLink(handle, process, [Piece(0, torch.uint8, landing)])
    for slot in (0, 1, 1, 0, 1):
        link.begin(slot)
    fetch(link, 0)
    assert (landing == 1).all()


def test_many_pieces_arrive_bit_for_bit_in_place_strided_and_cast() -> None:
    torch.manual_seed(0)
    slots = [torch.randint(0, 256, (SIZE,), dtype=torch.uint8) for _ in range(2)]
    offers = [NixlOffer([slot], [Stretch(0, SIZE)]) for slot in slots]  # two of one process
    for offer, slot in zip(offers, slots, strict=True):
        values = slot.view(torch.float32).view(-1, 64)
        values.copy_(torch.randn(values.shape))
        wide = torch.zeros(1000, 8)
        landings = [torch.zeros(4, 64), wide[:, 3:7], torch.zeros(64, dtype=torch.bfloat16), torch.zeros(0)]
        landings += list(torch.zeros(300, 7).unbind(0))
        starts = [0, 1024, 20000, 30000, *range(40000, 40000 + 300 * 64, 64)]
        pieces = [Piece(*piece) for piece in zip(starts, [torch.float32] * 304, landings, strict=True)]
        link = NixlLink(offer.handle, HostProcess.current(), pieces)
        fetch(link, 0)
        for piece in pieces:
            sent = slot[piece.start : piece.start + piece.bytes].view(torch.float32)
            assert torch.equal(piece.landing, sent.view(piece.landing.shape).to(piece.landing.dtype))
        assert not wide[:, :3].any() and not wide[:, 7:].any()
        link.close()
        offer.close()
        offer.close()


def test_a_late_owner_ends_the_wait_and_neither_its_bytes_nor_giving_up_do_harm() -> None:
    """Over TCP, where the owner itself sends: in a process that is told so before it loads UCX."""
    ended = subprocess.run(
        [sys.executable, "-c", "import test_nixl; test_nixl.outlast_a_late_owner()"],
        env={
            **os.environ,
            "UCX_TLS": "tcp",
            "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path]),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "done", "")


def outlast_a_late_owner() -> None:
    here, there = processes.Pipe()
    process = processes.Process(target=owner, args=(there, 1 << 26), daemon=True)
    process.start()
    assert here.poll(120) and process.pid
    handle, named = here.recv()
    landings = [torch.zeros(1 << 26, dtype=torch.uint8) for _ in range(2)]
    links = [NixlLink(handle, named, [Piece(0, torch.uint8, landing)]) for landing in landings]
    os.kill(process.pid, signal.SIGSTOP)
    try:
        for link in links:
            link.begin(1)
            with pytest.raises(TransferFailed, match=f"weights of learner {named} by NIXL: not in time"):
                link.finish(time.monotonic() + 0.1, lambda: None)
        links[0].begin(0)
        with pytest.raises(RuntimeError, match="gone"):
            links[0].finish(time.monotonic() + 30, owner_is_gone)
        links.pop().close()
    finally:
        os.kill(process.pid, signal.SIGCONT)
    fetch(links[0], 0)
    assert (landings[0] == 1).all()
    here.send(7)  # the owner answers: it did not go with the link that gave it up
    assert here.poll(30) and here.recv() == "filled"
    fetch(links[0], 0)
    assert (landings[0] == 7).all()
    here.send(None)
    process.join(30)
    print("done")


def owner_is_gone() -> None:
    raise RuntimeError("gone")


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
    assert not pipe.poll(1.0)  # a second in which nothing happens
    assert own() - before < 0.1 and used(process.pid) - theirs < 0.1


def test_an_interpreter_ends_in_order_with_links_and_offers_open() -> None:
    code = (
        "import torch; from meshrl.weights.nixl import *; from meshrl.weights.wire import *;"
        "slot = torch.ones(64, dtype=torch.uint8); offer = NixlOffer([slot], [Stretch(0, 64)]);"
        "link = NixlLink(offer.handle, HostProcess.current(), [Piece(0, torch.uint8, torch.zeros_like(slot))]);"
        "link.begin(0); link.finish(time.monotonic() + 30, lambda: None); print('done')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout.strip()) == (0, "done"), ended.stderr
