"""Settings that a test may leave changed in its process. They are recorded before it, restored after it, and reported.

A ``Watched`` is one such setting: how to read it, how to restore it, and its name in a sentence. Random states are
restored without a report, because a test may use random numbers.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import random
import sys
import threading
import unittest
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist
from torch.utils import _python_dispatch as dispatch

from torch_fsdp_tests import settings
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.verdict import VERDICT, State, Verdict, events, in_one_line

# torch sets these itself when its compiler is first used, and sets them again if they are missing.
TORCHS_OWN_VARIABLES = frozenset({"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"})


@dataclasses.dataclass(frozen=True)
class Watched:
    """One setting that is checked after each test, and restored if the test has left it changed."""

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], object]


def _flag(owner: object, attribute: str, name: str) -> Watched:
    return Watched(name, lambda: getattr(owner, attribute), lambda value: setattr(owner, attribute, value))


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # the test has removed its working directory
        return None


def _restore_directory(path: str | None) -> None:
    if path is not None:
        os.chdir(path)


def _deterministic() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def _restore_deterministic(value: tuple[bool, bool, bool]) -> None:
    mode, warn_only, fill = value
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill


def default_device() -> torch.device:
    """Like ``torch.get_default_device()``, which in torch 2.9 raises after the default was reset with None."""
    try:
        return torch.get_default_device()
    except AttributeError:
        return torch.device("cpu")


def _restore_default_device(before: torch.device) -> None:
    # None removes the device mode from torch's stack. Setting the default device by name would leave a mode there.
    torch.set_default_device(None)
    if default_device() != before:
        torch.set_default_device(before)


def _restore_function_modes(depth: int) -> None:
    while torch._C._len_torch_function_stack() > depth:
        torch._C._pop_torch_function_stack()


def _restore_dispatch_modes(depth: int) -> None:
    while len(dispatch._get_current_dispatch_mode_stack()) > depth:
        dispatch._pop_mode()


# In this order: restoring the default device removes a function mode, so the number of modes is compared after it.
WATCHED: tuple[Watched, ...] = (
    Watched("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Watched("the default device", default_device, _restore_default_device),
    Watched("the number of torch function modes", torch._C._len_torch_function_stack, _restore_function_modes),
    Watched(
        "the number of torch dispatch modes",
        lambda: len(dispatch._get_current_dispatch_mode_stack()),
        _restore_dispatch_modes,
    ),
    Watched("grad mode", torch.is_grad_enabled, torch._C._set_grad_enabled),
    Watched("the number of threads", torch.get_num_threads, torch.set_num_threads),
    Watched("the deterministic-algorithms flags", _deterministic, _restore_deterministic),
    Watched("the float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _flag(torch.backends.cudnn, "enabled", "torch.backends.cudnn.enabled"),
    _flag(torch.backends.cudnn, "benchmark", "torch.backends.cudnn.benchmark"),
    _flag(torch.backends.cudnn, "deterministic", "torch.backends.cudnn.deterministic"),
    _flag(torch.backends.mkldnn, "enabled", "torch.backends.mkldnn.enabled"),
    Watched(
        "the swapping of parameters on module conversion",
        torch.__future__.get_swap_module_params_on_conversion,
        torch.__future__.set_swap_module_params_on_conversion,
    ),
    Watched("the debug level of torch.distributed", dist.get_debug_level, dist.set_debug_level),
    Watched("the working directory", _working_directory, _restore_directory),
)

_UNREADABLE = object()


def _read(watched: Watched) -> Any:
    # torch raises when it reads some flags after a test has mixed the old and the new way to set them.
    try:
        return watched.read()
    except RuntimeError:
        return _UNREADABLE


def values() -> dict[str, Any]:
    """The watched settings that can be read, by their names."""
    read = {watched.name: _read(watched) for watched in WATCHED}
    return {name: value for name, value in read.items() if value is not _UNREADABLE}


def adopt(settings_of_another_process: Mapping[str, Any]) -> None:
    """Give this process some of the :func:`values` of another one."""
    for watched in WATCHED:
        if watched.name in settings_of_another_process:
            watched.restore(settings_of_another_process[watched.name])


def save_rng_state() -> Callable[[], None]:
    """Save the states of all generators, and return a function that restores them.

    The state of an accelerator is saved only if its runtime is running, because reading it would start the runtime.
    """
    python, numpy_state, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    accelerator_device = torch.accelerator.current_accelerator() if accelerator.initialized() else None
    module = torch.get_device_module(accelerator_device.type) if accelerator_device is not None else None
    device = module.get_rng_state() if module is not None else None

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(host)
        if module is not None:
            module.set_rng_state(device)

    return restore


class SavedState:
    """The state of this process at one moment."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._values = [_read(watched) for watched in WATCHED]
        self._restore_rng = save_rng_state()

    def restore(self) -> list[str]:
        """Restore everything, and return one phrase for each setting that was changed."""
        changes = list(self._restore_environment())
        for watched, before in zip(WATCHED, self._values, strict=True):
            after = _read(watched)
            if after == before or before is _UNREADABLE:
                continue
            if after is _UNREADABLE:
                changes.append(f"left {watched.name} in a state that cannot be read")
                continue
            changes.append(f"left {watched.name} at {after!r} instead of {before!r}")
            watched.restore(before)
        self._restore_rng()
        return changes

    def _restore_environment(self) -> Iterator[str]:
        before, after = self._environment, dict(os.environ)
        for name in sorted((before.keys() | after.keys()) - TORCHS_OWN_VARIABLES):
            if before.get(name) == after.get(name):
                continue
            if name in before:
                os.environ[name] = before[name]
                gone = name not in after
                yield f"{'removed' if gone else 'changed'} the environment variable {name}"
            else:
                del os.environ[name]
                yield f"left the environment variable {name} set"


