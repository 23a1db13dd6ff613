"""A race detector for streams that needs no accelerator: work on shared memory must be ordered.

Streams of the CPU do nothing. If FSDP leaves out a wait, the CPU does not show it, and an accelerator shows it only now
and then. A :class:`Recording` gives clocks to streams and events. An operator reads and writes memory on the stream
that is current when it is called. A wait orders the later work of a stream after everything that the other stream, or
the event, has seen. Two accesses to the same bytes race if at least one is a write and neither is ordered after the
other.

Freed memory goes to the next allocation on the stream where it was allocated, as in a caching allocator. That
allocation must come after all accesses, except those on streams that were passed to ``record_stream``, and those for
which such a stream has waited. Sanitizers for accelerators, such as ``torch.cuda._sanitizer``, have the same rules,
except the one about freed memory.

An operator on host memory runs on the host, at once. A copy between host and device runs on the current stream, and the
host waits for it unless it is non-blocking. On the CPU, host memory is what FSDP has pinned (as recorded by
:mod:`torch_fsdp_tests.device.substitutes`) and what is computed from it. There, ``Tensor.to`` and ``Tensor.cpu`` copy
where FSDP would copy between a device and the host.
"""

from __future__ import annotations

import contextlib
import enum
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.extensions.races import operator_calls
from torch_fsdp_tests.extensions.races.operator_calls import CallSite, OperatorCall, storage_of
from torch_fsdp_tests.verdict.events import Skipped

_SWEEP = 256  # operators, after which all memory that nothing refers to is forgotten
Clock = dict[int, int]  # for each stream, how many of its operators are known to have finished
HOST = -1  # instead of the number of a stream: the operator ran on the CPU
COLLECTIVES = -2  # the stream of the backend, on which asynchronous collectives run


class Access(NamedTuple):
    """One operator's access to bytes of a storage."""

    stream: int
    number: int  # the number of the operator on its stream
    operator: str
    start: int
    end: int
    writes: bool
    site: CallSite | None  # None if FSDP did not call it


class Race(NamedTuple):
    """Two accesses that nothing orders, each with its stream, and the lines of FSDP that made them, if any."""

    earlier: str
    later: str
    sites: tuple[CallSite | None, CallSite | None] = (None, None)

    def __str__(self) -> str:
        earlier, later = (f"{what} ({site})" if site else what for what, site in zip(self[:2], self.sites, strict=True))
        return f"{earlier} and {later} are not ordered"


class _Side(enum.Enum):
    """Where a tensor is."""

    HOST = enum.auto()
    DEVICE = enum.auto()


def _side(is_in_host: bool) -> _Side:
    return _Side.HOST if is_in_host else _Side.DEVICE


def _needs_host(operands: Sequence[torch.Tensor], sides: Sequence[_Side]) -> bool:
    """Whether an operator can run only in host memory: one of its operands, not a number, is there."""
    return any(tensor.dim() and side is _Side.HOST for tensor, side in zip(operands, sides, strict=True))


@dataclass
class _Memory:
    """The accesses to a storage. ``users`` are the streams that were passed to ``record_stream``."""

    storage: StorageWeakRef
    stream: int
    accesses: list[Access] = field(default_factory=list)
    users: set[int] = field(default_factory=set)


