"""instantiate_device_type_tests: the class for the device under test, its names, its device and its skips."""

from __future__ import annotations

import os
import unittest
import unittest.mock
from typing import Any

import torch
from samples import run, tests_of

from torch_fsdp_tests import common_cuda
from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_utils import TestCase, decorateIf, parametrize, run_tests, subtest
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.device.accelerator import Accelerator

FOO = accelerator.Accelerator("foo", "gloo", 2, 2, frozenset({"device_index"}))


class Recording(unittest.TestCase):
    """Base of the classes under test. Like a test case with ranks, it represents one of them."""

    rank = -1
    calls: list


def made_for(under_test: Accelerator, body: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Instantiate a class ``TestX`` with this body for a device. Returns the scope that has the class."""
    scope = {"TestX": type("TestX", (Recording,), {**body, "__module__": __name__, "calls": []})}
    with unittest.mock.patch.object(accelerator, "current", lambda: under_test):
        instantiate_device_type_tests(scope["TestX"], scope, **options)
    return scope


def run_on(cls: type[unittest.TestCase], under_test: Accelerator) -> unittest.TestResult:
    with unittest.mock.patch.object(accelerator, "current", lambda: under_test):
        return run(cls)


class DeviceTypeTest(TestCase):
    """Without it, a generated test could get another rank's device, or be skipped without a reason."""

    def test_names_and_device_of_each_rank(self):
        def test_y(self, device, a):
            self.calls.append((a, device))

        def test_bare(self):
            self.calls.append("bare")

        body = {"test_y": parametrize("a", [1, subtest(2, name="two")])(test_y), "test_bare": test_bare, "helper": 5}
        scope = made_for(FOO, body)
        self.assertEqual(list(scope), ["TestXFOO"])
        cls = scope["TestXFOO"]
        self.assertEqual(tests_of(cls), ["test_bare_foo", "test_y_a_1_foo", "test_y_two_foo"])
        self.assertEqual((cls.__module__, cls.__qualname__, cls.device_type), (__name__, "TestXFOO", "foo"))
        self.assertEqual(cls.helper, 5)
        for rank, device in [(-1, "foo:0"), (0, "foo:0"), (1, "foo:1")]:
            cls.rank = rank
            cls.calls.clear()
            with unittest.mock.patch.object(torch, "device", lambda kind, index=None: f"{kind}:{index}"):
                self.assertEqual(run_on(cls, FOO).errors, [])
            self.assertEqual(cls.calls, ["bare", (1, device), (2, device)])

    def test_the_device_under_test(self):
        under_test = accelerator.current()

        def test_y(self, device):
            self.calls.append(torch.empty(1, device=device).device.type)

        (name, cls), *others = made_for(under_test, {"test_y": test_y}).items()
        self.assertEqual((name, others), (f"TestX{under_test.type.upper()}", []))
        self.assertEqual(tests_of(cls), [f"test_y_{under_test.type}"])
        self.assertTrue(run_on(cls, under_test).wasSuccessful())
        self.assertEqual(cls.calls, [under_test.type])

    def test_devices_left_out_skip_and_say_why(self):
        body = {"test_y": lambda self, device: None}
        cases: list[tuple[dict[str, Any], str]] = [
            ({"only_for": ("bar", "baz")}, "written for bar, baz only, but the device under test is foo"),
            ({"except_for": "foo"}, "written for all devices except foo, but the device under test is foo"),
        ]
        for options, reason in cases:
            cls = made_for(FOO, body, **options)["TestXFOO"]
            self.assertEqual([why for _, why in run_on(cls, FOO).skipped], [reason])
            with unittest.mock.patch.dict(os.environ, {"PYTORCH_TESTING_DEVICE_FOR_CUSTOM": "foo"}):
                cls = made_for(FOO, {"test_y": lambda self: None}, **options)["TestXFOO"]
            self.assertEqual(run_on(cls, FOO).skipped, [])
        with unittest.mock.patch.dict(os.environ, {"PYTORCH_TESTING_DEVICE_ONLY_FOR": "bar"}):
            self.assertEqual(len(run_on(made_for(FOO, body)["TestXFOO"], FOO).skipped), 1)
        with self.assertRaises(AssertionError):
            made_for(FOO, body, only_for="foo", except_for="foo")

    def test_an_absent_device_still_names_its_tests(self):
        scope = {"TestX": type("TestX", (unittest.TestCase,), {"test_y": lambda self, device: None})}
        with unittest.mock.patch.dict(os.environ, {accelerator.DEVICE_VARIABLE: "absent"}):
            instantiate_device_type_tests(scope["TestX"], scope)
            result = run(scope["TestXABSENT"])
        self.assertIn("unknown device 'absent'", result.errors[0][1])

    def test_decorators_read_the_device(self):
        def is_foo(arguments):
            return arguments["device"] == "foo"

        test = decorateIf(unittest.skip("by device"), is_foo)(lambda self, device: None)
        cls = made_for(FOO, {"test_if": test})["TestXFOO"]
        self.assertEqual([why for _, why in run_on(cls, FOO).skipped], ["by device"])

    def test_cuda_names_are_about_the_device_under_test(self):
        for count, found in ((1, (True, False)), (2, (True, True))):
            cuda = accelerator.Accelerator("cuda", "nccl", count, 2)
            with unittest.mock.patch.object(accelerator, "current", lambda cuda=cuda: cuda):
                self.assertEqual((common_cuda.TEST_CUDA, common_cuda.TEST_MULTIGPU), found)
        with unittest.mock.patch.object(accelerator, "current", lambda: FOO):
            self.assertFalse(common_cuda.TEST_CUDA or common_cuda.TEST_MULTIGPU)


if __name__ == "__main__":
    run_tests()
