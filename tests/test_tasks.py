"""Tasks: the same index is the same prompt everywhere, and held-out prompts are never trained on."""

import json
import os
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.errors import UserError
from meshrl.programs.datasets import DatasetTask, Row, split_rows
from meshrl.programs.tasks import (
    REASONING_GYM_SCORE,
    ArithmeticTask,
    ReasoningGymTask,
    check_prompts,
    default_reward,
    parse_task,
    reasoning_gym_score,
)
from meshrl.rewards import EXACT_MATCH
from meshrl.rollout import Prompt, Rollout, Split, Task

indices = st.integers(0, 2**40)
seeds = st.integers(0, 2**31)


def unordered(prompt: Prompt) -> frozenset[int]:
    return frozenset(prompt.metadata["operands"])


# Arithmetic


def test_the_demo_recipe_is_what_the_issue_says() -> None:
    prompt = ArithmeticTask()._problem("train", 0, 47, 85)
    assert (prompt.text, prompt.answer) == ("47+85=", "231")
    small = ArithmeticTask()._problem("train", 0, 3, 4)
    assert (small.text, small.answer) == ("03+04=", "700")


@given(indices, seeds)
def test_answers_are_right_and_everything_is_padded(index: int, seed: int) -> None:
    task = ArithmeticTask(seed)
    for prompt in (task.prompt("train", index), task.supervised(index), task.prompt("heldout", index % 256)):
        x, y = prompt.metadata["operands"]
        assert prompt.text == f"{x:02}+{y:02}="
        assert prompt.answer is not None and len(prompt.answer) == 3 and int(prompt.answer[::-1]) == x + y


@given(indices, seeds)
def test_a_held_out_problem_is_trained_on_in_neither_order(index: int, seed: int) -> None:
    task = ArithmeticTask(seed)
    heldout = {unordered(task.prompt("heldout", i)) for i in range(task.heldout_size)}
    assert len(heldout) == 256
    assert unordered(task.prompt("train", index)) not in heldout
    assert unordered(task.supervised(index)) not in heldout


def test_held_out_problems_are_the_same_for_every_seed_and_training_is_not() -> None:
    one, two = ArithmeticTask(1), ArithmeticTask(2)
    assert all(one.prompt("heldout", i) == two.prompt("heldout", i) for i in range(256))
    assert [one.prompt("train", i).text for i in range(50)] != [
        two.prompt("train", i).text for i in range(50)
    ]


def test_the_warm_up_has_easy_operands_as_often_as_asked() -> None:
    def share(task: ArithmeticTask) -> float:
        operands = [x for i in range(2000) for x in task.supervised(i).metadata["operands"]]
        return sum(x < 10 for x in operands) / len(operands)

    assert share(ArithmeticTask(easy=0.5)) == pytest.approx(0.55, abs=0.03)
    assert share(ArithmeticTask(easy=0)) == pytest.approx(0.1, abs=0.03)
    assert share(ArithmeticTask(easy=1)) == 1


