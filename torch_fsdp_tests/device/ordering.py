"""A race detector for streams that needs no accelerator: work on shared memory must be ordered.

Streams of the CPU do nothing. If FSDP leaves out a wait, the CPU does not show it, and an accelerator shows it only now
and then. :func:`recorded` gives clocks to streams and events. An operator reads and writes memory on the stream that is
current when it is called. A wait orders the later work of a stream after everything that the other stream, or the
event, has seen. Two accesses to the same bytes race if at least one is a write and neither is ordered after the other.

Freed memory goes to the next allocation on the stream where it was allocated, as in a caching allocator. That
allocation must come after all accesses, except those on streams that were passed to ``record_stream``. Sanitizers for
accelerators, such as ``torch.cuda._sanitizer``, have the same rules, except the one about freed memory.

An operator on host memory runs on the host, at once. A copy between host and device runs on the current stream, and the
host waits for it unless it is non-blocking. On the CPU, host memory is what FSDP has pinned (as recorded by
:mod:`torch_fsdp_tests.device.substitutes`) and what is computed from it. There, ``Tensor.to`` and ``Tensor.cpu`` copy
where FSDP would copy between a device and the host.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
import unittest
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.installed_torch import torch_names
from torch_fsdp_tests.verdict import Reason, SkipKind
from torch_fsdp_tests.verdict.events import Skipped

_SWEEP = 256  # operators, after which all memory that nothing refers to is forgotten
STEPS = 3  # memory that one step frees belongs to the next
Clock = dict[int, int]  # for each stream, how many of its operators are known to have finished
HOST = -1  # in place of the number of a stream: the operator ran on the host
COLLECTIVES = -2  # the stream of the backend, on which asynchronous collectives run

_NO_ACCESS = ("empty", "new_empty", "resize_", "set_", "is_pinned", "record_stream", "sym_", "storage_offset", "_has_")
# Arguments that an operator writes although the schema does not say so. Collectives write their first argument.
_WRITES = {"fsdp::all_gather_copy_in": ("all_gather_output",)}
_COLLECTIVE = "c10d::"
_COPIES = ("copy_", "_to_copy")  # also between host and device
_FSDP = "torch.distributed.fsdp."
_RECORDING_MODULES = tuple(torch_names.module(f"{_FSDP}{name}") for name in ("_flat_param", "_runtime_utils"))
# FSDP2's modules that move gradients and parameters to the host.
_OFFLOADING_MODULES = {f"{_FSDP}_fully_shard.{name}" for name in ("_fsdp_collectives", "_fsdp_param")}


class Access(NamedTuple):
    """One operator's access to bytes of a storage."""

    stream: int
    number: int  # the number of the operator on its stream
    operator: str
    start: int
    end: int
    writes: bool


