"""The folder of one run: resolved config, metrics, rollouts, final weights."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, TypeVar

from meshrl.configuration import from_plain, to_plain
from meshrl.errors import UserError
from meshrl.metrics import JSONLSink, Sink, TensorBoardSink

T = TypeVar("T")


class RunDirectory:
    """A new folder for one run. Never overwrites another's.

    - `config.json`: program and resolved config; `read_config` gives the config back.
    - `metrics.jsonl`, `tensorboard/`: one entry a step.
    - `logs/`: one file a rank; `rollouts/`: Parquet; `final/`: weights that transformers loads. Each is
      made by the process that writes it.

    Raises `UserError` where `path` exists and holds something, or cannot be made.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            occupied = any(self.path.iterdir())
        except OSError as error:
            raise UserError(
                f"cannot make the run directory {path}: {error.strerror}; name another"
            ) from error
        if occupied:
            raise UserError(
                f"the run directory {path} is not empty; name a new one, runs are never overwritten"
            )

    @classmethod
    def new(cls, program: str, root: str | Path = "runs") -> RunDirectory:
        """`<root>/<program>-<timestamp>`, with `-2`, `-3` … behind it where that is taken."""
        root = Path(root)
        stem = f"{program}-{time.strftime('%Y%m%d-%H%M%S')}"
        number = 1
        while True:
            path = root / (stem if number == 1 else f"{stem}-{number}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                number += 1
            except OSError as error:
                raise UserError(f"cannot make {path}: {error.strerror}; name a run directory") from error
            else:
                return cls(path)

    @property
    def config_path(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def write_config(self, program: str, config: Any) -> None:
        """Write program and config as they were resolved, defaults included."""
        content = {"program": program, "config": to_plain(config)}
        self.config_path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def sinks(self) -> list[Sink]:
        """Open `metrics.jsonl` and `tensorboard/` for writing."""
        return [JSONLSink(self.metrics_path), TensorBoardSink(self.path / "tensorboard")]


def read_config(directory: str | Path, kind: type[T]) -> T:
    """The config of the run in `directory`, as a `kind`. Raises `UserError` where missing or unfit."""
    path = Path(directory) / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; is {directory} a run directory?") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    return from_plain(kind, content["config"])


def shown(path: Path) -> str:
    """The path for a person: relative where it lies below the working directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
