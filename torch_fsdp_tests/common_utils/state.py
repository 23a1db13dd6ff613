"""What a test may leave changed in its process: recorded before, put back after, and named.

A thing that can be left changed is a ``Watched``: how to read it, how to put it back, and its name in a sentence.
Random states are put back without a word, since a test that draws numbers does nothing wrong.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import torch
from torch.utils import _python_dispatch as dispatch

from torch_fsdp_tests import events

from .seed import save_rng_state

# torch sets these itself when its compiler is first used, and sets them again when they are gone.
TORCHS_OWN_VARIABLES = frozenset({"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"})

STRICT_VARIABLE = "TORCH_FSDP_TESTS_STRICT_LEAKS"


def strict() -> bool:
    """Whether a leak fails its test instead of being noted."""
    return os.environ.get(STRICT_VARIABLE) == "1"


@dataclasses.dataclass(frozen=True)
class Watched:
    """One thing that a test may leave changed."""

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], object]

    def describe(self, before: Any, after: Any) -> str:
        """The change in words, to follow the name of the test."""
        return f"left {self.name} at {after!r} instead of {before!r}"


def _flag(owner: object, attribute: str, name: str) -> Watched:
    return Watched(name, lambda: getattr(owner, attribute), lambda value: setattr(owner, attribute, value))


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # the test has removed the directory that it stands in
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
    """``torch.get_default_device()``, which in torch 2.9 raises once the default has been taken back with None."""
    try:
        return torch.get_default_device()
    except AttributeError:
        return torch.device("cpu")


def _restore_default_device(before: torch.device) -> None:
    # None takes the device mode off torch's stack; naming the device that is the default anyway would leave one there.
    torch.set_default_device(None)
    if default_device() != before:
        torch.set_default_device(before)


def _restore_function_modes(depth: int) -> None:
    while torch._C._len_torch_function_stack() > depth:
        torch._C._pop_torch_function_stack()


def _restore_dispatch_modes(depth: int) -> None:
    while len(dispatch._get_current_dispatch_mode_stack()) > depth:
        dispatch._pop_mode()


# In the order in which they are put back: the default device takes a function mode of its own off the stack, so the
# number of function modes is looked at after it.
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
    Watched("the working directory", _working_directory, _restore_directory),
)

_UNREADABLE = object()


def _read(watched: Watched) -> Any:
    # torch refuses to read some flags after a test has mixed its old and new ways to set them; then there is no way
    # back either.
    try:
        return watched.read()
    except RuntimeError:
        return _UNREADABLE


class SavedState:
    """The state of this process at one moment."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._values = [_read(watched) for watched in WATCHED]
        self._restore_rng = save_rng_state()

    def restore(self) -> list[str]:
        """Put everything back and return one phrase for each thing that had been left changed."""
        changes = list(self._restore_environment())
        for watched, before in zip(WATCHED, self._values, strict=True):
            after = _read(watched)
            if after == before or before is _UNREADABLE:
                continue
            if after is _UNREADABLE:
                changes.append(f"left {watched.name} in a state that torch refuses to read")
                continue
            changes.append(watched.describe(before, after))
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
def saved_state() -> Iterator[list[str]]:
    """Undo on leaving whatever the block changed in this process.

    Yields a list that is empty inside the block and afterwards holds one phrase for each thing that was left changed,
    such as ``left the environment variable X set``. Random states are restored without one.
    """
    saved, leaks = SavedState(), []  # type: ignore[var-annotated]
    try:
        yield leaks
    finally:
        leaks += saved.restore()


class LeakNotes:
    """Leaks of the tests of this process, kept until they can be printed without standing inside a test's line."""

    def __init__(self) -> None:
        self._notes: dict[str, list[str]] = {}  # what was left, and by which tests
        self._owner = 0

    def add(self, test: str, leaks: list[str]) -> None:
        """Keep what one test left, and tell the dispatcher.

        The first note also arranges that an interpreter that leaves prints what no runner has printed.
        """
        if not leaks:
            return
        if self._owner != os.getpid():  # a forked rank has its own notes, not a copy of its parent's
            self._owner = os.getpid()
            self._notes = {}
            atexit.register(self.report, sys.stderr)
        for leak in leaks:
            self._notes.setdefault(leak, []).append(test)
            events.note(f"{test} {leak}")

    def take(self) -> list[str]:
        """Remove and return the notes, a sentence for each thing; many tests that left the same one are counted."""
        if self._owner != os.getpid():
            return []
        notes, self._notes = self._notes, {}
        return [
            f"leak: {tests[0]}{f' (and {len(tests) - 1} more tests)' if len(tests) > 1 else ''} {leak}"
            for leak, tests in notes.items()
        ]

    def report(self, stream: TextIO) -> None:
        """Print the notes that nobody has taken."""
        for note in self.take():
            print(note, file=stream)


notes = LeakNotes()
