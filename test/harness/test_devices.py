"""This suite has each test of upstream, which runs on as few devices with one rank each as upstream's does.

No rank starts. Each test is asked what it requires, with a device that is only a number of devices.
"""

import functools
import importlib
import inspect
import os
import re
import sys
import unittest
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from runs import clean_environment
from sources import TESTS, TESTS_OF_FSDP

from torch_fsdp_tests import world_sizes
from torch_fsdp_tests.common_distributed import RankTestCase
from torch_fsdp_tests.common_distributed.requirements import requirements_of, skip_unless
from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.device.accelerator import CAPABILITIES, Accelerator
from torch_fsdp_tests.verdict import events

UPSTREAM = Path(__file__).with_name("inputs") / "upstream_tests.txt"
NUMBERS = 1, 2, 3, 4, 8
ENOUGH = 64  # devices; no test needs more


class _Asked(BaseException):
    """A test would now start its ranks."""


def stand_in(count: int) -> mock._patch:
    """Make a device current that has all capabilities, except that ranks cannot share one of ``count`` devices.

    Its tensors would be on the CPU, but no test makes any.
    """
    able = frozenset(CAPABILITIES) - {"shared_device"}
    device = Accelerator("cpu", "exclusive", count, world_sizes.by_default(count), able, vendor_name="stand-in")
    return mock.patch.object(accelerator, "current", lambda: device)


def runs(test: unittest.TestCase, count: int) -> bool:
    """Whether a test would run on ``count`` devices with one rank each."""
    method = getattr(type(test), test._testMethodName)
    if getattr(type(test), "__unittest_skip__", False) or getattr(method, "__unittest_skip__", False):
        return False
    with stand_in(count), mock.patch.object(RankTestCase, "_ask_requirements", _ask_alone):
        try:
            if not isinstance(test, RankTestCase):
                skip_unless(requirements_of(method))
                return True
            try:
                test.setUpClass()
                test.setUp()
            finally:
                test.doCleanups()
        except unittest.SkipTest:
            return False
        except _Asked:
            return True
    raise AssertionError(f"{test.id()} starts ranks without a question for what it needs")


_ask = RankTestCase._ask_requirements


def _ask_alone(self: RankTestCase, world_size: int, devices: int | None = None) -> None:
    _ask(self, world_size, devices)
    raise _Asked


def upstreams() -> Iterator[tuple[str, str, str, int]]:
    """The file, class and name of each test of upstream, and the number of devices that it needs."""
    file, cls, devices = "", "", "0"
    for line in re.sub(r"(?m)^#.*\n", "", UPSTREAM.read_text(encoding="utf-8")).splitlines():
        if begin := re.match(r"  (\w+) (\d+):", line):
            cls, devices = begin.groups()
            line = line[begin.end() :]
        elif not line.startswith(" "):
            file = line
            continue
        yield from ((file, cls, name, int(devices)) for name in line.split())


@functools.cache
def tests() -> dict[tuple[str, str, str], list[unittest.TestCase]]:
    """This suite's tests of FSDP by file, class and name, without the suffixes of parameters and device."""
    sys.path.insert(0, str(TESTS))
    found = defaultdict(list)
    for path in sorted(TESTS_OF_FSDP.rglob("test_*.py")):
        file = path.relative_to(TESTS).with_suffix("")
        with stand_in(ENOUGH):
            suite = unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(".".join(file.parts)))
        for test in events.tests_in(suite):
            cls = type(test).__name__.removesuffix("CPU")  # the type of the stand-in
            found[file.as_posix(), cls, _written_name(test)].append(test)
    return found


def _written_name(test: unittest.TestCase) -> str:
    name = test._testMethodName
    written = _names_in(inspect.getsourcefile(type(test)) or "")
    return max((each for each in written if f"{name}_".startswith(f"{each}_")), key=len, default=name)


@functools.cache
def _names_in(path: str) -> frozenset[str]:
    return frozenset(re.findall(r"    def (test_\w+)\(", Path(path).read_text(encoding="utf-8")))


def behind(file: str, cls: str, name: str, devices: int) -> list[str]:
    """What this suite lacks compared with this test of upstream."""
    id, here = f"{file}::{cls}.{name}", tests().get((file, cls, name), [])
    able = [test for test in here if runs(test, ENOUGH)]  # others skip for another reason
    numbers = [number for number in NUMBERS if number >= devices and not all(runs(test, number) for test in able)]
    return [f"{id} skips on {number} devices" for number in numbers] if here else [f"{id} is not here"]


@mock.patch.dict(os.environ, clean_environment(), clear=True)
class TestDevices(TestCase):
    """Without it, a test of upstream could be lost, or skip on two devices that upstream's takes."""

    def test_every_test_of_upstream_runs_on_as_few_devices(self):
        listed = list(upstreams())
        self.assertGreater(len(listed), 500)
        self.assertEqual([fault for each in listed for fault in behind(*each)], [])

    def test_a_test_that_is_lost_or_needs_more_is_reported(self):
        test = ("distributed/_composable/fsdp/test_fully_shard_clip_grad_norm_", "TestClipGradNormWorldSize4")
        self.assertEqual(behind(*test, "test_clip_grad_norm_2d", 4), [])
        self.assertEqual(len(behind(*test, "test_clip_grad_norm_2d", 2)), 2)  # on two and three devices
        self.assertEqual(behind(*test, "test_x", 4), ["::".join(test) + ".test_x is not here"])

    def test_eight_devices_run_every_test(self):
        able = [test for each in tests().values() for test in each if runs(test, ENOUGH)]
        self.assertEqual([test.id() for test in able if not runs(test, 8)], [])
        self.assertFalse(all(runs(test, 1) for test in able))


if __name__ == "__main__":
    run_tests()
