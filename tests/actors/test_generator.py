"""The generator around its engine, without a mesh: its methods are called as they are."""

import asyncio
import inspect
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from meshrl.actors.generator import Generator, GeneratorConfig, GeneratorSetup
from meshrl.actors.models import ModelConfig, build_model
from meshrl.handoff.dock import dock
from meshrl.programs.tasks import ArithmeticTask
from meshrl.rollout import GroupRequest, SamplingParams


class Watched:
    """An engine that keeps by which threads its methods were called."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.threads: set[int] = set()
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._engine, name)
        if not callable(value):
            return value

        def called(*args: Any) -> Any:
            self.threads.add(threading.get_ident())
            self.steps += name == "step"
            return value(*args)

        return called


def endpoint(generator: Generator, name: str) -> Any:
    method: Any = getattr(Generator, name)
    return lambda *args: inspect.unwrap(method._method)(generator, *args)


def requests(first: int, count: int) -> Sequence[GroupRequest]:
    sampling = SamplingParams(max_tokens=24)
    return [
        GroupRequest(number, "train", number, (2 * number, 2 * number + 1), (1, 2), sampling)
        for number in range(first, first + count)
    ]


def test_an_engine_is_called_by_one_thread_and_abandoning_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never_answers(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("meshrl.actors.graders.call", never_answers)

    async def drive() -> Watched:
        task, model = ArithmeticTask(), ModelConfig()
        generator = Generator.__new__(Generator)
        generator.replica = 0
        await endpoint(generator, "setup")(GeneratorSetup(GeneratorConfig(), model, task))
        generator._engine = watched = Watched(generator._engine)  # pyright: ignore[reportAttributeAccessIssue]
        weights = dict(build_model(model, generator._tokenizer.vocab_size, seed=0).named_parameters())

        await endpoint(generator, "connect_reward")(["a reward actor"])
        for phase in range(3):
            await generator.swap_weights(weights, phase)
            for part in range(4):
                await endpoint(generator, "submit")(requests(100 * phase + 10 * part, 10))
            seen = watched.steps
            while watched.steps < seen + 5:
                await asyncio.sleep(0)
            await endpoint(generator, "abandon")()
            assert watched.idle and not generator._groups and len(dock()) == 0
        generator._driver.cancel()
        return watched

    watched = asyncio.run(asyncio.wait_for(drive(), 120))
    assert len(watched.threads) == 1 and threading.get_ident() not in watched.threads
