"""The leases of an arena over TCP: the server on a learner rank, and a reader's connection to it.

A lease hangs on the reader's connection: it ends when that process or its host is gone, so a killed reader never
blocks the learner. The connection tells a reader as quickly that the owner is gone.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from meshrl.weights.errors import ArenaBusy, ArenaUnreachable, VersionUnavailable, WeightsError
from meshrl.weights.host import HostProcess
from meshrl.weights.leases import Leases

_DIAL_SECONDS = 5.0
"""For an address to take a call; one that leads nowhere may swallow it."""
_GREETING_SECONDS = 30.0
"""For a process that took a call to answer it: it may be busy."""
_CLOSE_SECONDS = 5.0
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 3), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))
"""Seconds, seconds, times: a host that vanishes without a word is noticed after about six seconds."""


@dataclass(frozen=True)
class ServiceAddress:
    """Where a service listens, and the secret that a caller must know."""

    owner: HostProcess
    hosts: tuple[str, ...]
    """IPv4 addresses to try, in turn."""
    port: int
    secret: bytes


class SlotService:
    """The leases of one arena, guarded by a lock, and the server that readers call."""

    def __init__(self, slots: int, answer: Callable[..., Any], *, secret: bytes, local: bool) -> None:
        """
        Args:
            answer: `answer(request, *arguments)` for a request other than a lease; bytes-like answers travel as
                they are.
            local: whether every reader is on this host, so that no other need be listened to.
        """
        self._leases = Leases(slots)
        self._changed = threading.Condition()
        self._answer = answer
        self._manifests: dict[int, Any] = {}
        self._listener = socket.create_server(("127.0.0.1" if local else "0.0.0.0", 0))
        self._secret = secret
        self.port = self._listener.getsockname()[1]
        self._connected: dict[threading.Thread, socket.socket] = {}
        self._closed = False
        self._acceptor = threading.Thread(target=self._accept, name="weights-service", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Stop serving, and wait for the threads: one that still ran while the interpreter ends, and then
        freed a tensor, would abort the process."""
        with self._changed:
            self._closed = True
            serving = dict(self._connected)
        for connected in (self._listener, *serving.values()):
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
        for thread in (self._acceptor, *serving):
            if thread is not threading.current_thread():
                thread.join(_CLOSE_SECONDS)
        self._listener.close()

    def begin(self, version: int, deadline_seconds: float) -> int:
        """The slot for a new version, free of readers. Waits for: those that read the version in it.

        Raises:
            VersionUnavailable: `version` is not above the last one.
            ArenaBusy: a reader did not give back before the deadline; it is named.
        """
        with self._changed:
            newest = self._leases.newest
            if version < 0 or (newest is not None and version <= newest):
                raise VersionUnavailable(f"version {version} cannot follow version {newest}: versions go up")
            slot = self._leases.oldest
            if not self._changed.wait_for(lambda: not self._leases.readers(slot), deadline_seconds):
                readers = " and ".join(sorted(map(str, self._leases.readers(slot))))
                raise ArenaBusy(
                    f"cannot publish version {version}: after {deadline_seconds:g} s {readers} still read "
                    f"version {self._leases.version(slot)}"
                )
            self._leases.withdraw(slot)
            self._manifests.pop(slot, None)
            return slot

    def commit(self, slot: int, version: int, manifest: Any) -> None:
        """Hand the version out from now on."""
        with self._changed:
            self._manifests[slot] = manifest
            self._leases.commit(slot, version)

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:  # closed
                return
            thread = threading.Thread(
                target=self._serve, args=(connected,), name="weights-reader", daemon=True
            )
            with self._changed:
                if self._closed:
                    connected.close()
                    return
                self._connected[thread] = connected
                thread.start()

    def _serve(self, connected: socket.socket) -> None:
        """Answer one reader until it goes; what it has leased then is given back."""
        connection = _as_connection(connected)
        held: list[tuple[int, HostProcess]] = []
        try:
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
            reader: HostProcess = connection.recv()
            while True:
                request, *arguments = connection.recv()
                try:
                    answer = self._respond(request, arguments, reader, held)
                except WeightsError as error:
                    answer = error
                if isinstance(answer, memoryview):
                    connection.send_bytes(answer)
                else:
                    connection.send(answer)
        except (EOFError, OSError, AuthenticationError):
            pass
        finally:
            connection.close()
            connected.close()
            with self._changed:
                self._connected.pop(threading.current_thread(), None)
                for slot, reader in held:
                    self._leases.release(slot, reader)
                self._changed.notify_all()

    def _respond(
        self, request: str, arguments: list[Any], reader: HostProcess, held: list[tuple[int, HostProcess]]
    ) -> Any:
        if request not in ("lease", "release"):
            return self._answer(request, *arguments)
        with self._changed:
            if request == "lease":
                slot = self._leases.lease(arguments[0], reader)
                held.append((slot, reader))
                return slot, self._manifests[slot]
            slot = arguments[0]
            held.remove((slot, reader))
            self._leases.release(slot, reader)
            self._changed.notify_all()
            return None


