"""A real notebook kernel, driven cell by cell."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from processes import MARK, marked

SECONDS = 60.0
"""Until a test gives up."""


@dataclass
class Cell:
    """What became of a cell."""

    status: str
    """`ok` or `error`."""
    output: str
    """What it printed, and the value of its last line."""
    error: str
    """Type of the exception."""
    traceback: str


@dataclass
class Kernel:
    manager: KernelManager
    client: BlockingKernelClient
    mark: str

    def start(self, code: str) -> str:
        """Begin to run a cell."""
        return self.client.execute(code)

    def finish(self, cell: str, until_output: str | None = None) -> Cell:
        """Wait for its end, or only until it has printed such a text."""
        deadline = time.monotonic() + SECONDS
        result = Cell("ok", "", "", "")
        while time.monotonic() < deadline:
            message = self.client.get_iopub_msg(timeout=SECONDS)
            content: dict[str, Any] = message["content"]
            if message["msg_type"] == "stream":
                result.output += content["text"]
            elif message["parent_header"].get("msg_id") != cell:
                continue
            elif message["msg_type"] == "execute_result":
                result.output += content["data"]["text/plain"]
            elif message["msg_type"] == "error":
                result.status, result.error = "error", content["ename"]
                result.traceback = "\n".join(content["traceback"])
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return result
            if until_output is not None and until_output in result.output:
                return result
        raise AssertionError(f"the cell went on for {SECONDS} s: {result}")

    def run(self, code: str) -> Cell:
        """Run a cell."""
        return self.finish(self.start(code))


@contextmanager
def kernel() -> Iterator[Kernel]:
    """Started, and ended in any case."""
    mark = uuid.uuid4().hex
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env=os.environ | {MARK: mark}, cwd=os.path.dirname(__file__))
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=SECONDS)
        yield Kernel(manager, client, mark)
    finally:
        client.stop_channels()
        if manager.has_kernel:
            manager.shutdown_kernel(now=True)
        for pid in marked(mark):
            os.kill(pid, 9)
