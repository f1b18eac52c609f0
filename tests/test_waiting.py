"""What a process waits for, and the chains that it makes across processes."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_of_ranks_that_were_called_those_that_have_answered_are_left_out() -> None:
    ranks = {
        "learner[0]": [entry(0, "pull", kind="work"), entry(1, "a message", inside=0)],
        "learner[1]": [
            entry(0, "pull", kind="work"),
            entry(1, "other", inside=0),
            entry(2, "step", kind="work"),
        ],
        "learner[2]": [],
    }
    (tree,) = explain([entry(0, "step on learner[0], …", by="learner[0] learner[1] learner[2]")], ranks)
    assert [node.text for node in tree.below] == ["learner[1] is in step for 8.0 s"]


@pytest.mark.parametrize("count", [2, 3, 12])
def test_ranks_that_wait_for_each_other_are_named_once_and_are_the_root(count: int) -> None:
    names = [f"rank[{i}]" for i in range(count)]
    ranks = {name: [entry(0, "all", by=" ".join(n for n in names if n != name))] for name in names}
    why = Why(
        "",
        explain([entry(0, "a step", by="before[0]")], {"before[0]": [entry(0, "all", by=names[0])]} | ranks),
    )
    (root,) = why.roots
    assert root.startswith(f"{names[0]}, {names[1]}") and root.endswith("wait for each other")
    assert "before[0]" not in root and len(str(why).splitlines()) == count + 4


def test_ranks_that_wait_for_each_other_and_for_one_who_works_are_not_stuck() -> None:
    ranks = {
        "a[0]": [entry(0, "all", by="b[0] c[0]")],
        "b[0]": [entry(0, "all", by="a[0] c[0]")],
        "c[0]": [entry(0, "backward", kind="work")],
    }
    assert Why("", explain([entry(0, "step", by="a[0]")], ranks)).roots == ("c[0] is in backward for 10.0 s",)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=30), st.sets(st.integers(0, 7)))
def test_every_report_is_short_and_ends_in_a_root(edges: list[tuple[int, int]], dead: set[int]) -> None:
    """Its roots are those reached that wait for nobody, and the knots that nobody can leave."""
    by = {i: [f"r[{b}]" for a, b in edges if a == i and b != i] for i in range(8)}
    ranks = {
        f"r[{i}]": f"is dead: {i}" if i in dead else [entry(0, "all", by=" ".join(by[i]))] for i in range(8)
    }
    why = Why("", explain([entry(0, "a step", by="r[0]")], ranks))
    assert why.roots and len(str(why).splitlines()) <= 1 + 1 + 8 + 1
    reached, left = set(), [0]
    while left:
        if (i := left.pop()) not in reached:
            reached.add(i)
            left += [] if i in dead else [int(name[2:-1]) for name in by[i]]
    ends = {f"r[{i}]" for i in reached if i in dead or not by[i]}
    assert ends <= {root.split()[0] for root in why.roots}
    assert len(why.roots) - len(ends) in (0, 1)


def test_many_ranks_with_nothing_to_do_take_one_line() -> None:
    names = [f"generator[{i}]" for i in range(1000)]
    (tree,) = explain([entry(0, "a batch", by=" ".join(names))], {name: [] for name in names})
    assert len(list(tree.lines())) == 2 and all(len(line) < 200 for line in tree.lines())


def test_a_wait_that_does_not_know_who_ends_it_goes_by_the_one_around_it() -> None:
    (wait,) = innermost([entry(0, "grades", by="reward[0]"), entry(1, "a message", inside=0)])
    assert (wait.what, wait.unblocked_by) == ("a message", ("reward[0]",))


def test_details_that_fail_do_not_take_the_report_with_them() -> None:
    with waiting("a batch", unblocked_by=["generator[0]"], details=lambda: str(1 // 0)):
        (found,) = [wait for wait in waits() if wait.what == "a batch"]
    assert "ZeroDivisionError" in found.details and found.unblocked_by == ("generator[0]",)


def test_threads_have_entries_of_their_own() -> None:
    inside, looked = threading.Event(), threading.Event()

    def work() -> None:
        with waiting("the other thread"):
            inside.set()
            looked.wait(10)

    thread = threading.Thread(target=work, name="helper")
    thread.start()
    assert inside.wait(10)
    (found,) = [wait for wait in waits() if wait.what == "the other thread"]
    looked.set()
    thread.join()
    assert (found.who, found.inside) == ("helper", None)
    assert not [wait for wait in waits() if wait.what == "the other thread"]
