"""What a person sees of a run: narration, one live line a step, samples, and the closing line."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.live import Live
from rich.text import Text

from meshrl.metrics import StepReport

SECONDS_BETWEEN_LINES = 2.0
"""A step gets a line that stays at most this often. On a terminal a live line shows each step besides."""


class RunView:
    """Prints a run. Use as a context; `note` and `log` may be called from any thread.

    Args:
        steps: of the whole run, to show how far it is; None: unknown.
    """

    def __init__(
        self, console: Console, steps: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._steps = steps
        self._clock = clock
        self._last_line = float("-inf")
        self._live = (
            Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None
        )

    def __enter__(self) -> RunView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def note(self, text: str) -> None:
        """What session and program are doing."""
        self._print(text, style="cyan")

    def log(self, line: str) -> None:
        """A line that a worker printed."""
        self._print(line, style="dim")

    def step(self, report: StepReport) -> None:
        """One step; kept on the screen when it is due, or has something to say that others have not."""
        line = step_line(report, self._steps)
        if self._live:
            self._live.update(Text(line, style="bold", no_wrap=True, overflow="ellipsis"), refresh=True)
        now = self._clock()
        rare = "heldout_accuracy" in report.metrics or report.samples or report.note
        if rare or now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._print(line)
        for sample in report.samples:
            self._print(f"    {sample}", style="green")
        if report.note:
            self.note(report.note)

    def _print(self, line: str, style: str = "") -> None:
        # soft_wrap: a line stays a line, also where the output is a file; no markup: the text is not ours.
        self._console.print(Text(line, style=style), soft_wrap=True)


def step_line(report: StepReport, steps: int | None = None) -> str:
    """One step in one line; what the report does not hold is left out.

    >>> report = StepReport(12, {"reward": 0.5, "response_tokens": 960}, {"generate": 0.03, "train": 0.09})
    >>> step_line(report, 400)
    'step 12/400  reward 0.500  8.0k tok/s  0.12 s: generate 25% train 75%'
    """
    metrics, total = report.metrics, report.total_seconds
    parts = [f"step {report.step}" + (f"/{steps}" if steps else "")]
    for name, label, form in (
        ("loss", "loss", ".3f"),
        ("reward", "reward", ".3f"),
        ("accuracy", "accuracy", ".3f"),
        ("heldout_accuracy", "held-out", ".3f"),
        ("heldout_accuracy_greedy", "greedy", ".3f"),
    ):
        if name in metrics and not (name == "loss" and "reward" in metrics):
            parts.append(f"{label} {metrics[name]:{form}}")
    if total > 0 and "response_tokens" in metrics:
        parts.append(f"{_count(metrics['response_tokens'] / total)} tok/s")
    if "staleness_mean" in metrics:
        parts.append(f"staleness {metrics['staleness_mean']:g}")
    if "logprob_difference_mean" in metrics:
        parts.append(f"|Δlogprob| {metrics['logprob_difference_mean']:.1e}")
    if total > 0:
        parts.append(f"{total:.2f} s: {_split(report.seconds, total)}")
    return "  ".join(parts)


def closing_line(history: list[StepReport], wall_seconds: float, directory: str) -> str:
    """`accuracy 0.34 -> 0.88  steps 400  wall 95 s  runs/grpo-…`; no accuracy where no report holds it."""
    accuracies = [r.metrics["heldout_accuracy"] for r in history if "heldout_accuracy" in r.metrics]
    parts = [f"accuracy {accuracies[0]:.2f} -> {accuracies[-1]:.2f}"] if accuracies else []
    parts += [f"steps {history[-1].step if history else 0}", f"wall {wall_seconds:.0f} s", directory]
    return "  ".join(parts)


def _split(seconds: Mapping[str, float], total: float) -> str:
    """Phases that took any time, in percent of all."""
    shares = {phase: round(100 * value / total) for phase, value in seconds.items()}
    return " ".join(f"{phase} {share}%" for phase, share in shares.items() if share > 0)


def _count(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"
