"""A task from a file of rows: JSON Lines or Parquet.

Fields of a row:
    prompt (text, required): what the model is shown, verbatim.
    answer (text, optional): the right answer; the default reward and the supervised warm-up need it.
    anything else: kept as `Prompt.metadata`, for reward functions.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshrl.errors import UserError
from meshrl.rollout import Prompt, Split

ROW_NAMES = {".jsonl": "line", ".ndjson": "line", ".parquet": "row"}
"""File types that can be read, and what a row is called in an editor or viewer; both count from 1."""


@dataclass(frozen=True)
class DatasetTask:
    """Prompts from a file that every process can read.

    Only the path travels when the task is pickled; each process reads the file once and checks that it is
    still the file that the controller saw. Rows with equal prompts fall on the same side of the split, so
    held-out prompts are never trained on; the split depends on the prompts alone, not on the order of rows,
    and not on a seed.

    Raises:
        UserError: the file is missing, malformed or too small; names file, row and field.
    """

    path: Path
    """A `.jsonl`, `.ndjson` or `.parquet` file."""
    seed: int = 0
    """Order in which the supervised warm-up goes through the rows."""
    heldout_fraction: float = 0.1
    """Share of the distinct prompts that is held out, at least one; 0: none."""
    heldout_limit: int = 256
    """Most distinct prompts to hold out, so that evaluation stays short on large files."""
    tokenizer: str = "bytes"
    """`bytes`, or a directory with a tokenizer.json."""
    digest: str = field(default="", repr=True)
    """SHA-256 of the file; empty: taken from the file now."""

    def __post_init__(self) -> None:
        if not 0 <= self.heldout_fraction < 1:
            raise UserError(
                f"heldout_fraction is {self.heldout_fraction}: it must be at least 0 and less than 1"
            )
        path = Path(self.path).expanduser().absolute()
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "digest", self.digest or file_digest(path))
        if not self._rows.train:
            raise UserError(
                f"{path}: at least 2 distinct prompts are needed, one to train on and one to hold out; "
                "add rows, or set heldout_fraction to 0"
            )

    @property
    def train_size(self) -> int:
        return len(self._rows.train)

    @property
    def heldout_size(self) -> int:
        return len(self._rows.heldout)

    def prompt(self, split: Split, index: int) -> Prompt:
        row = self._row(split, index)
        return Prompt(index, split, row.prompt, row.answer, row.metadata)

    def supervised(self, index: int) -> Prompt:
        """Training rows in a new order each time through.

        Raises:
            UserError: the row has no answer.
        """
        epoch, position = divmod(index, self.train_size)
        prompt = self.prompt("train", _order(self.train_size, self.seed, epoch)[position])
        if prompt.answer is None:
            raise UserError(
                f"{self.where('train', prompt.index)}, field 'answer': missing, but a supervised warm-up "
                "learns from answers; add them, or start without a warm-up"
            )
        return prompt

    def where(self, split: Split, index: int) -> str:
        """Where a prompt stands, for messages: `rows.jsonl, line 17`."""
        return _where(self.path, self._row(split, index).number)

    def _row(self, split: Split, index: int) -> Row:
        rows = self._rows.train if split == "train" else self._rows.heldout
        if not 0 <= index < len(rows):
            raise IndexError(f"{split} prompt {index} of {self.path}: there are {len(rows)}")
        return rows[index]

    @property
    def _rows(self) -> SplitRows:
        return _read_split(self.path, self.digest, self.heldout_fraction, self.heldout_limit)


@dataclass(frozen=True)
class Row:
    """One validated row; `number` counts from 1."""

    number: int
    prompt: str
    answer: str | None
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class SplitRows:
    """The two sides of the split, each in file order."""

    train: tuple[Row, ...]
    heldout: tuple[Row, ...]


def read_rows(path: Path) -> list[Row]:
    """Rows of a JSON Lines or Parquet file, validated.

    Raises:
        UserError: names file, row and field.
    """
    if path.suffix not in ROW_NAMES:
        raise UserError(f"{path}: file type {path.suffix!r} is not known; use one of {', '.join(ROW_NAMES)}")
    read = _read_parquet if path.suffix == ".parquet" else _read_json_lines
    rows = [_validate(path, number, fields) for number, fields in read(path)]
    if not rows:
        raise UserError(f"{path}: no rows")
    return rows


def split_rows(rows: list[Row], heldout_fraction: float, heldout_limit: int) -> SplitRows:
    """Hold out the distinct prompts whose hashes are smallest: exact in size, stable when rows are moved."""
    prompts = sorted({row.prompt for row in rows}, key=lambda text: hashlib.sha256(text.encode()).digest())
    count = min(heldout_limit, max(1, round(heldout_fraction * len(prompts)))) if heldout_fraction else 0
    heldout = set(prompts[:count])
    return SplitRows(
        train=tuple(row for row in rows if row.prompt not in heldout),
        heldout=tuple(row for row in rows if row.prompt in heldout),
    )


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


@lru_cache(maxsize=8)
def _read_split(path: Path, digest: str, heldout_fraction: float, heldout_limit: int) -> SplitRows:
    if file_digest(path) != digest:
        raise UserError(f"{path}: changed since the task was made, or differs between hosts; start again")
    return split_rows(read_rows(path), heldout_fraction, heldout_limit)


@lru_cache(maxsize=2)
def _order(size: int, seed: int, epoch: int) -> list[int]:
    order = list(range(size))
    random.Random(f"rows {seed} {epoch}").shuffle(order)
    return order


def _read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise UserError(f"{_where(path, number)}: not UTF-8 text: {error.reason}") from None
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{_where(path, number)}: not JSON: {error.msg} at column {error.colno}; "
                    "each line is one object"
                ) from None


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a Parquet file that can be read: {error}") from error
    yield from enumerate(table.to_pylist(), 1)


def _validate(path: Path, number: int, fields: Any) -> Row:
    if not isinstance(fields, dict):
        raise UserError(
            f"{_where(path, number)}: expected an object such as {{'prompt': …}}, found {_shown(fields)}"
        )
    if "prompt" not in fields:
        found = ", ".join(repr(name) for name in fields) or "none"
        raise UserError(f"{_where(path, number)}, field 'prompt': missing; fields found: {found}")
    prompt, answer = fields["prompt"], fields.get("answer")
    for name, value in (("prompt", prompt), ("answer", answer)):
        if name == "answer" and value is None:
            continue
        where = f"{_where(path, number)}, field {name!r}"
        if not isinstance(value, str):
            hint = f"; write it as {str(value)!r}" if isinstance(value, (int, float)) else ""
            raise UserError(f"{where}: expected text, found {_shown(value)}{hint}")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{where}: not valid text: {error.reason} at character {error.start}") from None
    if not prompt:
        raise UserError(f"{_where(path, number)}, field 'prompt': empty")
    return Row(number, prompt, answer, {k: v for k, v in fields.items() if k not in ("prompt", "answer")})


def _where(path: Path, number: int) -> str:
    return f"{path}, {ROW_NAMES[path.suffix]} {number}"


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:39] + '…'}"
