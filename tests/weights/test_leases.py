"""Leases: a version that is read is not replaced, one that is not held is not given, a reader that goes gives back."""

import socket
import threading
import time
from multiprocessing.connection import Connection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.weights.errors import ArenaBusy, ArenaUnreachable, VersionUnavailable
from meshrl.weights.host import HostProcess, ip_addresses
from meshrl.weights.leases import Leases
from meshrl.weights.service import Caller, ServiceAddress, SlotService, service_hosts

SECRET = b"secret of sixteen"


@given(
    st.integers(2, 4),
    st.lists(st.tuples(st.sampled_from(["publish", "lease", "release"]), st.integers(0, 3))),
)
def test_a_slot_in_use_keeps_its_version_and_the_newest_are_kept(
    slots: int, moves: list[tuple[str, int]]
) -> None:
    leases = Leases(slots)
    published: list[int] = []
    held: list[tuple[int, int]] = []
    for move, number in moves:
        if move == "publish":
            slot = leases.oldest
            if leases.readers(slot):
                continue
            leases.withdraw(slot)
            published.append(len(published) + 1)
            leases.commit(slot, published[-1])
        elif move == "lease" and published:
            version = published[-1] - number
            if version > 0 and version in published[-slots:]:
                held.append((leases.lease(version, "reader"), version))
            else:
                with pytest.raises(VersionUnavailable):
                    leases.lease(version, "reader")
        elif move == "release" and held:
            leases.release(held.pop(number % len(held))[0], "reader")
        for slot, version in held:
            assert leases.version(slot) == version and leases.readers(slot) == ["reader"]
        assert {leases.version(slot) for slot in range(slots)} - {None} == set(published[-slots:])


def service(answer: object = None) -> tuple[SlotService, ServiceAddress]:
    made = SlotService(2, lambda *_: answer, secret=SECRET, local=True)
    return made, ServiceAddress(HostProcess.current(), ("127.0.0.1",), made.port, SECRET)


def lease(caller: Caller, version: int) -> tuple[int, object]:
    caller.send("lease", version)
    return caller.receive(time.monotonic() + 30)


def test_a_lease_brings_the_manifest_and_keeps_the_slot_until_it_is_given_back() -> None:
    slots, address = service()
    slots.commit(slots.begin(1, 1.0), 1, "first")
    caller = Caller(address)
    slot, manifest = lease(caller, 1)
    assert manifest == "first"
    slots.commit(slots.begin(2, 1.0), 2, "second")
    with pytest.raises(
        ArenaBusy, match=f"cannot publish version 3: .* {HostProcess.current()} still read version 1"
    ):
        slots.begin(3, 0.01)
    caller.send("release", slot)
    caller.receive(time.monotonic() + 30)
    assert slots.begin(3, 0.01) == slot


def test_a_reader_that_hangs_up_gives_back_what_it_leased() -> None:
    slots, address = service()
    slots.commit(slots.begin(1, 1.0), 1, None)
    slots.commit(slots.begin(2, 1.0), 2, None)
    caller = Caller(address)
    lease(caller, 1)
    caller.close()
    slots.begin(3, 30.0)


def test_a_publisher_waits_for_a_reader_that_gives_back_in_time() -> None:
    slots, address = service()
    slots.commit(slots.begin(1, 1.0), 1, None)
    slots.commit(slots.begin(2, 1.0), 2, None)
    caller = Caller(address)
    slot, _ = lease(caller, 1)
    begun: list[int] = []
    thread = threading.Thread(target=lambda: begun.append(slots.begin(3, 30.0)))
    thread.start()
    caller.send("release", slot)
    caller.receive(time.monotonic() + 30)
    thread.join(30)
    assert begun == [slot]


def test_a_version_that_is_not_held_is_told_with_those_that_are() -> None:
    slots, address = service()
    caller = Caller(address)
    with pytest.raises(
        VersionUnavailable, match=r"learner process \d+ .* does not hold version 1 but nothing yet"
    ):
        lease(caller, 1)
    slots.commit(slots.begin(4, 1.0), 4, None)
    slots.commit(slots.begin(6, 1.0), 6, None)
    with pytest.raises(VersionUnavailable, match="version 5 but version 4 and version 6"):
        lease(caller, 5)
    slots.begin(7, 1.0)  # being written: 4 is gone, 7 not there yet
    with pytest.raises(VersionUnavailable, match="version 7 but version 6"):
        lease(caller, 7)


def test_versions_only_go_up() -> None:
    slots, _ = service()
    slots.commit(slots.begin(4, 1.0), 4, None)
    for version in (4, 3, -1):
        with pytest.raises(VersionUnavailable, match="versions go up"):
            slots.begin(version, 1.0)


def test_a_caller_without_the_secret_is_not_served() -> None:
    slots, address = service()
    slots.commit(slots.begin(1, 1.0), 1, None)
    mistaken = ServiceAddress(address.owner, address.hosts, address.port, b"another")
    with pytest.raises(ArenaUnreachable, match="is dead or cannot be reached"):
        Caller(mistaken)
    assert lease(Caller(address), 1)[1] is None


def test_a_service_that_is_closed_cannot_be_called() -> None:
    slots, address = service()
    slots.close()
    with pytest.raises(ArenaUnreachable, match=r"learner process \d+ .*127.0.0.1:\d+: .*refused"):
        Caller(address)


def test_addresses_that_do_not_answer_are_passed_by() -> None:
    slots, address = service()
    slots.commit(slots.begin(1, 1.0), 1, "here")
    several = ServiceAddress(address.owner, ("127.0.0.77", "127.0.0.1"), address.port, SECRET)
    assert lease(Caller(several), 1)[1] == "here"


def test_silence_ends_with_the_deadline() -> None:
    slots, address = service()
    caller = Caller(address)
    with pytest.raises(ArenaUnreachable, match="does not answer in time"):
        caller.receive(time.monotonic() + 0.01)


def test_silence_within_a_message_ends_with_the_deadline_too() -> None:
    here, there = socket.socketpair()
    caller = Caller.__new__(Caller)
    caller.owner, caller._connection = HostProcess.current(), Connection(here.detach())
    there.send((1000).to_bytes(4, "big") + b"only the beginning")
    with pytest.raises(ArenaUnreachable, match=r"learner process \d+ .* does not answer in time"):
        caller.receive_into(memoryview(bytearray(1000)), time.monotonic() + 0.05)
    there.close()


def test_other_hosts_are_listened_to_only_where_a_reader_is_on_one() -> None:
    here = HostProcess.current()
    elsewhere = HostProcess("elsewhere", "another boot", here.namespaces, 1)
    assert service_hosts([here, here], here, ["192.0.2.7"]) == ("127.0.0.1",)
    assert service_hosts([here, elsewhere], here, ["192.0.2.7", "127.0.0.1"]) == ("192.0.2.7", "127.0.0.1")
    assert "127.0.0.1" in ip_addresses()
