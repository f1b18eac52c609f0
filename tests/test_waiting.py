"""What a process waits for, and the chains that it makes across processes."""

from __future__ import annotations

import asyncio

import pytest

from meshrl.waiting import Wait, innermost, waiting, waits
from meshrl.why import Why, explain


def entry(number: int, what: str, *, inside: int | None = None, kind: str = "wait", by: str = "") -> Wait:
    names = tuple(by.split()) if by else ()
    return Wait(number, inside, "grpo", what, kind, names, 10.0 - number, None, "")  # pyright: ignore[reportArgumentType]


def test_an_entry_is_there_from_beginning_to_end_also_where_it_is_cancelled() -> None:
    async def drive() -> None:
        begun = asyncio.Event()

        async def wait() -> None:
            with waiting("the moon", unblocked_by=lambda: ["night[0]"], details=lambda: "full"):
                begun.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(wait(), name="wolf")
        await begun.wait()
        (found,) = [wait for wait in waits() if wait.what == "the moon"]
        assert (found.who, found.unblocked_by, found.details) == ("wolf", ("night[0]",), "full")
        assert found.seconds >= 0
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not [wait for wait in waits() if wait.what == "the moon"]

    asyncio.run(drive())


def test_what_stands_inside_another_is_what_is_really_waited_for() -> None:
    async def inner(begun: asyncio.Event) -> None:
        with waiting("a message"):
            begun.set()
            await asyncio.Event().wait()

    async def drive() -> None:
        begun = asyncio.Event()
        with waiting("a batch"):
            task = asyncio.create_task(inner(begun))  # started inside, so it stands inside
            await begun.wait()
            assert [wait.what for wait in innermost(waits())] == ["a message"]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert [wait.what for wait in innermost(waits())] == ["a batch"]

    asyncio.run(drive())


def test_what_is_idle_and_what_stands_inside_it_is_left_out_and_the_longest_comes_first() -> None:
    entries = [
        entry(3, "short"),
        entry(0, "news", kind="idle"),
        entry(1, "poll of generator[0]", inside=0),
        entry(2, "long"),
    ]
    assert [wait.what for wait in innermost(entries)] == ["long", "short"]


def test_a_chain_is_followed_to_whom_everything_waits_for() -> None:
    ranks = {
        "generator[0]": [entry(0, "finished", kind="work"), entry(1, "grades", inside=0, by="reward[0]")],
        "generator[1]": [entry(0, "groups to generate", kind="idle")],
        "reward[0]": [entry(0, "grade", kind="work")],
        "learner[0]": "is dead: killed by SIGKILL",
    }
    trees = explain(
        [entry(0, "a batch", by="generator[0] generator[1]"), entry(1, "step", by="learner[0]")], ranks
    )
    why = Why("step 3", trees)
    assert why.roots == (
        "reward[0] is in grade for 10.0 s",
        "generator[1] has nothing to do",
        "learner[0] is dead: killed by SIGKILL",
    )
    first, second = str(why).splitlines()[1:3]
    assert first == "  grpo waits for a batch for 10.0 s, unblocked by generator[0], generator[1]"
    assert second == "    generator[0] waits for grades for 9.0 s, unblocked by reward[0]"


def test_ranks_that_wait_for_each_other_are_a_tree_that_ends() -> None:
    ranks = {
        "a[0]": [entry(0, "b", by="b[0]")],
        "b[0]": [entry(0, "a", by="a[0]")],
    }
    (tree,) = explain([entry(0, "a", by="a[0]")], ranks)
    assert len(list(tree.lines())) == 3
