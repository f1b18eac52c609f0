"""Make a notebook kernel a good controller: an interrupted cell stops at once."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
import weakref

_prepared: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()


def in_kernel() -> bool:
    """Whether this process is a notebook kernel; a script that merely imports IPython is none."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def prepare_kernel() -> None:
    """Let the interrupt button reach a cell that waits.

    The kernel cancels the cell in a callback of its event loop. A loop that waits for messages of
    other processes would run it at its next event, seconds later: here each signal also wakes the
    loop. Does nothing outside a kernel, in a thread that gets no signals, or when done already.
    """
    if not in_kernel() or threading.current_thread() is not threading.main_thread():
        return
    loop = asyncio.get_running_loop()
    if loop in _prepared:
        return
    receive, send = socket.socketpair()
    receive.setblocking(False)
    send.setblocking(False)
    before = signal.set_wakeup_fd(send.fileno(), warn_on_full_buffer=False)
    if before != -1:  # somebody's signals wake this loop already
        signal.set_wakeup_fd(before)
        receive.close()
        send.close()
    else:
        loop.add_reader(receive, _drain, receive, send)
    _prepared.add(loop)


def _drain(receive: socket.socket, _send: socket.socket) -> None:
    # Waking is all; the reader's arguments keep both sockets open as long as the loop lives.
    try:
        receive.recv(4096)
    except BlockingIOError:
        pass
