"""How a process ended is told, reaped or not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from meshrl.processes import exit_cause


@pytest.mark.parametrize("reaped", [False, True])
@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("exit(3)", "it exited with status 3"),
        ("exit(0)", "it exited with status 0"),
        ("os.kill(os.getpid(), 15)", f"killed by {signal.SIGTERM.name}"),
        (
            "os.kill(os.getpid(), 9)",
            f"killed by {signal.SIGKILL.name}, as the kernel does when memory runs out",
        ),
        ("os.abort()", f"killed by {signal.SIGABRT.name}"),
    ],
)
def test_the_cause_of_an_end_is_known_or_left_open(code: str, cause: str, reaped: bool) -> None:
    process = subprocess.Popen([sys.executable, "-c", f"import os; {code}"])
    descriptor = os.pidfd_open(process.pid)
    try:
        if reaped:  # then only newer kernels still tell
            process.wait()
            assert exit_cause(descriptor) in (cause, "its process is gone")
        else:
            os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT)
            assert exit_cause(descriptor) == cause
            process.wait()
    finally:
        os.close(descriptor)
