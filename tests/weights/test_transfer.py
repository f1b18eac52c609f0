"""Publish and pull: bit for bit, whole or not at all, and a named error for each thing that can go wrong."""

import errno
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor
from weight_ends import Offered, publisher

from meshrl.errors import UserError
from meshrl.weights import memfd
from meshrl.weights.arena import Arena, WeightsConfig
from meshrl.weights.errors import (
    ArenaBusy,
    ArenaUnreachable,
    DigestMismatch,
    LayoutError,
    VersionUnavailable,
    WeightsError,
)
from meshrl.weights.layout import Layout

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["torch", "meshrl.weights.transfer"])

ALWAYS = WeightsConfig(digests="always")


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


@pytest.mark.parametrize("transport", ["memfd", "nixl", "tcp"])
@pytest.mark.parametrize("digests", ["off", "sampled", "always"])
def test_every_kind_of_tensor_arrives_bit_for_bit(transport: str, digests: Any) -> None:
    named = awkward()
    arena, offered = publisher(named, transport=transport, config=WeightsConfig(digests=digests))
    subscriber = offered.subscriber()
    for version in (1, 2, 3):
        named["plain"].mul_(-1.5)
        arena.publish(version, named)
        arrived, report = subscriber.pull(version)
        assert_same(arrived, named)
        needed = sum(t.numel() * t.itemsize for t in named.values())
        assert (report.bytes, report.version, report.transport) == (needed, version, transport)


@pytest.mark.parametrize("transport", ["memfd", "nixl", "tcp"])
def test_a_fused_half_of_each_arrives_cast_and_in_place(transport: str) -> None:
    named = {"q": torch.randn(8, 6), "k": torch.randn(4, 6), "v": torch.randn(4, 6), "norm": torch.randn(6)}

    def two_ranks(source: Layout) -> Layout:
        cut = source.cast(torch.bfloat16).split({"q": 0, "k": 0, "v": 0}, ranks=2)
        return cut.fused("qkv", ["q", "k", "v"]).renamed({"norm": "model.norm"})

    arena, offered = publisher(named, two_ranks, transport=transport)
    arena.publish(1, named)
    for rank in (0, 1):
        arrived, report = offered.subscriber(rank).pull(1)
        pieces = [named[name].chunk(2)[rank] for name in "qkv"]
        assert_same(arrived, {"qkv": torch.cat(pieces).bfloat16(), "model.norm": named["norm"].bfloat16()})
        assert report.bytes == 2 * (8 * 6 + 6)


def test_a_target_of_a_larger_dtype_is_cast_on_arrival() -> None:
    named = {"w": torch.randn(5, 3).bfloat16()}
    arena, offered = publisher(named, lambda source: source.cast(torch.float32).whole(), config=ALWAYS)
    arena.publish(1, named)
    arrived, report = offered.subscriber().pull(1)
    assert torch.equal(arrived["w"], named["w"].float()) and report.bytes == 5 * 3 * 2


@pytest.mark.parametrize("transport", ["memfd", "nixl", "tcp"])
def test_a_nan_arrives_by_a_cast_too(transport: str) -> None:
    patterns = torch.tensor([0x7FC0, 0x7F81, 0x7FFF, -64, -1, 0x3F80], dtype=torch.int16)
    named = {"w": patterns.view(torch.bfloat16)}
    arena, offered = publisher(
        named, lambda source: source.cast(torch.float32).whole(), transport=transport, config=ALWAYS
    )
    arena.publish(1, named)
    arrived = offered.subscriber().pull(1)[0]["w"]
    assert arrived.isnan().tolist() == [True] * 5 + [False] and arrived[5] == 1


