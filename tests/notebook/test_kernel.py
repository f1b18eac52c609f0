"""meshrl in real notebook kernels: workers written in cells, interrupts, and what kernels leave behind."""

from __future__ import annotations

import asyncio
import importlib
import signal
from collections.abc import Iterator

import pytest
from kernels import SECONDS, Kernel, kernel
from processes import marked, wait_until

from meshrl.notebook.init import in_kernel, prepare_kernel

START = """
import asyncio
from meshrl.session import Session, Worker, endpoint

class Greeter(Worker):
    @endpoint
    async def setup(self, greeting):
        self.greeting = greeting
    @endpoint
    async def greet(self, name):
        return f"{self.greeting}, {name}"
    @endpoint
    async def hang(self):
        print("hanging")
        await asyncio.Event().wait()
    @endpoint
    async def fail(self):
        raise LookupError("nobody here")

session = Session()
await session.start()
greeters = await session.spawn(Greeter, "Hello", replicas=2)
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    with kernel() as started:
        cell = started.run(START)
        assert cell.status == "ok", cell
        yield started


def nothing_left(mark: str) -> None:
    wait_until(lambda: not marked(mark), SECONDS, lambda: marked(mark))


def test_a_worker_written_in_a_cell_answers(notebook: Kernel) -> None:
    assert notebook.run("await greeters.call('greet', 'you')").output == "['Hello, you', 'Hello, you']"


def test_a_worker_is_written_anew_and_spawned_again(notebook: Kernel) -> None:
    cell = notebook.run("""
class Greeter(Worker):
    @endpoint
    async def greet(self, name):
        return f"Bye, {name}"

again = await session.spawn(Greeter, name="again")
await again.call("greet", "you") + [await greeters.call_rank("greet", "you")]
""")
    assert cell.output == "['Bye, you', 'Hello, you']", cell


def test_an_error_in_a_cell_shows_the_line_of_the_cell_that_raised_it(notebook: Kernel) -> None:
    cell = notebook.run("await greeters.call('fail')")
    assert cell.error == "LookupError"
    assert "raised on greeter[" in cell.traceback
    remote = cell.traceback.partition("remote traceback:")[2]
    assert "in fail" in remote and 'raise LookupError("nobody here")' in remote


def test_an_interrupted_cell_returns_and_the_workers_still_answer(notebook: Kernel) -> None:
    for _ in range(2):
        waiting = notebook.start("await greeters.call('hang')")
        notebook.finish(waiting, until_output="hanging")
        notebook.manager.interrupt_kernel()
        assert notebook.finish(waiting).error == "CancelledError"
        assert notebook.run("await greeters.call('greet', 'you')").output == "['Hello, you', 'Hello, you']"


def test_sessions_of_a_notebook_prepare_it_once(notebook: Kernel) -> None:
    cell = notebook.run("""
import signal
first = signal.set_wakeup_fd(-1); signal.set_wakeup_fd(first)
async with Session(): pass
second = signal.set_wakeup_fd(-1); signal.set_wakeup_fd(second)
first != -1 and first == second
""")
    assert cell.output == "True", cell


def test_stopping_leaves_the_kernel_alone(notebook: Kernel) -> None:
    assert len(marked(notebook.mark)) > 1
    assert notebook.run("await session.stop()").status == "ok"
    wait_until(lambda: len(marked(notebook.mark)) == 1, SECONDS, lambda: marked(notebook.mark))
    assert notebook.run("1 + 1").output == "2"


@pytest.mark.parametrize("end", ["shutdown", "kill"])
def test_a_kernel_that_ends_leaves_no_process(end: str) -> None:
    with kernel() as started:
        assert started.run(START).status == "ok"
        waiting = started.start("await greeters.call('hang')")
        started.finish(waiting, until_output="hanging")
        if end == "shutdown":
            started.manager.shutdown_kernel()
        else:
            started.manager.signal_kernel(signal.SIGKILL)
        nothing_left(started.mark)


def test_importing_ipython_makes_no_kernel_of_a_script() -> None:
    importlib.import_module("IPython")
    before = signal.set_wakeup_fd(-1)
    assert not in_kernel()

    async def start() -> None:
        prepare_kernel()

    asyncio.run(start())
    assert signal.set_wakeup_fd(before) == -1
