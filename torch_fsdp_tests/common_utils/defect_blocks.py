"""The blocks in which the running test, or a running rank of it, must show known defects of torch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from torch_fsdp_tests.verdict import DefectBlock


class _Current(threading.local):  # a rank may be a thread
    blocks: list[DefectBlock] | None = None
    subtests: tuple[str, ...] = ()


_current = _Current()
_watchers: list[Callable[[], Callable[[], None]]] = []


@contextlib.contextmanager
def recorded() -> Iterator[list[DefectBlock]]:
    """Yield the list to which this thread adds each block that it leaves."""
    blocks: list[DefectBlock] = []
    before = _current.blocks, _current.subtests
    _current.blocks, _current.subtests = blocks, ()
    try:
        yield blocks
    finally:
        _current.blocks, _current.subtests = before


@contextlib.contextmanager
def in_subtest(words: str) -> Iterator[None]:
    """The blocks of this thread are in a subtest with this description."""
    before = _current.subtests
    _current.subtests = (*before, words)
    try:
        yield
    finally:
        _current.subtests = before


def enter() -> Callable[[], None]:
    """A block begins. Returns what is called if it shows its defect, which also explains what was seen in it."""
    hits = [each() for each in _watchers]

    def hit() -> None:
        for each in hits:
            each()

    return hit


@contextlib.contextmanager
def watched(watcher: Callable[[], Callable[[], None]]) -> Iterator[None]:
    """Call a function when a block begins, and what it returned if the block shows its defect."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def current() -> list[DefectBlock] | None:
    """The list of the running test. None in a thread that runs no test."""
    return _current.blocks


def place(file: str, line: int) -> str:
    """A line of the running test in words, with the subtest."""
    return " ".join([f"{file}:{line}", *_current.subtests])
