"""The recordings of a rank. Torch's streams, events and copies report to those of the thread that uses them."""

from __future__ import annotations

import contextlib
import sys
import threading
import unittest
from collections.abc import Callable, Collection, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torch_fsdp_tests import moments
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.device.capabilities import STAGED
from torch_fsdp_tests.extensions.races.accesses import Race, Recording
from torch_fsdp_tests.extensions.races.operator_calls import FSDP1_MOVES
from torch_fsdp_tests.installed_torch import torch_names
from torch_fsdp_tests.verdict import Reason, SkipKind
from torch_fsdp_tests.verdict.events import Skipped

STEPS = 3  # a step uses memory that the step before has freed
_optimizer = torch_names.module("torch.optim.optimizer")
_RECORDING_MODULES = tuple(map(torch_names.module, sorted(FSDP1_MOVES)))


class _Here(threading.local):  # a rank may be a thread
    recordings: tuple[Recording, ...] = ()  # those around the current code; the innermost comes last
    checking: Recording | None = None  # that of the whole test
    stream: Any = None  # the current one of the CPU, where torch has one for all threads


class _Everywhere:
    """What all threads of this process share."""

    recordings: tuple[Recording, ...] = ()  # those of its only rank, for the threads in which a device runs backward


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


class _Refusal(moments.Watcher):
    """Skips a test that compiles."""

    def compiling(self) -> None:
        raise Skipped("the race detector does not see what compiled code does")


def check_thread() -> None:
    """Skip the running test if its ranks are threads of one process that uses an accelerator."""
    if threading.current_thread() is not threading.main_thread() and not accelerator.current().is_cpu:
        reason = "ranks are threads, and the race detector cannot tell to which of them a backward belongs"
        raise Skipped(Reason(reason, SkipKind.DEVICE))


@contextlib.contextmanager
def checked(explain: Callable[[list[Race]], object]) -> Iterator[None]:
    """Record a test in a rank, and pass its races on. Skips a test that compiles."""
    with moments.watched(_Refusal()), recorded() as _here.checking:
        try:
            yield
            explain(_here.checking.races)
        finally:
            _here.checking = None


@contextlib.contextmanager
def recorded() -> Iterator[Recording]:
    """Record what this rank does inside the context."""
    recording = Recording(torch.get_device_module(accelerator.current().type))
    with _patches.used():
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

    def broadcast(*args: Any, **kwargs: Any) -> None:
        with contextlib.ExitStack() as stack:
            for recording in _recordings():
                stack.enter_context(recording.coalescing())
            original_broadcast(*args, **kwargs)

    original_broadcast = replace(dist, "_broadcast_coalesced", broadcast)
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


_patches = moments.WhileUsed(_patch)


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
