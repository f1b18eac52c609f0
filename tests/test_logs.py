"""The log server, told lines through plain sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from meshrl.logs import KEPT_LINES, LONGEST_LINE, LogServer, ProcessLog


class Listener:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.pids: list[int] = []
        self.server = LogServer(self.hear)
        self.log = ProcessLog("echo[0]", "echo", 0, 0, on_start=self.pids.append)

    def hear(self, log: ProcessLog, line: str) -> None:
        if line == "bad":
            raise ValueError(line)
        self.lines.append(line)

    def send(self, *parts: bytes) -> None:
        """Connect as a process, send, and end."""
        with socket.socket(socket.AF_UNIX) as process:
            process.connect(f"\0{self.server.address}")
            process.sendall(f"{self.server.expect(self.log)} 123\n".encode())
            for part in parts:
                process.sendall(part)
        assert self.log.ended.wait(10)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.server.close()


def test_lines_arrive_whole_however_they_are_sent(listener: Listener) -> None:
    listener.send(b"one\ntw", b"o\nthr", b"ee")
    assert listener.lines == ["one", "two", "three"]
    assert listener.pids == [123]


def test_a_redrawn_line_is_shown_as_it_ended(listener: Listener) -> None:
    listener.send(b"10%\r50%\r100%\nwindows\r\n\n")
    assert listener.lines == ["100%", "windows", ""]


def test_output_without_line_ends_takes_bounded_memory(listener: Listener) -> None:
    listener.send(b"x" * (5 * LONGEST_LINE))
    assert sum(map(len, listener.lines)) == 5 * LONGEST_LINE
    assert max(map(len, listener.lines)) <= 2 * LONGEST_LINE


def test_only_the_last_lines_are_kept(listener: Listener) -> None:
    listener.send(b"".join(b"%d\n" % number for number in range(1000)))
    assert list(listener.log.lines) == [str(number) for number in range(1000 - KEPT_LINES, 1000)]


def test_a_line_that_cannot_be_shown_stops_nothing(
    listener: Listener, capsys: pytest.CaptureFixture[str]
) -> None:
    listener.send(b"bad\ngood\n")
    assert listener.lines == ["good"]
    assert "a line of echo[0] could not be shown: ValueError('bad')" in capsys.readouterr().err


def test_bytes_that_are_no_text_are_shown_all_the_same(listener: Listener) -> None:
    listener.send(b"\xff\xfe caf\xc3\xa9\n")
    assert listener.lines == ["\ufffd\ufffd café"]


def test_closing_reads_what_is_still_on_its_way() -> None:
    listener = Listener()
    with socket.socket(socket.AF_UNIX) as process:
        process.connect(f"\0{listener.server.address}")
        process.sendall(f"{listener.server.expect(listener.log)} 123\n".encode() + b"line\n" * 10_000)
    listener.server.close(seconds=30)
    assert len(listener.lines) == 10_000


def test_a_stranger_is_ignored(listener: Listener, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"\0{listener.server.address}")
        stranger.sendall(b"who goes there\n")
        assert stranger.recv(1) == b""  # shown the door
    listener.send(b"one\n")
    assert listener.lines == ["one"]