def test_two_publishes_at_once_follow_one_another() -> None:
    class Slow(dict[str, Tensor]):
        """Stands still at `b` until it is told to go on."""

        reached, go_on = threading.Event(), threading.Event()

        def __getitem__(self, name: str) -> Tensor:
            if name == "b":
                self.reached.set()
                assert self.go_on.wait(60)
            return super().__getitem__(name)

    def weights(value: float) -> dict[str, Tensor]:
        return {name: torch.full((4,), value) for name in "abc"}

    arena, offered = publisher(weights(0), config=WeightsConfig(keep_versions=2))
    subscriber = offered.subscriber()
    arena.publish(1, weights(1))
    slow = threading.Thread(target=arena.publish, args=(2, Slow(weights(2))))
    slow.start()
    assert Slow.reached.wait(60)
    with pytest.raises(ArenaBusy, match="cannot publish version 3: the one before is still being copied"):
        arena.publish(3, weights(3), deadline_seconds=0.01)
    following = threading.Thread(target=arena.publish, args=(3, weights(3)))
    following.start()
    Slow.go_on.set()
    slow.join(60)
    following.join(60)
    for version in (1, 2, 3):
        arrived, _ = subscriber.pull(version)
        assert all(tensor.tolist() == [version] * 4 for tensor in arrived.values())


def test_published_weights_do_not_follow_the_parameters() -> None:
    named = {"w": torch.ones(5)}
    arena, offered = publisher(named)
    arena.publish(1, named)
    named["w"].zero_()
    assert offered.subscriber().pull(1)[0]["w"].tolist() == [1.0] * 5


@pytest.mark.parametrize("keep", [1, 3])
def test_so_many_versions_are_kept_as_were_asked_for_and_one_goes_back(keep: int) -> None:
    arena, offered = publisher({"w": torch.zeros(3)}, config=WeightsConfig(keep_versions=keep))
    subscriber = offered.subscriber()
    for version in (1, 2, 3, 4, 9):  # versions may be skipped
        arena.publish(version, {"w": torch.full((3,), float(version))})
    kept = [1, 2, 3, 4, 9][-1 - keep :]
    for version in reversed(kept):
        assert subscriber.pull(version)[0]["w"].tolist() == [version] * 3
    with pytest.raises(VersionUnavailable, match=f"does not hold version 1 but version {kept[0]} and"):
        subscriber.pull(1)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UserError, match="keep_versions is 0"):
        WeightsConfig(keep_versions=0)
    for seconds in (0, -1, float("nan"), float("inf")):
        with pytest.raises(UserError, match="deadline_seconds is"):
            WeightsConfig(deadline_seconds=seconds)
    wrong: Any = "pigeon"
    with pytest.raises(UserError, match="transport is 'pigeon': one of auto, memfd"):
        WeightsConfig(transport=wrong)
    with pytest.raises(UserError, match="digests is 'pigeon': one of always"):
        WeightsConfig(digests=wrong)


@pytest.mark.parametrize("box", ["plain", "strided", "bfloat16"])
def test_a_flipped_bit_is_found(box: str) -> None:
    named = awkward()
    arena, offered = publisher(named, config=ALWAYS)
    subscriber = offered.subscriber()
    arena.publish(1, named)
    flip(arena, box)
    with pytest.raises(
        DigestMismatch, match=f"{box} of version 1 from learner process {os.getpid()} .* with digest"
    ):
        subscriber.pull(1)
    arena.publish(2, named)
    assert_same(subscriber.pull(2)[0], named)


def test_a_flipped_bit_is_found_where_a_box_is_taken_in_part_and_cast_on_arrival() -> None:
    named = {"w": torch.randn(4, 6).bfloat16()}

    def left_columns(source: Layout) -> Layout:
        return source.cast(torch.float32).split({"w": 1}, ranks=2).of_rank(0)

    arena, offered = publisher(named, left_columns, config=ALWAYS)
    subscriber = offered.subscriber()
    arena.publish(1, named)
    arrived, report = subscriber.pull(1)
    assert torch.equal(arrived["w"], named["w"][:, :3].float()) and report.bytes == 4 * 3 * 2
    flip(arena, "w")
    with pytest.raises(DigestMismatch):
        subscriber.pull(1)


def test_sampling_finds_weights_of_another_version() -> None:
    named = {"w": torch.randn(512, 300)}
    arena, offered = publisher(named)
    arena.publish(1, named)
    arena.views[0][0].copy_(torch.randn(512, 300))
    with pytest.raises(DigestMismatch):
        offered.subscriber().pull(1)


