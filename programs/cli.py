"""The command line: `meshrl run PROGRAM`, `meshrl doctor`.

Exit codes: 0 done; 1 the run failed, or `doctor` found a problem; 2 bad input; 130 stopped (Ctrl-C, SIGTERM).
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from meshrl.errors import UserError

if TYPE_CHECKING:
    from meshrl.run import Program, Run
    from meshrl.session import Session

HELP = """usage: meshrl [-h] [--version] COMMAND ...

Reinforcement-learning post-training on Monarch actor meshes: one program drives them all.

  meshrl run PROGRAM [flags]     run a program; PROGRAM is one of
      grpo                       group-relative policy optimization, after a short supervised warm-up
      sft                        supervised fine-tuning
      path/to/file.py            a file with one program in it (or path/to/file.py:function)
      module:function            a program that can be imported
  meshrl run PROGRAM --help      every setting of the program
  meshrl simulate PROGRAM        the same program in virtual time, on as many simulated processes as you like
  meshrl doctor [--json]         what is installed, what works here, and what to do about the rest

  --traceback                    show the whole traceback of an error
"""

OK, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. `arguments`: None: those of the process."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    show_traceback = "--traceback" in arguments
    arguments = [argument for argument in arguments if argument != "--traceback"]
    try:
        with _terminate_like_interrupt():
            return _dispatch(arguments, show_traceback)
    except UserError as error:
        return _report_bad_input(error, show_traceback)
    except KeyboardInterrupt:
        print("stopped before the run began", file=sys.stderr)
        return STOPPED


def _dispatch(arguments: list[str], show_traceback: bool) -> int:
    match arguments:
        case [] | ["-h" | "--help", *_] | ["run"] | ["run", "-h" | "--help", *_]:
            print(HELP, end="")
            return OK if arguments and arguments != ["run"] else BAD_INPUT
        case ["--version", *_]:
            print(f"meshrl {importlib.metadata.version('meshrl')}")
            return OK
        case ["run", name, *flags]:
            return _run(name, flags, show_traceback)
        case ["simulate", "-h" | "--help", *_] | ["simulate"]:
            print("meshrl simulate PROGRAM [flags]: `meshrl simulate grpo --help` lists them")
            return OK if len(arguments) > 1 else BAD_INPUT
        case ["simulate", name, *flags]:
            from meshrl.programs.simulate import main as simulate

            return simulate(name, flags)
        case ["doctor", *flags]:
            from meshrl.programs.doctor import main as doctor

            return doctor(flags)
        case [command, *_]:
            raise UserError(
                f"unknown command {command!r}: there are `meshrl run PROGRAM`, `meshrl simulate PROGRAM` and "
                "`meshrl doctor`"
            )
    raise AssertionError(arguments)


def _run(name: str, flags: Sequence[str], show_traceback: bool) -> int:
    if name.startswith("-"):
        raise UserError(f"the program comes first: `meshrl run PROGRAM {name} …`")
    from meshrl.programs.loading import load_program

    try:
        program = load_program(name)
    except UserError:
        raise
    except Exception as error:  # the user's file, as it is imported
        raise UserError(f"cannot load {name}: {type(error).__name__}: {error}{_place(error)}") from error
    config, directory, stall_seconds = parse_flags(program, name, flags)
    return asyncio.run(_drive(program, config, directory, stall_seconds, show_traceback))


def parse_flags(program: Program, name: str, flags: Sequence[str]) -> tuple[Any, Path | None, float]:
    """The program's config, the run directory (None: a new one) and `launch`'s stall_seconds from flags, by tyro.

    A wrong flag is explained on stderr and ends the process with 2, as `--help` ends it with 0.
    """
    import tyro

    from meshrl.run import STALL_SECONDS, config_type

    kind = config_type(program)
    # One flat set of flags: the program's own fields, and those of the command.
    options = dataclasses.make_dataclass(
        "Options",
        [
            ("config", Annotated[kind, tyro.conf.arg(name="")]),
            (
                "run_directory",
                Annotated[
                    Path | None,
                    tyro.conf.arg(metavar="DIR", help="New or empty folder. None: runs/PROGRAM-TIMESTAMP."),
                ],
                dataclasses.field(default=None),
            ),
            (
                "stall_seconds",
                Annotated[
                    float,
                    tyro.conf.arg(help="Say who waits for whom when a step takes this long. 0: never."),
                ],
                dataclasses.field(default=STALL_SECONDS),
            ),
        ],
        frozen=True,
    )
    description = (program.__doc__ or kind.__doc__ or "").strip()
    parsed: Any = tyro.cli(options, prog=f"meshrl run {name}", description=description, args=flags)
    return parsed.config, parsed.run_directory, parsed.stall_seconds


async def _drive(
    program: Program, config: Any, directory: Path | None, stall_seconds: float, show_traceback: bool
) -> int:
    """Run to the end, to an error or to a signal; everything is closed when it returns."""
    from rich.console import Console

    from meshrl.programs.console import RunView, closing_line
    from meshrl.run import launch
    from meshrl.run_directory import shown
    from meshrl.session import Session

    steps = getattr(config, "steps", None)  # a config need not have it
    view = RunView(Console(highlight=False), steps if isinstance(steps, int) else None)
    session = Session()
    session.on_note, session.on_log = view.note, view.log
    run = launch(program, config, directory=directory, session=session, stall_seconds=stall_seconds)
    began = time.monotonic()
    error: Exception | None = None
    with view, _stop_on_signal(session) as stopping:
        try:
            async with session, run:
                async for report in run:
                    view.step(report)
        except asyncio.CancelledError:
            if not stopping:
                raise
        except Exception as raised:
            error = raised
    directory = run.directory or Path()
    if stopping:
        print(f"stopped {_where(run)}; metrics and rollouts so far: {shown(directory)}", file=sys.stderr)
        return STOPPED
    if isinstance(error, UserError):
        if not run.history:
            _discard(directory)
        return _report_bad_input(error, show_traceback)
    if error is not None:
        return _report_failure(error, run, show_traceback)
    print(closing_line(run.history, time.monotonic() - began, shown(directory)))
    return OK


@contextmanager
def _stop_on_signal(session: Session) -> Iterator[list[int]]:
    """The first Ctrl-C or SIGTERM cancels the current task and is in the list; the second kills."""
    received: list[int] = []
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def stop(number: int) -> None:
        if received:
            _kill(session)
        received.append(number)
        print("stopping; once more to kill", file=sys.stderr)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        yield received
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _kill(session: Session) -> NoReturn:
    for row in session.describe():
        try:
            os.kill(row.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    os._exit(STOPPED)


@contextmanager
def _terminate_like_interrupt() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, until the run has handlers of its own."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _report_bad_input(error: UserError, show_traceback: bool) -> int:
    if show_traceback:
        traceback.print_exception(error)
    print(f"error: {error}", file=sys.stderr)
    return BAD_INPUT


def _discard(directory: Path) -> None:
    """Remove the folder of a run that never began, unless something is in it besides its config."""
    if {path.name for path in directory.iterdir()} <= {"config.json", "tensorboard", "metrics.jsonl"}:
        shutil.rmtree(directory)


def _report_failure(error: Exception, run: Run, show_traceback: bool) -> int:
    """What happened and on which rank; the traceback goes to a file, for it is long."""
    from meshrl.run_directory import shown

    whole = "".join(traceback.format_exception(error))
    if show_traceback:
        print(whole, end="", file=sys.stderr)
    print(f"failed {_where(run)}: {type(error).__name__}: {error}", file=sys.stderr)
    for note in getattr(error, "__notes__", [])[:1]:
        print(f"  {note.splitlines()[0]}", file=sys.stderr)  # the rank; the rest is its traceback
    if run.directory and run.directory.is_dir():
        path = run.directory / "error.txt"
        path.write_text(whole, encoding="utf-8")
        print(
            f"traceback: {shown(path)}, or --traceback; the run so far: {shown(run.directory)}",
            file=sys.stderr,
        )
    return FAILED


def _where(run: Run) -> str:
    return f"after step {run.history[-1].step}" if run.history else "before the first step"


def _place(error: BaseException) -> str:
    """` (file.py, line 3)`: the innermost frame of the error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


if __name__ == "__main__":
    sys.exit(main())
