"""How a worker process begins: `python -m meshrl.worker_process ADDRESS TOKEN NAME`.

Before Monarch or torch is imported, it connects to the controller's `LogServer` twice. Its stdout and stderr
become the first socket. Nothing is ever sent on the second: when the controller ends, by whatever signal, it
closes, and the kernel then kills the worker with all the processes that it started. Then Monarch takes over.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import runpy
import select
import signal
import socket
import sys
import threading
import warnings


def main() -> None:
    """`NAME` is for those who read the list of processes."""
    address, token, _ = sys.argv[1:]
    _end_with_controller(_connect(address))
    output = _connect(address)
    output.sendall(f"{token} {os.getpid()}\n".encode())
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    # Of two libraries that use each other's old names: nothing that a user could do.
    for message in (
        "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
        "To get the last learning rate computed",
    ):
        warnings.filterwarnings("ignore", message)
    faulthandler.enable(2)  # a crash in native code tells where
    runpy.run_module("monarch._src.actor.bootstrap_main", run_name="__main__", alter_sys=True)


def _connect(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(f"\0{address}")
    except OSError:  # the controller has ended, or stopped its session
        os._exit(1)
    return connection


def _end_with_controller(life: socket.socket) -> None:
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    # The kernel signals the whole group when the other end closes. No thread of ours has to run for it: this
    # works while native code holds the interpreter's lock. Output would cause signals too: none is sent here.
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC)
    # It may have closed just before, and sandboxes may not know such signals.
    threading.Thread(target=_wait_for_end, args=(life,), name="controller-watch", daemon=True).start()


def _wait_for_end(life: socket.socket) -> None:
    waiting = select.poll()  # a blocked `recv` would keep the kernel from sending its signal
    waiting.register(life, select.POLLIN)
    waiting.poll()
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
