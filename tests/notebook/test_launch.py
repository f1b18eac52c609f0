"""The program in a real kernel: launched, iterated, interrupted, given a reward from a cell, closed."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from kernels import SECONDS, Kernel, kernel
from processes import marked, wait_until

LAUNCH = """
import tempfile
import meshrl
from dataclasses import replace
from meshrl.actors.reward import RewardConfig
from meshrl.actors.rollouts import RolloutsConfig
from meshrl.programs.config import EvaluationConfig
from meshrl.programs.grpo import GRPOConfig, grpo
from meshrl.programs.sft import WarmUpConfig

def reward(rollout):
    return float(len(rollout.response) % 2)

config = GRPOConfig(
    steps=1000,
    reward=RewardConfig(function=reward),
    rollouts=RolloutsConfig(prompts_per_step=4, group_size=4),
    warm_up=WarmUpConfig(steps=0),
    evaluation=EvaluationConfig(every=0, prompts=4),
)
run = meshrl.launch(grpo, config, directory=tempfile.mkdtemp())
async for step in run:
    if step.step == 2:
        break
step.step, 0 < step.metrics["reward"] < 1
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    with kernel() as started:
        cell = started.run(LAUNCH)
        assert cell.status == "ok", cell
        assert cell.output.endswith("(2, True)"), cell
        yield started


def test_not_asking_is_the_pause_and_the_next_cell_goes_on(notebook: Kernel) -> None:
    assert notebook.run("run.state, (await anext(run)).step").output.endswith("('paused', 3)")


def test_an_interrupted_cell_harms_nothing(notebook: Kernel) -> None:
    going = notebook.start("async for step in run:\n    print('step', step.step, flush=True)")
    notebook.finish(going, until_output="step 5")
    notebook.manager.interrupt_kernel()
    cell = notebook.finish(going)
    assert cell.error in ("KeyboardInterrupt", "CancelledError"), cell
    after = notebook.run("before = step.step; (await anext(run)).step - before")
    assert after.status == "ok" and after.output.endswith("1"), after


def test_stopping_leaves_the_kernel_alone_with_itself(notebook: Kernel) -> None:
    cell = notebook.run("await run.stop(); import os; print(run.state, os.getpid())")
    state, pid = cell.output.split()[-2:]
    assert state == "stopped"
    wait_until(lambda: set(marked(notebook.mark)) == {int(pid)}, SECONDS, lambda: marked(notebook.mark))


def test_a_killed_kernel_takes_its_run_along() -> None:
    with kernel() as started:
        assert started.run(LAUNCH).status == "ok"
        started.manager.signal_kernel(signal.SIGKILL)
        wait_until(lambda: not marked(started.mark), SECONDS, lambda: marked(started.mark))
