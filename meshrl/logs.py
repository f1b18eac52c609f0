"""One stream socket per worker process: its output comes up it, and its life hangs on it.

A worker's stdout and stderr become the socket, so that whatever it prints arrives at the controller once, line by line.
When the controller is gone, by whatever signal, the socket closes and the worker ends itself.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

KEPT_LINES = 50
"""Last lines kept of each process, to be told when it dies."""


@dataclass
class ProcessLog:
    """Output of one process."""

    role: str
    replica: int
    rank: int
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))


class LogServer:
    """Reads all workers' output on a thread of its own; `on_line(log, line)` is called there.

    Never shown: lines that Monarch itself writes about its start.
    """

    def __init__(self, on_line: Callable[[ProcessLog, str], None]) -> None:
        self._on_line = on_line
        self._folder = Path(tempfile.mkdtemp(prefix="meshrl-"))  # mode 700: nobody else connects
        self.address = str(self._folder / "logs")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen(1024)
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._logs: dict[socket.socket, ProcessLog | None] = {}
        self._partial: dict[socket.socket, bytes] = {}
        self.by_pid: dict[int, ProcessLog] = {}
        self._thread = threading.Thread(target=self._serve, name="worker-logs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reading; workers that are still alive end themselves."""
        self._wake.send(b"x")
        self._thread.join(timeout=2)
        for worker in self._logs:
            worker.close()
        for other in (self._listener, self._wake, self._woken):
            other.close()
        self._selector.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    return
                if key.fileobj is self._listener:
                    worker, _ = self._listener.accept()
                    self._selector.register(worker, selectors.EVENT_READ)
                    self._logs[worker], self._partial[worker] = None, b""
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._read(key.fileobj)

    def _read(self, worker: socket.socket) -> None:
        try:
            data = worker.recv(1 << 16)
        except OSError:
            data = b""
        if not data and self._partial[worker]:
            data = b"\n"  # a last line without its end
        elif not data:
            self._selector.unregister(worker)
            del self._logs[worker], self._partial[worker]
            worker.close()
            return
        *lines, self._partial[worker] = (self._partial[worker] + data).split(b"\n")
        for line in lines:
            self._line(worker, line.decode(errors="replace").rstrip("\r"))

    def _line(self, worker: socket.socket, line: str) -> None:
        log = self._logs[worker]
        if log is None:
            role, replica, rank, pid = line.split(" ")
            self._logs[worker] = self.by_pid[int(pid)] = ProcessLog(role, int(replica), int(rank))
        else:
            log.lines.append(line)
            self._on_line(log, line)


def connect_process(address: str, role: str, replica: int) -> None:
    """Run in a new worker process: send its output up the socket, and end the process when the socket closes."""
    from monarch.actor import current_rank

    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    connection.sendall(f"{role} {replica} {current_rank().rank} {os.getpid()}\n".encode())
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(connection.fileno(), number)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    threading.Thread(target=_end_with, args=(connection,), name="controller-watch", daemon=True).start()


def _end_with(connection: socket.socket) -> None:
    try:
        connection.recv(1)  # the controller never sends: this returns when it is gone
    finally:
        os.kill(os.getpid(), signal.SIGKILL)  # no exit handler may hang
