"""Driving a program: steps, pauses, ends. No process is started here but the session's none."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshrl.errors import UserError
from meshrl.metrics import StepReport
from meshrl.run import launch

EVENTS: list[str] = []


@dataclass(frozen=True)
class Config:
    """Counts."""

    steps: int = 3
    fail_at: int = 0


async def count(session: Any, config: Config) -> AsyncIterator[StepReport]:
    """Counts, and tells when it is closed."""
    EVENTS.append("opened")
    try:
        for step in range(1, config.steps + 1):
            if step == config.fail_at:
                raise LookupError(f"step {step}")
            await asyncio.sleep(0)
            yield StepReport(step, {"reward": step / 10})
    finally:
        EVENTS.append("closed")


@pytest.fixture(autouse=True)
def _no_events() -> None:
    EVENTS.clear()


def test_every_step_is_handed_out_kept_and_written(tmp_path: Path) -> None:
    async def drive() -> None:
        run = launch(count, directory=tmp_path / "run")
        assert [report.step async for report in run] == [1, 2, 3]
        assert [report.step for report in run.history] == [1, 2, 3]
        assert run.state == "finished" and EVENTS == ["opened", "closed"]
        assert await anext(run, None) is None

    asyncio.run(drive())
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["metrics"]["reward"] for row in rows] == [0.1, 0.2, 0.3]
    assert json.loads((tmp_path / "run/config.json").read_text())


def test_nothing_starts_before_the_first_step_is_asked_for(tmp_path: Path) -> None:
    async def drive() -> None:
        run = launch(count, directory=tmp_path / "run")
        await asyncio.sleep(0)
        assert run.state == "new" and not EVENTS and not (tmp_path / "run").exists()
        await run.stop()
        assert run.state == "stopped"

    asyncio.run(drive())


def test_an_exception_of_the_program_surfaces_unchanged_after_closing(tmp_path: Path) -> None:
    async def drive() -> None:
        run = launch(count, Config(fail_at=2), directory=tmp_path / "run")
        await anext(run)
        with pytest.raises(LookupError, match="step 2"):
            await anext(run)
        assert EVENTS == ["opened", "closed"] and isinstance(run.error, LookupError)

    asyncio.run(drive())


def test_stop_break_and_leaving_the_context_close_the_program(tmp_path: Path) -> None:
    async def drive() -> None:
        run = launch(count, directory=tmp_path / "stopped")
        await anext(run)
        await run.stop()
        assert EVENTS == ["opened", "closed"]
        async with launch(count, directory=tmp_path / "left") as run:
            await anext(run)
        assert EVENTS == ["opened", "closed"] * 2
        del run
        async for _ in launch(count, directory=tmp_path / "broken"):
            break
        gc.collect()
        async with asyncio.timeout(10):
            while len(EVENTS) < 6:
                await asyncio.sleep(0)

    asyncio.run(drive())
    assert EVENTS == ["opened", "closed"] * 3


def test_a_cancelled_wait_loses_no_step(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def gated(session: Any, config: Config) -> AsyncIterator[StepReport]:
        await gate.wait()
        yield StepReport(1)
        yield StepReport(2)

    async def drive() -> list[int]:
        run = launch(gated, directory=tmp_path / "run")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(run), 0.01)
        gate.set()
        return [report.step async for report in run]

    assert asyncio.run(drive()) == [1, 2]


def test_a_folder_that_holds_something_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        asyncio.run(anext(launch(count, directory=tmp_path)))  # pyright: ignore[reportArgumentType]


def test_what_is_no_program_is_refused() -> None:
    async def coroutine(session: Any, config: Config) -> None: ...

    async def unannotated(session, config) -> AsyncIterator[StepReport]:
        yield StepReport(1)

    async def short(session: Any) -> AsyncIterator[StepReport]:
        yield StepReport(1)

    for program, complaint in (
        (coroutine, "yields StepReports"),
        (unannotated, "does not say what its config is"),
        (short, "two parameters"),
    ):
        with pytest.raises(UserError, match=complaint):
            launch(program)  # pyright: ignore[reportArgumentType]
