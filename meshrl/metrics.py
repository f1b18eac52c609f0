"""What a program says of each step, and where that is written."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class StepReport:
    """One step of a program. Step 0 is the state before the first optimizer step."""

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Values that depend on the seed alone: two runs of one seed agree in all of them."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Phase -> wall seconds of this step, in the order of the phases: `{"generate": 0.02, "train": 0.1}`."""
    samples: tuple[str, ...] = ()
    """Readable lines for a person to look at; empty: none this time."""
    note: str = ""
    """One line to say besides; empty: nothing."""

    @property
    def total_seconds(self) -> float:
        """All phases together."""
        return sum(self.seconds.values())

    def row(self) -> dict[str, Any]:
        """The report as one JSON object. Values that JSON has no number for (NaN, infinities) become None."""
        return {"step": self.step, "metrics": _finite(self.metrics), "seconds": _finite(self.seconds)}


def _now() -> float:
    """Seconds of the event loop, which need not be those of the wall; outside of one, of the wall."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.perf_counter()


class Stopwatch:
    """Splits the time of a step into named phases.

    `rest(phase)` gives a phase all the time since the last `rest` (or the start) that no `lap` has claimed;
    `lap` claims a known number of seconds out of it. Both return the stopwatch:

    >>> ticks = iter([10.0, 11.0, 11.5])
    >>> Stopwatch(clock=lambda: next(ticks)).lap("generate", 0.75).rest("wait").rest("train").seconds
    {'generate': 0.75, 'wait': 0.25, 'train': 0.5}
    """

    def __init__(self, clock: Callable[[], float] = _now) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._mark = clock()
        self._claimed = 0.0

    def lap(self, phase: str, seconds: float) -> Stopwatch:
        """Claim `seconds` for a phase that was timed elsewhere (on a rank, say)."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        self._claimed += seconds
        return self

    def rest(self, phase: str) -> Stopwatch:
        """Give a phase what is left since the last `rest`; never less than 0, laps may have overlapped."""
        now = self._clock()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + max(now - self._mark - self._claimed, 0.0)
        self._mark, self._claimed = now, 0.0
        return self


class Sink(Protocol):
    """Where reports go."""

    def write(self, report: StepReport) -> None: ...

    def close(self) -> None: ...


class JSONLSink:
    """One JSON object per step: `{"step": 3, "metrics": {…}, "seconds": {…}}`. A report has left the process when
    `write` returns: a kill loses none."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, report: StepReport) -> None:
        self._file.write(json.dumps(report.row(), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Scalars `metrics/<name>` and `seconds/<phase>` by step, samples as text."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # imports torch: only where a run writes

        # Written out every few seconds: metrics.jsonl is the record that a kill never shortens.
        self._writer = SummaryWriter(str(directory), flush_secs=5)

    def write(self, report: StepReport) -> None:
        for group, values in (("metrics", report.metrics), ("seconds", report.seconds)):
            for name, value in values.items():
                self._writer.add_scalar(f"{group}/{name}", value, report.step)
        if report.samples:
            self._writer.add_text("samples", "\n\n".join(f"`{line}`" for line in report.samples), report.step)

    def close(self) -> None:
        self._writer.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a last line cut short by a kill is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            rows.append(json.loads(line))
    return rows


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    numbers = {name: float(value) for name, value in values.items()}
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}
