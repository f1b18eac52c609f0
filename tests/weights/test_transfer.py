"""Publish and pull: bit for bit, whole or not at all, and a named error for each thing that can go wrong."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from meshrl.weights import memfd, transfer
from meshrl.weights.errors import (
    ArenaBusy,
    ArenaUnreachable,
    DigestMismatch,
    LayoutError,
    VersionUnavailable,
    WeightsError,
)
from meshrl.weights.layout import Box, Layout
from meshrl.weights.memfd import MemfdWriter
from meshrl.weights.transfer import Publisher, Subscriber

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["torch", "meshrl.weights.transfer"])


def awkward() -> dict[str, Tensor]:
    """Every kind of tensor that a broadcast must not harm (numerics case 20)."""
    tied = torch.randn(6, 4)
    return {
        "plain": torch.randn(33, 7),
        "transposed": torch.randn(5, 9).T,
        "strided": torch.randn(8, 12)[::2, 1::3],
        "expanded": torch.randn(1, 3).expand(4, 3),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "bfloat16": torch.randn(3, 5).bfloat16(),
        "integers": torch.randint(-9, 9, (7,)),
        "flags": torch.tensor([True, False, True]),
        "embedding": tied,
        "output": tied,
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-42]),
        "three": torch.randn(2, 3, 4).permute(2, 0, 1),
    }


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(arrived: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
    assert list(arrived) == list(sent)
    for name, tensor in sent.items():
        assert (arrived[name].shape, arrived[name].dtype) == (tensor.shape, tensor.dtype), name
        assert bits(arrived[name]) == bits(tensor), name


def test_every_kind_of_tensor_arrives_bit_for_bit() -> None:
    named = awkward()
    publisher = Publisher(named)
    subscriber = Subscriber([publisher.source])
    for version in (1, 2, 3):
        named["plain"].mul_(-1.5)
        publisher.publish(version, named)
        arrived, report = subscriber.pull(version)
        assert_same(arrived, named)
        assert (
            report.bytes == sum(t.numel() * t.itemsize for t in named.values()) and report.version == version
        )


def test_published_weights_do_not_follow_the_parameters() -> None:
    named = {"w": torch.ones(5)}
    publisher = Publisher(named)
    subscriber = Subscriber([publisher.source])
    publisher.publish(1, named)
    named["w"].zero_()
    assert subscriber.pull(1)[0]["w"].tolist() == [1.0] * 5


def test_a_version_stays_while_the_next_is_published_and_goes_with_the_one_after() -> None:
    named = {"w": torch.zeros(3)}
    publisher = Publisher(named)
    subscriber = Subscriber([publisher.source])
    for version in (1, 2):
        publisher.publish(version, {"w": torch.full((3,), float(version))})
    assert subscriber.pull(1)[0]["w"].tolist() == [1.0] * 3
    assert subscriber.pull(2)[0]["w"].tolist() == [2.0] * 3
    publisher.publish(7, named)  # versions may be skipped
    with pytest.raises(VersionUnavailable, match="does not hold version 1 but version 2 and version 7"):
        subscriber.pull(1)


def test_a_version_that_was_never_published_is_unavailable() -> None:
    publisher = Publisher({"w": torch.zeros(3)})
    subscriber = Subscriber([publisher.source])
    with pytest.raises(VersionUnavailable, match="does not hold version 1 but nothing yet"):
        subscriber.pull(1)
    with pytest.raises(VersionUnavailable):
        subscriber.pull(-1)


def test_versions_only_go_up() -> None:
    publisher = Publisher({"w": torch.zeros(3)})
    publisher.publish(4, {"w": torch.zeros(3)})
    for version in (4, 3, -1):
        with pytest.raises(VersionUnavailable, match="versions go up"):
            publisher.publish(version, {"w": torch.zeros(3)})


@pytest.mark.parametrize("box", ["plain", "strided", "bfloat16"])
def test_a_flipped_bit_is_found(box: str) -> None:
    named = awkward()
    publisher = Publisher(named)
    subscriber = Subscriber([publisher.source])
    publisher.publish(1, named)
    flip(publisher, list(named).index(box))
    with pytest.raises(DigestMismatch, match=f"{box} of version 1 arrived with digest"):
        subscriber.pull(1)
    publisher.publish(2, named)
    assert_same(subscriber.pull(2)[0], named)


def test_a_flipped_bit_is_found_where_a_box_is_taken_in_part() -> None:
    named = {"w": torch.randn(4, 6)}
    publisher = Publisher(named)

    def left_columns(source: Layout) -> tuple[Layout, int]:
        return Layout(source.parameters, ((Box("w", (0, 0), (4, 3)),),)), 0

    subscriber = Subscriber([publisher.source], left_columns)
    publisher.publish(1, named)
    arrived, report = subscriber.pull(1)
    assert torch.equal(arrived["w"], named["w"][:, :3]) and report.bytes == 4 * 3 * 4
    flip(publisher, 0)
    with pytest.raises(DigestMismatch):
        subscriber.pull(1)


def test_a_torn_manifest_is_refused() -> None:
    named = {"w": torch.randn(4)}
    publisher = Publisher(named)
    subscriber = Subscriber([publisher.source])
    publisher.publish(1, named)
    half = next(half for half in halves(publisher) if half.version == 1)
    half._digests[0] ^= 1
    with pytest.raises(DigestMismatch, match="the manifest of version 1 is damaged"):
        subscriber.pull(1)


def test_a_failed_publish_leaves_the_version_before_it_whole() -> None:
    publisher = Publisher({"a": torch.ones(2), "b": torch.ones(2)})
    subscriber = Subscriber([publisher.source])
    publisher.publish(1, {"a": torch.ones(2), "b": torch.ones(2)})
    with pytest.raises(LayoutError, match="b was .* and is .*connect again"):
        publisher.publish(2, {"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(LayoutError, match="c was absent"):
        publisher.publish(2, {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)})
    with pytest.raises(VersionUnavailable):
        subscriber.pull(2)
    assert subscriber.pull(1)[0]["b"].tolist() == [1.0, 1.0]


def test_a_version_that_is_being_read_is_not_overwritten() -> None:
    named = {"w": torch.zeros(3)}
    publisher = Publisher(named)
    subscriber = Subscriber([publisher.source])
    publisher.publish(1, named)
    reader = subscriber._readers[0]
    with reader.reading(1, 1.0):
        publisher.publish(2, named)  # the other half
        with pytest.raises(
            ArenaBusy, match=f"cannot publish version 3: .* process {os.getpid()} still read version 1"
        ):
            publisher.publish(3, named, deadline_seconds=0.01)
    publisher.publish(3, named)
    assert subscriber.pull(3)[1].version == 3


def test_a_publisher_waits_for_a_reader_that_lets_go_in_time() -> None:
    named = {"w": torch.zeros(3)}
    publisher = Publisher(named)
    subscriber = Subscriber([publisher.source])
    publisher.publish(1, named)
    publisher.publish(2, named)
    with subscriber._readers[0].reading(1, 1.0):
        thread = threading.Thread(target=publisher.publish, args=(3, named))
        thread.start()
    thread.join(30)
    assert subscriber.pull(3)[1].version == 3


def test_weights_that_do_not_fit_into_memory_are_refused_before_memory_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        WeightsError, match=r"no memory for the weights: .* needs \d+\.\d GiB, .* GiB are free"
    ):
        Publisher({"w": torch.empty(10**13, device="meta")})
    monkeypatch.setattr(memfd, "available_memory", lambda: None)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(WeightsError, match="No space left"):
        Publisher({"w": torch.zeros(3)})


def test_another_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Publisher({"w": torch.zeros(3)}).source
    owner = replace(source.address.owner, host="elsewhere", boot="another")
    with pytest.raises(ArenaUnreachable, match="within one host, but the learner is process .* on elsewhere"):
        Subscriber([replace(source, address=replace(source.address, owner=owner))])


def test_another_arena_at_the_address_is_noticed() -> None:
    publisher, other = Publisher({"w": torch.zeros(3)}), Publisher({"w": torch.zeros(3)})
    mistaken = replace(other.source.address, token=publisher.source.address.token)
    with pytest.raises(ArenaUnreachable, match="holds another arena by now"):
        Subscriber([replace(publisher.source, address=mistaken)])
    larger = Publisher({"w": torch.zeros(3000)})
    with pytest.raises(ArenaUnreachable, match="halves of .* bytes, its layout needs"):
        Subscriber([replace(publisher.source, address=larger.source.address)])


def test_an_arena_goes_with_its_publisher() -> None:
    before = len(os.listdir("/proc/self/fd"))
    publisher = Publisher({"w": torch.zeros(3)})
    subscriber = Subscriber([publisher.source])
    assert len(os.listdir("/proc/self/fd")) > before
    del publisher, subscriber
    assert len(os.listdir("/proc/self/fd")) == before


# With processes of their own.


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[Any, Connection]]]:
    """Runs a function with one end of a pipe in a process of its own; returns it and the other end."""
    running = []

    def start(function: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
        here, there = processes.Pipe()
        process = processes.Process(target=function, args=(there, *args), daemon=True)
        process.start()
        there.close()
        running.append(process)
        return process, here

    yield start
    for process in running:
        process.kill()
        process.join(30)


def learner(pipe: Connection, versions: int, then_break_off: bool) -> None:
    publisher = Publisher({"a": torch.zeros(4), "b": torch.zeros(4)})
    for version in range(1, versions + 1):
        publisher.publish(version, {name: torch.full((4,), float(version)) for name in "ab"})
    if then_break_off:
        half = min(halves(publisher), key=lambda half: half.version)
        half.write(versions + 1, HalfSent(pipe, publisher.source))
    pipe.send(publisher.source)
    pipe.recv()


class HalfSent(dict[str, Tensor]):
    """Weights of which only `a` can be copied: at `b` the process stands still."""

    def __init__(self, pipe: Connection, source: transfer.WeightSource) -> None:
        super().__init__(a=torch.full((4,), 9.0))
        self.pipe, self.source = pipe, source

    def __missing__(self, name: str) -> Tensor:
        self.pipe.send(self.source)
        self.pipe.recv()
        raise AssertionError("was to be killed here")


def reader(pipe: Connection, source: transfer.WeightSource) -> None:
    subscriber = Subscriber([source])
    with subscriber._readers[0].reading(1, 30.0):
        pipe.send("reading")
        pipe.recv()


def foreigner(pipe: Connection, source: transfer.WeightSource) -> None:
    os.setgid(65534)
    os.setuid(65534)
    try:
        Subscriber([source])
    except Exception as error:
        pipe.send((type(error), str(error)))


def test_weights_cross_processes(start: Callable[..., tuple[Any, Connection]]) -> None:
    _, pipe = start(learner, 2, False)
    arrived, _ = Subscriber([receive(pipe)]).pull(2)
    assert arrived["a"].tolist() == arrived["b"].tolist() == [2.0] * 4


def test_a_reader_killed_while_it_reads_does_not_block_the_learner(
    start: Callable[..., tuple[Any, Connection]],
) -> None:
    named = {"w": torch.zeros(4)}
    publisher = Publisher(named)
    publisher.publish(1, named)
    publisher.publish(2, named)
    process, pipe = start(reader, publisher.source)
    assert receive(pipe) == "reading"
    with pytest.raises(ArenaBusy, match=f"process {process.pid} still read version 1"):
        publisher.publish(3, named, deadline_seconds=0.01)
    process.kill()
    process.join(30)
    publisher.publish(3, named)


def test_a_learner_killed_while_it_publishes_leaves_the_version_before_and_no_mixture(
    start: Callable[..., tuple[Any, Connection]],
) -> None:
    process, pipe = start(learner, 2, True)
    subscriber = Subscriber([receive(pipe)])
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    with pytest.raises(VersionUnavailable, match="does not hold version 3 but version 2"):
        subscriber.pull(3)
    arrived, _ = subscriber.pull(2)  # mapped memory outlives its owner
    assert arrived["a"].tolist() == arrived["b"].tolist() == [2.0] * 4


def test_a_dead_learner_is_named(start: Callable[..., tuple[Any, Connection]]) -> None:
    process, pipe = start(learner, 1, False)
    source = receive(pipe)
    process.kill()
    process.join(30)
    with pytest.raises(ArenaUnreachable, match=f"learner process {process.pid} on .* is dead"):
        Subscriber([source])


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_another_user_is_told_why_it_may_not_read(start: Callable[..., tuple[Any, Connection]]) -> None:
    publisher = Publisher({"w": torch.zeros(4)})
    _, pipe = start(foreigner, publisher.source)
    kind, message = receive(pipe)
    assert kind is ArenaUnreachable and "to be the same user's" in message and "65534" in message


def receive(pipe: Connection) -> Any:
    assert pipe.poll(120), "the other process does not answer"
    return pipe.recv()


def halves(publisher: Publisher) -> list[Any]:
    writer = publisher._writer
    assert isinstance(writer, MemfdWriter)
    return writer._halves


def flip(publisher: Publisher, box: int) -> None:
    """Change one bit of a published box in the arena."""
    half = max(halves(publisher), key=lambda half: half.version)
    half.boxes[box].reshape(-1).view(torch.uint8)[1] ^= 4


def refuse(*_: Any) -> None:
    raise OSError(28, "No space left on device")
