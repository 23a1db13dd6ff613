"""How many tests execute on machines with one, two, four and eight devices, and which skip for want of devices.

No test runs for it, and no device is needed: each test is asked on a device that only has a number.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
import sys
import unittest
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from unittest import mock

from torch_fsdp_tests import settings
from torch_fsdp_tests.common_distributed import RankTestCase
from torch_fsdp_tests.common_distributed.requirements import requirements_of, skip_unless
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.device.accelerator import CAPABILITIES, Accelerator
from torch_fsdp_tests.verdict import events

ENOUGH = 64  # devices; no test needs more
UPSTREAM = Path(__file__).with_name("upstream.txt")
Tests = Mapping[str, Collection[unittest.TestCase]]  # by file


class _Asked(BaseException):
    """A test would now start its ranks."""


def stand_in(count: int) -> Accelerator:
    """A device that can do everything, but whose backend refuses ranks that share one. There are ``count`` of them.

    Its tensors would be on the CPU, but nothing makes any.
    """
    able = frozenset(CAPABILITIES) - {"shared_device"}
    return Accelerator("cpu", "exclusive", count, settings.default_ranks(count), able, vendor_name="stand-in")


def tests_below(folder: Path) -> dict[str, list[unittest.TestCase]]:
    """The tests of all files below a folder of ``test``, by file. The files are imported."""
    root = next(parent for parent in (folder, *folder.parents) if parent.name == "test")
    sys.path.insert(0, str(root))
    found = {}
    with mock.patch.object(accelerator, "current", lambda: stand_in(ENOUGH)):
        for path in sorted(folder.rglob("test_*.py")):
            name = path.relative_to(root).with_suffix("")
            suite = unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(".".join(name.parts)))
            found[name.as_posix()] = list(events.tests_in(suite))
    return found


def runs(test: unittest.TestCase, count: int) -> bool:
    """Whether a test would run on ``count`` devices with one rank each. Ranks are not started."""
    with (
        mock.patch.object(accelerator, "current", lambda: stand_in(count)),
        mock.patch.object(RankTestCase, "_ask_requirements", _ask_alone),
    ):
        return _would_run(test)


def _would_run(test: unittest.TestCase) -> bool:
    method = getattr(type(test), test._testMethodName)
    if getattr(type(test), "__unittest_skip__", False) or getattr(method, "__unittest_skip__", False):
        return False
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


def _ask_alone(self: RankTestCase, world_size: int) -> None:
    _ask(self, world_size)
    raise _Asked


@dataclasses.dataclass(frozen=True)
class Upstreams:
    """A test method of PyTorch, and the number of devices that it needs."""

    file: str
    cls: str
    name: str
    devices: int


def upstreams() -> list[Upstreams]:
    """The tests of PyTorch, as ``upstream.txt`` lists them."""
    found, file, cls, devices = [], "", "", 0
    for line in UPSTREAM.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        if not line.startswith(" "):
            file = line
            continue
        begin = re.match(r"  (\w+) (\d+):", line)
        if begin:
            cls, devices = begin[1], int(begin[2])
        found += [Upstreams(file, cls, name, devices) for name in line[begin.end() if begin else 0 :].split()]
    return found


def pairs(ours: Tests) -> Iterator[tuple[Upstreams, list[unittest.TestCase]]]:
    """Each test of PyTorch with the tests here that have its name, with any suffixes of parameters and device."""
    named: dict[tuple[str, str, str], list[unittest.TestCase]] = {}
    for file, tests in ours.items():
        for test in tests:
            cls = type(test).__name__.removesuffix("CPU")  # the type of the stand-in
            named.setdefault((file, cls, _written_name(test)), []).append(test)
    for each in upstreams():
        yield each, named.get((each.file, each.cls, each.name), [])


def _written_name(test: unittest.TestCase) -> str:
    """The name of a test's method in the source, which has no suffix of parameters or device."""
    name = test._testMethodName
    written = _names_in(inspect.getsourcefile(type(test)) or "")
    return max((each for each in written if f"{name}_".startswith(f"{each}_")), key=len, default=name)


@functools.cache
def _names_in(path: str) -> frozenset[str]:
    return frozenset(re.findall(r"    def (test_\w+)\(", Path(path).read_text(encoding="utf-8")))


def missing(ours: Tests) -> list[Upstreams]:
    """The tests of PyTorch that have no test here."""
    return [each for each, here in pairs(ours) if not here]


@dataclasses.dataclass(frozen=True)
class Count:
    """What runs on a number of devices."""

    devices: int
    upstream: int  # tests of PyTorch
    theirs: int  # tests of PyTorch that run here
    tests: int  # all that run here
    wanting: tuple[unittest.TestCase, ...]  # that skip for want of devices
    behind: tuple[Upstreams, ...]  # that PyTorch runs, and that skip here


def count(ours: Tests, numbers: Iterable[int]) -> list[Count]:
    """What runs on each number of devices. Tests that skip on any number, for another reason, do not count."""
    every = [test for tests in ours.values() for test in tests if runs(test, ENOUGH)]
    able = set(map(id, every))
    theirs = [
        (test, here) for test, variants in pairs(ours) if (here := [each for each in variants if id(each) in able])
    ]
    found = []
    for number in numbers:
        wanting = [test for test in every if not runs(test, number)]
        lacking = set(map(id, wanting))
        there = [(test, all(id(each) not in lacking for each in here)) for test, here in theirs]
        upstream = [here for test, here in there if test.devices <= number]
        behind = tuple(test for test, here in there if test.devices <= number and not here)
        run_here = sum(here for _, here in there)
        found.append(Count(number, len(upstream), run_here, len(every) - len(wanting), tuple(wanting), behind))
    return found