class Caller:
    """A reader's connection to a service; used by one thread at a time."""

    def __init__(self, address: ServiceAddress) -> None:
        """
        Raises:
            ArenaUnreachable: nobody answers there, or somebody else.
        """
        self.owner = address.owner
        self._connection = self._dial(address)

    def send(self, *request: Any) -> None:
        """Ask; `receive` brings the answer."""
        self._limit(socket.SO_SNDTIMEO, _GREETING_SECONDS)
        try:
            self._connection.send(request)
        except BlockingIOError:
            raise self._late() from None
        except OSError as error:
            raise self._gone(error) from None

    def receive(self, deadline: float) -> Any:
        """The next answer, by `time.monotonic()`.

        Raises:
            ArenaUnreachable: the owner is gone, or silent until the deadline. Besides, what the owner answered with.
        """
        self._wait(deadline)
        try:
            answer = self._connection.recv()
        except BlockingIOError:
            raise self._late() from None
        except (EOFError, OSError) as error:
            raise self._gone(error) from None
        if isinstance(answer, WeightsError):
            raise type(answer)(f"learner {self.owner} {answer}")
        return answer

    def receive_into(self, buffer: memoryview, deadline: float) -> None:
        """The next answer, which is bytes; see `receive`."""
        self._wait(deadline)
        try:
            self._connection.recv_bytes_into(buffer)
        except BlockingIOError:
            raise self._late() from None
        except (EOFError, OSError) as error:
            raise self._gone(error) from None

    def check_owner(self) -> None:
        """Raises `ArenaUnreachable` if the owner is gone. Not while an answer is outstanding."""
        try:
            if self._connection.poll(0):
                self._connection.recv()
                raise EOFError
        except (EOFError, OSError) as error:
            raise self._gone(error) from None

    def close(self) -> None:
        """What is leased is given back with it."""
        self._connection.close()

    def _wait(self, deadline: float) -> None:
        """Until an answer begins to come in; from then on each silence has what is left of the time."""
        try:
            answers = self._connection.poll(max(deadline - time.monotonic(), 0))
        except OSError as error:
            raise self._gone(error) from None
        if not answers:
            raise self._late()
        self._limit(socket.SO_RCVTIMEO, max(deadline - time.monotonic(), 0.001))

    def _limit(self, option: int, seconds: float) -> None:
        """Longest silence of the connection within one message; a process that was stopped is silent for ever."""
        try:
            with socket.socket(fileno=os.dup(self._connection.fileno())) as connected:
                whole = int(seconds)
                interval = struct.pack("@ll", whole, int((seconds - whole) * 1e6))
                connected.setsockopt(socket.SOL_SOCKET, option, interval)
        except OSError as error:
            raise self._gone(error) from None

    def _late(self) -> ArenaUnreachable:
        return ArenaUnreachable(f"learner {self.owner} does not answer in time")

    def _gone(self, error: Exception) -> ArenaUnreachable:
        why = f": {error}" if str(error) else ""
        return ArenaUnreachable(f"learner {self.owner} is gone: it has closed its arena{why}")

    def _dial(self, address: ServiceAddress) -> Connection:
        failures = []
        for host in address.hosts:
            try:
                connected = socket.create_connection((host, address.port), _DIAL_SECONDS)
                connected.settimeout(None)
                connection = _as_connection(connected)
                connected.close()  # the connection has a descriptor of its own
                if not connection.poll(_GREETING_SECONDS):
                    raise OSError("does not answer")
                answer_challenge(connection, address.secret)
                deliver_challenge(connection, address.secret)
                connection.send(HostProcess.current())
                return connection
            except (OSError, EOFError, AuthenticationError) as error:
                failures.append(f"{host}:{address.port}: {error or type(error).__name__}")
        raise ArenaUnreachable(
            f"learner {address.owner} is dead or cannot be reached from {HostProcess.current()} "
            f"({'; '.join(failures)})"
        )


def _as_connection(connected: socket.socket) -> Connection:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(os.dup(connected.fileno()))


def service_hosts(
    readers: Sequence[HostProcess], here: HostProcess, addresses: Sequence[str]
) -> tuple[str, ...]:
    """Addresses at which the readers may call a service on this host: loopback where all are here."""
    local = all(here.same_host(reader) for reader in readers)
    return ("127.0.0.1",) if local else tuple(addresses)
