"""Slots read through NIXL over UCX: shared memory, TCP or InfiniBand, whatever UCX finds between two processes.

The owner registers its slots and answers reads on a progress thread, no line of Python involved; the reader
prepares one transfer for each slot and posts it again for every version.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor

from meshrl.weights.errors import ArenaUnreachable, TransferFailed, TransportUnavailable
from meshrl.weights.host import HostProcess
from meshrl.weights.wire import Arrivals, Piece, Stretch

NAME = "nixl"
_MODULES = ("nixl_cu12", "nixl_cu13", "nixl")
_BACKEND = "UCX"
_PROGRESS_MICROSECONDS = 1000
"""The progress thread sleeps in poll() for so long at most; 0, as the Python API has it, spins a whole core."""
_SHORTEST_WAIT, _LONGEST_WAIT = 2e-5, 1e-3
"""Seconds between two looks at a transfer."""
_CHECK_SECONDS = 0.05
"""How often to see whether the owner is still there."""


_links_to: Counter[str] = Counter()
"""Links of this process by the owner's agent, which is forgotten with the last one."""


@dataclass(frozen=True)
class NixlHandle:
    """What a reader needs of an owner's agent."""

    agent: str
    metadata: bytes
    memory: str
    """`DRAM` or `VRAM`."""
    device: int
    addresses: tuple[int, ...]
    """Of each slot."""


class NixlOffer:
    """An agent of its own, which knows these slots and nothing else."""

    def __init__(self, slots: Sequence[Tensor], stretches: Sequence[Stretch]) -> None:
        """
        Raises:
            TransportUnavailable: no agent can be made, or it does not take this memory.
        """
        agent = _make_agent()
        try:
            registered = agent.register_memory(list(slots))
        except Exception as error:
            raise TransportUnavailable(f"NIXL does not register the slots: {error}") from None
        self.handle = NixlHandle(
            agent.name,
            agent.get_agent_metadata(),
            _memory(slots[0]),
            _device(slots[0]),
            tuple(slot.data_ptr() for slot in slots),
        )
        self._slots = slots  # registered memory must not move
        self.close = weakref.finalize(self, _close, _Opened(agent, registered))


class NixlLink:
    """One prepared read for each slot, from the owner's memory to where the parts arrive."""

    def __init__(self, handle: NixlHandle, owner: HostProcess, pieces: Sequence[Piece]) -> None:
        """
        Raises:
            TransportUnavailable: no agent can be made.
            ArenaUnreachable: the owner's cannot be reached.
        """
        self._handle, self._owner = handle, owner
        self._arrivals = Arrivals(pieces)
        agent = _reader_agent()
        parts = self._arrivals.parts
        storages = {part.into.untyped_storage().data_ptr(): part.into for part in parts}
        regions = [
            (start, into.untyped_storage().nbytes(), _device(into), "") for start, into in storages.items()
        ]
        registered = agent.register_memory(regions, _memory(parts[0].into))
        self._opened = _Opened(agent, registered, remote=handle.agent)
        self.close = weakref.finalize(self, _close, self._opened)
        self._slot = 0
        self._state = ""
        _links_to[handle.agent] += 1
        try:
            agent.add_remote_agent(handle.metadata)
            agent.make_connection(handle.agent)
            for slot in range(len(handle.addresses)):
                self._opened.reads[slot] = self._prepare(slot)
        except Exception as error:
            self.close()
            raise ArenaUnreachable(f"learner {owner} cannot be reached by NIXL: {error}") from None

    def begin(self, slot: int) -> None:
        self._slot = slot
        try:
            if slot not in self._opened.reads:
                self._opened.reads[slot] = self._prepare(slot)
            self._state = self._opened.agent.transfer(self._opened.reads[slot])
        except Exception as error:
            raise self._failed(str(error)) from None

    def finish(self, deadline: float, check_owner: Callable[[], None]) -> None:
        wait, checked = _SHORTEST_WAIT, time.monotonic()
        while self._state != "DONE":
            if self._state == "ERR":
                raise self._failed("the transfer ended with an error")
            now = time.monotonic()
            if now > deadline:
                raise self._failed("not in time")
            if now - checked > _CHECK_SECONDS:
                checked = now
                try:
                    check_owner()
                except Exception:
                    self._give_up()
                    raise
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)
            try:
                self._state = self._opened.agent.check_xfer_state(self._opened.reads[self._slot])
            except Exception as error:
                raise self._failed(str(error)) from None
        self._arrivals.scatter()

    def _prepare(self, slot: int) -> Any:
        handle, parts = self._handle, self._arrivals.parts
        start = handle.addresses[slot]
        there = [(start + part.start, part.into.numel(), handle.device) for part in parts]
        here = [(part.into.data_ptr(), part.into.numel(), _device(part.into)) for part in parts]
        agent = self._opened.agent
        return agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs(here, _memory(parts[0].into)),
            agent.get_xfer_descs(there, handle.memory),
            handle.agent,
        )

    def _failed(self, why: str) -> TransferFailed:
        self._give_up()
        return TransferFailed(f"weights of learner {self._owner} by NIXL: {why}")

    def _give_up(self) -> None:
        """Drop the read that is under way; the next one of this slot is prepared anew."""
        read = self._opened.reads.pop(self._slot, None)
        if read is not None:
            self._opened.abandoned.append(read)
            _release(self._opened)


