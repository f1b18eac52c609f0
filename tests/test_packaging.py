"""What a user installs: one package, which works away from the checkout."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PROGRAM = '''
from dataclasses import dataclass

from meshrl import StepReport


@dataclass(frozen=True)
class Config:
    """Counts."""

    steps: int = 2
    """How far."""


async def count(session, config: Config):
    for step in range(config.steps + 1):
        yield StepReport(step, {"heldout_accuracy": step / 4})
'''


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT],
        check=True,
        capture_output=True,
    )
    return next(out.glob("*.whl"))


def test_wheel_holds_one_package_with_actors_and_programs(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"meshrl"}
    assert {"meshrl/actors/learner.py", "meshrl/programs/grpo.py", "meshrl/session.py"} <= set(names)


def test_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    subprocess.run(
        [environment / "bin/pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True
    )
    # The dependencies, some gigabytes, are those of this environment; the editable meshrl there comes last.
    site = next((environment / "lib").glob("python*/site-packages"))
    (site / "outer.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    (tmp_path / "count.py").write_text(PROGRAM)

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = run(
        environment / "bin/python", "-c", "import meshrl.actors.models as m; print(m.__file__)"
    ).strip()
    assert Path(where).is_relative_to(environment), where
    assert "meshrl doctor" in run(environment / "bin/meshrl", "--help")
    out = run(environment / "bin/meshrl", "run", "count.py", "--steps", "3", "--run-directory", "out")
    assert "accuracy 0.00 -> 0.75  steps 3" in out
    assert len((tmp_path / "out/metrics.jsonl").read_text().splitlines()) == 4


def test_importing_meshrl_starts_nothing_and_imports_nothing_heavy() -> None:
    code = (
        "import meshrl, sys, threading;"
        "print([m for m in ('torch', 'monarch', 'torchtitan', 'sglang', 'nixl') if m in sys.modules],"
        "threading.active_count())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[] 1"
