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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from meshrl.weights.errors import ArenaUnreachable, TransferFailed, TransportUnavailable
from meshrl.weights.host import HostProcess
from meshrl.weights.wire import Arrivals, Part, Piece, Stretch

NAME = "nixl"
_MODULES = ("nixl_cu12", "nixl_cu13", "nixl")
_BACKEND = "UCX"
_PROGRESS_MICROSECONDS = 10_000
"""The progress thread sleeps in poll() for so long at most, and wakes when something arrives; 0, as the Python API
has it, spins a whole core."""
_SHORTEST_WAIT, _LONGEST_WAIT = 2e-5, 1e-3
"""Seconds between two looks at a transfer."""
_CHECK_SECONDS = 0.05
"""How often to see whether the owner is still there."""
_CONNECT_SECONDS = 10.0
"""How long the first bytes may take that a new link brings, to see that they come at all."""
_PROBE_BYTES = 8


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
    """An agent of its own, which knows these slots and nothing else: readers refuse an agent whose memory is
    registered anew at an address that they know."""

    def __init__(self, slots: Sequence[Tensor], stretches: Sequence[Stretch]) -> None:
        """
        Args:
            slots: uint8 `[bytes]` each, of one device.

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
        self.close = weakref.finalize(self, _close, _Opened(agent, [registered], memory=list(slots)))


class NixlLink:
    """A prepared read for each slot, from the owner's memory to where the parts arrive, on an agent of its own.

    NIXL cannot call a read back: the bytes of one that was late still land when the owner sends them. So the
    next fetch waits for it first, and landing memory may hold anything until a fetch has succeeded again.
    """

    def __init__(self, handle: NixlHandle, owner: HostProcess, pieces: Sequence[Piece]) -> None:
        """Some bytes are brought right away, to see that there is a way.

        Args:
            pieces: land on one device.

        Raises:
            TransportUnavailable: no agent can be made.
            ArenaUnreachable: the owner's cannot be reached.
        """
        self._handle, self._owner = handle, owner
        self._arrivals = Arrivals(pieces)
        self._parts = [part for part in self._arrivals.parts if part.into.numel()]
        self._wanted: int | None = None
        self._failure = ""
        self._opened = _Opened()
        self.close = weakref.finalize(self, _close, self._opened)
        if self._parts:
            try:
                self._connect()
                self._probe()
            except TransportUnavailable:
                self.close()
                raise
            except Exception as error:
                self.close()
                raise ArenaUnreachable(f"learner {owner} cannot be reached by NIXL: {error}") from None

    def begin(self, slot: int) -> None:
        try:
            ended = self._look()
        except TransferFailed:  # what is left of the fetch before; this one has an agent of its own
            ended = True
        self._wanted = slot
        if ended:
            self._post()

    def finish(self, deadline: float, check_owner: Callable[[], None]) -> None:
        if self._wanted is not None:
            self._wait(deadline, check_owner)
            self._post()
        if self._failure:
            raise self._failed(self._failure)
        self._wait(deadline, check_owner)
        self._arrivals.scatter()

    def _connect(self) -> None:
        """Open an agent, register where bytes land, and prepare the reads."""
        opened, agent = self._opened, _make_agent()
        opened.agent = agent
        self._register([part.into for part in self._parts])
        agent.add_remote_agent(self._handle.metadata)
        agent.make_connection(self._handle.agent)
        opened.reads = [self._prepare(self._parts, address) for address in self._handle.addresses]

    def _register(self, tensors: Sequence[Tensor]) -> None:
        memory = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        regions = [(start, t.untyped_storage().nbytes(), _device(t), "") for start, t in memory.items()]
        self._opened.registered.append(self._opened.agent.register_memory(regions, _memory(tensors[0])))
        self._opened.memory += memory.values()

    def _prepare(self, parts: Sequence[Part], address: int) -> Any:
        there = [(address + part.start, part.into.numel(), self._handle.device) for part in parts]
        here = [(part.into.data_ptr(), part.into.numel(), _device(part.into)) for part in parts]
        agent = self._opened.agent
        return agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs(here, _memory(parts[0].into)),
            agent.get_xfer_descs(there, self._handle.memory),
            self._handle.agent,
        )

    def _probe(self) -> None:
        """Bring a few bytes to memory that is of no use: an address that no packet reaches shows only so."""
        part = self._parts[0]
        into = torch.zeros_like(part.into[:_PROBE_BYTES])
        self._register([into])
        opened = self._opened
        opened.under_way = self._prepare([Part(part.start, into)], self._handle.addresses[0])
        opened.agent.transfer(opened.under_way)
        self._wait(time.monotonic() + _CONNECT_SECONDS, lambda: None)

    def _post(self) -> None:
        """Start the read that is wanted; `finish` tells if that fails."""
        assert self._wanted is not None
        slot, self._wanted, self._failure = self._wanted, None, ""
        if not self._parts:
            return
        device = self._parts[0].into.device
        if device.type == "cuda":  # NIXL knows no streams: what they still do with the memory comes first
            torch.cuda.synchronize(device)
        opened = self._opened
        try:
            if not self.close.alive:
                raise RuntimeError("the link was closed")
            if opened.agent is None:
                self._connect()
            read: Any = opened.reads[slot]
            self._opened.agent.transfer(read)
            opened.under_way = read
        except Exception as error:
            self._failure = str(error)
            _close(opened)

    def _look(self) -> bool:
        """Whether no read is under way (any more). After an error the agent is of no use and ends."""
        opened = self._opened
        if opened.under_way is not None:
            try:
                state = opened.agent.check_xfer_state(opened.under_way)
            except Exception as error:
                state = str(error)
            if state == "PROC":
                return False
            opened.under_way = None
            if state != "DONE":
                _close(opened)
                raise self._failed(state)
        return True

    def _wait(self, deadline: float, check_owner: Callable[[], None]) -> None:
        wait, checked = _SHORTEST_WAIT, time.monotonic()
        while not self._look():
            now = time.monotonic()
            if now > deadline:
                raise self._failed("not in time")
            if now - checked > _CHECK_SECONDS:
                checked = now
                check_owner()
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    def _failed(self, why: str) -> TransferFailed:
        return TransferFailed(f"weights of learner {self._owner} by NIXL: {why}")


@dataclass
class _Opened:
    """What an offer or a link has of NIXL. It must be gone before the interpreter is: see `_close`."""

    agent: Any = None
    registered: list[Any] = field(default_factory=list)
    memory: list[Tensor] = field(default_factory=list)
    """That is registered: it may not move, nor go before the agent."""
    reads: list[Any] = field(default_factory=list)
    """A prepared one for each slot."""
    under_way: Any = None
    """The read that was begun and has not ended."""

    def in_use(self) -> bool:
        if self.under_way is None:
            return False
        try:
            return self.agent.check_xfer_state(self.under_way) == "PROC"
        except Exception:
            return False


_lingering: list[_Opened] = []
"""Closed with a read under way. To end an agent whose owner has stood still kills the owner when it goes on:
UCX aborts a process that answers a connection which was given up."""
atexit.register(_lingering.clear)


def _close(opened: _Opened) -> None:
    """Let go of everything; called by `close`, or when an object is forgotten, or before the interpreter ends.

    Later would be too late: an agent's destructor aborts the process in an interpreter that is ending.
    """
    _lingering[:] = [before for before in _lingering if before.in_use()]
    if opened.in_use():
        _lingering.append(replace(opened))
    elif opened.agent is not None:
        for read in opened.reads:
            with suppress(Exception):
                read.release()
        for registered in opened.registered:
            with suppress(Exception):
                opened.agent.deregister_memory(registered)
    opened.agent = opened.under_way = None
    opened.reads, opened.registered, opened.memory = [], [], []


def available() -> tuple[bool, str]:
    """Whether NIXL is installed, and why or why not."""
    module = _module_name()
    if module is None:
        return False, "not installed: pip install 'meshrl[nixl]'"
    return True, f"{module}, over UCX"


def _module_name() -> str | None:
    return next((name for name in _MODULES if importlib.util.find_spec(name)), None)


def _make_agent() -> Any:
    """An agent with UCX whose progress thread sleeps."""
    name = _module_name()
    if name is None:
        raise TransportUnavailable(available()[1])
    # What goes wrong is told in errors that name the owner; their logs would repeat it without.
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
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
