"""Perturbation: operations that must not change anything, inserted into the training loops of tests.

``run_test.py --perturb KIND[,KIND...]|all`` inserts them, and the references of the tests judge. What an operation must
not change beside the numbers is checked after each insertion (``invariants``).

- ``kinds``: the operations, each with the place in torch's documentation that says that it is neutral;
- ``insertion``: where they are inserted, and where they are not;
- ``invariants``: what has to be the same after an insertion.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch_fsdp_tests import settings

_T = TypeVar("_T")


class _Pauses(threading.local):
    """Ranks may be threads, and each decides from its own program. So all ranks of a test decide alike."""

    def __init__(self) -> None:
        self.depth = 0


_pauses = _Pauses()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Insert nothing in this rank while a test counts or replaces what its training loop calls."""
    _pauses.depth += 1
    try:
        yield
    finally:
        _pauses.depth -= 1


def is_paused() -> bool:
    return _pauses.depth > 0


@functools.cache
def pause_under_mock() -> None:
    """From now on nothing is inserted while something of ``mock`` is in force."""
    patch: Any = unittest.mock._patch
    enter, leave = patch.__enter__, patch.__exit__

    @functools.wraps(enter)
    def entering(self: Any) -> Any:
        entered = enter(self)
        _pauses.depth += 1
        return entered

    @functools.wraps(leave)
    def leaving(self: Any, *error: Any) -> Any:
        _pauses.depth -= 1
        return leave(self, *error)

    patch.__enter__, patch.__exit__ = entering, leaving


def unperturbed(reason: str, *kinds: str) -> Callable[[_T], _T]:
    """Decorator of a test, or of a test class: insert nothing (of these kinds, by default of any), for this reason."""
    if not reason:
        raise ValueError("unperturbed needs a reason")

    def mark(test: _T) -> _T:
        test.unperturbed = frozenset(kinds or settings.PERTURBATIONS)  # type: ignore[attr-defined]
        return test

    return mark
