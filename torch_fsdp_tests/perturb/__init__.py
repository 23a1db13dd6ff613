"""Perturbation: operations that must not change anything, inserted into the training loops of tests.

``run_test.py --perturb KIND[,KIND...]|all`` inserts them, and the tests' references check the result. ``invariants``
checks after each insertion what else must not have changed.

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
    """It is per thread: ranks may be threads, and the pause of another rank would make them decide differently."""

    depth = 0


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
    """From now on, an active ``mock.patch`` pauses the insertions of its rank."""
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
    """Decorator of a test or of a test class: insert none of these kinds (by default no kind), for this reason."""
    if not reason:
        raise ValueError("unperturbed needs a reason")

    def mark(test: _T) -> _T:
        test.unperturbed = frozenset(kinds or settings.PERTURBATIONS)  # type: ignore[attr-defined]
        return test

    return mark
