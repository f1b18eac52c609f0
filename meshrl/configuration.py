"""Nested frozen dataclasses as plain JSON values, and back: what config.json holds."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from meshrl.errors import UserError

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """`value` as dicts, lists, strings, numbers and None. Paths become strings, functions `module:name`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, (str, int, float)) or value is None:
        return value
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    return str(value)


def from_plain(kind: type[T], plain: Any, where: str = "config") -> T:
    """The value of type `kind` that `to_plain` made `plain` of.

    Fields that `plain` lacks keep their defaults. Functions stay the strings that name them. Raises
    `UserError`, which names the field, where a field is unknown or a value does not fit its type.
    """
    return _restore(kind, plain, where)


def _restore(kind: Any, plain: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _restore(arguments[0], plain, where)
    if origin in (typing.Union, types.UnionType):
        return _restore_union(arguments, plain, where)
    if origin is typing.Literal:
        return plain if plain in arguments else _refuse(kind, plain, where)
    if dataclasses.is_dataclass(kind):
        return _restore_dataclass(kind, plain, where)
    if origin is tuple:
        return _restore_tuple(arguments, plain, where)
    if origin in (list, Sequence) and isinstance(plain, list):
        return [_restore(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(plain)]
    if origin in (dict, Mapping) and isinstance(plain, dict):
        return {key: _restore(arguments[1], item, f"{where}[{key!r}]") for key, item in plain.items()}
    if not isinstance(kind, type):
        return plain  # Any, a Callable, a type variable: nothing to check against
    if isinstance(plain, str) and issubclass(kind, Path):
        return kind(plain)
    if isinstance(plain, str) and issubclass(kind, enum.Enum) and plain in kind.__members__:
        return kind[plain]
    if kind is float and type(plain) is int:
        return float(plain)
    if kind is int and isinstance(plain, bool):
        return _refuse(kind, plain, where)
    return plain if isinstance(plain, kind) else _refuse(kind, plain, where)


def _restore_dataclass(kind: Any, plain: Any, where: str) -> Any:
    if not isinstance(plain, dict):
        return _refuse(kind, plain, where)
    hints = typing.get_type_hints(kind, include_extras=True)
    names = [f.name for f in dataclasses.fields(kind) if f.init]
    unknown = sorted(set(plain) - set(names))
    if unknown:
        raise UserError(
            f"{where}: {kind.__name__} has no field {unknown[0]!r}; its fields are {', '.join(names)}"
        )
    return kind(
        **{name: _restore(hints[name], plain[name], f"{where}.{name}") for name in names if name in plain}
    )


def _restore_union(members: tuple[Any, ...], plain: Any, where: str) -> Any:
    if plain is None and type(None) in members:
        return None
    errors = []
    for member in members:
        try:
            return _restore(member, plain, where)
        except UserError as error:
            errors.append(str(error))
    raise UserError("; or ".join(errors))


def _restore_tuple(members: tuple[Any, ...], plain: Any, where: str) -> Any:
    if not isinstance(plain, list):
        return _refuse(tuple, plain, where)
    if len(members) == 2 and members[1] is Ellipsis:
        members = (members[0],) * len(plain)
    if len(members) != len(plain):
        raise UserError(f"{where}: {len(plain)} values {plain!r} where {len(members)} are needed")
    return tuple(
        _restore(member, item, f"{where}[{i}]")
        for i, (member, item) in enumerate(zip(members, plain, strict=True))
    )


def _refuse(kind: Any, plain: Any, where: str) -> Any:
    raise UserError(f"{where}: {plain!r} is not {getattr(kind, '__name__', kind)}")
