"""Tasks by name: two-digit addition, reasoning-gym, rows of a file.

A task is a small frozen dataclass that turns an index into a prompt, the same one in every process: each
prompt draws from a random stream of its own, named by task, seed, split and index.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshrl.errors import UserError
from meshrl.programs.datasets import DatasetTask
from meshrl.rewards import EXACT_MATCH
from meshrl.rollout import Prompt, Rollout, Split, Task

REASONING_GYM_SCORE = "meshrl.programs.tasks:reasoning_gym_score"
"""Import path of the reward function for `ReasoningGymTask`."""


@dataclass(frozen=True)
class ArithmeticTask:
    """Addition with zero-padded operands and the answer's digits reversed: `47+85=` → `231`.

    Reversed digits let a small model carry as it writes. A held-out problem is held out in both orders:
    where `47+85` is, `85+47` is never trained on either. Held-out problems do not depend on the seed, so
    runs compare.
    """

    seed: int = 0
    """Which problems are trained on, in which order."""
    digits: int = 2
    """Digits of each operand."""
    easy: float = 0.5
    """Curriculum of the warm-up: how likely an operand is below 10. 0: none; some seeds never take off."""
    heldout_size: int = 256
    """Problems that are held out."""

    def __post_init__(self) -> None:
        if self.digits < 1:
            raise UserError(f"digits is {self.digits}: operands need at least 1")
        if not 0 <= self.easy <= 1:
            raise UserError(f"easy is {self.easy}: it is a probability, between 0 and 1")
        # Half of all unordered problems: the rejection below then takes two draws on average at worst.
        most = 10**self.digits * (10**self.digits + 1) // 4
        if not 0 <= self.heldout_size <= most:
            raise UserError(
                f"heldout_size is {self.heldout_size}: "
                f"{self.digits}-digit addition can hold out 0 to {most} problems"
            )

    @property
    def tokenizer(self) -> str:
        return "arithmetic"

    @property
    def train_size(self) -> None:
        """Endless."""
        return None

    def prompt(self, split: Split, index: int) -> Prompt:
        if split == "train":
            return self._problem("train", index, *self._draw("train", index, easy=0))
        problems = _heldout_sums(self.digits, self.heldout_size)
        if not 0 <= index < len(problems):
            raise IndexError(f"held-out prompt {index}: there are {len(problems)}")
        return self._problem("heldout", index, *problems[index])

    def supervised(self, index: int) -> Prompt:
        return self._problem("train", index, *self._draw("supervised", index, self.easy))

    def _draw(self, stream: str, index: int, easy: float) -> tuple[int, int]:
        if index < 0:
            raise IndexError(f"{stream} prompt {index}: indices start at 0")
        generator = random.Random(f"arithmetic {self.digits} {self.seed} {stream} {index}")
        heldout = _heldout_set(self.digits, self.heldout_size)
        while True:
            x, y = (generator.randrange(10 if generator.random() < easy else 10**self.digits) for _ in "xy")
            if (x, y) not in heldout:
                return x, y

    def _problem(self, split: Split, index: int, x: int, y: int) -> Prompt:
        text, answer = f"{x:0{self.digits}}+{y:0{self.digits}}=", f"{x + y:0{self.digits + 1}}"[::-1]
        return Prompt(index, split, text, answer, {"operands": (x, y)})


@dataclass(frozen=True)
class ReasoningGymTask:
    """A data set of reasoning-gym, such as `chain_sum`; its own scorer grades, and only a full score counts.

    Raises:
        UserError: reasoning-gym is not installed, or knows no such data set.
    """

    dataset: str
    """Name that reasoning-gym knows it by."""
    seed: int = 0
    """Which problems are trained on, in which order."""
    heldout_size: int = 256
    """Problems that are held out; training skips questions that read the same."""
    tokenizer: str = "bytes"
    """`bytes`, or a directory with a tokenizer.json."""

    def __post_init__(self) -> None:
        _reasoning_gym_dataset(self.dataset)

    @property
    def train_size(self) -> None:
        """Endless."""
        return None

    def prompt(self, split: Split, index: int) -> Prompt:
        if split == "train":
            return self._draw("train", index)
        items = _heldout_items(self.dataset, self.heldout_size)
        if not 0 <= index < len(items):
            raise IndexError(f"held-out prompt {index}: there are {len(items)}")
        return self._prompt("heldout", index, items[index])

    def supervised(self, index: int) -> Prompt:
        return self._draw("supervised", index)

    def _draw(self, stream: str, index: int) -> Prompt:
        if index < 0:
            raise IndexError(f"{stream} prompt {index}: indices start at 0")
        heldout = _heldout_questions(self.dataset, self.heldout_size)
        generator = random.Random(f"reasoning_gym {self.dataset} {self.seed} {stream} {index}")
        for _ in range(1000):
            item = _reasoning_gym_item(self.dataset, generator)
            if item["question"] not in heldout:
                return self._prompt("train", index, item)
        raise UserError(
            f"reasoning_gym:{self.dataset} has too few different questions for {self.heldout_size} held out; "
            "hold out fewer"
        )

    def _prompt(self, split: Split, index: int, item: dict[str, Any]) -> Prompt:
        return Prompt(index, split, item["question"], item["answer"], item["metadata"])


def reasoning_gym_score(rollout: Rollout) -> float:
    """1 where reasoning-gym's scorer gives full marks, else 0; its partial credit invites collapse."""
    import reasoning_gym

    prompt = rollout.prompt
    entry = {"question": prompt.text, "answer": prompt.answer, "metadata": dict(prompt.metadata)}
    score_answer: Any = reasoning_gym.get_score_answer_fn(prompt.metadata["source_dataset"])
    score = score_answer(rollout.response, entry)
    return float(rollout.stop_reason == "stop" and score == 1)


