"""Reward functions by name, and the default one."""

import pytest

from meshrl.errors import UserError
from meshrl.rewards import EXACT_MATCH, batched, exact_match, is_async, is_batched, load_reward
from meshrl.rollout import Prompt, Rollout, StopReason


def rollout(response: str, answer: str | None = "231", stop_reason: StopReason = "stop") -> Rollout:
    return Rollout(7, Prompt(3, "train", "47+85=", answer), response, (1, 2), stop_reason)


def test_exact_match_counts_only_the_whole_answer() -> None:
    assert exact_match(rollout("231")) == 1
    assert exact_match(rollout(" 231\n")) == 1
    for wrong in ("", "23", "2311", "132", "231$"):
        assert exact_match(rollout(wrong)) == 0


def test_a_response_that_was_cut_off_is_known_by_its_stop_reason() -> None:
    assert exact_match(rollout("231", stop_reason="length")) == 0
    assert exact_match(rollout("231", stop_reason="abort")) == 0


def test_a_missing_answer_is_an_error_not_a_zero() -> None:
    with pytest.raises(ValueError, match="train prompt 3 has no answer"):
        exact_match(rollout("231", answer=None))


def test_functions_are_found_by_module_and_by_file(tmp_path) -> None:
    assert load_reward(EXACT_MATCH) is exact_match
    (tmp_path / "beside.py").write_text("VALUE = 0.25\n")
    (tmp_path / "mine.py").write_text("from beside import VALUE\ndef score(rollout):\n    return VALUE\n")
    assert load_reward(f"{tmp_path}/mine.py:score")(rollout("")) == 0.25


def test_a_file_named_like_a_module_of_the_standard_library_does_not_replace_it(tmp_path) -> None:
    (tmp_path / "random.py").write_text("def score(rollout):\n    return 0.5\n")
    assert load_reward(f"{tmp_path}/random.py:score")(rollout("")) == 0.5
    import random

    assert hasattr(random, "Random")


def test_wrong_names_say_what_is_wrong_and_the_way_out(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("number = 3\ndef score(rollout):\n    return 1\n")
    for name, message in {
        "exact_match": "expected module:function or path/to/file.py:function",
        ":score": "expected module:function",
        "no_such_package.rewards:score": "there is no module 'no_such_package'",
        "meshrl.no_such:score": "there is no module 'meshrl.no_such'",
        "meshrl.rewards:exact_mach": "did you mean exact_match",
        f"{file}:scor": "did you mean score",
        f"{file}:number": "a int, not a function",
        f"{tmp_path}/other.py:score": "no such file",
    }.items():
        with pytest.raises(UserError, match=message):
            load_reward(name)


def test_a_file_named_like_a_module_is_pointed_at(tmp_path, monkeypatch) -> None:
    (tmp_path / "lonely_rewards.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="for a file write lonely_rewards.py:"):
        load_reward("lonely_rewards:score")


def test_an_import_that_fails_inside_the_users_module_is_not_taken_for_a_wrong_name(tmp_path) -> None:
    (tmp_path / "needy.py").write_text("import no_such_library\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load_reward(f"{tmp_path}/needy.py:score")


def test_kinds_of_functions_are_told_apart() -> None:
    async def judge(rollout):
        return 1

    class Judge:
        async def __call__(self, rollout):
            return 1

    @batched
    async def ranking(rollouts):
        return [1] * len(rollouts)

    assert is_async(judge) and is_async(Judge()) and is_async(ranking) and not is_async(exact_match)
    assert is_batched(ranking) and not is_batched(judge)