@dataclass
class _Opened:
    """What an offer or a link has of NIXL. It must be gone before the interpreter is: see `_close`."""

    agent: Any
    registered: Any
    remote: str | None = None
    reads: dict[int, Any] = field(default_factory=dict)
    """A prepared read by slot."""
    abandoned: list[Any] = field(default_factory=list)
    """Reads that could not be released while they were under way."""


def _close(opened: _Opened) -> None:
    """Let go of everything; called by `close`, or when an object is forgotten, or before the interpreter ends.

    Later would be too late: an agent's destructor aborts the process in an interpreter that is ending.
    """
    opened.abandoned += opened.reads.values()
    opened.reads.clear()
    _release(opened)
    with suppress(Exception):
        opened.agent.deregister_memory(opened.registered)
    if opened.remote is not None:
        _links_to[opened.remote] -= 1
        if not _links_to[opened.remote]:
            del _links_to[opened.remote]
            with suppress(Exception):
                opened.agent.remove_remote_agent(opened.remote)
    opened.abandoned.clear()
    opened.agent = opened.registered = None


def _release(opened: _Opened) -> None:
    kept = []
    for read in opened.abandoned:
        try:
            read.release()
        except Exception:  # still under way: it is asked to stop, and can be released later
            kept.append(read)
    opened.abandoned[:] = kept


def available() -> tuple[bool, str]:
    """Whether NIXL is installed, and why or why not."""
    module = _module_name()
    if module is None:
        return False, "not installed: pip install 'meshrl[nixl]'"
    return True, f"{module}, over UCX"


def _module_name() -> str | None:
    return next((name for name in _MODULES if importlib.util.find_spec(name)), None)


@cache
def _reader_agent() -> Any:
    """The agent of this process that reads."""
    atexit.register(_reader_agent.cache_clear)
    return _make_agent()


def _make_agent() -> Any:
    """An agent with UCX whose progress thread sleeps."""
    name = _module_name()
    if name is None:
        raise TransportUnavailable(available()[1])
    # Their notices of what they are about are not for the user; warnings are.
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    try:
        api = importlib.import_module(f"{name}._api")
        agent = _with_sleeping_thread(api)
        agent.create_backend(_BACKEND)
    except Exception as error:
        raise TransportUnavailable(f"NIXL does not start: {type(error).__name__}: {error}") from None
    return agent


def _with_sleeping_thread(api: Any) -> Any:
    """The Python API fixes the delay of the progress thread at 0; the binding below it takes any."""
    bindings, original = api.nixlBind, api.nixlBind.nixlAgentConfig

    class Config(original):
        def __setattr__(self, key: str, value: Any) -> None:
            super().__setattr__(key, _PROGRESS_MICROSECONDS if key == "pthrDelay" else value)

    bindings.nixlAgentConfig = Config
    try:
        config = api.nixl_agent_config(enable_prog_thread=True, backends=[])
        return api.nixl_agent(f"meshrl-{uuid.uuid4().hex}", config)
    finally:
        bindings.nixlAgentConfig = original


def _memory(tensor: Tensor) -> str:
    return "VRAM" if tensor.device.type == "cuda" else "DRAM"


def _device(tensor: Tensor) -> int:
    return max(tensor.get_device(), 0)
