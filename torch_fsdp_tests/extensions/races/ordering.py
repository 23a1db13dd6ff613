"""A race detector for streams that needs no accelerator: work on shared memory must be ordered.

Streams of the CPU do nothing. If FSDP leaves out a wait, the CPU does not show it, and an accelerator shows it only now
and then. :func:`recorded` gives clocks to streams and events. An operator reads and writes memory on the stream that is
current when it is called. A wait orders the later work of a stream after everything that the other stream, or the
event, has seen. Two accesses to the same bytes race if at least one is a write and neither is ordered after the other.

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
import functools
import sys
import threading
import unittest
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.device.capabilities import STAGED
from torch_fsdp_tests.installed_torch import torch_names
from torch_fsdp_tests.verdict import Reason, SkipKind
from torch_fsdp_tests.verdict.events import Skipped

_NEAREST = 16  # callers; if FSDP is none of them, an operator is the user's, although FSDP runs the user's forward
_SWEEP = 256  # operators, after which all memory that nothing refers to is forgotten
STEPS = 3  # a step uses memory that the step before has freed
Clock = dict[int, int]  # for each stream, how many of its operators are known to have finished
HOST = -1  # instead of the number of a stream: the operator ran on the CPU
COLLECTIVES = -2  # the stream of the backend, on which asynchronous collectives run

_NO_ACCESS = ("empty", "new_empty", "resize_", "set_", "is_pinned", "record_stream", "sym_", "storage_offset", "_has_")
# Arguments that an operator writes although the schema does not say so. Collectives write their first argument.
_WRITES = {"fsdp::all_gather_copy_in": ("all_gather_output",)}
_COLLECTIVE = "c10d::"
_VALUES = ("equal", "_local_scalar_dense")
_COPIES = ("copy_", "_to_copy")  # also between host and device
_FSDP = "torch.distributed.fsdp."
# The modules that move gradients and parameters between device and host.
_FSDP1_MOVES = {f"{_FSDP}{name}" for name in ("_flat_param", "_runtime_utils")}
_FSDP2_MOVES = {f"{_FSDP}_fully_shard.{name}" for name in ("_fsdp_collectives", "_fsdp_param")}
_MOVES = _FSDP1_MOVES | _FSDP2_MOVES
_optimizer = torch_names.module("torch.optim.optimizer")
_RECORDING_MODULES = tuple(map(torch_names.module, sorted(_FSDP1_MOVES)))


class CallSite(NamedTuple):
    """The line of FSDP that called an operator."""

    module: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.py:{self.line}, {self.function}"


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


class _Operator(NamedTuple):
    """What the schema and the name of an operator say."""

    name: str
    defaults: Mapping[str, Any]  # by the names of its arguments
    written: Collection[str]  # arguments
    only_written: Collection[str]
    is_collective: bool
    copies: bool
    accesses_memory: bool
    returns_value: bool  # a device hands its result to the host

    @classmethod
    def of(cls, func: Any) -> _Operator:
        schema = func._schema
        name = str(func.name())
        short_name = name.partition("::")[2]
        is_collective = name.startswith(_COLLECTIVE)
        marked = {each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write}
        only_written = _WRITES.get(schema.name, ())
        return cls(
            name,
            {argument.name: argument.default_value for argument in schema.arguments},
            {*marked, *only_written, *([schema.arguments[0].name] if is_collective else [])},
            {"out", *only_written},
            is_collective,
            copies=short_name.startswith(_COPIES),
            accesses_memory=not func.is_view and not short_name.startswith(_NO_ACCESS),
            returns_value=short_name in _VALUES,
        )


_operator = functools.cache(_Operator.of)


class _Call(NamedTuple):
    """One call of an operator, and its operands."""

    operator: _Operator
    arguments: Mapping[str, Any]  # by name, without defaults
    read: list[torch.Tensor]
    written: list[torch.Tensor]
    storages: set[int]  # of both, before the operator runs
    site: CallSite | None

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], site: CallSite | None) -> _Call:
        operator = _operator(func)
        given = dict(zip(operator.defaults, args, strict=False)) | dict(kwargs)
        read = _tensors(value for name, value in given.items() if name not in operator.only_written)
        written = _tensors(value for name, value in given.items() if name in operator.written)
        return cls(operator, given, read, written, {*map(_key, read), *map(_key, written)}, site)

    @property
    def may_move(self) -> bool:
        """Whether it may replace a copy between host and device."""
        by_mover = self.site is not None and self.site.module in _MOVES
        return self.operator.copies or self.operator.is_collective or by_mover

    def argument(self, name: str) -> Any:
        """What is given for an argument, its default, or None if there is no such argument."""
        return self.arguments.get(name, self.operator.defaults.get(name))

    def made(self, result: Any) -> list[torch.Tensor]:
        """The tensors of a result whose memory is not an operand's."""
        return [tensor for tensor in _tensors([result]) if _key(tensor) not in self.storages]


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
        call = _Call.of(func, args, kwargs, _call_site())
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

    def _stream_of(self, call: _Call, sides: set[_Side]) -> int:
        """The stream on which an operator runs whose operands are on these sides."""
        if sides == {_Side.HOST} and not self._moves:
            return HOST
        stream = self.stream()
        # The host waits for other asynchronous collectives in C++, such as those of DDP, where no recording sees it.
        by_fsdp = call.site is not None and not _here.coalesces
        if call.operator.is_collective and by_fsdp and call.argument("async_op"):
            _merge(self._clocks[COLLECTIVES], self._clocks[stream])
            return COLLECTIVES
        return stream

    def is_in_host(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type != self._device_type:
            return True
        key = _key(tensor)
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

    def _sides(self, call: _Call) -> set[_Side]:
        """Where the operands are.

        On the CPU, nothing shows where a tensor would be. An operand that is used together with host memory counts as
        host memory, and an operand of what may be a copy as device memory.
        """
        operands = [*call.read, *call.written]
        if call.may_move:
            self._adopted.difference_update(map(_key, operands))
        sides = [_side(self.is_in_host(tensor)) for tensor in operands]
        if self._is_cpu and not call.may_move and _needs_host(operands, sides):
            for tensor, side in zip(operands, sides, strict=True):
                if side is _Side.DEVICE:
                    self._adopted.add(_key(tensor))
                    self._of(tensor.untyped_storage()).accesses = []
            return {_Side.HOST}
        return set(sides)

    def moves(self, tensor: torch.Tensor, caller: str) -> bool:
        """Whether a module that calls ``Tensor.to`` or ``Tensor.cpu`` copies between host and device."""
        return caller.startswith(_FSDP) and (self.is_in_host(tensor) or caller in _FSDP2_MOVES)

    def move(self, tensor: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """Copy a tensor from the host to the device, or to pinned memory of the host, although they are the same."""
        to_host = not self.is_in_host(tensor)
        self._moves = True
        try:
            copy = tensor.clone()
        finally:
            self._moves = False
        if to_host:
            self._host_memory.add(_key(copy))
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
            self._compare(access, stream, f"the memory's next owner, {operator},", _call_site())

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


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_within(inner: Access, outer: Access) -> bool:
    """Whether ``outer`` covers all bytes of ``inner``, and all that is ordered after ``outer`` follows ``inner``."""
    return inner.stream == outer.stream and outer.start <= inner.start and inner.end <= outer.end


def _call_site() -> CallSite | None:
    """The innermost function of FSDP among the nearest callers."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_NEAREST):
        if frame is None:
            return None
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_FSDP):
            return CallSite(module, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among values, except those without memory."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors += [] if value.is_meta else [value]
        elif isinstance(value, (list, tuple)):
            tensors += _tensors(value)
    return tensors


class _Here(threading.local):  # a rank may be a thread
    recordings: tuple[Recording, ...] = ()  # those around the current code; the innermost comes last
    checking: Recording | None = None  # that of the whole test
    coalesces: bool = False  # inside a function in C++ that waits for its collectives itself
    stream: Any = None  # the current one of the CPU, where torch has one for all threads


class _Everywhere:
    """What all threads of this process share."""

    recordings: tuple[Recording, ...] = ()  # those of its only rank, for the threads in which a device runs backward
    users = 0  # how many recordings there are in all threads

    def __init__(self) -> None:
        self._lock, self._patches = threading.Lock(), contextlib.ExitStack()

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Torch is patched while at least one thread is in this context."""
        with self._lock:
            self.users += 1
            if self.users == 1:
                _patch(self._patches)
        try:
            yield
        finally:
            with self._lock:
                self.users -= 1
                if not self.users:
                    self._patches.close()


_here, _everywhere = _Here(), _Everywhere()


def _recordings() -> tuple[Recording, ...]:
    return _here.recordings or _everywhere.recordings


def conclude(races: Collection[Race]) -> None:
    """Raise ``AssertionError`` with all races, if there are any."""
    if races:
        raise AssertionError("\n".join(map(str, races)))


def part() -> contextlib.AbstractContextManager[Recording]:
    """The recording of a part of a test: that of the whole test, if there is one."""
    return contextlib.nullcontext(_here.checking) if _here.checking else recorded()


def mark() -> Callable[[], None]:
    """Return a function that forgets the races found since now, and lets the host wait for everything.

    An exception in the middle of a step leaves memory for which no stream has waited.
    """
    before = [(recording, len(recording.races)) for recording in _recordings()]

    def start_again() -> None:
        for recording, races in before:
            del recording.races[races:]
            recording.synchronize()

    return start_again


def check_thread() -> None:
    """Skip the running test if its ranks are threads of one process that uses an accelerator."""
    if threading.current_thread() is not threading.main_thread() and not accelerator.current().is_cpu:
        reason = "ranks are threads, and the race detector cannot tell to which of them a backward belongs"
        raise Skipped(Reason(reason, SkipKind.DEVICE))


@contextlib.contextmanager
def checked(explain: Callable[[list[Race]], object]) -> Iterator[None]:
    """Record a test in a rank, and pass its races on. Skips a test that compiles."""
    with recorded() as _here.checking:
        try:
            yield
            explain(_here.checking.races)
        finally:
            _here.checking = None


@contextlib.contextmanager
def recorded() -> Iterator[Recording]:
    """Record what this rank does inside the context."""
    recording = Recording(torch.get_device_module(accelerator.current().type))
    with _everywhere.patched():
        before = _here.recordings, _here.stream
        _here.recordings = (*_here.recordings, recording)
        if not accelerator.current().is_cpu:  # there, a rank is a process, and backward has threads of its own
            _everywhere.recordings = _here.recordings
        try:
            with recording:
                recording.stream()
                yield recording
        finally:
            _here.recordings, _here.stream = before
            if not accelerator.current().is_cpu:
                _everywhere.recordings = _here.recordings


def _patch(patches: contextlib.ExitStack) -> None:
    """Let streams, events and copies report to the recordings of the thread that uses them."""
    module = torch.get_device_module(accelerator.current().type)

    def patch(owner: Any, name: str, note: Callable[..., Any]) -> None:
        """Call ``note`` after each call of the original, with a recording, the result and the arguments."""
        original = getattr(owner, name, lambda *args, **kwargs: None)  # the CPU's events have no ``wait``

        def noted(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            for recording in _recordings():
                result = note(recording, result, *args, **kwargs)
            return result

        patches.enter_context(mock.patch.object(owner, name, noted, create=True))

    def replace(owner: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(owner, name)
        patches.enter_context(mock.patch.object(owner, name, function))
        return original

    def record_event(recording: Recording, event: Any, stream: Any, *args: Any) -> Any:
        event = module.Event() if event is None else event  # a stream of the CPU creates no event
        recording.record(event, stream)
        return event

    def resize(
        recording: Recording, storage: torch.UntypedStorage, owner: torch.UntypedStorage, size: int
    ) -> torch.UntypedStorage:
        recording.free(owner._cdata)
        if size:
            recording.allocate(owner, "resize_")
        return storage

    def compile_nothing(*args: Any, **kwargs: Any) -> Any:
        if _here.checking:
            raise Skipped("the race detector does not see what compiled code does")
        return original_compile(*args, **kwargs)

    def broadcast(*args: Any, **kwargs: Any) -> None:
        _here.coalesces = True
        try:
            original_broadcast(*args, **kwargs)
        finally:
            _here.coalesces = False

    original_broadcast = replace(dist, "_broadcast_coalesced", broadcast)
    original_compile = replace(torch, "compile", compile_nothing)
    if accelerator.current().is_cpu:
        _patch_host(patch, replace)
    patch(module.Stream, "wait_stream", lambda recording, _, *args: recording.wait_stream(*args))
    patch(module.Stream, "wait_event", lambda recording, _, *args: recording.wait_event(*args))
    patch(module.Stream, "record_event", record_event)
    patch(module.Stream, "synchronize", lambda recording, _, stream: recording.synchronize_stream(stream))
    patch(module.Event, "record", lambda recording, _, *args: recording.record(*args))
    patch(module.Event, "wait", lambda recording, _, event, stream=None: recording.wait_event(stream, event))
    patch(module.Event, "synchronize", lambda recording, _, event: recording.synchronize_event(event))
    patch(dist.Work, "wait", lambda recording, result, *_: recording.wait_work(result))
    patch(torch.futures, "wait_all", lambda recording, result, *_: recording.wait_work(result))
    patch(module, "synchronize", lambda recording, *_: recording.synchronize())
    patch(torch.UntypedStorage, "resize_", resize)
    # FSDP2 asks this for the stream of the device under test, which may differ from torch's own accelerator.
    replace(torch.accelerator, "current_stream", lambda *_: module.current_stream())

    for owner in _RECORDING_MODULES:  # does nothing on the CPU
        patch(owner, "_no_dispatch_record_stream", lambda recording, _, *args: recording.keep_for(*args))


def _patch_host(patch: Callable[..., None], replace: Callable[..., Callable[..., Any]]) -> None:
    """Give each thread a current stream of its own, and let FSDP copy where it would copy to and from a device."""

    def moving(tensor: torch.Tensor) -> Recording | None:
        """The recording that knows that FSDP copies a tensor between host and device."""
        recordings = _recordings()
        if not recordings or tensor.is_meta or isinstance(tensor, DTensor):
            return None
        caller = sys._getframe(2).f_globals.get("__name__", "")
        return recordings[-1] if recordings[-1].moves(tensor, caller) else None

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device = (*args, kwargs.get("device"))[0]
        recording = moving(tensor) if isinstance(device, torch.device) and device.type == "cpu" else None
        if recording is None:
            return original_to(tensor, *args, **kwargs)
        return recording.move(tensor, bool(kwargs.get("non_blocking")))

    def cpu(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        recording = moving(tensor)
        if recording is None or recording.is_in_host(tensor):
            return original_cpu(tensor, *args, **kwargs)
        return recording.move(tensor, non_blocking=False)

    def pin(recording: Recording, pinned: torch.Tensor, *_: Any) -> torch.Tensor:
        recording.synchronize_stream(None, "pin")  # the host copies, but on the CPU it looks like a stream
        return pinned

    def enter(context: Any) -> None:
        context.prev_stream = _here.stream
        _here.stream = context.stream if context.stream is not None else _here.stream

    def leave(context: Any, *_: Any) -> None:
        _here.stream = context.prev_stream

    original_to, original_cpu = replace(torch.Tensor, "to", to), replace(torch.Tensor, "cpu", cpu)
    patch(torch.Tensor, "pin_memory", pin)
    replace(torch.cpu.StreamContext, "__enter__", enter)
    replace(torch.cpu.StreamContext, "__exit__", leave)
    default = torch.cpu.current_stream()
    replace(torch.cpu, "current_stream", lambda *_: _here.stream or default)


def sees_collectives() -> bool:
    """Whether collectives are operators here. Those of the backend "staged" are copies, for which the host waits."""
    return accelerator.current().backend != STAGED


def check_order(
    test: unittest.TestCase, build: Callable[[], Any], step: Callable[[Any], object], host_waits: Collection[str] = ()
) -> None:
    """Build a model and train it for some steps, and fail unless all work is ordered.

    ``step`` makes the model's gradients. ``host_waits`` are the things for which the host must wait, and no others.
    """
    # Only the order is checked: a race may spoil the values of one rank, and the others would wait for it.
    no_hooks = mock.patch.dict(_optimizer._global_optimizer_post_hooks, clear=True)
    with part() as recording, no_hooks:
        model = build()
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        before = recording.host_waits.copy()
        for _ in range(STEPS):
            step(model)
            optim.step()
            optim.zero_grad()
    conclude(recording.races)
    test.assertGreater(recording.waits, 0)
    waits = (recording.host_waits - before).keys() - {"pin"}
    test.assertTrue(waits == {*host_waits}, f"the host waited for {sorted(waits)}, and not for {sorted(host_waits)}")
