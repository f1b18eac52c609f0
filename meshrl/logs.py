"""The controller's end of the sockets that worker processes connect to; see `worker_process` for theirs."""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

KEPT_LINES = 50
"""Last lines kept of each process, to be told when it dies."""

MONARCH_NOTICE = "(bootstrap) PDEATHSIG disabled via config"
"""Never shown."""

LONGEST_LINE = 1 << 16
"""Bytes after which a line without an end is passed on as it is."""


@dataclass
class ProcessLog:
    """Output of one process."""

    name: str
    """`generator[1]`."""
    role: str
    replica: int
    rank: int
    on_start: Callable[[int], object]
    """Told the process id when the process has connected; called on the server's thread."""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    ended: threading.Event = field(default_factory=threading.Event)
    """Nothing more will come."""


class LogServer:
    """Reads the output of all workers on a thread of its own; `on_line(log, line)` is called there."""

    def __init__(self, on_line: Callable[[ProcessLog, str], None]) -> None:
        self._on_line = on_line
        # An abstract name: no file is left behind. Other users can see it: `_accept` refuses them.
        self.address = f"meshrl-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(1024)
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._logs: dict[socket.socket, ProcessLog | None] = {}
        self._partial: dict[socket.socket, bytes] = {}
        self._expected: dict[str, ProcessLog] = {}
        self._thread = threading.Thread(target=self._serve, name="worker-logs", daemon=True)
        self._thread.start()

    def expect(self, log: ProcessLog) -> str:
        """A token, with which a process shows that its output belongs to `log`."""
        token = secrets.token_hex(8)
        self._expected[token] = log
        return token

    def close(self, seconds: float = 0.5) -> None:
        """Read what ended workers left, for so long at most, and stop. It kills workers that still live."""
        self._wake.send(struct.pack("d", seconds))
        self._thread.join()

    def _serve(self) -> None:
        deadline = None
        while deadline is None or (self._logs and time.monotonic() < deadline):
            for key, _ in self._selector.select(None if deadline is None else deadline - time.monotonic()):
                if key.fileobj is self._woken:
                    deadline = time.monotonic() + struct.unpack("d", self._woken.recv(8))[0]
                    self._selector.unregister(self._woken)
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._read(key.fileobj)
        for each in (*self._logs, self._listener, self._wake, self._woken):
            each.close()
        self._selector.close()

    def _accept(self) -> None:
        worker, _ = self._listener.accept()
        _, user, _ = struct.unpack("3i", worker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            worker.close()
            return
        self._selector.register(worker, selectors.EVENT_READ)
        self._logs[worker], self._partial[worker] = None, b""

    def _read(self, worker: socket.socket) -> None:
        try:
            data = worker.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            if self._partial[worker]:  # a last line without its end
                self._lines(worker, [self._partial[worker]])
            self._forget(worker)
            return
        *lines, rest = (self._partial[worker] + data).split(b"\n")
        if len(rest) > LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        self._partial[worker] = rest
        self._lines(worker, lines)

    def _forget(self, worker: socket.socket) -> None:
        self._selector.unregister(worker)
        log = self._logs.pop(worker)
        if log is not None:
            log.ended.set()
        del self._partial[worker]
        worker.close()

    def _lines(self, worker: socket.socket, lines: list[bytes]) -> None:
        log = self._logs[worker]
        if log is None and lines:
            token, _, pid = lines.pop(0).decode(errors="replace").partition(" ")
            log = self._logs[worker] = self._expected.pop(token, None)
            if log is None:  # none of ours
                self._forget(worker)
                return
            log.on_start(int(pid))
        for line in lines:
            assert log is not None
            # A progress bar redraws its line after each \r: its last state is what counts.
            self._line(log, line.decode(errors="replace").rstrip("\r").rpartition("\r")[2])

    def _line(self, log: ProcessLog, line: str) -> None:
        if line == MONARCH_NOTICE:
            return
        log.lines.append(line)
        try:
            self._on_line(log, line)
        except Exception as error:  # one bad line must not silence all workers, and block them
            print(f"a line of {log.name} could not be shown: {error!r}", file=sys.stderr)


def rank_name(role: str, replica: int, rank: int, replicas: int, procs: int) -> str:
    """How a worker is called: `generator[1]`, by replica or rank, or both where there are several of both."""
    if procs == 1:
        return f"{role}[{replica}]"
    return f"{role}[{rank}]" if replicas == 1 else f"{role}[{replica},{rank}]"
