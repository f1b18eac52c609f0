"""Workers for tests of sessions and workers, and a session to share."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from meshrl.worker import Worker, call, endpoint


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("holds a generator")
        self.generator = (number for number in range(3))


class TwoArguments(Exception):
    """Pickles, but cannot be made again from its pickle."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Forgetful(Exception):
    """Pickles, but without its notes."""

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return Forgetful, self.args


@dataclass(frozen=True)
class Setup:
    offset: int = 0
    error: str = ""
    exit_status: int | None = None


class Echo(Worker):
    @endpoint
    async def setup(self, setup: Setup) -> None:
        if setup.error:
            raise LookupError(setup.error)
        if setup.exit_status is not None:
            print("going down", flush=True)
            os._exit(setup.exit_status)
        self.offset = setup.offset
        self.event = asyncio.Event()

    @endpoint
    async def add(self, number: int) -> int:
        return self.offset + number

    @endpoint
    async def where(self) -> tuple[str, int, int, int, int, int]:
        return self.role, self.replica, self.replicas, self.rank, self.world_size, os.getpid()

    @endpoint
    async def wait(self) -> str:
        await self.event.wait()
        return "woken"

    @endpoint
    async def wake(self) -> None:
        self.event.set()

    @endpoint
    async def hang(self) -> None:
        print("hanging", flush=True)
        await asyncio.Event().wait()

    @endpoint
    async def fail(self, error: BaseException | type[BaseException], rank: int = 0) -> None:
        if self.rank == rank:
            raise error

    @endpoint
    async def fail_unpicklable(self) -> None:
        raise Unpicklable

    @endpoint
    async def fail_two_arguments(self) -> None:
        raise TwoArguments("this", "that")

    @endpoint
    async def ask(self, other: Any, name: str, *args: Any) -> Any:
        return await call(other, name, *args, deadline_seconds=30)

    @endpoint
    async def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    @endpoint
    async def path(self) -> list[str]:
        return sys.path

    @endpoint
    async def say(self, text: str) -> None:
        print(text)

    @endpoint
    async def say_natively(self, text: str) -> None:
        os.write(1, f"{text} out\n".encode())
        os.write(2, f"{text} err\n".encode())
        subprocess.run(["echo", f"{text} child"], check=True)

    @endpoint
    async def start_child(self) -> int:
        self.child = subprocess.Popen(["sleep", "1000"])
        return self.child.pid
