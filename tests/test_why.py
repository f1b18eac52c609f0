"""Why nothing moves, asked of real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from waiting_workers import Asks, Hangs

from meshrl.errors import UserError
from meshrl.mesh import Replica, RoleMesh
from meshrl.metrics import StepReport
from meshrl.run import launch
from meshrl.session import Session, WorkerDied
from meshrl.waiting import waiting
from meshrl.why import Why, ask

SECONDS = 30.0


@dataclass
class Bench:
    runner: asyncio.Runner
    session: Session
    generator: RoleMesh
    reward: RoleMesh

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(work, SECONDS))


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        session = Session()

        async def start() -> tuple[RoleMesh, RoleMesh]:
            await session.start()
            return await asyncio.gather(
                session.spawn(Asks, name="generator"), session.spawn(Hangs, "begin", name="reward")
            )

        try:
            yield Bench(runner, session, *runner.run(start()))
        finally:
            runner.run(session.stop())


async def until(session: Session, seen: Callable[[str], bool]) -> str:
    """Ask why until the answer is as wanted."""
    while not seen(text := str(await session.why())):
        await asyncio.sleep(0)
    return text


def test_the_chain_goes_over_both_processes_to_the_one_that_hangs(bench: Bench) -> None:
    async def drive() -> None:
        idle = asyncio.create_task(bench.generator.call("news"))
        asking = asyncio.create_task(bench.generator.call("ask", bench.reward.handles[0]))
        await until(bench.session, lambda text: "reward[0] is in grade" in text)
        why = await bench.session.why()
        chain = str(next(node for node in why.waiting if "ask on" in node.text).text)
        assert chain.startswith("the controller waits for ask on generator[0] for ")
        assert any(root.startswith("reward[0] is in grade for ") for root in why.roots)
        lines = str(why).splitlines()
        place = next(i for i, line in enumerate(lines) if "ask on generator[0]" in line)
        assert "generator[0] waits for grade of Hangs for" in lines[place + 1]
        assert "unblocked by reward[0]" in lines[place + 1]
        assert "reward[0] is in grade for" in lines[place + 2] and "ends here" in lines[place + 2]
        await bench.reward.call("go_on")
        assert await asking == ["good"]
        idle.cancel()
        await asyncio.gather(idle, return_exceptions=True)

    bench.run(drive())


def test_a_stopped_process_is_told_of_as_not_answering(bench: Bench) -> None:
    pid = bench.reward.replicas[0].pids[0]

    async def drive() -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            asking = asyncio.create_task(bench.reward.call("grade"))
            text = await until(bench.session, lambda text: "grade on reward[0]" in text)
            assert f"reward[0] does not answer (process {pid} is stopped" in text
            both = await asyncio.gather(bench.session.why(), bench.session.why())
            assert [len(why.waiting) for why in both] == [1, 1]  # they do not tell of each other
        finally:
            os.kill(pid, signal.SIGCONT)
        await asking

    bench.run(drive())


def test_a_worker_is_asked_while_its_setup_hangs_and_is_told_of_when_it_has_died(bench: Bench) -> None:
    async def drive() -> None:
        starting = asyncio.create_task(bench.session.spawn(Hangs, "hang", name="slow"))
        await until(bench.session, lambda text: "slow[0] is in setup for" in text)
        (pid,) = [rank.pid for rank in bench.session.describe() if rank.name == "slow[0]"]
        replica = Replica(next(each for each in bench.session._processes if each.role == "slow"), None)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            await starting
        with waiting("a batch", unblocked_by=["slow[0]"]):
            why = Why("", await ask([replica]))
        (root,) = why.roots
        assert root.startswith(f"slow[0] is dead: slow[0] (pid {pid}) died: killed by SIGKILL")

    bench.run(drive())


def test_a_run_that_stands_still_says_why_by_itself_and_not_while_it_is_paused(bench: Bench) -> None:
    async def program(session: Session, config: None) -> AsyncIterator[StepReport]:
        yield StepReport(0)
        with_answer = await session.meshes["generator"].call("ask", session.meshes["reward"].handles[0])
        yield StepReport(1, note=with_answer[0])

    async def drive() -> None:
        await bench.reward.call("setup", "anew")
        said: asyncio.Queue[str] = asyncio.Queue()
        bench.session.on_note = lambda text: "no step for" in text and said.put_nowait(text) or None
        run = launch(program, NO_CONFIG, session=bench.session, stall_seconds=0.2)
        assert "ask for the first step" in str(await run.why())
        await anext(run)
        assert "paused: nobody asked for the next step" in str(await run.why())
        stepping = asyncio.create_task(anext(run))
        for seconds in ("0.2", "0.4"):
            text = await said.get()
            assert f"no step for {seconds} s: program is running, step 1" in text
            assert "reward[0] is in grade" in text
        await bench.reward.call("go_on")
        assert (await stepping).note == "good"
        while not said.empty():
            said.get_nowait()
        with pytest.raises(TimeoutError):  # twice the time after which a step would be told of
            await asyncio.wait_for(said.get(), 0.4)
        await run.stop()
        assert "stopped" in str(await run.why())

    bench.run(drive())


def test_seconds_that_are_negative_are_refused() -> None:
    async def program(session: Session, config: None) -> AsyncIterator[StepReport]:
        yield StepReport(0)

    with pytest.raises(UserError, match="-1"):
        launch(program, NO_CONFIG, stall_seconds=-1)


NO_CONFIG: Any = object()