def parse_task(
    task: str = "arithmetic", data: str | Path | None = None, seed: int = 0, tokenizer: str = "bytes"
) -> Task:
    """The task that the command line names.

    Args:
        task: `arithmetic` or `reasoning_gym:NAME`.
        data: a file of rows; it then is the task, and `task` must be left as it is.
        seed: which problems are trained on, in which order.
        tokenizer: for tasks of free text; `arithmetic` has one of its own.

    Raises:
        UserError: no such task, or both `task` and `data` given.
    """
    if data is not None:
        if task != "arithmetic":
            raise UserError(f"both a task ({task}) and data ({data}) are given: name one of them")
        return DatasetTask(Path(data), seed=seed, tokenizer=tokenizer)
    name, colon, dataset = task.partition(":")
    if name == "reasoning_gym" and dataset:
        return ReasoningGymTask(dataset, seed=seed, tokenizer=tokenizer)
    if name == "arithmetic" and not colon:
        return ArithmeticTask(seed=seed)
    hint = "; did you mean --data?" if Path(task).suffix in (".jsonl", ".ndjson", ".parquet") else ""
    raise UserError(
        f"no task is called {task!r}; known: arithmetic, reasoning_gym:NAME "
        f"(such as reasoning_gym:chain_sum){hint}"
    )


def default_reward(task: Task) -> str:
    """Import path of the reward function that fits a task where the user names none."""
    return REASONING_GYM_SCORE if isinstance(task, ReasoningGymTask) else EXACT_MATCH


def check_prompts(
    task: Task, encode: Callable[[str], Sequence[int]], context_tokens: int, response_tokens: int = 1
) -> None:
    """Make sure that prompts leave room for a response: all of a finite task, 256 of an endless one.

    Args:
        encode: text to token ids.
        context_tokens: what the model holds, prompt and response together.
        response_tokens: room that must be left.

    Raises:
        UserError: names the row, its tokens, and the room there is.
    """
    train = 256 if task.train_size is None else task.train_size
    sizes: tuple[tuple[Split, int], ...] = (("train", train), ("heldout", task.heldout_size))
    for split, size in sizes:
        for index in range(size):
            tokens = len(encode(task.prompt(split, index).text))
            if tokens + response_tokens > context_tokens:
                where = (
                    f"{task.where(split, index)}, field 'prompt'"
                    if isinstance(task, DatasetTask)
                    else f"{split} prompt {index}"
                )
                raise UserError(
                    f"{where}: {tokens} tokens, but the context of {context_tokens} tokens leaves "
                    f"{context_tokens - response_tokens} beside a response of {response_tokens}; "
                    "shorten it, or give the model a longer context"
                )


@lru_cache(maxsize=8)
def _heldout_sums(digits: int, count: int) -> tuple[tuple[int, int], ...]:
    generator = random.Random(f"arithmetic {digits} heldout")
    problems: list[tuple[int, int]] = []
    taken: set[tuple[int, int]] = set()
    while len(problems) < count:
        x, y = generator.randrange(10**digits), generator.randrange(10**digits)
        if (x, y) not in taken:
            taken |= {(x, y), (y, x)}
            problems.append((x, y))
    return tuple(problems)


@lru_cache(maxsize=8)
def _heldout_set(digits: int, count: int) -> frozenset[tuple[int, int]]:
    problems = _heldout_sums(digits, count)
    return frozenset(problems) | frozenset((y, x) for x, y in problems)


@lru_cache(maxsize=8)
def _reasoning_gym_dataset(name: str) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(
            f"reasoning_gym:{name} needs reasoning-gym ({error}): pip install 'meshrl[tasks]'"
        ) from error
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else f"{len(DATASETS)} are known, such as chain_sum"
        raise UserError(f"reasoning-gym has no data set {name!r}; {hint}")
    return reasoning_gym.create_dataset(name, seed=0, size=2**31)


def _reasoning_gym_item(name: str, generator: random.Random) -> dict[str, Any]:
    # reasoning-gym seeds an item with seed + index, so seeds share items: draw the index instead.
    return _reasoning_gym_dataset(name)[generator.randrange(2**31)]


@lru_cache(maxsize=8)
def _heldout_items(name: str, count: int) -> tuple[dict[str, Any], ...]:
    generator = random.Random(f"reasoning_gym {name} heldout")
    items: dict[str, dict[str, Any]] = {}
    for _ in range(100 * count):
        if len(items) == count:
            return tuple(items.values())
        item = _reasoning_gym_item(name, generator)
        items.setdefault(item["question"], item)
    if len(items) < count:
        raise UserError(f"reasoning_gym:{name} has fewer than {count} different questions; hold out fewer")
    return tuple(items.values())


@lru_cache(maxsize=8)
def _heldout_questions(name: str, count: int) -> frozenset[str]:
    return frozenset(item["question"] for item in _heldout_items(name, count))