def test_a_manifest_with_a_wrong_digest_is_refused() -> None:
    named = {"w": torch.randn(4)}
    arena, offered = publisher(named)
    arena.publish(1, named)
    manifest = arena.service._manifests[0]
    arena.service._manifests[0] = replace(manifest, values=tuple(v ^ 1 for v in manifest.values))
    with pytest.raises(DigestMismatch, match="published was"):
        offered.subscriber().pull(1)
    arena.service._manifests[0] = replace(manifest, values=manifest.values[1:])
    with pytest.raises(DigestMismatch, match="has 1 digests of version 1, not 2"):
        offered.subscriber().pull(1)


def test_a_manifest_of_another_version_or_plan_is_refused() -> None:
    named = {"w": torch.randn(4)}
    arena, offered = publisher(named)
    arena.publish(1, named)
    manifest = arena.service._manifests[0]
    assert manifest.transports == ("memfd",)
    arena.service._manifests[0] = replace(manifest, version=2)
    with pytest.raises(VersionUnavailable, match="has version 2 where version 1 should be"):
        offered.subscriber().pull(1)
    arena.service._manifests[0] = replace(manifest, fingerprint=manifest.fingerprint + 1)
    with pytest.raises(LayoutError, match="connect again"):
        offered.subscriber().pull(1)


def test_a_failed_publish_leaves_the_version_before_it_whole() -> None:
    arena, offered = publisher({"a": torch.ones(2), "b": torch.ones(2)})
    subscriber = offered.subscriber()
    arena.publish(1, {"a": torch.ones(2), "b": torch.ones(2)})
    with pytest.raises(LayoutError, match="b was .* and is .*connect again"):
        arena.publish(2, {"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(LayoutError, match="c was absent"):
        arena.publish(2, {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)})
    with pytest.raises(VersionUnavailable):
        subscriber.pull(2)
    assert subscriber.pull(1)[0]["b"].tolist() == [1.0, 1.0]


def test_weights_that_do_not_fit_into_memory_are_refused_before_memory_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        WeightsError, match=r"no memory for the weights: .* needs \d+\.\d GiB, .* GiB are free"
    ):
        publisher({"w": torch.empty(10**13, device="meta")})
    monkeypatch.setattr(memfd, "available_memory", lambda: None)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(WeightsError, match="No space left"):
        publisher({"w": torch.zeros(3)})


def test_memory_of_another_host_or_container_is_not_mapped() -> None:
    arena, offered = publisher({"w": torch.zeros(3)})
    owner = offered.source.service.owner
    for elsewhere in (replace(owner, host="elsewhere", boot="another"), replace(owner, namespaces="other")):
        source = replace(offered.source, service=replace(offered.source.service, owner=elsewhere))
        with pytest.raises(
            ArenaUnreachable, match="within one host, but the learner is process .* and this is"
        ):
            replace(offered, source=source).subscriber()
    arena.close()


def test_an_arena_goes_with_its_publisher() -> None:
    def files() -> list[str]:
        descriptors = os.listdir("/proc/self/fd")
        links = [f"/proc/self/fd/{d}" for d in descriptors]
        found = [os.readlink(link) for link in links if os.path.islink(link)]
        return [file for file in found if "meshrl-weights" in file]

    gc.collect()  # of other tests
    before = len(files())
    arena, offered = publisher({"w": torch.zeros(3)})
    subscriber = offered.subscriber()
    assert len(files()) > before
    subscriber.close()
    del arena, subscriber
    end = time.monotonic() + 30
    while len(files()) > before:  # the thread that served the reader ends by itself
        assert time.monotonic() < end


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


def learner(pipe: Connection, transport: str, versions: int, then_break_off: bool) -> None:
    arena, offered = publisher({"a": torch.zeros(4), "b": torch.zeros(4)}, transport=transport)
    for version in range(1, versions + 1):
        arena.publish(version, {name: torch.full((4,), float(version)) for name in "ab"})
    pipe.send(offered)
    if then_break_off:
        arena.publish(versions + 1, HalfSent(pipe))
    pipe.recv()


