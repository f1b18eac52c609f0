"""However the controller ends, nothing that it started outlives it, whatever the workers are doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import MARK, marked, wait_until

CONTROLLER = Path(__file__).with_name("teardown_controller.py")


@contextmanager
def controller(end: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, str(CONTROLLER), end],
        env=os.environ | {MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, mark
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def wait_for_line(process: subprocess.Popen[str], wanted: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == wanted:
            return
    raise AssertionError(f"the controller never said {wanted!r}: {process.communicate()[1]}")


def nothing_left(mark: str, seconds: float) -> None:
    wait_until(lambda: not marked(mark), seconds, lambda: marked(mark))


@pytest.mark.parametrize(
    ("end", "number", "status"),
    [
        ("exception", None, 1),
        ("forgotten", None, 0),
        ("signal", signal.SIGINT, -signal.SIGINT),
        ("signal", signal.SIGTERM, -signal.SIGTERM),
        ("signal", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_no_process_outlives_the_controller(end: str, number: signal.Signals | None, status: int) -> None:
    with controller(end) as (process, mark):
        wait_for_line(process, "ready")
        if number is not None:
            assert len(marked(mark)) == 7  # itself, three workers, a child of each
            process.send_signal(number)
        _, errors = process.communicate(timeout=10)
        assert process.returncode == status, errors
        nothing_left(mark, seconds=3)


def test_a_controller_that_is_killed_while_workers_start_leaves_none() -> None:
    with controller("starting") as (process, mark):
        wait_for_line(process, "starting")
        wait_until(lambda: len(marked(mark)) > 1, 20, lambda: marked(mark))
        process.kill()
        nothing_left(mark, seconds=10)
