"""Which process on which host: the two ends of a transfer name themselves, and see whether memory can be shared."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class HostProcess:
    """A process and where it runs."""

    host: str
    boot: str
    """Differs between two boots of a host and between two hosts of one name."""
    namespaces: str
    """Network and process namespaces: two containers on one host do not see each other's processes."""
    pid: int

    @classmethod
    def current(cls) -> HostProcess:
        boot = Path("/proc/sys/kernel/random/boot_id")
        return cls(
            socket.gethostname(),
            boot.read_text().strip() if boot.exists() else "",
            f"{_namespace('net')} {_namespace('pid')}",
            os.getpid(),
        )

    def same_host(self, other: HostProcess) -> bool:
        """Whether both see one kernel, one network and one set of processes."""
        return (self.boot, self.namespaces) == (other.boot, other.namespaces)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def ip_addresses() -> list[str]:
    """IPv4 addresses of this host's network interfaces, loopback last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, interface in socket.if_nameindex():
            request = struct.pack("256s", interface.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # an interface without an address
                continue
            found.append(socket.inet_ntoa(answer[20:24]))
    return sorted(found, key=lambda address: address.startswith("127."))


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""
