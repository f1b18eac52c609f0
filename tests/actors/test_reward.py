"""The reward actor on real meshes: called actor to actor, and what goes wrong arrives as itself."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import tyro
from grading import DEADLINE_SECONDS, ended, rollouts

from meshrl.actors.grader_process import RewardError
from meshrl.actors.reward import Reward, RewardConfig, RewardSetup
from meshrl.configuration import from_plain, to_plain
from meshrl.errors import UserError
from meshrl.parcel import parcel
from meshrl.rewards import Grade
from meshrl.rollout import Rollout
from meshrl.session import Session, WorkerDied
from meshrl.worker import Worker, call, endpoint


class Sender(Worker):
    """Stands for a generator: sends rollouts to the reward actors that it knows."""

    @endpoint
    async def send(self, handles: Sequence, batch: Sequence[Rollout]) -> list[list[Grade]]:
        return list(
            await asyncio.gather(
                *(call(handle, "grade", parcel(batch), deadline_seconds=60) for handle in handles)
            )
        )


@dataclass
class Bench:
    """A session on a loop that several tests share."""

    runner: asyncio.Runner
    session: Session
    lines: list[str] = field(default_factory=list)
    news: threading.Condition = field(default_factory=threading.Condition)

    def log(self, line: str) -> None:
        with self.news:
            self.lines.append(line)
            self.news.notify_all()

    def run(self, coroutine):
        return self.runner.run(asyncio.wait_for(coroutine, 120))


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        session = Session()
        bench = Bench(runner, session)
        session.on_log = bench.log
        bench.run(session.start())
        yield bench
        bench.run(session.stop())


def setup(function=None, **options) -> RewardSetup:
    return RewardSetup(RewardConfig(function=function, **options))


def test_text_goes_from_actor_to_actor_and_the_function_may_come_from_a_cell(bench: Bench) -> None:
    bonus = 0.5

    def with_bonus(rollout):
        print("graded", rollout.id)
        return bonus + (rollout.response == rollout.prompt.answer)

    with_bonus.__module__ = "__main__"

    async def scenario() -> None:
        reward, sender = await asyncio.gather(
            bench.session.spawn(Reward, setup(with_bonus), replicas=2, name="reward"),
            bench.session.spawn(Sender, name="sender"),
        )
        [answers] = await sender.call("send", reward.handles, rollouts(3))
        assert answers == [[Grade(1.5)] * 3] * 2

    bench.run(scenario())
    # Printed by a child of the actor: in the log of the actor.
    wanted = {f"reward[{replica}] graded {i}" for replica in range(2) for i in range(3)}
    with bench.news:
        assert bench.news.wait_for(lambda: wanted <= set(bench.lines), DEADLINE_SECONDS)


def test_the_task_names_the_function_where_the_user_does_not(bench: Bench) -> None:
    async def scenario() -> None:
        reward = await bench.session.spawn(Reward, RewardSetup(), name="by_default")
        assert await reward.call("grade", rollouts(1)) == [[Grade(1.0)]]
        assert await reward.call("grade", rollouts(1, response="132")) == [[Grade(0.0)]]

    bench.run(scenario())


def test_what_is_wrong_arrives_as_its_own_type(bench: Bench) -> None:
    def fails(rollout):
        raise ValueError("bad rollout")

    fails.__module__ = "__main__"

    async def scenario() -> None:
        with pytest.raises(UserError, match="did you mean exact_match"):
            await bench.session.spawn(Reward, setup("meshrl.rewards:exact_mach"), name="misspelt")
        reward = await bench.session.spawn(Reward, setup(fails, failures_in_a_row=2), name="failing")
        [[grade]] = await reward.call("grade", rollouts(1))
        assert grade.reward is None
        assert str(grade.error).startswith("rollout 0: the reward function raised ValueError: bad rollout")
        with pytest.raises(RewardError, match="failed on 2 rollouts in a row") as caught:
            await reward.call("grade", rollouts(3))
        assert any(note.startswith("raised on failing[0]") for note in caught.value.__notes__)

    bench.run(scenario())


def test_the_grader_ends_with_its_actor(bench: Bench) -> None:
    def hangs(rollout):
        import os
        import time

        if rollout.id == 0:
            return os.getpid()
        time.sleep(1000)

    hangs.__module__ = "__main__"

    async def scenario() -> int:
        reward = await bench.session.spawn(Reward, setup(hangs), name="mortal")
        [[grade]] = await reward.call("grade", rollouts(1))
        waiting = asyncio.create_task(reward.call("grade", rollouts(2)[1:]))
        await asyncio.sleep(0)
        [pid] = reward.replicas[0].pids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            await waiting
        return int(grade.reward)

    assert ended(bench.run(scenario()))


def test_the_command_line_names_functions_and_python_gives_them() -> None:
    def mine(rollout):
        return 1.0

    assert tyro.cli(RewardConfig, args=[]) == RewardConfig(function=None)
    assert tyro.cli(RewardConfig, args=["--function", "mine.py:score"]).function == "mine.py:score"
    assert tyro.cli(RewardConfig, args=[], default=RewardConfig(mine)).function is mine
    for function in (None, "mine.py:score"):
        config = RewardConfig(function)
        assert from_plain(RewardConfig, to_plain(config)) == config


def test_no_grader_outlives_the_session() -> None:
    def pid_of_grader(rollout):
        import os

        return os.getpid()

    pid_of_grader.__module__ = "__main__"

    async def scenario() -> int:
        async with Session() as session:
            reward = await session.spawn(Reward, setup(pid_of_grader))
            [[grade]] = await reward.call("grade", rollouts(1))
        return int(grade.reward)

    assert ended(asyncio.run(scenario()))
