"""Workers that wait for each other."""

from __future__ import annotations

import asyncio
from typing import Any

from meshrl.waiting import waiting
from meshrl.worker import Worker, call, endpoint


class Asks(Worker):
    """Asks another one, like a generator its reward."""

    @endpoint
    async def ask(self, handle: Any) -> str:
        return await call(handle, "grade", deadline_seconds=60)

    @endpoint
    async def news(self) -> None:
        with waiting("something to happen", kind="idle"):
            await asyncio.Event().wait()


class Hangs(Worker):
    """Answers when it is told to."""

    _told: asyncio.Event

    @endpoint
    async def setup(self, setup: object) -> None:
        self._told = asyncio.Event()
        if setup == "hang":
            await self._told.wait()

    @endpoint
    async def grade(self) -> str:
        await self._told.wait()
        return "good"

    @endpoint
    async def go_on(self) -> None:
        self._told.set()
