"""Compares what the planner reads in the test files with what their tests request after an import."""

import contextlib
import dataclasses
import importlib.util
import sys
import unittest
import unittest.mock
from pathlib import Path
from typing import Any

from torch_fsdp_tests.common_distributed.case import RankTestCase
from torch_fsdp_tests.common_distributed.requirements import requirements_of
from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.device.accelerator import CAPABILITIES, Accelerator
from torch_fsdp_tests.dispatch.discover import TestFile, discover
from torch_fsdp_tests.dispatch.needs import Needs

TESTS = Path(__file__).resolve().parents[1]
RANKS, FEW_RANKS = 5, 3  # numbers that no test requests


@dataclasses.dataclass(frozen=True)
class Roomy(Accelerator):
    """A device with room for any number of ranks, which records how many are requested."""

    asked: list[int] = dataclasses.field(default_factory=list)

    @property
    def few_ranks(self) -> int:
        return FEW_RANKS

    def lacks_room_for(self, world_size: int) -> str | None:
        self.asked.append(world_size)
        return None


def tests_of(file: TestFile) -> list[unittest.TestCase]:
    """The tests of a file, which is imported under a unique name."""
    spec = importlib.util.spec_from_file_location(f"needs_of_{file.name.replace('/', '_')}", file.path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with unittest.mock.patch.object(sys, "path", [str(file.path.parent), *sys.path]):
        spec.loader.exec_module(module)
    suites: Any = unittest.defaultTestLoader.loadTestsFromModule(module)
    return [test for suite in suites for test in suite]


def world_size_of(test: unittest.TestCase) -> int:
    """The number of ranks of a test. The test gets all the room that it requests from the device under test."""
    if not isinstance(test, RankTestCase):
        for reason in requirements_of(getattr(type(test), test._testMethodName)):
            reason()
        return 1
    stated = int(test.world_size)
    world_size = stated if stated > 0 else RANKS
    with contextlib.suppress(unittest.SkipTest):  # not a request for room
        test._ask_requirements(world_size)
    return world_size


class TestNeedsOfShippedFiles(TestCase):
    def test_planned_needs_are_those_that_the_tests_ask_for(self):
        files = discover(TESTS)
        planned = {file.name: file.needs(RANKS, FEW_RANKS) for file in files}
        tests = {file.name: tests_of(file) for file in files}
        found = {}
        for name, own in tests.items():
            device = Roomy("xpu", "xccl", 99, RANKS, frozenset(CAPABILITIES) - {"shared_device"})
            with unittest.mock.patch.object(accelerator, "current", lambda device=device: device):
                ranks = [world_size_of(test) for test in own]
            found[name] = Needs(max([1, *ranks, *device.asked]), max([1, *device.asked]))
        self.assertEqual(planned, found)
        self.assertGreater(len({(need.ranks, need.devices) for need in found.values()}), 5)


if __name__ == "__main__":
    run_tests()
