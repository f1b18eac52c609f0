"""An event loop whose clock jumps."""

from __future__ import annotations

import asyncio
import doctest
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshrl.virtual_time
from meshrl.virtual_time import Deadlock, run
from meshrl.waiting import waiting


def test_docstring_examples_are_true() -> None:
    assert doctest.testmod(meshrl.virtual_time).failed == 0


@given(st.lists(st.floats(0, 1e6), max_size=20))
def test_sleepers_wake_in_the_order_of_their_times_and_at_them(seconds: list[float]) -> None:
    async def drive() -> list[tuple[float, float]]:
        woken = []

        async def sleep(length: float) -> None:
            await asyncio.sleep(length)
            woken.append((asyncio.get_running_loop().time(), length))

        await asyncio.gather(*map(sleep, seconds))
        return woken

    woken = run(drive())
    assert [length for _, length in woken] == pytest.approx(sorted(seconds), abs=1e-8)
    assert all(at == pytest.approx(length, abs=1e-8) for at, length in woken)


def test_a_timeout_ends_a_wait_that_is_longer_and_no_other() -> None:
    async def drive() -> tuple[str, str, float]:
        short = await asyncio.wait_for(asyncio.sleep(9, "slept"), 10)
        try:
            long = await asyncio.wait_for(asyncio.sleep(11, "slept"), 10)
        except TimeoutError:
            long = "timed out"
        return short, long, asyncio.get_running_loop().time()

    assert run(drive()) == ("slept", "timed out", 19)


def test_a_century_takes_no_processor_time_worth_naming_and_no_waiting() -> None:
    slept = []
    asyncio_sleep = time.sleep
    time.sleep = (
        slept.append
    )  # whoever waits for real would do so here, or in the selector, which gets no timeout
    try:
        run(asyncio.sleep(100 * 365 * 86400.0))
    finally:
        time.sleep = asyncio_sleep
    assert slept == []


def test_a_deadlock_is_an_error_that_names_who_waits_for_what() -> None:
    async def drive() -> None:
        async def wait() -> None:
            with waiting("a batch that never comes"):
                await asyncio.Event().wait()

        await asyncio.create_task(wait(), name="grpo")

    with pytest.raises(Deadlock, match=r"grpo \(a batch that never comes\)"):
        run(drive())


def test_what_is_set_from_another_thread_before_the_loop_looks_is_no_deadlock() -> None:
    async def drive() -> str:
        loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        loop.call_soon_threadsafe(done.set_result, "here")
        return await done

    assert run(drive()) == "here"