def test_the_same_index_is_the_same_prompt_in_every_process(tmp_path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": str(i)}) + "\n" for i in range(40)))
    tasks = [ArithmeticTask(3), ReasoningGymTask("chain_sum", 3), DatasetTask(rows, 3)]
    script = (
        "import pickle, sys\n"
        "tasks = pickle.load(sys.stdin.buffer)\n"
        "prompts = [(t.prompt('train', 5), t.prompt('heldout', 2), t.supervised(90)) for t in tasks]\n"
        "sys.stdout.buffer.write(pickle.dumps(prompts))\n"
    )
    for hash_seed in ("1", "2"):
        answer = subprocess.run(
            [sys.executable, "-c", script],
            input=pickle.dumps(tasks),
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        assert pickle.loads(answer.stdout) == [
            (task.prompt("train", 5), task.prompt("heldout", 2), task.supervised(90)) for task in tasks
        ]


def test_impossible_arithmetic_is_refused() -> None:
    with pytest.raises(UserError, match="digits is 0"):
        ArithmeticTask(digits=0)
    with pytest.raises(UserError, match="easy is 1.5"):
        ArithmeticTask(easy=1.5)
    with pytest.raises(UserError, match="can hold out 0 to 27"):
        ArithmeticTask(digits=1, heldout_size=28)
    assert ArithmeticTask(digits=1, heldout_size=27).prompt("train", 0).text
    assert ArithmeticTask(heldout_size=0).prompt("train", 0).text


def test_indices_outside_a_split_are_errors(tmp_path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(20)))
    for task in (ArithmeticTask(), ReasoningGymTask("chain_sum"), DatasetTask(rows)):
        outside: list[tuple[Split, int]] = [("heldout", task.heldout_size), ("heldout", -1), ("train", -1)]
        for split, index in outside:
            with pytest.raises(IndexError):
                task.prompt(split, index)


# reasoning-gym


def test_reasoning_gym_questions_that_read_the_same_are_on_one_side_of_the_split() -> None:
    # Two thousand items of this data set share 260 questions, so a split by index would leak.
    task = ReasoningGymTask("coin_flip", heldout_size=64)
    heldout = {task.prompt("heldout", i).text for i in range(64)}
    assert len(heldout) == 64
    for i in range(200):
        assert task.prompt("train", i).text not in heldout
        assert task.supervised(i).text not in heldout
    assert len({task.prompt("train", i).text for i in range(200)}) > 80


def test_reasoning_gym_counts_full_marks_only() -> None:
    prompt = ReasoningGymTask("chain_sum").prompt("train", 0)
    assert prompt.answer is not None

    def score(response: str) -> float:
        return reasoning_gym_score(Rollout(0, prompt, response, (), "stop"))

    assert score(prompt.answer) == 1
    assert score(f"the answer is {prompt.answer}") == 0  # its own scorer gives a little for this
    assert score("") == 0
    assert reasoning_gym_score(Rollout(0, prompt, prompt.answer, (), "length")) == 0


def test_unknown_reasoning_gym_names_get_suggestions() -> None:
    with pytest.raises(UserError, match="no data set 'chainsum'; did you mean chain_sum"):
        ReasoningGymTask("chainsum")


def test_missing_reasoning_gym_names_the_extra(monkeypatch) -> None:
    from meshrl.programs import tasks

    tasks._reasoning_gym_dataset.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"pip install 'meshrl\[tasks\]'"):
        ReasoningGymTask("chain_sum")


# Rows of a file


def write(path, *rows) -> None:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def test_rows_come_back_as_prompts_from_both_file_types(tmp_path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [{"prompt": f"{i} + 1 =", "answer": str(i + 1), "level": i} for i in range(30)]
    write(tmp_path / "rows.jsonl", *rows)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    lines, table = DatasetTask(tmp_path / "rows.jsonl"), DatasetTask(tmp_path / "rows.parquet")
    assert lines.train_size == table.train_size == 27
    assert lines.heldout_size == table.heldout_size == 3
    for i in range(27):
        prompt = lines.prompt("train", i)
        assert prompt == table.prompt("train", i)
        assert prompt.answer == str(prompt.metadata["level"] + 1)
        assert prompt.text == f"{prompt.metadata['level']} + 1 ="


def test_bad_rows_are_named_by_file_row_and_field(tmp_path) -> None:
    good = {"prompt": "a"}
    path = tmp_path / "rows.jsonl"
    for bad, message in (
        ("{'prompt': 1}", "line 2: not JSON: .* at column 2"),
        ("[1]", "line 2: expected an object .*, found list"),
        (
            {"question": "b", "answer": "c"},
            "line 2, field 'prompt': missing; fields found: 'question', 'answer'",
        ),
        ({"prompt": 3}, "line 2, field 'prompt': expected text, found int 3; write it as '3'"),
        ({"prompt": ["b"]}, "line 2, field 'prompt': expected text, found list"),
        ({"prompt": ""}, "line 2, field 'prompt': empty"),
        ({"prompt": None}, "line 2, field 'prompt': expected text, found NoneType"),
        ({"prompt": "b", "answer": 3}, "line 2, field 'answer': expected text, found int 3"),
        ('{"prompt": "\\ud800"}', "line 2, field 'prompt': not valid text"),
    ):
        write(path, good, bad)
        with pytest.raises(UserError, match=f"rows.jsonl, {message}"):
            DatasetTask(path)
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(UserError, match="rows.jsonl, line 2: not UTF-8"):
        DatasetTask(path)


def test_bad_files_are_named(tmp_path) -> None:
    (tmp_path / "rows.csv").write_text("prompt\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "one.jsonl").write_text('{"prompt": "a"}\n{"prompt": "a"}\n')
    (tmp_path / "not.parquet").write_text("no")
    (tmp_path / "folder.jsonl").mkdir()
    for name, message in {
        "rows.csv": "file type '.csv' is not known",
        "none.jsonl": "no such file",
        "empty.jsonl": "no rows",
        "one.jsonl": "at least 2 distinct prompts",
        "not.parquet": "not a Parquet file",
        "folder.jsonl": "cannot be read",
    }.items():
        with pytest.raises(UserError, match=f"{name}: {message}"):
            DatasetTask(tmp_path / name)


def test_a_parquet_file_without_prompts_names_its_columns(tmp_path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"question": ["a"]}), tmp_path / "rows.parquet")
    with pytest.raises(UserError, match="row 1, field 'prompt': missing; fields found: 'question'"):
        DatasetTask(tmp_path / "rows.parquet")


