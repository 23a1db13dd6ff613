"""A separate device type: its own allocator, devices, streams and backend, and memory that the host cannot touch.

With ``ABACUS_LATE``, the tasks of streams run as late as their order allows. ``ABACUS_LATE=last`` runs the last of them
first, and a number is the seed of another choice.
"""

import atexit
import contextlib
import os
import tempfile
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from . import _C  # type: ignore[attr-defined]  # compiled from device.cpp

_MEMORY = int(os.environ.get("ABACUS_MEMORY", 1 << 34))  # bytes of a device
_C.begin(int(os.environ.get("ABACUS_DEVICES", "4")), _MEMORY)
_AVAILABLE = _C.device_count() > 0
torch.utils.rename_privateuse1_backend("abacus")
atexit.register(_C.settle)

_current_stream = torch.accelerator.current_stream  # others may replace it
_show_config = torch.__config__.show
_Device: TypeAlias = int | str | torch.device | None


def _index(device: _Device) -> int:
    if device is None:
        return _C.current_device()
    found = torch.device("abacus", device) if isinstance(device, int) else torch.device(device)
    return _C.current_device() if found.index is None else found.index


class Stream(torch.Stream):
    def __new__(cls, device: _Device = None, priority: int = 0, **given: Any) -> "Stream":
        if given:
            return super().__new__(cls, priority=priority, **given)
        return super().__new__(cls, device=torch.device("abacus", _index(device)), priority=priority)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = Event() if event is None else event
        event.record(self)
        return event


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> "Event":
        return super().__new__(cls, device="abacus", enable_timing=enable_timing, blocking=blocking)

    def elapsed_time(self, end: torch.Event) -> float:
        return _C.elapsed_time(self, end)


@contextlib.contextmanager
def device(which: _Device) -> Iterator[None]:
    before = _C.current_device()
    index = _index(which)
    if index >= 0:
        _C.set_device(index)
    try:
        yield
    finally:
        _C.set_device(before)


@contextlib.contextmanager
def stream(which: torch.Stream | None) -> Iterator[None]:
    if which is None:
        yield
        return
    before = torch.accelerator.current_stream(which.device)
    torch.accelerator.set_stream(which)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def _stream(number: int, index: int) -> Stream:
    kind = int(torch._C._autograd.DeviceType.PrivateUse1)
    return Stream(stream_id=number, device_index=index, device_type=kind)


def current_stream(device: _Device = None) -> Stream:
    index = _index(device)
    return _stream(_current_stream(torch.device("abacus", index)).stream_id, index)


def default_stream(device: _Device = None) -> Stream:
    return _stream(0, _index(device))


def memory_stats(device: _Device = None) -> dict[str, int]:
    return _C.memory_stats(_index(device))


def _statistic(name: str) -> Callable[..., int]:
    return lambda device=None: memory_stats(device)[name]


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """What is free for this process, and what the device has. Other processes do not count."""
    return _MEMORY - memory_stats(device)["reserved_bytes.all.current"], _MEMORY


def empty_cache() -> None:
    for index in range(_C.device_count()):
        _C.empty_cache(index)


default_generators = tuple(_C.generator(index) for index in range(_C.device_count()))


def get_rng_state(device: _Device = "abacus") -> torch.Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(state: torch.Tensor, device: _Device = "abacus") -> None:
    default_generators[_index(device)].set_state(state)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def is_available() -> bool:
    """Whether there is a device. Asking starts the driver, as for some real devices."""
    _C.start_driver()
    return _AVAILABLE


is_available._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo cannot trace it


def show_config() -> str:
    """torch's description of itself. It starts the driver, as a version of PyTorch that was built for CUDA does."""
    _C.start_driver()
    return _show_config()


torch.__config__.show = show_config

_module = types.ModuleType("torch.abacus", __doc__)
_module.__dict__.update(
    Stream=Stream,
    Event=Event,
    device=device,
    stream=stream,
    current_stream=current_stream,
    default_stream=default_stream,
    set_stream=torch.accelerator.set_stream,
    is_available=is_available,
    _initialized=True,  # checkpoints keep the state of its generators
    is_initialized=_C.is_initialized,
    init=lambda: None,
    _is_in_bad_fork=lambda: False,
    device_count=_C.device_count,
    current_device=_C.current_device,
    set_device=lambda which: _C.set_device(_index(which)),
    synchronize=lambda device=None: _C.synchronize(_index(device)),
    is_late=_C.is_late,  # whether the tasks of streams run as late as they may
    _sleep=_C._sleep,  # keep the current stream busy for some nanoseconds, which take no real time
    _waited=_C._waited,  # for how many of them the host would have waited
    pending=_C.pending,  # how many tasks of streams are not done
    synchronized_operators=_C.synchronized_operators,  # those that could not be late, and how often
    empty_cache=empty_cache,
    memory_stats=memory_stats,
    memory_allocated=_statistic("allocated_bytes.all.current"),
    max_memory_allocated=_statistic("allocated_bytes.all.peak"),
    memory_reserved=_statistic("reserved_bytes.all.current"),
    max_memory_reserved=_statistic("reserved_bytes.all.peak"),
    reset_peak_memory_stats=lambda device=None: _C.reset_peak(_index(device)),
    mem_get_info=mem_get_info,
    get_rng_state=get_rng_state,
    set_rng_state=set_rng_state,
    get_rng_state_all=lambda: [generator.get_state() for generator in default_generators],
    set_rng_state_all=lambda states: [g.set_state(s) for g, s in zip(default_generators, states)],
    manual_seed=lambda seed: default_generators[_C.current_device()].manual_seed(seed),
    manual_seed_all=manual_seed_all,
    initial_seed=lambda: default_generators[_C.current_device()].initial_seed(),
    default_generators=default_generators,
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    get_device_name=lambda device=None: "abacus",
    get_device_properties=lambda device=None: types.SimpleNamespace(name="abacus", total_memory=_MEMORY),
)
torch._register_device_module("abacus", _module)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _ledger(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    if os.environ.get("ABACUS_EXCLUSIVE"):  # reject ranks that share a device, as some backends do
        store.set(f"device of rank {rank}", str(_C.current_device()))
        taken = [int(store.get(f"device of rank {each}")) for each in range(size)]
        if len(set(taken)) < size:
            raise RuntimeError(f"ledger: ranks share a device; they use the devices {taken}")
    return _C.ledger(dist.ProcessGroupGloo(store, rank, size, timeout=timeout), _shared(store, rank))


def _shared(store: dist.Store, rank: int) -> str:
    """A file for all ranks of a late backend, which the last rank that opens it removes."""
    if not _C.is_late():
        return ""
    if rank == 0:
        file, path = tempfile.mkstemp()
        os.truncate(file, 4096)
        os.close(file)
        store.set("shared memory", path)
    return store.get("shared memory").decode()


if dist.is_available():
    dist.Backend.register_backend("ledger", _ledger, devices=["abacus"])


def autoload() -> None:
    """The function for torch's entry point. It does nothing: the import has done the work."""
