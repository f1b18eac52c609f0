"""The sockets between worker processes and their controller: output comes up one, life hangs on the other.

A worker's stdout and stderr become the first socket, so that whatever it prints, from native code too,
arrives at the controller once, line by line. Nothing is ever sent on the second. When the controller ends,
by whatever signal, it closes, and the kernel then kills the worker with all the processes that it started.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import secrets
import selectors
import signal
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
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    ended: threading.Event = field(default_factory=threading.Event)
    """Nothing more will come."""


class LogServer:
    """Reads the output of all workers on a thread of its own; `on_line(log, line)` is called there."""

    def __init__(self, on_line: Callable[[ProcessLog, str], None]) -> None:
        self._on_line = on_line
        # An abstract name: no file is left behind. Other users can see it: `_accept` refuses them.
        self.address = f"\0meshrl-{secrets.token_hex(16)}"
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
        if not data and self._partial[worker]:
            data = b"\n"  # a last line without its end
        elif not data:
            self._selector.unregister(worker)
            log = self._logs.pop(worker)
            if log is not None:
                log.ended.set()
            del self._partial[worker]
            worker.close()
            return
        *lines, rest = (self._partial[worker] + data).split(b"\n")
        if len(rest) > LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        self._partial[worker] = rest
        for line in lines:
            # A progress bar redraws its line after each \r: its last state is what counts.
            self._line(worker, line.decode(errors="replace").rstrip("\r").rpartition("\r")[2])

    def _line(self, worker: socket.socket, line: str) -> None:
        log = self._logs[worker]
        if log is None:
            name, role, replica, rank, pid = line.split(" ")
            self._logs[worker] = self.by_pid[int(pid)] = ProcessLog(name, role, int(replica), int(rank))
            return
        log.lines.append(line)
        try:
            self._on_line(log, line)
        except Exception as error:  # one bad line must not silence all workers, and block them
            print(f"a line of {log.name} could not be shown: {error!r}", file=sys.stderr)


def connect_process(address: str, role: str, replica: int, replicas: int, procs: int) -> None:
    """Run in a new worker process: send its output up, and bind its life to the controller's."""
    from monarch.actor import current_rank

    rank = current_rank().rank
    _end_with_controller(address)
    output = _connect(address)
    hello = (rank_name(role, replica, rank, replicas, procs), role, replica, rank, os.getpid())
    output.sendall((" ".join(map(str, hello)) + "\n").encode())
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(output.fileno(), number)
    output.close()
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    faulthandler.enable(2)  # a crash in native code tells where


def rank_name(role: str, replica: int, rank: int, replicas: int, procs: int) -> str:
    """How a worker is called: `generator[1]`, by replica or rank, or both where there are several of both."""
    if procs == 1:
        return f"{role}[{replica}]"
    return f"{role}[{rank}]" if replicas == 1 else f"{role}[{replica},{rank}]"


def _connect(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except OSError:  # the controller is gone, or has stopped its session
        os._exit(1)
    return connection


def _end_with_controller(address: str) -> None:
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    life = _connect(address)
    # The kernel signals the whole group when the other end closes. No thread of ours has to run for it: this
    # works while native code holds the interpreter's lock. Output would cause signals too: none is sent here.
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC)
    # It may have closed just before, and sandboxes may not know such signals.
    threading.Thread(target=_wait_for_end, args=(life,), name="controller-watch", daemon=True).start()


def _wait_for_end(life: socket.socket) -> None:
    life.recv(1)
    os.killpg(os.getpgrp(), signal.SIGKILL)
