"""Learner and generator on two hosts: network namespaces that are joined by a virtual cable."""

import asyncio
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from weight_peer import decoded, encoded

from meshrl.weights.broadcast import WeightBroadcast, WeightsConfig
from meshrl.weights.errors import TransportUnavailable

TESTS = Path(__file__).parent.parent
SECONDS = 120


class PeerMesh:
    """One process, called as a mesh of one rank is."""

    def __init__(self, role: str, prefix: Sequence[str]) -> None:
        self.name = role
        self.replicas = [self]
        self.size = 1
        self.processes = SimpleNamespace(name=lambda rank: f"{role}[{rank}]")
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(TESTS / "weight_peer.py"), role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Both ends are on one kernel in truth, and UCX would find shared memory.
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{TESTS}:{TESTS.parent}",
                "UCX_TLS": "tcp",
            },
        )

    async def call(self, endpoint: str, *args: Any, deadline_seconds: float | None = SECONDS) -> list[Any]:
        return [await asyncio.wait_for(asyncio.to_thread(self._call, endpoint, args), deadline_seconds)]

    def _call(self, endpoint: str, args: Sequence[Any]) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(encoded((endpoint, args)), file=self.process.stdin, flush=True)
        answer = decoded(self.process.stdout.readline())
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)


@contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces with addresses of their own, joined."""
    tag = uuid.uuid4().hex[:6]
    names, cables = (f"meshrl-{tag}-a", f"meshrl-{tag}-b"), (f"mr{tag}a", f"mr{tag}b")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for number, (name, cable) in enumerate(zip(names, cables, strict=True), start=1):
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "addr", "add", f"10.213.77.{number}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[PeerMesh, PeerMesh]]:
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command")
    with ExitStack() as stack:
        try:
            names = stack.enter_context(namespaces())
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this system makes no network namespaces: {error.stderr.decode().strip()}")
        prefixes = [("ip", "netns", "exec", name) for name in names]
        meshes = [
            PeerMesh(role, prefix) for role, prefix in zip(("learner", "generator"), prefixes, strict=True)
        ]
        for mesh in meshes:
            stack.callback(mesh.close)

        async def set_up() -> None:
            await asyncio.gather(*(mesh.call("setup", None) for mesh in meshes))

        asyncio.run(set_up())
        yield meshes[0], meshes[1]


async def broadcast(
    hosts: tuple[PeerMesh, PeerMesh], config: WeightsConfig
) -> tuple[WeightBroadcast, list[str]]:
    learner, generator = hosts
    notes: list[str] = []
    weights = await WeightBroadcast.connect(
        source=learner,  # pyright: ignore[reportArgumentType]
        target=generator,  # pyright: ignore[reportArgumentType]
        config=config,
        note=notes.append,
    )
    await weights.broadcast()
    sent, arrived = (await learner.call("weights"))[0], (await generator.call("weights"))[0]
    assert torch.equal(arrived.pop("matrix"), sent.pop("matrix")[:, 100:])
    assert arrived.keys() == sent.keys()
    assert all(torch.equal(arrived[name], sent[name]) for name in sent)
    return weights, notes


def test_memory_is_not_shared_between_hosts_and_the_next_way_is_taken(
    hosts: tuple[PeerMesh, PeerMesh],
) -> None:
    weights, notes = asyncio.run(broadcast(hosts, WeightsConfig(digests="always")))
    assert weights.transports == ("nixl",)
    assert len(notes) == 1 and "memfd shares memory within one host" in notes[0]


def test_plain_messages_reach_the_other_host_too(hosts: tuple[PeerMesh, PeerMesh]) -> None:
    weights, notes = asyncio.run(broadcast(hosts, WeightsConfig(transport="tcp", digests="always")))
    assert weights.transports == ("tcp",) and not notes


def test_memory_files_alone_are_refused(hosts: tuple[PeerMesh, PeerMesh]) -> None:
    with pytest.raises(TransportUnavailable, match="no way for weights to .*: memfd: .* within one host"):
        asyncio.run(broadcast(hosts, WeightsConfig(transport="memfd")))
