"""instantiate_device_type_tests: the class for the device under test, its names, its device and its skips."""

from __future__ import annotations

import os
import sys
import types
import unittest
import unittest.mock
from typing import Any

import torch
from samples import run, tests_of, under_test

from torch_fsdp_tests import common_cuda, common_utils, inductor_utils
from torch_fsdp_tests.common_device_type import OpDTypes, deviceCountAtLeast, instantiate_device_type_tests, ops
from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests, subtest
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.device.accelerator import Accelerator

FOO = Accelerator("foo", "gloo", 2, 2, frozenset({"device_index"}))
CPU = Accelerator("cpu", "gloo", 0, 2, frozenset())


class Recording(unittest.TestCase):
    """Base of the classes under test. Like a test case with ranks, it represents one of them."""

    rank = -1
    calls: list


def made_for(device: Accelerator, body: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Instantiate a class ``TestX`` with this body for a device. Returns the scope that has the class."""
    scope = {"TestX": type("TestX", (Recording,), {**body, "__module__": __name__, "calls": []})}
    with under_test(device):
        instantiate_device_type_tests(scope["TestX"], scope, **options)
    return scope


def run_on(cls: type[unittest.TestCase], device: Accelerator) -> unittest.TestResult:
    with under_test(device):
        return run(cls)


class DeviceTypeTest(TestCase):
    """Without it, a generated test could get another rank's device, or be skipped without a reason."""

    def test_parameters_and_dtypes_together(self):
        def test_y(self, device, dtype, a):
            self.calls.append((a, dtype))

        vars(test_y)["dtypes"] = {"all": (torch.float16, torch.float32)}  # as upstream's decorator does
        cls = made_for(CPU, {"test_y": parametrize("a", [1])(test_y)})["TestXCPU"]
        self.assertEqual(tests_of(cls), ["test_y_a_1_cpu_float16", "test_y_a_1_cpu_float32"])
        self.assertTrue(run_on(cls, CPU).wasSuccessful())
        self.assertEqual(cls.calls, [(1, torch.float16), (1, torch.float32)])

    def test_a_name_of_a_loop_keeps_no_test(self):
        case = type("TestX", (Recording,), {"test_y": lambda self, device: None, "__module__": __name__})
        scope = {"TestX": case, "each": case}
        with under_test(FOO):
            instantiate_device_type_tests(case, scope)
        self.assertEqual((tests_of(scope["each"]), tests_of(scope["TestXFOO"])), ([], ["test_y_foo"]))

    def test_what_a_backend_excludes_is_skipped(self):
        base = type("Base", (), {"device_type": "foo", "test_exclusions": {"TestX": ["test_a"]}})
        upstreams = types.SimpleNamespace(FOOTestBase=base)
        body = dict.fromkeys(("test_a", "test_b"), lambda self, device: None)
        with unittest.mock.patch.dict(sys.modules, {"torch.testing._internal.common_device_type": upstreams}):
            cls = made_for(FOO, body)["TestXFOO"]
        skipped = [(test._testMethodName, reason) for test, reason in run_on(cls, FOO).skipped]
        self.assertEqual(skipped, [("test_a_foo", "the test configuration of foo excludes it")])

    def test_several_devices_in_one_process(self):
        def test_y(self, devices):
            self.calls.append(devices)

        body = {"test_one": deviceCountAtLeast(1)(test_y), "test_two": deviceCountAtLeast(2)(test_y)}
        cls = made_for(CPU, body)["TestXCPU"]
        reasons = [reason for _, reason in run_on(cls, CPU).skipped]
        self.assertEqual((cls.calls, reasons), ([["cpu"]], ["needs 2 devices in one process, which has one here"]))

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
        current = accelerator.current()

        def test_y(self, device):
            self.calls.append(torch.empty(1, device=device).device.type)

        (name, cls), *others = made_for(current, {"test_y": test_y}).items()
        self.assertEqual((name, others), (f"TestX{current.type.upper()}", []))
        self.assertEqual(tests_of(cls), [f"test_y_{current.type}"])
        self.assertTrue(run_on(cls, current).wasSuccessful())
        self.assertEqual(cls.calls, [current.type])

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

        test = common_utils.decorateIf(unittest.skip("by device"), is_foo)(lambda self, device: None)
        cls = made_for(FOO, {"test_if": test})["TestXFOO"]
        self.assertEqual([why for _, why in run_on(cls, FOO).skipped], ["by device"])

    def test_compilers_are_those_of_the_device_under_test(self):
        for kind in ("cuda", "xpu", "foo"):
            has_compiler = unittest.mock.patch.object(inductor_utils, "why_no_device_compiler", lambda: None)
            with under_test(Accelerator(kind, "gloo", 1, 1)), has_compiler:
                actual = [inductor_utils.HAS_GPU, inductor_utils.HAS_CUDA, inductor_utils.HAS_XPU_AND_TRITON]
            self.assertEqual(actual, [True, kind == "cuda", kind == "xpu"])

    def test_cuda_names_are_about_the_device_under_test(self):
        for count, found in ((1, (True, False)), (2, (True, True))):
            with under_test(Accelerator("cuda", "nccl", count, 2)):
                self.assertEqual((common_cuda.TEST_CUDA, common_cuda.TEST_MULTIGPU), found)
        with under_test(FOO):
            self.assertFalse(common_cuda.TEST_CUDA or common_cuda.TEST_MULTIGPU)


class Op:
    """The part of torch's ``OpInfo`` that ``ops`` uses. Other devices than ``foo`` have other data types."""

    def __init__(self, name: str, forward: set[torch.dtype], backward: set[torch.dtype], *decorators: Any) -> None:
        self.formatted_name, self.forward, self.backward, self.decorators = name, forward, backward, decorators
        self.asked: list[tuple] = []

    def supported_dtypes(self, device_type: str) -> set[torch.dtype]:
        return self.forward if device_type == "foo" else {torch.int8, torch.bool}

    def supported_backward_dtypes(self, device_type: str) -> set[torch.dtype]:
        return self.backward if device_type == "foo" else set()

    def get_decorators(self, *asked: Any) -> tuple:
        self.asked.append(asked)
        return self.decorators


class OpsTest(TestCase):
    """Without it, a test of operators could lose some of them, or run them with other data types than upstream's."""

    def made(self, *op_list: Op, **options: Any) -> type[unittest.TestCase]:
        def test_y(self, device, op, dtype=None):
            self.calls.append((op.formatted_name, dtype, device))

        return made_for(FOO, {"test_y": ops(op_list, **options)(test_y)})["TestXFOO"]

    def test_names_arguments_and_decorators(self):
        add = Op("add", {torch.float32, torch.int8}, set())
        sin = Op("sin", {torch.float32}, set(), unittest.skip("by its own decorator"))
        cls: Any = self.made(add, sin)
        names = ["test_y_add_foo_float32", "test_y_add_foo_int8", "test_y_sin_foo_float32"]
        self.assertEqual(tests_of(cls), names)
        with unittest.mock.patch.object(torch, "device", lambda kind, index=None: f"{kind}:{index}"):
            result = run_on(cls, FOO)
        self.assertEqual([reason for _, reason in result.skipped], ["by its own decorator"])
        self.assertEqual(cls.calls, [("add", torch.float32, "foo:0"), ("add", torch.int8, "foo:0")])
        (asked,) = sin.asked
        arguments = {"op": sin, "dtype": torch.float32, "device": "foo"}
        self.assertEqual(asked, ("TestX", "test_y", "foo", torch.float32, arguments))

    def test_rules_for_data_types(self):
        op = Op("x", {torch.float32, torch.float16, torch.int8, torch.bool}, {torch.float16})
        forward, backward = {"float32", "float16", "int8", "bool"}, {"float16"}
        everything = forward | {"float64", "complex64", "complex128", "bfloat16", "int64", "int32", "int16", "uint8"}
        rules: list[tuple[Any, set[str]]] = [
            (OpDTypes.supported, forward),
            (OpDTypes.unsupported, everything - forward),
            (OpDTypes.supported_backward, backward),
            (OpDTypes.unsupported_backward, everything - backward),
            (OpDTypes.any_one, {"float16"}),
            (OpDTypes.any_common_cpu_cuda_one, {"int8"}),
            (OpDTypes.none, {""}),
            ([torch.int64, torch.float8_e5m2], {"int64", "float8_e5m2"}),
        ]
        for rule, dtypes in rules:
            with self.subTest(rule):
                names = {"_".join(filter(None, ("test_y_x_foo", dtype))) for dtype in dtypes}
                self.assertEqual(set(tests_of(self.made(op, dtypes=rule))), names)
        self.assertEqual(tests_of(self.made(op, allowed_dtypes=[torch.bool, torch.int64])), ["test_y_x_foo_bool"])
        no_backward = Op("x", {torch.int8, torch.int32}, set())
        self.assertEqual(tests_of(self.made(no_backward, dtypes=OpDTypes.any_one)), ["test_y_x_foo_int32"])

    def test_no_test_disappears(self):
        cls = self.made(Op("x", {torch.int8}, set()), allowed_dtypes=[torch.float32])
        self.assertEqual(tests_of(cls), ["test_y_foo"])
        reasons = [reason for _, reason in run_on(cls, FOO).skipped]
        self.assertEqual(reasons, ["none of its 1 operators has one of its data types on foo"])
        with self.assertRaisesRegex(ValueError, "test_y has no operators, so the test would disappear"):
            self.made()
        with self.assertRaisesRegex(RuntimeError, r"test_y needs a device: use instantiate_device_type_tests\(\)"):
            test = ops([Op("x", set(), set())])(lambda self, device, op: None)
            test.__qualname__ = "test_y"
            instantiate_parametrized_tests(type("TestX", (Recording,), {"test_y": test}))

    def test_a_parameter_that_is_a_data_type_ends_the_name(self):
        test = parametrize("dtype", [torch.int8])(lambda self, device, dtype: None)
        self.assertEqual(tests_of(made_for(FOO, {"test_y": test})["TestXFOO"]), ["test_y_int8_foo_int8"])


if __name__ == "__main__":
    run_tests()
