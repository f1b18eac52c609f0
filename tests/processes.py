"""Finding processes, for tests of what is left behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

MARK = "MESHRL_TEST_MARK"
"""Environment variable that a test sets for a controller: all processes that come from it inherit it."""


def marked(mark: str) -> dict[int, str]:
    """Process id → command, of live processes with such a mark."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(condition: Callable[[], bool], seconds: float, what: Callable[[], object]) -> None:
    """Return as soon as `condition()` holds; fail, showing `what()`, when it does not in so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds} s: {what()}"
        time.sleep(0.02)
