"""Endpoints and errors of workers, between controller and workers and between workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from session_workers import Echo, Forgetful, Setup

from meshrl.logs import rank_name
from meshrl.mesh import RoleMesh
from meshrl.session import DeadlineError, RemoteError, Session, Worker, endpoint
from meshrl.worker import call


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def session(runner: asyncio.Runner) -> Iterator[Session]:
    session = Session()
    runner.run(session.start())
    yield session
    runner.run(session.stop())


@pytest.fixture(scope="module")
def pair(runner: asyncio.Runner, session: Session) -> RoleMesh:
    return runner.run(session.spawn(Echo, Setup(10), procs=2, name="pair"))


def raised(runner: asyncio.Runner, mesh: RoleMesh, name: str, *args: object) -> Exception:
    with pytest.raises(Exception) as caught:
        runner.run(mesh.call(name, *args, deadline_seconds=60))
    return caught.value


def test_names_of_ranks_are_short_and_tell_them_apart() -> None:
    assert rank_name("reward", 0, 0, replicas=1, procs=1) == "reward[0]"
    assert rank_name("generator", 1, 0, replicas=2, procs=1) == "generator[1]"
    assert rank_name("learner", 0, 1, replicas=1, procs=2) == "learner[1]"
    assert rank_name("generator", 1, 3, replicas=2, procs=4) == "generator[1,3]"


def test_a_call_that_waits_does_not_hold_up_others(runner: asyncio.Runner, pair: RoleMesh) -> None:
    async def both() -> list[str]:
        waiting = asyncio.create_task(pair.call("wait", deadline_seconds=60))
        await pair.call("add", 1, deadline_seconds=60)
        assert not waiting.done()
        await pair.call("wake", deadline_seconds=60)
        return await waiting

    assert runner.run(both()) == ["woken", "woken"]


def test_an_exception_arrives_as_its_own_type_and_says_where_it_was_raised(
    runner: asyncio.Runner, pair: RoleMesh
) -> None:
    error = raised(runner, pair, "fail", KeyError("nothing there"), 1)
    assert type(error) is KeyError and error.args == ("nothing there",)
    where, frames = error.__notes__
    assert where.startswith(f"raised on pair[1], pid {pair.replicas[0].pids[1]}, host ")
    assert "in fail\n    raise error\n" in frames


def test_an_exception_of_a_local_class_is_still_an_instance_of_it(
    runner: asyncio.Runner, pair: RoleMesh
) -> None:
    class Local(Exception):
        pass

    assert isinstance(raised(runner, pair, "fail", Local("mine")), Local)


def test_an_exception_that_would_lose_its_notes_arrives_by_name(
    runner: asyncio.Runner, pair: RoleMesh
) -> None:
    error = raised(runner, pair, "fail", Forgetful("what was it"))
    assert type(error) is RemoteError and str(error) == "session_workers.Forgetful: what was it"
    assert len(error.__notes__) == 2


def test_an_exception_keeps_the_notes_of_its_own(runner: asyncio.Runner, pair: RoleMesh) -> None:
    given = ValueError("wrong")
    given.add_note("in row 7")
    error = raised(runner, pair, "fail", given)
    assert type(error) is ValueError and error.__notes__[0] == "in row 7" and len(error.__notes__) == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fail_unpicklable", "session_workers.Unpicklable: holds a generator"),
        ("fail_two_arguments", "session_workers.TwoArguments: this and that"),
    ],
)
def test_an_exception_that_cannot_travel_arrives_by_name(
    runner: asyncio.Runner, pair: RoleMesh, name: str, text: str
) -> None:
    error = raised(runner, pair, name)
    assert type(error) is RemoteError and str(error) == text
    assert any(f"in {name}" in note for note in error.__notes__)


def test_leaving_python_in_an_endpoint_is_an_error_and_the_worker_lives(
    runner: asyncio.Runner, pair: RoleMesh
) -> None:
    error = raised(runner, pair, "fail", SystemExit(3))
    assert type(error) is RemoteError and str(error) == "SystemExit: 3"
    assert runner.run(pair.call("add", 1)) == [11, 11]


def test_a_timeout_of_the_endpoint_is_not_taken_for_ours(runner: asyncio.Runner, pair: RoleMesh) -> None:
    error = raised(runner, pair, "fail", TimeoutError("of a file"))
    assert type(error) is TimeoutError and str(error) == "of a file"


def test_an_endpoint_that_does_not_exist_is_named(runner: asyncio.Runner, pair: RoleMesh) -> None:
    with pytest.raises(AttributeError, match="Echo has no endpoint named 'subtract'"):
        runner.run(pair.call("subtract", 1))


def test_a_class_defined_in_a_function_makes_a_worker(runner: asyncio.Runner, session: Session) -> None:
    class Local(Worker):
        @endpoint
        async def setup(self, factor: int) -> None:
            self.factor = factor

        @endpoint
        async def multiply(self, number: int) -> int:
            return self.factor * number

    async def use() -> list[int]:
        mesh = await session.spawn(Local, 3)
        return await mesh.call("multiply", 5, deadline_seconds=60)

    assert runner.run(use()) == [15]


def test_workers_call_each_other_and_errors_keep_their_origin(runner: asyncio.Runner, pair: RoleMesh) -> None:
    async def use() -> None:
        beside = await pair.spawn_beside(Echo, "beside")
        await beside.call("setup", Setup(100))
        other = beside.replicas[0].actors.slice(gpus=1)
        assert await pair.call_rank("ask", other, "add", 5) == 105
        assert await call(other, "add", 6, deadline_seconds=60) == 106
        with pytest.raises(KeyError) as caught:
            await pair.call_rank("ask", other, "fail", KeyError("theirs"), 1)
        assert [note[:20] for note in caught.value.__notes__] == [
            "raised on beside[1],",
            "remote traceback:\nTr",
        ]
        with pytest.raises(DeadlineError, match="waited 0.05 s for hang of Echo"):
            await call(other, "hang", deadline_seconds=0.05)

    runner.run(use())
