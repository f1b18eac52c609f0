"""Code that travels by value keeps the name of its file, so that tracebacks and debuggers find its source."""

from __future__ import annotations

import types
from typing import Any

import cloudpickle.cloudpickle as cloudpickle

_reduce_code = cloudpickle._code_reduce  # pyright: ignore[reportAttributeAccessIssue]


def keep_file_names() -> None:
    """Pickle code objects with their file names; cloudpickle from 3.1.2 on says `<dynamic-code>` instead.

    Code of a script is then found on disk; that of a notebook cell Monarch fetches from the controller.
    """
    table = cloudpickle.Pickler._dispatch_table  # pyright: ignore[reportAttributeAccessIssue]
    table[types.CodeType] = _reduce_code_with_file


def _reduce_code_with_file(code: types.CodeType) -> tuple[Any, ...]:
    build, parts = _reduce_code(code)
    return build, tuple(code.co_filename if part == "<dynamic-code>" else part for part in parts)
