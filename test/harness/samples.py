"""Test classes for other tests: some to derive from, and others that are made and run in this process.

This is not a test file.
"""

import unittest
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from torch_fsdp_tests.common_distributed import MultiProcessTestCase, MultiThreadedTestCase
from torch_fsdp_tests.device import accelerator


class Processes(MultiProcessTestCase):
    """Starts the rank processes of each test, as subclasses of upstream's class do in ``setUp``."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


class Threads(MultiThreadedTestCase):
    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()


def under_test(device: accelerator.Accelerator) -> AbstractContextManager[object]:
    """Replace the device under test in this process."""
    return mock.patch.object(accelerator, "current", lambda: device)


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
