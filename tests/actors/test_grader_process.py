"""The grader child: a grade or a reason for each rollout, whatever a function does; nothing left behind."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from grading import DEADLINE_SECONDS, ended, grade, here, rollouts
from hypothesis import given
from hypothesis import strategies as st

from meshrl.actors.grader_messages import FrameReader, frame
from meshrl.actors.grader_process import GraderProcess, RewardError
from meshrl.rewards import EXACT_MATCH

# What a function may return


def test_every_kind_of_number_is_a_reward() -> None:
    @here
    def numbers(rollout):
        import numpy
        import torch

        return [1, 0.5, True, numpy.float32(0.25), torch.tensor(-2.0), numpy.array(3)][rollout.id]

    assert [g.reward for g in grade(numbers)] == [1, 0.5, 1, 0.25, -2, 3]


def test_what_is_not_a_finite_number_is_a_reason_and_never_a_zero() -> None:
    @here
    def junk(rollout):
        return [None, float("nan"), float("-inf"), "1", [1.0], {}, 1j, 1.0][rollout.id]

    grades = grade(junk, 8)
    assert [g.reward for g in grades] == [None] * 7 + [1]
    reasons = [
        "returned None",
        "returned nan",
        "returned -inf",
        "str '1'",
        "list [1.0]",
        "dict {}",
        "complex",
    ]
    for i, reason in enumerate(reasons):
        error = grades[i].error
        assert error is not None and error.startswith(f"rollout {i}: the reward function") and reason in error


def test_an_exception_fails_its_own_rollout_and_says_where(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def score(rollout):\n    if rollout.id == 2:\n        raise KeyError('gold')\n    return 1\n"
    )
    grades = grade(f"{file}:score", 4)
    assert [g.reward for g in grades] == [1, 1, None, 1]
    assert grades[2].error == "rollout 2: the reward function raised KeyError: 'gold' (mine.py:3)"


def test_the_default_function_runs_without_torch() -> None:
    @here
    def imports(rollout):
        import sys

        return float("torch" in sys.modules or "monarch" in sys.modules)

    assert [g.reward for g in grade(imports, 1)] == [0]
    assert [g.reward for g in grade(EXACT_MATCH, 1)] == [1]


# What a function may do


def test_a_function_that_exits_fails_its_own_rollout() -> None:
    @here
    def quits(rollout):
        if rollout.id == 1:
            raise SystemExit("enough")
        return rollout.id

    grades = grade(quits, 3)
    assert [g.reward for g in grades] == [0, None, 2]
    assert "SystemExit: enough" in str(grades[1].error)


def test_a_grader_that_uses_signals_works() -> None:
    @here
    def bounded(rollout):
        import signal

        class OutOfTime(Exception):
            pass

        def ring(number, frame):
            raise OutOfTime

        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            while rollout.id == 1:
                pass
            return 1.0
        except OutOfTime:
            return 0.0
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    assert [g.reward for g in grade(bounded, 3)] == [1, 0, 1]


def test_a_hang_is_ended_with_its_stack_in_the_log_and_the_others_go_on(capfd) -> None:
    @here
    def hangs(rollout):
        import time

        def dig_forever():
            time.sleep(1000)

        return dig_forever() if rollout.id == 2 else rollout.id

    grades = grade(hangs, 5, timeout_seconds=1.0)
    assert [g.reward for g in grades] == [0, 1, None, 3, 4]
    assert grades[2].error == "rollout 2: the reward function timed out after 1 s"
    assert "dig_forever" in capfd.readouterr().err


def test_a_child_process_of_a_hanging_function_ends_with_it(tmp_path: Path) -> None:
    @here
    def hangs(rollout, path=str(tmp_path / "pid")):
        import subprocess

        child = subprocess.Popen(["sleep", "1000"])
        with open(path, "w") as file:
            file.write(str(child.pid))
        child.wait()

    assert "timed out" in str(grade(hangs, 1, timeout_seconds=1.0)[0].error)
    assert ended(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("end", "reason"), [("os._exit(7)", "exit code 7"), ("os.kill(os.getpid(), 11)", "signal SIGSEGV")]
)
def test_a_crash_costs_only_the_rollout_that_crashes(tmp_path: Path, end: str, reason: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import os\ndef score(rollout):\n    if rollout.id == 2: {end}\n    return rollout.id\n")
    grades = grade(f"{file}:score", 5)
    assert [g.reward for g in grades] == [0, 1, None, 3, 4]
    assert reason in str(grades[2].error)


def test_a_child_that_is_killed_once_costs_nothing(tmp_path: Path) -> None:
    @here
    def unlucky(rollout, marker=str(tmp_path / "marker")):
        import os
        import signal

        if rollout.id == 3 and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)  # what the kernel does when memory runs out
        return rollout.id

    assert [g.reward for g in grade(unlucky)] == [0, 1, 2, 3, 4, 5]


def test_a_child_that_dies_between_two_calls_is_replaced() -> None:
    async def run() -> None:
        grader = GraderProcess(EXACT_MATCH)
        await grader.grade(rollouts(1))
        first = grader.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert [g.reward for g in await grader.grade(rollouts(3))] == [1, 1, 1]
        assert grader.pid != first
        await grader.close()

    asyncio.run(run())


def test_what_a_function_prints_is_in_the_log_and_nothing_else_breaks(capfd) -> None:
    @here
    def chatty(rollout):
        import sys

        print("looking at", rollout.id)
        print("odd", file=sys.stderr)
        return len(sys.stdin.read())  # there is nothing to read, and nobody to wait for

    assert [g.reward for g in grade(chatty, 2)] == [0, 0]
    captured = capfd.readouterr()
    assert captured.out == "looking at 0\nlooking at 1\n" and captured.err == "odd\nodd\n"


# Nothing left behind

SCRIPT = """
import asyncio, subprocess, sys
from meshrl.actors.grader_process import GraderProcess
from meshrl.rollout import Prompt, Rollout

def busy(rollout):
    import os, subprocess, sys, time
    child = subprocess.Popen(["sleep", "1000"])
    print(os.getpid(), child.pid, flush=True)
    time.sleep(1000)

async def main():
    await GraderProcess(busy).grade([Rollout(0, Prompt(0, "train", "", ""), "", (), "stop")])

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_child_and_its_children_end_with_their_parent(number: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.send_signal(number)
    parent.wait(DEADLINE_SECONDS)
    parent.stdout.close()
    assert all(ended(pid) for pid in pids)


def test_closing_ends_the_child_and_what_waits() -> None:
    @here
    def hangs(rollout):
        import time

        time.sleep(1000)

    async def run() -> int:
        grader = GraderProcess(hangs)
        await grader.start()
        pid = grader.pid
        assert pid is not None
        waiting = asyncio.create_task(grader.grade(rollouts(1)))
        await asyncio.sleep(0)
        await grader.close()
        with pytest.raises(RewardError, match="closed"):
            await waiting
        return pid

    assert ended(asyncio.run(run()))


# Messages


@given(st.lists(st.binary(max_size=50)), st.integers(1, 40))
def test_messages_survive_any_cutting_of_the_stream(messages: list[bytes], size: int) -> None:
    stream = b"".join(frame(message) for message in messages)
    frames = FrameReader()
    chunks = [stream[i : i + size] for i in range(0, len(stream), size)]
    assert [message for chunk in chunks for message in frames.feed(chunk)] == messages