@contextlib.contextmanager
def watched_threads() -> Iterator[list[str]]:
    """Yields a list. It has one phrase for each exception that ended a thread in the block, which Python only prints.

    If blocks are nested, the inner one has it.
    """
    ended: list[str] = []
    before = threading.excepthook
    prints = getattr(before, "prints", before)

    def note(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and args.exc_type is not SystemExit:
            name = args.thread.name if args.thread is not None else "unknown"
            ended.append(f"let the thread {name!r} end with {in_one_line(args.exc_value)}")
        prints(args)

    note.prints = prints  # type: ignore[attr-defined]
    threading.excepthook = note
    try:
        yield ended
    finally:
        threading.excepthook = before


@contextlib.contextmanager
def saved_state() -> Iterator[list[str]]:
    """At the end of the block, undo what it changed in this process.

    Yields a list. After the block it has one phrase for each change, such as ``left the environment variable X set``.
    Random states are restored without a phrase.
    """
    saved, leaks = SavedState(), []  # type: ignore[var-annotated]
    with watched_threads() as ended:
        try:
            yield leaks
        finally:
            leaks += [*ended, *saved.restore()]


def undo_leaks(test: unittest.TestCase, before: SavedState, ended: list[str]) -> None:
    """The last clean-up of a test: undo and report what it left changed, and report threads that exceptions ended.

    With the strict setting, a leak fails the test.
    """
    leaks = [*ended, *before.restore()]
    if leaks and settings.is_on(settings.STRICT_LEAKS_VARIABLE, os.environ):
        remark = "--strict-leaks makes a leak a failure"
        error = test.failureException(f"the test {' and '.join(leaks)} ({remark})")
        setattr(error, VERDICT, Verdict(State.LEAKED, " and ".join(leaks)))
        raise error
    notes.add(test.id(), leaks)


def check_every_test() -> None:
    """From now on, undo and report the leaks of every test, also those of unittest's own class."""
    original = unittest.TestCase.run

    def run(self: unittest.TestCase, result: unittest.TestResult | None = None) -> unittest.TestResult | None:
        with watched_threads() as ended:
            self.addCleanup(undo_leaks, self, SavedState(), ended)
            return original(self, result)

    unittest.TestCase.run = run  # type: ignore[method-assign]


class LeakNotes:
    """The leaks of this process' tests. They are kept until they can be printed outside of a test's line."""

    def __init__(self) -> None:
        self._notes: dict[str, list[str]] = {}  # what was left, and by which tests
        self._owner = 0

    def add(self, test: str, leaks: list[str]) -> None:
        """Keep a test's leaks, and report them to the dispatcher. What no runner prints is printed at exit."""
        if not leaks:
            return
        if self._owner != os.getpid():  # a forked rank has its own notes, not a copy of its parent's
            self._owner = os.getpid()
            self._notes = {}
            atexit.register(lambda: self.report(sys.stderr))  # as it is then: pytest closes what it is now
        for leak in leaks:
            self._notes.setdefault(leak, []).append(test)
            events.note(f"{test} {leak}")

    def take(self) -> list[str]:
        """Remove and return the notes, one sentence for each leak. Tests with the same leak are counted."""
        if self._owner != os.getpid():
            return []
        notes, self._notes = self._notes, {}
        return [
            f"leak: {tests[0]}{f' (and {len(tests) - 1} more tests)' if len(tests) > 1 else ''} {leak}"
            for leak, tests in notes.items()
        ]

    def report(self, stream: TextIO) -> None:
        """Print the notes that are left."""
        for note in self.take():
            print(note, file=stream)


notes = LeakNotes()
