"""Sessions: what is started, heard, noticed and ended."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import alive, wait_until
from session_workers import Echo, Setup

from meshrl.errors import UserError
from meshrl.mesh import RoleMesh
from meshrl.session import DeadlineError, Session, SessionConfig, SessionStopped, Worker, WorkerDied

SECONDS = 30
"""Until a test gives up; nothing here takes a tenth of it."""


class Heard(list[str]):
    """Lines of workers, heard on another thread."""

    def wait_for(self, line: str) -> None:
        wait_until(lambda: line in self, SECONDS, lambda: (line, list(self)))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def heard() -> Heard:
    return Heard()


@pytest.fixture(scope="module")
def session(runner: asyncio.Runner, directory: Path, heard: Heard) -> Iterator[Session]:
    session = Session(SessionConfig(start_deadline_seconds=60))
    session.directory = directory
    session.on_log = heard.append
    runner.run(session.start())
    yield session
    runner.run(session.stop())


@pytest.fixture(scope="module")
def pairs(runner: asyncio.Runner, session: Session) -> RoleMesh:
    """Two replicas of two processes."""
    return runner.run(session.spawn(Echo, Setup(10), procs=2, replicas=2, name="pairs"))


def gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(alive, pids)), SECONDS, lambda: [pid for pid in pids if alive(pid)])


def test_every_rank_knows_its_place_and_answers_in_order(
    runner: asyncio.Runner, session: Session, pairs: RoleMesh
) -> None:
    places = runner.run(pairs.call("where"))
    assert [place[:5] for place in places] == [
        ("pairs", 0, 2, 0, 2),
        ("pairs", 0, 2, 1, 2),
        ("pairs", 1, 2, 0, 2),
        ("pairs", 1, 2, 1, 2),
    ]
    assert [place[5] for place in places] == [pid for replica in pairs.replicas for pid in replica.pids]
    assert runner.run(pairs.call_rank("where", replica=1, rank=0)) == places[2]
    assert pairs.size == 4 and len(set(places)) == 4

    rows = [row for row in session.describe() if row.role == "pairs"]
    assert [row.name for row in rows] == ["pairs[0,0]", "pairs[0,1]", "pairs[1,0]", "pairs[1,1]"]
    assert [row.pid for row in rows] == [place[5] for place in places]
    assert str(rows[2]) == f"pairs[1,0] on {os.uname().nodename}, process {places[2][5]}"
    assert session.meshes["pairs"] is pairs


def test_workers_find_the_modules_of_the_controller_and_one_thread(
    runner: asyncio.Runner, pairs: RoleMesh
) -> None:
    assert str(Path(__file__).parent) in runner.run(pairs.call_rank("path"))
    assert runner.run(pairs.call_rank("environment", "OMP_NUM_THREADS")) == "1"


def test_each_line_is_heard_once_tagged_and_kept(
    runner: asyncio.Runner, pairs: RoleMesh, heard: Heard, directory: Path
) -> None:
    runner.run(pairs.call_rank("say", "hello", replica=1, rank=0))
    runner.run(pairs.call_rank("say_natively", "deep", replica=1, rank=0))
    expected = ["hello", "deep out", "deep err", "deep child"]
    heard.wait_for("pairs[1,0] deep child")
    assert sorted(line for line in heard if "hello" in line or "deep" in line) == sorted(
        f"pairs[1,0] {line}" for line in expected
    )
    assert (directory / "logs" / "pairs-1-0.log").read_text().splitlines() == expected


def test_a_deadline_names_what_it_waited_for_and_whom(runner: asyncio.Runner, pairs: RoleMesh) -> None:
    with pytest.raises(DeadlineError, match=r"waited 0\.05 s for hang on pairs\[0,1\]"):
        runner.run(pairs.call_rank("hang", rank=1, deadline_seconds=0.05))
    with pytest.raises(DeadlineError, match=r"for hang on pairs\[\d,0\], pairs\[\d,1\]"):
        runner.run(pairs.call("hang", deadline_seconds=0.05))
    assert runner.run(pairs.call("add", 1)) == [11] * 4


def test_another_actor_shares_the_processes(runner: asyncio.Runner, pairs: RoleMesh) -> None:
    async def use() -> tuple[RoleMesh, list[Any]]:
        beside = await pairs.spawn_beside(Echo, "beside")
        return beside, await beside.call("where")

    beside, places = runner.run(use())
    assert beside.name == places[0][0] == "beside"
    assert [place[5] for place in places] == [pid for replica in pairs.replicas for pid in replica.pids]


def test_a_dead_process_fails_the_calls_of_its_replica_and_no_other(
    runner: asyncio.Runner, session: Session, heard: Heard
) -> None:
    async def use() -> None:
        mesh = await session.spawn(Echo, Setup(), replicas=2, name="mortal")
        children = await mesh.call("start_child")
        pid = mesh.replicas[1].pids[0]
        told_to: list[WorkerDied] = []
        waiting = [asyncio.create_task(mesh.call_rank("hang", replica=1)) for _ in range(3)]
        both = asyncio.create_task(mesh.call("hang"))
        await asyncio.to_thread(heard.wait_for, "mortal[1] hanging")
        os.kill(pid, signal.SIGKILL)
        for call in (*waiting, both, asyncio.create_task(mesh.call_rank("add", 1, replica=1))):
            with pytest.raises(WorkerDied) as caught:
                await asyncio.wait_for(call, SECONDS)
            told = str(caught.value)
            assert told.startswith(f"mortal[1] (pid {pid}) died: ") and "\n  | hanging" in told
            died = caught.value
            assert (died.role, died.replica, died.rank, died.pid) == ("mortal", 1, 0, pid)
            assert died.last_lines[-1] == "hanging"
            told_to.append(died)
        assert len(set(map(id, told_to))) == len(told_to)  # nobody shares an exception, nor its traceback
        assert await mesh.call_rank("add", 1, replica=0) == 1
        gone([pid, children[1]])
        assert alive(children[0])

    runner.run(use())


def test_a_failed_setup_ends_the_processes_and_frees_the_name(
    runner: asyncio.Runner, session: Session
) -> None:
    async def use() -> None:
        before = session.describe()
        with pytest.raises(LookupError, match="no such data") as caught:
            await session.spawn(Echo, Setup(error="no such data"), replicas=2, name="retried")
        pid = int(caught.value.__notes__[0].split("pid ")[1].split(",")[0])
        gone([pid])
        assert session.describe() == before and "retried" not in session.meshes
        mesh = await session.spawn(Echo, Setup(1), name="retried")
        assert await mesh.call("add", 1) == [2]

    runner.run(use())


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("fails_at_import", "ImportError: no library of that name"),
        ("dies_at_import", r"doomed\[0\] \(pid \d+\) died: .*\n  \| importing badly"),
    ],
)
def test_a_worker_that_cannot_be_imported_says_so_at_once(
    runner: asyncio.Runner, session: Session, monkeypatch: pytest.MonkeyPatch, module: str, message: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("MESHRL_TEST_IMPORT", "1")
        doomed = importlib.import_module(module).Doomed
    with pytest.raises(WorkerDied, match=message):
        runner.run(session.spawn(doomed))
    assert "doomed" not in session.meshes


def test_a_process_that_ends_in_setup_is_told_with_its_last_words(
    runner: asyncio.Runner, session: Session
) -> None:
    with pytest.raises(WorkerDied) as caught:
        runner.run(session.spawn(Echo, Setup(exit_status=7), name="leaving"))
    assert "going down" in str(caught.value) and "died: " in str(caught.value)


def test_a_cancelled_spawn_leaves_no_process(runner: asyncio.Runner, session: Session) -> None:
    async def use() -> None:
        before = session.describe()
        spawning = asyncio.create_task(session.spawn(Echo, name="cancelled"))
        while "cancelled" not in {row.role for row in session.describe()}:
            await asyncio.sleep(0)
        [pid] = [row.pid for row in session.describe() if row.role == "cancelled"]
        spawning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await spawning
        gone([pid])
        assert session.describe() == before and "cancelled" not in session.meshes

    runner.run(use())


def test_stopping_fails_pending_and_later_calls_and_ends_everything(runner: asyncio.Runner) -> None:
    async def use() -> None:
        session = Session()
        heard = Heard()
        session.on_log = heard.append
        await session.start()
        await session.start()
        mesh = await session.spawn(Echo, Setup(), name="stopped")
        children = await mesh.call("start_child")
        waiting = asyncio.create_task(mesh.call("hang"))
        await asyncio.to_thread(heard.wait_for, "stopped[0] hanging")
        await session.stop()
        for call in (waiting, mesh.call("add", 1)):
            with pytest.raises(SessionStopped, match=r"stopped\[0\]"):
                await call
        gone(mesh.replicas[0].pids + children)
        assert session.describe() == [] and session.meshes == {}
        await session.stop()

    runner.run(use())


def test_a_task_that_outlives_its_session_brings_no_process_back(runner: asyncio.Runner) -> None:
    async def use() -> None:
        session = Session()
        await session.start()
        await session.stop()
        with pytest.raises(SessionStopped, match="revenant"):
            await session.spawn(Echo, name="revenant")
        assert session.describe() == []
        async with session:  # asked for, it starts anew
            mesh = await session.spawn(Echo, Setup(2), name="again")
            assert await mesh.call("add", 1) == [3]

    runner.run(use())


def test_ranks_and_replicas_that_do_not_exist_are_refused(runner: asyncio.Runner, pairs: RoleMesh) -> None:
    with pytest.raises(UserError, match="no replica 2, only 0 to 1"):
        runner.run(pairs.call_rank("add", 1, replica=2))
    with pytest.raises(UserError, match="no replica -1"):
        runner.run(pairs.call_rank("add", 1, replica=-1))
    with pytest.raises(UserError, match="no rank 2, only 0 to 1"):
        runner.run(pairs.call_rank("add", 1, rank=2))


def test_stopping_in_the_midst_of_a_spawn_ends_it(runner: asyncio.Runner) -> None:
    async def use() -> None:
        session = Session()
        await session.start()
        spawning = asyncio.create_task(session.spawn(Echo, name="late"))
        while not session.describe():
            await asyncio.sleep(0)
        [row] = session.describe()
        await session.stop()
        with pytest.raises(SessionStopped):
            await spawning
        gone([row.pid])

    runner.run(use())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"procs": 0}, "1 replicas of 0 processes; at least 1"),
        ({"replicas": -1}, "-1 replicas of 1 processes"),
        ({"name": "two words"}, "'two words': use letters, digits and underscores"),
        ({"name": "taken"}, "'taken' is already running"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(
    runner: asyncio.Runner, arguments: dict[str, Any], message: str
) -> None:
    session = Session()
    session.meshes["taken"] = RoleMesh("taken", [])
    with pytest.raises(UserError, match=message):
        runner.run(session.spawn(Echo, Setup(), **arguments))
    assert session.describe() == []


def test_only_workers_are_spawned_and_only_with_a_setup_that_they_have(runner: asyncio.Runner) -> None:
    with pytest.raises(UserError, match="int is not a Worker"):
        runner.run(Session().spawn(int))  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="Worker has no endpoint `setup` to be given 1"):
        runner.run(Session().spawn(Worker, 1))


def test_notes_go_where_they_are_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session()
    session.note("for people")
    assert capsys.readouterr().out == "for people\n"
    notes: list[str] = []
    session.on_note = notes.append
    session.note("for programs")
    assert notes == ["for programs"]