def test_a_file_that_changes_under_a_run_is_noticed(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, *({"prompt": str(i)} for i in range(5)))
    travelling = pickle.dumps(DatasetTask(path))
    write(path, *({"prompt": str(i)} for i in range(6)))
    script = "import pickle, sys; pickle.load(sys.stdin.buffer).prompt('train', 0)"
    answer = subprocess.run([sys.executable, "-c", script], input=travelling, capture_output=True)
    assert b"changed since the task was made" in answer.stderr


def test_each_epoch_of_the_warm_up_shows_every_row_once_in_a_new_order(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, *({"prompt": str(i), "answer": "x"} for i in range(20)))
    task = DatasetTask(path)
    epochs = [[task.supervised(e * 18 + i).text for i in range(18)] for e in range(3)]
    assert len({frozenset(epoch) for epoch in epochs}) == 1 and len(set(epochs[0])) == 18
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_warm_up_without_answers_names_the_row(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, {"prompt": "a", "answer": "b"}, "", {"prompt": "c"})
    task = DatasetTask(path, heldout_fraction=0)
    with pytest.raises(UserError, match="rows.jsonl, line 3, field 'answer': missing"):
        for i in range(2):
            task.supervised(i)


texts = st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=40)


@given(texts, st.floats(0, 0.9), st.integers(1, 8), st.randoms())
def test_the_split_loses_nothing_leaks_nothing_and_ignores_order(texts, fraction, limit, random) -> None:
    rows = [Row(i, text, None, {}) for i, text in enumerate(texts, 1)]
    split = split_rows(rows, fraction, limit)
    assert sorted([*split.train, *split.heldout], key=lambda row: row.number) == rows
    heldout = {row.prompt for row in split.heldout}
    assert heldout.isdisjoint(row.prompt for row in split.train)
    assert len(heldout) <= limit and bool(heldout) == bool(fraction)
    random.shuffle(rows)
    assert {row.prompt for row in split_rows(rows, fraction, limit).heldout} == heldout


# By name


def test_tasks_are_found_by_name(tmp_path) -> None:
    write(tmp_path / "rows.jsonl", {"prompt": "a"}, {"prompt": "b"})
    assert parse_task(seed=4) == ArithmeticTask(4)
    assert parse_task("reasoning_gym:chain_sum", seed=4) == ReasoningGymTask("chain_sum", 4)
    assert parse_task(data=tmp_path / "rows.jsonl") == DatasetTask(tmp_path / "rows.jsonl")
    for task in (
        parse_task(),
        parse_task("reasoning_gym:chain_sum"),
        parse_task(data=tmp_path / "rows.jsonl"),
    ):
        assert isinstance(task, Task)
    assert default_reward(ArithmeticTask()) == EXACT_MATCH
    assert default_reward(ReasoningGymTask("chain_sum")) == REASONING_GYM_SCORE


def test_wrong_task_names_say_what_is_known() -> None:
    for name in ("arithmetics", "reasoning_gym", "reasoning_gym:", "arithmetic:3", ""):
        with pytest.raises(UserError, match="known: arithmetic, reasoning_gym:NAME"):
            parse_task(name)
    with pytest.raises(UserError, match="did you mean --data"):
        parse_task("rows.jsonl")
    with pytest.raises(UserError, match="name one of them"):
        parse_task("reasoning_gym:chain_sum", data="rows.jsonl")


def test_a_prompt_longer_than_the_context_is_named(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, {"prompt": "a"}, {"prompt": "b" * 9}, {"prompt": "c"})
    task = DatasetTask(path)

    def encode(text: str) -> list[int]:
        return list(text.encode())

    check_prompts(task, encode, context_tokens=10)
    message = "rows.jsonl, line 2, field 'prompt': 9 tokens, but the context of 10 tokens leaves 8"
    with pytest.raises(UserError, match=message):
        check_prompts(task, encode, context_tokens=10, response_tokens=2)
    with pytest.raises(UserError, match="train prompt 0: 6 tokens"):
        check_prompts(ArithmeticTask(), encode, context_tokens=5)
