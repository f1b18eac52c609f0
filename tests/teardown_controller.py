"""A controller to be ended: `python teardown_controller.py END`. Says `ready` when its workers are busy."""

from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys
import time

from meshrl.session import Session, Worker, endpoint

STUBBORN = "trap '' TERM; echo deaf; exec sleep 1000"
"""A polite request to end changes nothing."""


class Troubled(Worker):
    """Starts a process of its own, then does what its replica's number says."""

    @endpoint
    async def setup(self, _: str) -> None:
        self.child = subprocess.Popen(["sh", "-c", STUBBORN], stdout=subprocess.PIPE)
        assert self.child.stdout is not None
        self.child.stdout.readline()

    @endpoint
    async def trouble(self) -> None:
        print("in trouble", flush=True)
        if self.replica == 0:
            await asyncio.sleep(1000)
        elif self.replica == 1:
            time.sleep(1000)  # blocks the worker's event loop
        else:
            ctypes.PyDLL(None).sleep(1000)  # holds the interpreter's lock: no thread of the worker runs


async def main(end: str) -> None:
    session = Session()
    try:
        await session.start()
        if end == "starting":
            print("starting", flush=True)
        mesh = await session.spawn(Troubled, "now", replicas=3)
        waiting = asyncio.create_task(mesh.call("trouble"))
        in_trouble = asyncio.Semaphore(0)
        loop = asyncio.get_running_loop()

        def heard(_: str) -> None:
            loop.call_soon_threadsafe(in_trouble.release)

        session.on_log = heard
        for _ in range(3):
            await in_trouble.acquire()
        print("ready", flush=True)
        if end == "exception":
            raise RuntimeError("the program failed")
        if end == "signal":
            await waiting
        # "forgotten": ends without stopping the session
    finally:
        if end != "forgotten":
            await session.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