class HalfSent(dict[str, Tensor]):
    """Weights of which only `a` can be copied: at `b` the process stands still."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__(a=torch.full((4,), 9.0), b=torch.full((4,), 9.0))
        self.pipe = pipe

    def __getitem__(self, name: str) -> Tensor:
        if name == "b":
            self.pipe.send("half sent")
            self.pipe.recv()
        return super().__getitem__(name)


def reader(pipe: Connection, offered: Offered) -> None:
    subscriber = offered.subscriber()
    caller = next(iter(subscriber._owners.values())).caller
    assert caller is not None
    caller.send("lease", 1)
    caller.receive(time.monotonic() + 30)
    pipe.send("reading")
    pipe.recv()


def foreigner(pipe: Connection, offered: Offered) -> None:
    import encodings.idna  # noqa: F401 - may not be read later

    os.setgid(65534)
    os.setuid(65534)
    try:
        offered.subscriber()
    except Exception as error:
        pipe.send((type(error), str(error)))


@pytest.mark.parametrize("transport", ["memfd", "nixl", "tcp"])
def test_weights_cross_processes(start: Callable[..., tuple[Any, Connection]], transport: str) -> None:
    _, pipe = start(learner, transport, 2, False)
    arrived, _ = receive(pipe).subscriber().pull(2)
    assert arrived["a"].tolist() == arrived["b"].tolist() == [2.0] * 4


def test_a_reader_killed_while_it_reads_does_not_block_the_learner(
    start: Callable[..., tuple[Any, Connection]],
) -> None:
    named = {"w": torch.zeros(4)}
    arena, offered = publisher(named)
    arena.publish(1, named)
    arena.publish(2, named)
    process, pipe = start(reader, offered)
    assert receive(pipe) == "reading"
    with pytest.raises(WeightsError, match=f"process {process.pid} on .* still read version 1"):
        arena.publish(3, named, deadline_seconds=0.01)
    process.kill()
    process.join(30)
    arena.publish(3, named)


@pytest.mark.parametrize("transport", ["memfd", "nixl", "tcp"])
def test_a_version_is_not_there_while_it_is_published_and_the_one_before_is(
    start: Callable[..., tuple[Any, Connection]], transport: str
) -> None:
    _, pipe = start(learner, transport, 2, True)
    subscriber = receive(pipe).subscriber()
    assert receive(pipe) == "half sent"
    with pytest.raises(VersionUnavailable, match="does not hold version 3 but version 2"):
        subscriber.pull(3)
    arrived, _ = subscriber.pull(2)
    assert arrived["a"].tolist() == arrived["b"].tolist() == [2.0] * 4


@pytest.mark.parametrize("transport", ["memfd", "nixl", "tcp"])
def test_a_learner_killed_while_it_publishes_is_named_to_its_readers(
    start: Callable[..., tuple[Any, Connection]], transport: str
) -> None:
    process, pipe = start(learner, transport, 2, True)
    offered = receive(pipe)
    subscriber = offered.subscriber()
    assert receive(pipe) == "half sent"
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    for _ in range(2):
        with pytest.raises(ArenaUnreachable, match=f"learner process {process.pid} on "):
            subscriber.pull(3)
    with pytest.raises(ArenaUnreachable, match=f"learner process {process.pid} on .* is dead"):
        offered.subscriber()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_another_user_is_told_why_it_may_not_read(start: Callable[..., tuple[Any, Connection]]) -> None:
    arena, offered = publisher({"w": torch.zeros(4)})
    _, pipe = start(foreigner, offered)
    kind, message = receive(pipe)
    arena.close()
    assert kind is ArenaUnreachable and "to be the same user's" in message and "65534" in message


def receive(pipe: Connection) -> Any:
    assert pipe.poll(120), "the other process does not answer"
    return pipe.recv()


def flip(arena: Arena, parameter: str) -> None:
    """Change one bit of a published cell in the arena."""
    cells = arena.plan.cells(0)
    number = next(n for n, cell in enumerate(cells) if cell.parameter == parameter)
    arena.slots[0][cells[number].start + 1] ^= 4


def refuse(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