class Recording(TorchDispatchMode):
    """The races that were found. ``waits`` counts how often one stream waited for another, and ``host_waits`` how often
    the host waited for a copy, an event, a stream or the device.
    """

    def __init__(self, device_module: Any) -> None:
        super().__init__()
        self.races: list[Race] = []
        self.waits = 0
        self._coalesces = False  # inside a function in C++ that waits for its collectives itself
        self.host_waits: Counter[str] = Counter()
        self._module, self._kind = device_module, device_module.Stream
        self._device_type = accelerator.current().type
        self._is_cpu = self._device_type == "cpu"
        self._names: dict[int, str] = {HOST: "the host", COLLECTIVES: "the backend's stream"}
        self._streams: dict[int, Any] = {}  # kept, so that no other stream gets the id of a deleted one
        self._host: Clock = {HOST: 0}
        self._clocks: dict[int, Clock] = {HOST: self._host, COLLECTIVES: {COLLECTIVES: 0}}
        self._host_memory: set[int] = set()  # storages; pinned ones and those of another device type need not be here
        self._adopted: set[int] = set()  # storages that are where they were last used together with the host's
        self._moves = False  # whether the current operator replaces a copy between host and device
        # Weak references to CUDA's events dangle when the events are gone (pytorch#183403), so these stay.
        self._events: dict[Any, Clock] = {}
        self._memory: dict[int, _Memory] = {}
        self._shared: set[int] = set()  # storages that another stream than their own has accessed
        self._operators = 0
        self._node: Any = None  # of autograd, to which the last operator belongs
        self._node_streams: set[int] = set()  # those of the current backward
        self._freed: dict[int, list[Access]] = {}  # for each stream, the accesses to memory that is free again

    # Streams and events

    def stream(self, stream: Any = None) -> int:
        """The number of a stream. The default is the current one."""
        stream = self._module.current_stream() if stream is None else stream
        if not isinstance(stream, self._kind):
            raise Skipped("the test has streams of its own, which the race detector does not know")
        key = getattr(stream, "stream_id", id(stream))
        if key not in self._streams:
            self._names[key] = f"stream {len(self._streams)}"
            self._streams[key], self._clocks[key] = stream, {key: 0}
        return key

    def record(self, event: Any, stream: Any = None) -> None:
        """Let an event include all work that its stream has been given so far."""
        self._events[event] = dict(self._clocks[self.stream(stream)])

    def wait(self, stream: Any, seen: Mapping[int, int] | None) -> None:
        """Order the later work of a stream after what was seen."""
        self.waits += 1
        _merge(self._clocks[self.stream(stream)], seen or {})

    def wait_stream(self, stream: Any, other: Any) -> None:
        """Order the later work of a stream after all work that another stream has been given so far."""
        self.wait(stream, self._clocks[self.stream(other)])

    def wait_event(self, stream: Any, event: Any) -> None:
        """Order the later work of a stream after the work that an event includes. The default is the current stream."""
        self.wait(stream, self._events.get(event))

    def wait_work(self, result: Any) -> Any:
        """Order the later work of the current stream after all asynchronous collectives so far."""
        self.wait(None, self._clocks[COLLECTIVES])
        return result

    def synchronize_stream(self, stream: Any, because_of: str = "stream") -> None:
        """Let the host wait for a stream."""
        self.host_waits[because_of] += 1
        _merge(self._host, self._clocks[self.stream(stream)])

    def synchronize_event(self, event: Any) -> None:
        """Let the host wait for the work that an event includes."""
        self.host_waits["event"] += event in self._events
        _merge(self._host, self._events.get(event, {}))

    def synchronize(self) -> None:
        """Let the host wait for everything."""
        self.host_waits["device"] += 1
        for clock in self._clocks.values():
            _merge(self._host, clock)

    # Memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a DTensor's operators on local tensors come here too
        kwargs = kwargs or {}
        self._free()
        call = OperatorCall.of(func, args, kwargs, operator_calls.call_site())
        operator = call.operator
        sides = self._sides(call)
        result = func(*args, **kwargs)
        made = call.made(result)
        if self._is_cpu:  # which does not show where a new tensor is
            made_in_host = [False] * len(made)
        else:
            made_in_host = [self.is_in_host(tensor) for tensor in made]
            sides.update(map(_side, made_in_host))
        stream = self._stream_of(call, sides)
        if call.site is None and not self._is_cpu:
            self._follow_autograd(stream)
        for tensor, is_in_host in zip(made, made_in_host, strict=True):
            self.allocate(tensor.untyped_storage(), operator.name, HOST if is_in_host else stream)
        if operator.accesses_memory:
            clock = self._clocks[stream]
            _merge(clock, self._host)
            clock[stream] += 1
            for tensors, writes in ((call.read, False), (call.written, True), (made, True)):
                for tensor in tensors:
                    self._access(tensor, stream, operator.name, writes, call.site)
        if operator.copies and len(sides) == len(_Side) and not call.argument("non_blocking"):
            self.synchronize_stream(None, "copy")
        elif operator.returns_value and not self._is_cpu and stream != HOST:
            self.synchronize_stream(None, "value")
        return result

    @contextlib.contextmanager
    def coalescing(self) -> Iterator[None]:
        """A function in C++ waits for its collectives itself."""
        self._coalesces = True
        try:
            yield
        finally:
            self._coalesces = False

    def _stream_of(self, call: OperatorCall, sides: set[_Side]) -> int:
        """The stream on which an operator runs whose operands are on these sides."""
        if sides == {_Side.HOST} and not self._moves:
            return HOST
        stream = self.stream()
        # The host waits for other asynchronous collectives in C++, such as those of DDP, where no recording sees it.
        by_fsdp = call.site is not None and not self._coalesces
        if call.operator.is_collective and by_fsdp and call.argument("async_op"):
            _merge(self._clocks[COLLECTIVES], self._clocks[stream])
            return COLLECTIVES
        return stream

    def is_in_host(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type != self._device_type:
            return True
        key = storage_of(tensor)
        return self._is_cpu and (key in self._host_memory or key in self._adopted or tensor.is_pinned())

    def _follow_autograd(self, stream: int) -> None:
        """Order an operator of backward after the nodes before it, as autograd does in C++ if their streams differ.

        It also lets the stream that started backward wait at the end. On the CPU, all of it has one stream.
        """
        node = torch._C._current_autograd_node()
        if node is not self._node:
            self._node = node
            for other in self._node_streams:
                _merge(self._clocks[stream], self._clocks[other])
        self._node_streams = {*self._node_streams, stream} if node is not None else set()

    def _sides(self, call: OperatorCall) -> set[_Side]:
        """Where the operands are.

        On the CPU, nothing shows where a tensor would be. An operand that is used together with host memory counts as
        host memory, and an operand of what may be a copy as device memory.
        """
        operands = [*call.read, *call.written]
        if call.may_move:
            self._adopted.difference_update(map(storage_of, operands))
        sides = [_side(self.is_in_host(tensor)) for tensor in operands]
        if self._is_cpu and not call.may_move and _needs_host(operands, sides):
            for tensor, side in zip(operands, sides, strict=True):
                if side is _Side.DEVICE:
                    self._adopted.add(storage_of(tensor))
                    self._of(tensor.untyped_storage()).accesses = []
            return {_Side.HOST}
        return set(sides)

    def moves(self, tensor: torch.Tensor, caller: str) -> bool:
        """Whether a module that calls ``Tensor.to`` or ``Tensor.cpu`` copies between host and device."""
        return caller.startswith(operator_calls.FSDP) and (
            self.is_in_host(tensor) or caller in operator_calls.FSDP2_MOVES
        )

    def move(self, tensor: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """Copy a tensor from the host to the device, or to pinned memory of the host, although they are the same."""
        to_host = not self.is_in_host(tensor)
        self._moves = True
        try:
            copy = tensor.clone()
        finally:
            self._moves = False
        if to_host:
            self._host_memory.add(storage_of(copy))
            self._of(copy.untyped_storage()).stream = HOST
        if not non_blocking:
            self.synchronize_stream(None, "copy")
        return copy

    def _of(self, storage: torch.UntypedStorage, stream: int | None = None) -> _Memory:
        key = storage._cdata
        if key not in self._memory:
            self._memory[key] = _Memory(StorageWeakRef(storage), self.stream() if stream is None else stream)
        return self._memory[key]

    def _access(self, tensor: torch.Tensor, stream: int, operator: str, writes: bool, site: CallSite | None) -> None:
        if not tensor.numel() or tensor.untyped_storage().size() == 0:
            return
        memory = self._of(tensor.untyped_storage())
        start = tensor.storage_offset() * tensor.itemsize
        strides = zip(tensor.size(), tensor.stride(), strict=True)
        end = start + (1 + sum((size - 1) * stride for size, stride in strides)) * tensor.itemsize
        access = Access(stream, self._clocks[stream][stream], operator, start, end, writes, site)
        for other in memory.accesses:
            if (writes or other.writes) and other.start < end and start < other.end:
                self._compare(other, stream, operator, site)
        kept = [other for other in memory.accesses if not (_is_within(other, access) and (writes or not other.writes))]
        memory.accesses = [*kept, access]
        if stream != memory.stream:
            self._shared.add(memory.storage.cdata)

    def _compare(self, earlier: Access, stream: int, operator: str, site: CallSite | None) -> None:
        if earlier.stream != stream and self._clocks[stream].get(earlier.stream, 0) < earlier.number:
            names = self._names
            operators = f"{earlier.operator} on {names[earlier.stream]}", f"{operator} on {names[stream]}"
            race = Race(*operators, (earlier.site, site))
            if race not in self.races:
                self.races.append(race)

    def free(self, key: int) -> None:
        """Let the allocator give the memory of a storage to the next allocation on its stream."""
        memory = self._memory.pop(key, None)
        self._shared.discard(key)
        self._host_memory.discard(key)
        self._adopted.discard(key)
        if memory is not None and memory.stream != HOST:  # the host's allocator knows which copies use its memory
            kept: Clock = {}  # for each stream, how many of its operators have finished before the memory is used again
            for user in memory.users:
                _merge(kept, self._clocks[user])
            left = (
                access
                for access in memory.accesses  # a backend keeps its own memory
                if access.stream != COLLECTIVES and kept.get(access.stream, 0) < access.number
            )
            self._freed.setdefault(memory.stream, []).extend(left)

    def allocate(self, storage: torch.UntypedStorage, operator: str, stream: int | None = None) -> None:
        """Allocate on a stream (by default the current one): perhaps memory freed there since the last allocation."""
        stream = self.stream() if stream is None else stream
        self._of(storage, stream)
        if stream == HOST:
            self._host_memory.add(storage._cdata)
        _merge(self._clocks[stream], self._host)
        for access in self._freed.pop(stream, []):
            self._compare(access, stream, f"the memory's next owner, {operator},", operator_calls.call_site())

    def _free(self) -> None:
        """Free what nothing refers to any more. Memory of one stream may wait, because its next owner comes later."""
        self._operators += 1
        keys = self._shared if self._operators % _SWEEP else self._memory
        expired = torch.UntypedStorage._expired  # StorageWeakRef.expired comes to the same, three times slower
        for key in [key for key in keys if expired(self._memory[key].storage.cdata)]:
            self.free(key)

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """``record_stream``: after it is freed, the memory stays unused until the stream's work so far is done."""
        self._of(tensor.untyped_storage()).users.add(self.stream(stream))


def _merge(clock: Clock, seen: Mapping[int, int]) -> None:
    for stream, number in list(seen.items()):
        clock[stream] = max(clock.get(stream, 0), number)


def _is_within(inner: Access, outer: Access) -> bool:
    """Whether ``outer`` covers all bytes of ``inner``, and all that is ordered after ``outer`` follows ``inner``."""
    return inner.stream == outer.stream and outer.start <= inner.start and inner.end <= outer.end