class Race(NamedTuple):
    """Two accesses that nothing orders, and the place in FSDP (or elsewhere) that made the later one."""

    earlier: str
    later: str
    where: str

    def __str__(self) -> str:
        return f"{self.earlier} and {self.later} ({self.where}) are not ordered"


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
        self._names: dict[int, str] = {HOST: "the host", COLLECTIVES: "the backend's stream"}
        self._streams: dict[int, Any] = {}  # kept, so that no other stream gets the id of a deleted one
        self._host: Clock = {HOST: 0}
        self._clocks: dict[int, Clock] = {HOST: self._host, COLLECTIVES: {COLLECTIVES: 0}}
        self._host_memory: set[int] = set()  # storages; pinned ones and those of another device type need not be here
        self._moves = False  # whether an operator stands for a copy between host and device
        self._events: weakref.WeakKeyDictionary[Any, Clock] = weakref.WeakKeyDictionary()
        self._memory: dict[int, _Memory] = {}
        self._shared: set[int] = set()  # storages that another stream than their own has accessed
        self._operators = 0
        self._freed: dict[int, list[Access]] = {}  # for each stream, the accesses to memory that is free again

    # Streams and events

    def stream(self, stream: Any = None) -> int:
        """The number of a stream. The default is the current one."""
        stream = self._module.current_stream() if stream is None else stream
        if not isinstance(stream, self._kind):
            raise Skipped(
                Reason("the test has streams of its own, which the race detector does not know", SkipKind.OTHER)
            )
        key = getattr(stream, "stream_id", id(stream))
        if key not in self._streams:
            self._names[key] = f"stream {len(self._streams)}"
            self._streams[key], self._clocks[key] = stream, {key: 0}
        return key

    def record(self, event: Any, stream: Any = None) -> None:
        """Let an event stand for all work that its stream has been given so far."""
        self._events[event] = dict(self._clocks[self.stream(stream)])

    def wait(self, stream: Any, seen: Mapping[int, int] | None) -> None:
        """Order the later work of a stream after what was seen."""
        self.waits += 1
        _merge(self._clocks[self.stream(stream)], seen or {})

    def wait_stream(self, stream: Any, other: Any) -> None:
        """Order the later work of a stream after all work that another stream has been given so far."""
        self.wait(stream, self._clocks[self.stream(other)])

    def wait_event(self, stream: Any, event: Any) -> None:
        """Order the later work of a stream after what an event stands for. The default is the current stream."""
        self.wait(stream, self._events.get(event))

    def wait_work(self, result: bool) -> bool:
        """Order the later work of the current stream after all asynchronous collectives so far."""
        self.wait(None, self._clocks[COLLECTIVES])
        return result

    def synchronize_stream(self, stream: Any, because_of: str = "stream") -> None:
        """Let the host wait for a stream."""
        self.host_waits[because_of] += 1
        _merge(self._host, self._clocks[self.stream(stream)])

    def synchronize_event(self, event: Any) -> None:
        """Let the host wait for what an event stands for."""
        self.host_waits["event"] += event in self._events
        _merge(self._host, self._events.get(event, {}))

    def synchronize(self) -> None:
        """Let the host wait for everything."""
        self.host_waits["device"] += 1
        for clock in self._clocks.values():
            _merge(self._host, clock)

    def conclude(self) -> None:
        """Raise ``AssertionError`` with all races."""
        if self.races:
            raise AssertionError("\n".join(map(str, self.races)))

    # Memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a DTensor's operators on local tensors come here too
        kwargs = kwargs or {}
        self._free()
        read, written = _operands(func, args, kwargs)
        given = {_key(tensor) for tensor in (*read, *written)}
        in_host = {self.is_in_host(tensor) for tensor in (*read, *written)}
        result = func(*args, **kwargs)
        name = str(func.name() if hasattr(func, "name") else func)
        made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor) and _key(each) not in given]
        if self._device_type != "cpu":  # on the CPU, the device does not tell
            in_host |= {self.is_in_host(tensor) for tensor in made}
        stream = HOST if in_host == {True} and not self._moves else self.stream()
        # The host waits for other asynchronous collectives in C++, such as those of DDP, where nobody sees it.
        if name.startswith(_COLLECTIVE) and _argument(func, args, kwargs, "async_op") and _is_within_fsdp():
            _merge(self._clocks[COLLECTIVES], self._clocks[stream])
            stream = COLLECTIVES
        for tensor in made:
            self.allocate(tensor.untyped_storage(), name, stream)
        short = name.partition("::")[2]
        if not func.is_view and not short.startswith(_NO_ACCESS):
            clock = self._clocks[stream]
            _merge(clock, self._host)
            clock[stream] += 1
            for tensors, writes in ((read, False), (written, True), (made, True)):
                for tensor in tensors:
                    self._access(tensor, stream, name, writes)
        if len(in_host) > 1 and short.startswith(_COPIES) and not _argument(func, args, kwargs, "non_blocking"):
            self.synchronize_stream(None, "copy")
        return result

    def is_in_host(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type != self._device_type:
            return True
        return self._device_type == "cpu" and (_key(tensor) in self._host_memory or tensor.is_pinned())

    def moves(self, tensor: torch.Tensor, caller: str) -> bool:
        """Whether a module that calls ``Tensor.to`` or ``Tensor.cpu`` copies between host and device."""
        return caller.startswith(_FSDP) and (self.is_in_host(tensor) or caller in _OFFLOADING_MODULES)

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

    def _access(self, tensor: torch.Tensor, stream: int, operator: str, writes: bool) -> None:
        if not tensor.numel() or tensor.untyped_storage().size() == 0:
            return
        memory = self._of(tensor.untyped_storage())
        start = tensor.storage_offset() * tensor.itemsize
        strides = zip(tensor.size(), tensor.stride(), strict=True)
        end = start + (1 + sum((size - 1) * stride for size, stride in strides)) * tensor.itemsize
        access = Access(stream, self._clocks[stream][stream], operator, start, end, writes)
        for other in memory.accesses:
            if (writes or other.writes) and other.start < end and start < other.end:
                self._compare(other, stream, operator)
        kept = [other for other in memory.accesses if not (_is_within(other, access) and (writes or not other.writes))]
        memory.accesses = [*kept, access]
        if stream != memory.stream:
            self._shared.add(memory.storage.cdata)

    def _compare(self, earlier: Access, stream: int, operator: str) -> None:
        if earlier.stream != stream and self._clocks[stream].get(earlier.stream, 0) < earlier.number:
            names = self._names
            where = next((_place(frame) for frame in reversed(traceback.extract_stack()) if _is_of_fsdp(frame)), "?")
            race = Race(f"{earlier.operator} on {names[earlier.stream]}", f"{operator} on {names[stream]}", where)
            if race not in self.races:
                self.races.append(race)

    def free(self, key: int) -> None:
        """Let the allocator give the memory of a storage to the next allocation on its stream."""
        memory = self._memory.pop(key, None)
        self._shared.discard(key)
        self._host_memory.discard(key)
        if memory is not None and memory.stream != HOST:  # the host's allocator knows which copies use its memory
            kept = {COLLECTIVES, *memory.users}  # a backend keeps what it works on
            left = (access for access in memory.accesses if access.stream not in kept)
            self._freed.setdefault(memory.stream, []).extend(left)

    def allocate(self, storage: torch.UntypedStorage, operator: str, stream: int | None = None) -> None:
        """Allocate memory on a stream. It may be memory that was freed there since the last allocation. The default is
        the current stream.
        """
        stream = self.stream() if stream is None else stream
        self._of(storage, stream)
        if stream == HOST:
            self._host_memory.add(storage._cdata)
        _merge(self._clocks[stream], self._host)
        for access in self._freed.pop(stream, []):
            self._compare(access, stream, f"the memory's next owner, {operator},")

    def _free(self) -> None:
        """Free what nothing refers to any more. Memory of one stream may wait, because its next owner comes later."""
        self._operators += 1
        keys = self._shared if self._operators % _SWEEP else self._memory
        for key in [key for key in keys if self._memory[key].storage.expired()]:
            self.free(key)

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """``record_stream``: after it is freed, the memory stays unused until the stream's work so far is done."""
        self._of(tensor.untyped_storage()).users.add(self.stream(stream))


def _merge(clock: Clock, seen: Mapping[int, int]) -> None:
    for stream, number in list(seen.items()):
        clock[stream] = max(clock.get(stream, 0), number)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _argument(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    """What is given for one of an operator's arguments, its default, or None if there is no such argument."""
    defaults = _arguments(func)[0]
    return (defaults | dict(zip(defaults, args, strict=False)) | dict(kwargs)).get(name)


def _is_within(inner: Access, outer: Access) -> bool:
    """Whether ``outer`` covers all bytes of ``inner``, and all that is ordered after ``outer`` follows ``inner``."""
    return inner.stream == outer.stream and outer.start <= inner.start and inner.end <= outer.end


def _is_of_fsdp(frame: traceback.FrameSummary) -> bool:
    return "torch/distributed/fsdp/" in frame.filename


def _place(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).name}:{frame.lineno}, {frame.name}"


def _caller() -> str:
    """The module that calls the function that calls this one."""
    return sys._getframe(2).f_globals.get("__name__", "")


def _is_within_fsdp() -> bool:
    """Whether a function of FSDP is among the callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(_FSDP):
        frame = frame.f_back
    return frame is not None


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    return [leaf for value in values for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _operands(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """The tensors that an operator reads, and those of its arguments that it writes."""
    names, marked, only_written = _arguments(func)
    by_name = dict(zip(names, args, strict=False)) | dict(kwargs)
    read = _tensors(value for name, value in by_name.items() if name not in only_written)
    return read, _tensors(value for name, value in by_name.items() if name in marked)


@functools.cache
def _arguments(func: Any) -> tuple[dict[str, Any], set[str], set[str]]:
    """The names of an operator's arguments with their defaults, of those that it writes, and that it does not read."""
    schema = func._schema
    names = {argument.name: argument.default_value for argument in schema.arguments}
    marked = {each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write}
    marked |= set(_WRITES.get(schema.name, ()))
    if schema.name.startswith(_COLLECTIVE):
        marked.add(schema.arguments[0].name)
    return names, marked, {"out", *_WRITES.get(schema.name, ())}


_checking: Recording | None = None  # of the whole test that runs in this rank


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Record a test in a rank, and raise ``AssertionError`` if there were races. Skips a test that compiles."""
    global _checking
    compiles = Skipped(Reason("the race detector does not see what compiled code does", SkipKind.OTHER))
    with mock.patch.object(torch, "compile", side_effect=compiles), recorded() as _checking:
        try:
            yield
            _checking.conclude()
        finally:
            _checking = None


@contextlib.contextmanager
def recorded() -> Iterator[Recording]:
    """Record what this rank does inside the context. Use it only if ranks are processes: threads share the patches."""
    module = torch.get_device_module(accelerator.current().type)
    recording = Recording(module)
    with contextlib.ExitStack() as patches:

        def patch(owner: Any, name: str, note: Callable[..., Any]) -> None:
            """Call ``note`` after each call of the original, with its result and its arguments."""
            original = getattr(owner, name, lambda *args, **kwargs: None)

            def noted(*args: Any, **kwargs: Any) -> Any:
                return note(original(*args, **kwargs), *args, **kwargs)

            patches.enter_context(mock.patch.object(owner, name, noted, create=True))

        def record_event(event: Any, stream: Any, *args: Any) -> Any:
            event = module.Event() if event is None else event  # a stream of the CPU creates no event
            recording.record(event, stream)
            return event

        def resize(storage: torch.UntypedStorage, owner: torch.UntypedStorage, size: int) -> Any:
            recording.free(owner._cdata)
            if size:
                recording.allocate(owner, "resize_")
            return storage

        original_to, original_cpu = torch.Tensor.to, torch.Tensor.cpu

        def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if isinstance(tensor, DTensor) or not isinstance((*args, kwargs.get("device"))[0], torch.device):
                return original_to(tensor, *args, **kwargs)
            if not recording.moves(tensor, _caller()):
                return original_to(tensor, *args, **kwargs)
            return recording.move(tensor, bool(kwargs.get("non_blocking")))

        def cpu(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            is_in_host = isinstance(tensor, DTensor) or recording.is_in_host(tensor)
            if is_in_host or not recording.moves(tensor, _caller()):
                return original_cpu(tensor, *args, **kwargs)
            return recording.move(tensor, non_blocking=False)

        def pin(pinned: torch.Tensor, *_: Any) -> torch.Tensor:
            recording.synchronize_stream(None, "pin")  # the host copies, but on the CPU it looks like a stream
            return pinned

        if accelerator.current().is_host:
            patches.enter_context(mock.patch.object(torch.Tensor, "to", to))
            patches.enter_context(mock.patch.object(torch.Tensor, "cpu", cpu))
            patch(torch.Tensor, "pin_memory", pin)
        patch(module.Stream, "wait_stream", lambda _, stream, other: recording.wait_stream(stream, other))
        patch(module.Stream, "wait_event", lambda _, stream, event: recording.wait_event(stream, event))
        patch(module.Stream, "record_event", record_event)
        patch(module.Stream, "synchronize", lambda _, stream: recording.synchronize_stream(stream))
        patch(module.Event, "record", lambda _, event, stream=None: recording.record(event, stream))
        patch(module.Event, "wait", lambda _, event, stream=None: recording.wait_event(stream, event))
        patch(module.Event, "synchronize", lambda _, event: recording.synchronize_event(event))
        patch(dist.Work, "wait", lambda result, *_: recording.wait_work(result))
        patch(module, "synchronize", lambda *_: recording.synchronize())
        patch(torch.UntypedStorage, "resize_", resize)
        # FSDP2 asks this for the stream of the device under test, which may differ from torch's own accelerator.
        current = mock.patch.object(torch.accelerator, "current_stream", lambda *_: module.current_stream())
        patches.enter_context(current)
        for owner in _RECORDING_MODULES:  # does nothing on the CPU
            patches.enter_context(torch_names.patched(owner, "_no_dispatch_record_stream", recording.keep_for))
        patches.enter_context(recording)
        recording.stream()
        yield recording


def check_order(
    test: unittest.TestCase, build: Callable[[], Any], step: Callable[[Any], object], host_waits: Collection[str] = ()
) -> None:
    """Build a model and train it for some steps, and fail unless all work is ordered.

    ``step`` makes the model's gradients. ``host_waits`` are the things for which the host must wait, and no others.
    """
    with contextlib.nullcontext(_checking) if _checking else recorded() as recording:
        model = build()
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        before = recording.host_waits.copy()
        for _ in range(STEPS):
            step(model)
            optim.step()
            optim.zero_grad()
    recording.conclude()
    test.assertGreater(recording.waits, 0)
    found = (recording.host_waits - before).keys() - {"pin"}
    test.assertTrue(found == {*host_waits}, f"the host waited for {sorted(found)}, and not for {sorted(host_waits)}")
