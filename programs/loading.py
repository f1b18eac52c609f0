"""A program by name: a built-in one, a file of the user's, or a function of an importable module."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from meshrl.errors import UserError
from meshrl.run import Program, config_type, program_name

BUILT_IN = ("grpo", "sft")
"""Each is a module of `meshrl.programs` with a function of the same name."""


def load_program(name: str) -> Program:
    """The async generator function that `name` stands for.

    - `grpo`: a built-in program.
    - `path/to/file.py`: the one program in that file; `path/to/file.py:function` where there are several.
      The file's folder goes on `sys.path`, as `python file.py` would do, so that worker processes can
      import it too.
    - `module:function`: from a module that can be imported from here.

    Raises `UserError` where there is no such thing. An exception that the file itself raises surfaces as
    it is.
    """
    target, _, function = name.partition(":")
    if target.endswith(".py") or "/" in target:
        return _from_module(_import_file(Path(target)), function, name)
    if function:
        return _from_module(_import_module(target, name), function, name)
    if name in BUILT_IN:
        return _from_module(importlib.import_module(f"meshrl.programs.{name}"), name, name)
    close = difflib.get_close_matches(name, BUILT_IN, n=1)
    meant = f" Did you mean {close[0]}?" if close else ""
    known = ", ".join(BUILT_IN)
    raise UserError(f"unknown program {name!r}: there are {known}, path/to/file.py, module:function.{meant}")


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"no such program file: {path}")
    path = path.resolve()
    if path.suffix != ".py" or "." in path.stem:
        raise UserError(f"{path.name} cannot be imported: a program file is named like `my_program.py`")
    known = sys.modules.get(path.stem)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() != path:
        raise UserError(f"{path.name} has the name of a module that is loaded already; rename the file")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    importlib.invalidate_caches()
    module = importlib.import_module(path.stem)
    if Path(module.__file__ or "").resolve() != path:
        raise UserError(f"{path.name} has the name of another module, {module.__file__}; rename the file")
    return module


def _import_module(target: str, name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a console script has its own folder there, not the user's
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{target}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise UserError(f"cannot import {error.name!r} for program {name!r}: no such module") from error


def _from_module(module: ModuleType, function: str, name: str) -> Program:
    programs = _programs(module)
    listed = ", ".join(program_name(program) for program in programs) or "none"
    if function:
        found = getattr(module, function, None)
        if found is None:
            raise UserError(f"{name}: {module.__name__} has no {function!r}; its programs: {listed}")
        config_type(found)  # says why where it is no program
        return found
    if not programs:
        raise UserError(f"{name} defines no program: one is `async def` of (session, config), with `yield`")
    if len(programs) > 1:
        raise UserError(f"{name} defines {len(programs)} programs, {listed}: say which, {name}:function")
    return programs[0]


def _programs(module: ModuleType) -> list[Program]:
    """The async generator functions of two parameters that the module itself defines, public ones only."""
    return [
        value
        for name, value in vars(module).items()
        if inspect.isasyncgenfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
        and len(inspect.signature(value).parameters) == 2
    ]
