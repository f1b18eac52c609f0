"""`meshrl doctor`: what is installed, what works on this machine, and what to do about the rest."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from meshrl.errors import UserError

GIGABYTE = 1e9
MEMORY_FOR_DEMO = 3 * GIGABYTE
"""Three worker processes and the controller, about 0.6 GB each, and some room."""

State = Literal["ok", "absent", "problem"]


@dataclass(frozen=True)
class Finding:
    """One row of the table."""

    name: str
    state: State
    """`absent`: not there, and nothing depends on it."""
    value: str
    advice: str = ""
    """What to do; empty: nothing."""


def main(flags: Sequence[str]) -> int:
    """Print the table, or with `--json` one JSON object per row; 1 where there is a problem, else 0."""
    if unknown := [flag for flag in flags if flag != "--json"]:
        raise UserError(f"unknown flag {unknown[0]!r}: `meshrl doctor` takes --json, nothing else")
    findings = examine()
    if "--json" in flags:
        for finding in findings:
            print(json.dumps(asdict(finding)))
    else:
        _show(findings)
    return int(any(finding.state == "problem" for finding in findings))


def examine() -> list[Finding]:
    """Look at everything. Starts no process; imports torch and Monarch."""
    return [
        _python(),
        *_required_packages(),
        *_optional_packages(),
        *_devices(),
        *_transports(),
        _memory(),
        _cores(),
        _disk(),
    ]


def _python() -> Finding:
    text = f"{platform.python_implementation()} {platform.python_version()} on {sys.platform}"
    if sys.version_info < (3, 11):  # noqa: UP036 - run from a checkout, it may be
        return Finding("Python", "problem", text, "use CPython 3.11 or newer: make setup PYTHON=python3.12")
    if not sys.platform.startswith("linux"):
        return Finding("Python", "problem", text, "meshrl runs on Linux only: weights travel through memfd")
    return Finding("Python", "ok", text)


REQUIRED = {
    "torch": ("torch", "torch"),
    "torchmonarch": ("Monarch", "monarch.actor"),
    "torchtitan": ("TorchTitan", "torchtitan"),
    "triton": ("Triton", "triton"),
}
"""Package -> its name for people, and the module whose import shows that it works."""


def _required_packages() -> Iterator[Finding]:
    """Installed versions against the ranges that meshrl itself declares."""
    ranges = {r.name: r for r in map(Requirement, importlib.metadata.requires("meshrl") or [])}
    for package, (label, module) in REQUIRED.items():
        wanted = ranges[package].specifier
        version = _version(package)
        if version is None:
            yield Finding(
                label, "problem", "not installed", f"pip install '{package}{wanted}', or make setup"
            )
        elif not wanted.contains(version, prereleases=True):
            yield Finding(
                label, "problem", version, f"meshrl needs {package}{wanted}: pip install it, or make setup"
            )
        elif trouble := _import_trouble(module):
            yield Finding(label, "problem", f"{version}, does not import: {trouble}", "run make setup again")
        else:
            yield Finding(label, "ok", version)


def _optional_packages() -> Iterator[Finding]:
    for label, packages, modules, use in (
        ("SGLang", ["sglang"], ["sglang"], "not needed: meshrl does not generate with it yet"),
        (
            "NIXL",
            ["nixl-cu12", "nixl-cu13"],
            ["nixl_cu12", "nixl_cu13"],
            "for weights between hosts: pip install 'meshrl[nixl]'",
        ),
        (
            "Transformers",
            ["transformers"],
            ["transformers"],
            "to load exported models: pip install transformers",
        ),
        ("reasoning-gym", ["reasoning-gym"], ["reasoning_gym"], "for its tasks: pip install 'meshrl[tasks]'"),
    ):
        versions = [version for package in packages if (version := _version(package))]
        if not versions:
            yield Finding(label, "absent", "not installed", use)
        elif any(importlib.util.find_spec(module) for module in modules):
            yield Finding(label, "ok", versions[0])
        else:
            yield Finding(label, "problem", f"{versions[0]}, but no module {modules[0]}", "install it again")


def _devices() -> Iterator[Finding]:
    if _import_trouble("torch"):
        return
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if names:
        yield Finding("devices", "ok", ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names)))
    elif shutil.which("nvidia-smi"):
        advice = f"torch {torch.__version__} sees no GPU: install its CUDA build, see constraints.txt"
        yield Finding("devices", "problem", "CPU", advice)
    else:
        yield Finding("devices", "ok", "CPU")


def _transports() -> Iterator[Finding]:
    if _import_trouble("torch"):
        return
    from meshrl.weights.transport import available_transports

    statuses = available_transports()
    for status in statuses:
        yield Finding(f"transport {status.name}", "ok" if status.available else "absent", status.reason)
    # tcp is always there
    here = next(status.name for status in statuses if status.available)
    across = next(status.name for status in statuses if status.available and status.name != "memfd")
    yield Finding("weights travel by", "ok", f"{here} on this host, {across} to others")


def _memory() -> Finding:
    free, total = _free_memory()
    text = f"{free / GIGABYTE:.1f} of {total / GIGABYTE:.1f} GB free"
    if free < MEMORY_FOR_DEMO:
        return Finding("memory", "problem", text, "`meshrl run grpo` needs about 3 GB: close other programs")
    return Finding("memory", "ok", text)


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < 2:
        return Finding(
            "cores", "problem", str(cores), "generator and learner share one core: runs take twice as long"
        )
    return Finding("cores", "ok", str(cores))


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    text = f"{free / GIGABYTE:.1f} GB free here"
    if free < GIGABYTE:
        return Finding("disk", "problem", text, "run directories go here: make room, or give --run-directory")
    return Finding("disk", "ok", text)


def _free_memory() -> tuple[float, float]:
    """Bytes free and bytes in all: of the machine, or of the container where that has less."""
    rows = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines())
    free, total = (int(rows[key].split()[0]) * 1024.0 for key in ("MemAvailable", "MemTotal"))
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        free, total = min(free, float(limit) - float(used)), min(total, float(limit))
    return free, total


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import_trouble(module: str) -> str:
    """Why the module does not import; empty: it does."""
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _show(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    marks = {"ok": "[green]ok[/]", "absent": "[dim]-[/]", "problem": "[red]problem[/]"}
    table = Table("", "", "found", "what to do", title="meshrl doctor", title_justify="left", box=None)
    for finding in findings:
        table.add_row(marks[finding.state], finding.name, _plain(finding.value), _plain(finding.advice))
    Console().print(table)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
