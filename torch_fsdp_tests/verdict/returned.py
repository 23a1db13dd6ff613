"""What test methods return: nothing. Anything else is checked by nobody, and a coroutine has not even run."""

from __future__ import annotations

import types
import unittest
from collections.abc import Callable
from typing import Any

__unittest = True  # keeps the frames of this module out of the tracebacks that unittest prints


def check_ran(value: object, what: str = "the test") -> None:
    """Raise ``TypeError`` if a call returned something that still has to run, such as a coroutine."""
    how = next((how for kind, how in _TO_RUN.items() if isinstance(value, kind)), None)
    if how is None:
        return
    if isinstance(value, types.CoroutineType):
        value.close()  # otherwise the interpreter warns that it was never awaited
    raise TypeError(f"{what} did not run, because it {how}")


def check_returned(value: object) -> None:
    """Raise ``TypeError`` if a test returned anything but None: perhaps it did not run, and no value is checked."""
    check_ran(value)
    if value is not None:
        what = f"a value of type {type(value).__qualname__}"
        raise TypeError(f"the test returned {what}, which is not checked: assert what should hold, and return nothing")


_ASYNC = "write `def`, and run the coroutine with asyncio.run()"
_TO_RUN = {
    types.CoroutineType: f"is an `async def`: {_ASYNC}",
    types.AsyncGeneratorType: f"is an `async def` with a `yield`: {_ASYNC}",
    types.GeneratorType: "is a generator: remove its `yield`; parameters belong in @parametrize or self.subTest()",
}


def checked(test: Any, method: Callable[[], object]) -> Callable[[], None]:
    """A test method with a check of what it returns. What it returned is never an expected failure."""

    def call() -> None:
        value = method()
        try:
            check_returned(value)
        except TypeError:
            test._outcome.expecting_failure = False
            raise

    return call


def check_calls() -> None:
    """From now on, check what every test method, ``setUp`` and ``tearDown`` of unittest's own class returns.

    ``unittest.IsolatedAsyncioTestCase`` runs coroutines, and calls its methods in its own way.
    """
    calls: dict[str, Callable[..., None]] = {
        "_callTestMethod": lambda self, method: checked(self, method)(),
        "_callSetUp": lambda self: check_ran(self.setUp(), "setUp"),
        "_callTearDown": lambda self: check_ran(self.tearDown(), "tearDown"),
    }
    for name, call in calls.items():
        setattr(unittest.TestCase, name, call)
