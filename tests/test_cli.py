"""The command line, as a user meets it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from processes import MARK, marked, wait_until

MESHRL = Path(sys.executable).parent / "meshrl"

WAITS = '''
import asyncio
from dataclasses import dataclass

from meshrl import StepReport
from meshrl.session import Worker, endpoint


class Sleeper(Worker):
    @endpoint
    async def sleep(self):
        await asyncio.Event().wait()


@dataclass(frozen=True)
class Config:
    """Waits."""

    fail: bool = False
    """Raise in place of waiting."""


async def waits(session, config: Config):
    sleeper = await session.spawn(Sleeper)
    yield StepReport(1, {"reward": 0.5})
    if config.fail:
        raise RuntimeError("as asked")
    await sleeper.call("sleep")
'''


def meshrl(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [MESHRL, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120, env=wide()
    )


def wide() -> dict[str, str]:
    return os.environ | {"COLUMNS": "200"}


def test_help_documents_every_field(tmp_path: Path) -> None:
    from meshrl.programs.grpo import GRPOConfig

    help_text = meshrl("run", "grpo", "--help", cwd=tmp_path).stdout

    def flags(config: object, prefix: str = "") -> list[str]:
        found = []
        for field in dataclasses.fields(config):  # pyright: ignore[reportArgumentType]
            value, name = getattr(config, field.name), prefix + field.name.replace("_", "-")
            found += flags(value, f"{name}.") if dataclasses.is_dataclass(value) else [f"--{name}"]
        return found

    missing = [flag for flag in flags(GRPOConfig()) if flag not in help_text]
    assert not missing


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run", "gpro"], "unknown program 'gpro': there are grpo, sft"),
        (["run", "nowhere.py"], "no such program file: nowhere.py"),
        (["fly"], "unknown command 'fly'"),
        (["run", "grpo", "--stpes", "3"], "--steps"),
        (["run", "grpo", "--task", "arithmetics"], "no task is called 'arithmetics'; known: arithmetic"),
        (["run", "grpo", "--data", "rows.jsonl"], "rows.jsonl, line 2, field 'prompt'"),
        (["run", "grpo", "--data", "absent.jsonl"], "absent.jsonl: no such file"),
        (["run", "grpo", "--model.name", "tiny-9m"], "unknown model 'tiny-9m'"),
        (["run", "grpo", "--sampling.max-tokens", "400"], "the context of 256 tokens"),
        (["run", "grpo", "--rollouts.group-size", "1"], "group_size is 1"),
        (["run", "grpo", "--meshes.learner", "0"], "meshes.learner is 0"),
        (["run", "grpo", "--sampling.temperature", "0"], "sampling.temperature is 0"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_bad_input_is_one_clear_error(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": 5, "answer": "x"}\n')
    done = meshrl(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert complaint in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not list(tmp_path.glob("runs/*")), "a run that never began leaves no folder"


def test_a_failing_program_is_told_with_its_traceback_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    done = meshrl("run", "waits.py", "--fail", "--run-directory", "out", cwd=tmp_path)
    assert done.returncode == 1
    assert "failed after step 1: RuntimeError: as asked" in done.stderr
    assert 'raise RuntimeError("as asked")' in (tmp_path / "out/error.txt").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_keeps_what_it_has(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    mark = uuid.uuid4().hex
    controller = subprocess.Popen(
        [MESHRL, "run", "waits.py", "--run-directory", "out"],
        cwd=tmp_path,
        env=wide() | {MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics = tmp_path / "out/metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text() != "", 60, metrics.exists)
    controller.send_signal(number)
    output, _ = controller.communicate(timeout=30)
    assert controller.returncode == 130
    assert "stopped after step 1; metrics and rollouts so far: out" in output
    wait_until(lambda: not marked(mark), 10, lambda: marked(mark))
    assert json.loads(metrics.read_text())["metrics"] == {"reward": 0.5}


def test_doctor_tells_versions_transports_and_what_to_do(tmp_path: Path) -> None:
    done = meshrl("doctor", "--json", cwd=tmp_path)
    findings = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert {"Python", "torch", "Monarch", "TorchTitan", "SGLang", "NIXL", "devices", "memory"} <= set(
        findings
    )
    assert findings["weights travel by"]["value"] == "memfd on this host, nixl to others"
    assert (
        findings["SGLang"]["state"] == "ok" or "does not generate with it yet" in findings["SGLang"]["advice"]
    )
    assert "Monarch" in meshrl("doctor", cwd=tmp_path).stdout
