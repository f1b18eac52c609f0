"""Reward functions: what they look like, the default one, and how one is found by name.

A reward function takes a `Rollout` and returns a finite number. It may be `async`, and with `@batched` it
takes a list of rollouts and returns as many numbers. This module stays light: the process that runs the
function imports nothing else.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from meshrl.errors import UserError
from meshrl.rollout import Rollout

RewardFunction = Callable[..., Any]
"""`(Rollout) -> float`, or with `@batched` `(list[Rollout]) -> list[float]`; either may be `async`."""

EXACT_MATCH = "meshrl.rewards:exact_match"
"""Import path of the default reward function."""

Function = TypeVar("Function", bound=RewardFunction)


@dataclass(frozen=True)
class Grade:
    """What became of one rollout in the reward mesh."""

    reward: float | None
    """Finite; None: it could not be graded."""
    error: str | None = None
    """Why there is no reward; names the rollout."""


def exact_match(rollout: Rollout) -> float:
    """1 where the response is the right answer and ended by itself, else 0; space around does not count.

    Raises:
        ValueError: the prompt has no answer.
    """
    answer = rollout.prompt.answer
    if answer is None:
        raise ValueError(
            f"{rollout.prompt.split} prompt {rollout.prompt.index} has no answer to match; "
            "add answers, or name a reward function that needs none"
        )
    return float(rollout.stop_reason == "stop" and rollout.response.strip() == answer.strip())


def batched(function: Function) -> Function:
    """Mark a reward function that takes a list of rollouts and returns a list of as many rewards, in order.

    >>> @batched
    ... def shortest(rollouts):
    ...     lengths = [len(rollout.response_token_ids) for rollout in rollouts]
    ...     return [float(length == min(lengths)) for length in lengths]
    """
    function.__meshrl_batched__ = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def is_batched(function: RewardFunction) -> bool:
    """Whether the function is marked with `@batched`."""
    return getattr(function, "__meshrl_batched__", False)


def is_async(function: RewardFunction) -> bool:
    """Whether calling the function gives an awaitable."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__ is a function too
    )


def load_reward(name: str) -> RewardFunction:
    """Import a reward function by `module:function` or `path/to/file.py:function`.

    Raises:
        UserError: no such file, module or function. What the user's module raises itself comes unchanged.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise UserError(
            f"reward {name!r}: expected module:function or path/to/file.py:function, such as {EXACT_MATCH}"
        )
    module = _load_file(name, Path(place)) if place.endswith(".py") else _load_module(name, place)
    function = getattr(module, attribute, None)
    if function is None:
        known = [key for key, value in vars(module).items() if inspect.isroutine(value) and key[0] != "_"]
        near = difflib.get_close_matches(attribute, known, n=1) or known
        hint = f"; did you mean {', '.join(near)}?" if near else "; it defines no function"
        raise UserError(f"reward {name!r}: {place} has no {attribute!r}{hint}")
    if not callable(function):
        raise UserError(f"reward {name!r}: it is a {type(function).__name__}, not a function")
    return function


def _load_module(name: str, place: str) -> Any:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        # A module that the user's module fails to import is another matter, and surfaces unchanged.
        if error.name and (place == error.name or place.startswith(f"{error.name}.")):
            hint = f"; for a file write {place}.py:…" if Path(f"{place}.py").exists() else ""
            raise UserError(f"reward {name!r}: there is no module {error.name!r}{hint}") from None
        raise


def _load_file(name: str, path: Path) -> Any:
    path = path.expanduser().absolute()
    if not path.is_file():
        raise UserError(f"reward {name!r}: {path}: no such file")
    module_name = f"{path.stem}_reward" if path.stem in sys.modules else path.stem
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Modules beside the file can be imported, and its classes can be pickled. Last in line: a file named like a
    # module of some library must not take its place, here or in the workers.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module
