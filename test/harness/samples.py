"""Small test classes, made and run in this process, whose results other tests check. This is not a test file."""

import unittest
from collections.abc import Callable, Sequence
from typing import Any


def tests_of(cls: type[unittest.TestCase]) -> Sequence[str]:
    return unittest.TestLoader().getTestCaseNames(cls)


def run(cls: type[unittest.TestCase]) -> unittest.TestResult:
    result = unittest.TestResult()
    unittest.TestLoader().loadTestsFromTestCase(cls).run(result)
    return result


def class_with(
    *decorators: Callable[[Callable], Callable], base: type[unittest.TestCase] = unittest.TestCase
) -> tuple[Any, list[dict[str, Any]]]:
    """A class whose only method ``test_x`` has these decorators, and the list of the arguments of its calls."""
    calls: list[dict[str, Any]] = []

    def test_x(self, **arguments):
        calls.append(arguments)

    for decorate in reversed(decorators):
        test_x = decorate(test_x)
    return type("T", (base,), {"test_x": test_x}), calls
