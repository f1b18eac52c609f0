"""The grader child: async and batched functions, calls that overlap, giving up, loading."""

import asyncio
from pathlib import Path

import pytest
from grading import grade, here, rollouts

from meshrl.actors.grader_process import GraderProcess, RewardError
from meshrl.errors import UserError
from meshrl.rewards import batched

# Async and batched functions


def test_async_calls_run_side_by_side() -> None:
    barrier = None

    @here
    async def together(rollout):
        nonlocal barrier
        import asyncio

        barrier = barrier or asyncio.Barrier(6)
        await barrier.wait()  # passes only once all six are in progress
        return rollout.id

    assert [g.reward for g in grade(together)] == [0, 1, 2, 3, 4, 5]


def test_no_more_async_calls_are_in_progress_than_allowed() -> None:
    running = 0

    @here
    async def counted(rollout):
        nonlocal running
        import asyncio

        running += 1
        most = running
        for _ in range(5):
            await asyncio.sleep(0)
            most = max(most, running)
        running -= 1
        return most

    rewards = [g.reward for g in grade(counted, 12, concurrency=3)]
    assert max(r for r in rewards if r is not None) == 3


def test_an_async_call_that_never_ends_is_given_up_even_if_it_refuses() -> None:
    @here
    async def slow(rollout):
        import asyncio

        while rollout.id == 1:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
        return rollout.id

    grades = grade(slow, 3, timeout_seconds=1.0)
    assert [g.reward for g in grades] == [0, None, 2]
    assert grades[1].error == "rollout 1: the reward function timed out after 1 s"


def test_an_async_call_that_blocks_the_loop_is_found_among_those_in_progress() -> None:
    @here
    async def blocks(rollout):
        import asyncio
        import time

        await asyncio.sleep(0)
        if rollout.id == 4:
            time.sleep(1000)
        return rollout.id

    grades = grade(blocks, 6, timeout_seconds=1.0)
    assert [g.reward for g in grades] == [0, 1, 2, 3, None, 5]
    assert "timed out" in str(grades[4].error)


def test_async_exceptions_and_wrong_signatures_are_reasons() -> None:
    @here
    async def wrong(rollout):
        if rollout.id == 1:
            raise ValueError("no judge")
        return rollout.id

    assert "ValueError: no judge" in str(grade(wrong, 2)[1].error)

    @here
    async def takes_nothing():
        return 1

    assert "TypeError" in str(grade(takes_nothing, 1)[0].error)


def test_batched_functions_see_the_whole_call() -> None:
    @here
    @batched
    def share(batch):
        return [rollout.id / len(batch) for rollout in batch]

    @here
    @batched
    async def share_async(batch):
        return (rollout.id / len(batch) for rollout in batch)

    for function in (share, share_async):
        assert [g.reward for g in grade(function, 4)] == [0, 0.25, 0.5, 0.75]


def test_a_batched_function_fails_rollouts_one_by_one_or_all_together() -> None:
    @here
    @batched
    def one_missing(batch):
        return [None if rollout.id == 1 else 1 for rollout in batch]

    @here
    @batched
    def too_few(batch):
        return [1.0] * (len(batch) - 1)

    @here
    @batched
    def no_list(batch):
        return 1.0

    assert [g.reward for g in grade(one_missing, 3)] == [1, None, 1]
    for function, reason in ((too_few, "2 rewards for 3 rollouts"), (no_list, "not a list of 3 numbers")):
        grades = grade(function, 3)
        assert [g.reward for g in grades] == [None] * 3
        assert all(f"rollout {i}: " in str(g.error) and reason in str(g.error) for i, g in enumerate(grades))


def test_calls_that_overlap_get_their_own_answers() -> None:
    @here
    def identify(rollout):
        return rollout.id

    async def run() -> None:
        grader = GraderProcess(identify)
        batches = [rollouts(n) for n in (5, 0, 256, 1)]
        answers = await asyncio.gather(*(grader.grade(batch) for batch in batches))
        assert [[g.reward for g in answer] for answer in answers] == [list(range(n)) for n in (5, 0, 256, 1)]
        await grader.close()

    asyncio.run(run())


def test_a_call_that_is_given_up_does_not_disturb_the_next() -> None:
    @here
    def slow_first(rollout):
        import time

        time.sleep(0.2 if rollout.id == 0 else 0)
        return rollout.id

    async def run() -> None:
        grader = GraderProcess(slow_first)
        await grader.start()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(grader.grade(rollouts(3)), 0.01)
        assert [g.reward for g in await grader.grade(rollouts(3))] == [0, 1, 2]
        await grader.close()

    asyncio.run(run())


# Giving up


def test_failing_on_everything_ends_with_the_last_reason_and_one_success_resets_the_count() -> None:
    @here
    def fails(rollout):
        raise ValueError(f"bad {rollout.id}")

    @here
    def fails_mostly(rollout):
        return 1 if rollout.id % 5 == 4 else None

    with pytest.raises(RewardError, match="failed on 5 rollouts in a row; the last: rollout 4: .*bad 4"):
        grade(fails, 20, failures_in_a_row=5)
    assert [g.reward for g in grade(fails, 20, failures_in_a_row=0)] == [None] * 20
    assert [g.reward for g in grade(fails_mostly, 20, failures_in_a_row=5)] == [None, None, None, None, 1] * 4


def test_hanging_on_everything_ends_soon_and_the_next_call_starts_afresh() -> None:
    @here
    def hangs(rollout):
        import time

        if rollout.response == "hang":
            time.sleep(1000)
        return 1

    async def run() -> None:
        grader = GraderProcess(hangs, timeout_seconds=1.0, hangs_in_a_row=2)
        with pytest.raises(RewardError, match="hung 2 times in a row; the last: rollout 1: .*timed out"):
            await grader.grade(rollouts(50, "hang"))
        assert [g.reward for g in await grader.grade(rollouts(2))] == [1, 1]
        await grader.close()

    asyncio.run(run())


# Loading


def test_a_wrong_name_is_the_users_error() -> None:
    with pytest.raises(UserError, match="did you mean exact_match"):
        grade("meshrl.rewards:exact_mach")


def test_a_module_that_cannot_be_imported_shows_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import meshrl\n1 / 0\n")
    with pytest.raises(
        RewardError, match=r"cannot be loaded:\n(.*\n)*.*broken.py.*\n(.*\n)*ZeroDivisionError"
    ):
        grade(f"{tmp_path}/broken.py:score")
    (tmp_path / "quits.py").write_text("import os\nos._exit(4)\n")
    with pytest.raises(RewardError, match="ended its process with exit code 4 while it loaded"):
        grade(f"{tmp_path}/quits.py:score")


def test_a_module_that_never_finishes_importing_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1000)\n")
    with pytest.raises(RewardError, match="not loaded within 1 s"):
        grade(f"{tmp_path}/slow.py:score", load_timeout_seconds=1.0)


def test_a_function_that_can_no_longer_be_loaded_fails_what_waits(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import os\ndef score(rollout):\n    os.truncate({str(file)!r}, 0)\n    os._exit(1)\n")
    with pytest.raises(UserError, match="has no 'score'"):
        grade(f"{file}:score")
