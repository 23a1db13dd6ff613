"""Names that this project does not define come from the installed torch, and those about ranks never do."""

import importlib
import operator
import os
import re
import subprocess
import sys
import tempfile
import types
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo.test_case
import torch.distributed as dist
from samples import run, under_test

from torch_fsdp_tests import common_cuda, common_distributed, common_fsdp, settings
from torch_fsdp_tests.common_device_type import (
    Capability,
    dtypes,
    instantiate_device_type_tests,
    onlyMPS,
    requires_capabilities,
)
from torch_fsdp_tests.common_distributed import (
    DynamoDistributedSingleProcTestCase,
    MultiProcessTestCase,
    spawn_threads_and_init_comms,
)
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import TestCase, absent_devices, parametrize, run_tests
from torch_fsdp_tests.common_utils.parametrization import instantiate_parametrized_tests
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed._tensor import common_dtensor
from torch_fsdp_tests.distributed._tensor.common_dtensor import local_tensors
from torch_fsdp_tests.installed_torch import upstream_names
from torch_fsdp_tests.installed_torch.upstream_tables import BORROWED, INSTEAD
from torch_fsdp_tests.ranks import RanksErred, RanksFailed
from torch_fsdp_tests.tools.names_left import left

UPSTREAM = upstream_names.UPSTREAM
VENDORS = Path(__file__).parents[2] / "docs" / "vendors.md"


def imported(statement: str) -> object:
    """The last name that an import statement binds."""
    scope: dict[str, object] = {}
    exec(statement, {}, scope)
    return list(scope.values())[-1]


@instantiate_parametrized_tests
class TestBorrowed(TestCase):
    """Without it, a vendor's file could end at an import, or change the process in which tests run."""

    def test_every_name_about_ranks_has_a_place(self):
        self.assertEqual(list(left()), [])
        with mock.patch.dict(BORROWED, {"common_dist_composable": ()}):
            self.assertIn("common_dist_composable.FakeSequential", list(left()))

    def test_values_are_upstreams(self):
        for place, name in (
            ("common_cuda", "SM90OrLater"),
            ("common_utils", "MI300_ARCH"),
            ("common_dist_composable", "FakeSequential"),
            ("common_dtype", "floating_types"),  # of a module that is not replaced
        ):
            value = imported(f"from torch_fsdp_tests.{place} import {name}")
            self.assertIs(value, getattr(importlib.import_module(f"{UPSTREAM}.{place}"), name))
            self.assertIn(f"{place}.{name}", upstream_names.borrowed_in_words())

    def test_methods_of_upstreams_test_case(self):
        self.assertNotWarn(lambda: None)
        with self.assertRaises(self.failureException):
            self.assertEqualIgnoreType(torch.ones(1), torch.zeros(1, dtype=torch.int64))
        self.assertIn("common_utils.TestCase.assertEqualIgnoreType", upstream_names.borrowed_in_words())

    def test_attributes_that_neither_test_case_has(self):
        """A property that raises AttributeError keeps its words."""

        class Case(TestCase):
            @property
            def device(self) -> Any:
                return torch.nothing

        for name, words in (("nothing", "'Case' object has no"), ("device", "module 'torch' has no")):
            with self.assertRaisesRegex(AttributeError, f"^{words} attribute 'nothing'$"):
                getattr(Case(), name)

    def test_what_upstream_imports_from_a_replaced_module_is_replaced(self):
        for statement in (
            "from torch_fsdp_tests.common_distributed import TestCase",
            "from torch_fsdp_tests.common_nn import TestCase",
        ):
            self.assertIs(imported(statement), TestCase)
        self.assertIs(imported("from torch_fsdp_tests.common_fsdp import MultiProcessTestCase"), MultiProcessTestCase)

    def test_names_about_ranks_are_refused(self):
        for place, names in INSTEAD.items():
            for name, instead in names.items():
                value: Any = imported(f"from torch_fsdp_tests.{place} import {name}")
                with self.assertRaises(ImportError) as raised:
                    value()
                self.assertEqual(str(raised.exception), f"torch_fsdp_tests has no {place}.{name}: {instead}")
        refused = upstream_names.lookup("torch_fsdp_tests.common_distributed", "DistributedTestBase")
        for use in (lambda: types.new_class("Case", (refused,)), lambda: refused.anything, refused):
            with self.assertRaisesRegex(ImportError, "starts ranks with upstream's harness.*derive from a test case"):
                use()

    def test_a_name_that_neither_has(self):
        for missing in ("nothing", "common_cuda.nothing", "common_distributed.nothing", "common_dtype.nothing"):
            module, _, name = f"torch_fsdp_tests.{missing}".rpartition(".")
            with self.assertRaisesRegex(
                ModuleNotFoundError, f"^neither torch_fsdp_tests nor .* has {missing}: correct"
            ):
                imported(f"from {module} import {name}")
            self.assertFalse(hasattr(importlib.import_module(module), name))

    def test_an_import_changes_nothing(self):
        code = (
            "import os, torch, torch_fsdp_tests.common_utils as c\n"
            "from torch_fsdp_tests.process_state import SavedState\n"
            "state = SavedState()\n"
            "c.TEST_MKL\n"
            "torch.backends.cudnn.benchmark = False\n"  # upstream's import forbids this
            "print(state.restore(), torch.backends.flags_frozen())\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
        self.assertEqual((done.stdout, done.returncode), ("[] False\n", 0), done.stderr)

    def test_backends_of_a_borrowed_module_stay_and_ours_too(self):
        code = (
            "import torch.distributed as dist, torch_fsdp_tests.distributed.fake_pg\n"
            "ours = dist.Backend._plugins['FAKE']\n"
            "from torch_fsdp_tests.distributed.distributed_utils import with_dist\n"
            "with with_dist(rank=2, world_size=4): print(dist.get_rank(), dist.get_world_size())\n"
            "from torch_fsdp_tests.installed_torch import upstream_names\n"
            "upstream_names._module('distributed.fake_pg')\n"
            "print(dist.Backend._plugins['FAKE'] is ours)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
        self.assertEqual((done.stdout, done.returncode), ("2 4\nTrue\n", 0), done.stderr)

    def test_names_of_older_versions(self):
        for place, old, new in (
            ("common_fsdp", "CUDAInitMode.CUDA_BEFORE", "DEVICEInitMode.DEVICE_BEFORE"),
            ("common_distributed", "MultiProcContinousTest", "MultiProcContinuousTest"),
        ):
            module = importlib.import_module(f"torch_fsdp_tests.{place}")
            with self.assertWarnsRegex(FutureWarning, f"in torch 2.6 and older versions: use {new.split('.')[0]}"):
                value = operator.attrgetter(old)(module)
            self.assertIs(value, operator.attrgetter(new)(module))
        group: Any = types.SimpleNamespace(rank=lambda: 0, size=lambda: 1)
        mode: Any = {"cuda_init_mode": common_fsdp.DEVICEInitMode.DEVICE_NEVER}
        for model in (common_fsdp.NestedWrappedModule, common_fsdp.TransformerWithSharedParams):
            with self.assertWarnsRegex(FutureWarning, "cuda_init_mode .* use device_init_mode"):
                self.assertIsInstance(model.init(group, common_fsdp.FSDPInitMode.NO_FSDP, **mode), model)

    def test_what_plugins_of_pytest_read(self):
        guard = common_distributed.skip_if_lt_x_gpu
        guarded: Any = guard(4)(guard(2)(lambda: None))
        self.assertEqual(guarded._min_gpus_required, 4)

    def test_tests_of_local_tensors_skip(self):
        class TestX(common_dtensor.DTensorTestBase):
            def test_y(self):
                raise AssertionError

        class TestZ(common_dtensor.LocalDTensorTestBase):
            def test_y(self):
                raise AssertionError

        for cls in (common_dtensor.create_local_tensor_test_class(TestX, skipped_tests=["test_y"]), TestZ):
            result = run(cls)
            self.assertEqual([reason for _, reason in result.skipped], [local_tensors.REASON])
            self.assertEqual((result.testsRun, result.errors, result.failures), (0, [], []))

    def test_a_constant_is_computed_without_the_driver(self):
        fails = mock.Mock(side_effect=AssertionError("this process asked the device"))
        with mock.patch.object(upstream_names, "_idle_device", return_value=torch.cpu):
            ask = upstream_names._without_driver
            self.assertIs(ask("common_cuda", "SM90OrLater", fails), bool(common_cuda.SM90OrLater))
            failed = subprocess.CompletedProcess([], 1, "", "Traceback\nImportError: no driver")
            with mock.patch.object(subprocess, "run", return_value=failed):
                with self.assertRaisesRegex(RuntimeError, "asks the device failed: ImportError: no driver"):
                    ask("common_cuda", "X", fails)

    def test_an_import_asks_no_device(self):
        fails = mock.Mock(side_effect=AssertionError("this process asked the device"))
        device = types.SimpleNamespace(is_available=fails, device_count=fails)
        with mock.patch.object(upstream_names, "_idle_device", return_value=device):
            with mock.patch.object(upstream_names, "_ask", return_value=[True, 8]) as ask:
                with upstream_names._answered_by_another_process():
                    self.assertEqual((device.is_available(), device.device_count()), (True, 8))
        self.assertEqual(ask.call_count, 1)
        with self.assertRaisesRegex(AssertionError, "asked the device"):
            device.device_count()

    @parametrize(
        "imports",
        [
            f"import torch\nfrom {UPSTREAM}.common_utils import (\n    TestCase,\n)",
            f"import {UPSTREAM}.common_utils\nTestCase = {UPSTREAM}.common_utils.TestCase",
            f"import {UPSTREAM}.common_utils as it\nfrom {UPSTREAM} import common_fsdp\n"
            f"if 1:\n    from {UPSTREAM}.common_utils import TestCase",
        ],
    )
    def test_full_names_in_a_file_that_the_documented_command_has_renamed(self, imports):
        code = (
            f'"""Tests."""\nfrom __future__ import annotations\n{imports}\nimport unittest.mock\n'
            "torch.testing._internal.common_fsdp.DEVICE_TYPE = 'cpu'\n"
            "class TestMine(TestCase):\n"
            "    @unittest.mock.patch('torch.testing._internal.common_utils.run_tests')\n"
            "    def test_mine(self, run):\n"
            "        self.assertIs(torch.testing._internal.common_utils.run_tests, run)\n"
            "if __name__ == '__main__':\n"
            "    torch.testing._internal.common_utils.run_tests()\n"
        )
        command = VENDORS.read_text(encoding="utf-8").partition("sed -i.bak -E '")[2].partition("' test_*.py")[0]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "test_mine.py")
            file.write_text(code)
            subprocess.run(["sed", "-i.bak", "-E", command, file], check=True, timeout=100)
            done = subprocess.run([sys.executable, file, "-v"], capture_output=True, text=True, timeout=300)
        self.assertIn("test_mine (__main__.TestMine.test_mine) ... ok", done.stderr)
        self.assertEqual(done.returncode, 0)

    def test_run_tests_of_torch_is_ours(self):
        code = (
            "import torch._dynamo.test_case\n"
            "from torch_fsdp_tests.common_utils import TestCase\n"
            "class TestMine(TestCase):\n"
            "    def test_mine(self): self.assertEqual(1, 1)\n"
            "from torch._dynamo.test_case import run_tests\n"
            "run_tests()\n"
        )
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "test_mine.py")
            file.write_text(code)
            done = subprocess.run([sys.executable, file, "-v"], capture_output=True, text=True, timeout=300)
        self.assertIn("test_mine (__main__.TestMine.test_mine) ... ok", done.stderr)
        self.assertEqual(done.returncode, 0)


@instantiate_parametrized_tests
class TestAbsentDevices(TestCase):
    """Without it, a test of a vendor's file would fail because the machine has another device."""

    @parametrize(
        "code",
        [
            "torch.ones(1).cuda()",
            "torch.ones(1, device='xpu')",
            "torch.ones(1, device='hpu')",
            "torch.ones(1, device='mps')",
            "torch.ones(1).npu()",
            "torch.device('sdaa:0')",
            "torch.npu",
            "torch.cuda.set_device(0)",
            "torch.cuda.Event()",
            "torch.cuda.device(0).__enter__()",
            "torch.accelerator.current_device_index()",
        ],
    )
    def test_torch_rejects(self, code):
        if torch.accelerator.is_available():
            self.skipTest("the names are those of devices that are missing on a machine without any")
        with self.assertRaises(Exception) as raised:
            eval(code)
        self.assertRegex(str(absent_devices.absence(raised.exception)), "^the test names a device that is not there: .")

    def test_what_torch_rejects_for_another_reason(self):
        for code in ("torch.ones(1, device='meta').item()", "torch.ones(1).nothing()", "torch.ones(2) @ torch.ones(3)"):
            with self.assertRaises(Exception) as raised:
                eval(code)
            self.assertIsNone(absent_devices.absence(raised.exception), code)
        broken = RuntimeError("No CUDA GPUs are available")
        for device, skips in (("cuda", False), ("npu", True)):
            with under_test(accelerator.Accelerator(device, "nccl", count=2, ranks=2)):
                self.assertEqual(absent_devices.absence(broken) is not None, skips)

    def test_only_a_file_of_another_project_skips(self):
        if torch.accelerator.is_available():
            self.skipTest("the file names a device that is missing on a machine without any")
        with tempfile.TemporaryDirectory() as folder, self.assertRaisesRegex(RuntimeError, "sdaa"):
            file = Path(folder, "test_mine.py")
            file.write_text(ABSENT)
            done = subprocess.run([sys.executable, file, "-v"], capture_output=True, text=True, timeout=300)
            skipped = re.findall(r"\.\.\. skipped .* is not there: Expected one of", done.stderr)
            self.assertEqual(len(skipped), 4, done.stderr)
            self.assertEqual(done.returncode, 0)
            with absent_devices.skips(type(self)):
                torch.device("sdaa")


ABSENT = """
import torch
from torch_fsdp_tests.common_distributed import MultiProcContinuousTest, MultiProcessTestCase
from torch_fsdp_tests.common_utils import TestCase, run_tests

class TestPlain(TestCase):
    def test_here(self): torch.device("sdaa")

class TestSetUp(TestCase):
    def setUp(self): torch.device("sdaa")
    def test_set_up(self): pass

class TestRanks(MultiProcessTestCase):
    world_size = 2
    def setUp(self):
        super().setUp()
        self._spawn_processes()
    def test_ranks(self): torch.device("sdaa")

class TestStaying(MultiProcContinuousTest):
    world_size = 2
    @classmethod
    def _init_pg(cls, *arguments): torch.device("sdaa")
    def test_staying(self): pass

run_tests()
"""


class TestAssigned(TestCase):
    """Without it, a vendor's file that chooses its device by upstream's globals could test another one."""

    def test_globals_choose_the_device(self):
        variables = (settings.DEVICE_VARIABLE, settings.BACKEND_VARIABLE, settings.RANKS_VARIABLE)
        with mock.patch.dict(os.environ), mock.patch.object(upstream_names, "_assigned", set()):
            for variable in variables:
                os.environ.pop(variable, None)
            common_fsdp.DEVICE_COUNT = 3
            self.assertEqual((common_fsdp.DEVICE_COUNT, common_distributed.DEFAULT_WORLD_SIZE), (3, 3))
            common_fsdp.DEVICE_COUNT = 2
            self.assertEqual(accelerator.current().ranks, 2)
            common_fsdp.DEVICE_TYPE, common_fsdp.DISTRIBUTED_BACKEND = "nodevice", "hccl"
            self.assertEqual([os.environ[each] for each in variables], ["nodevice", "hccl", "2"])
            with self.assertRaisesRegex(settings.ConfigurationError, "unknown device 'nodevice'"):
                accelerator.current()
            for name in ("DEVICE_TYPE", "DISTRIBUTED_BACKEND", "DEVICE_COUNT"):
                delattr(common_fsdp, name)
            self.assertFalse(set(variables) & os.environ.keys())

    def test_an_option_has_priority(self):
        with mock.patch.dict(os.environ, {settings.RANKS_VARIABLE: "2"}):
            words = "DEVICE_COUNT = 3 has no effect, because TORCH_FSDP_TESTS_RANKS is 2"
            with self.assertWarnsRegex(UserWarning, words):
                common_fsdp.DEVICE_COUNT = 3
            self.assertEqual(common_fsdp.DEVICE_COUNT, 2)


class TestDecorators(MultiProcessTestCase):
    """Without it, a decorator that only vendors use could run a test that cannot run, or skip one that can."""

    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @parametrize(
        "decorator, words",
        [
            ("skip_if_no_gpu", "needs 1 accelerators"),
            ("skip_if_small_worldsize", "needs 8 or more ranks, and not 2"),
            ("requires_mpi()", "torch was built without the backend mpi"),
            ("requires_multicast_support()", "needs multicast"),
            ("requires_cuda_p2p_access()", "needs peer_access"),
            ("import_transformers_or_skip()", "needs the package transformers"),
            ("skip_if_odd_worldsize", ""),
            ("nccl_skip_if_lt_x_gpu('gloo', 100)", ""),
            ("require_n_gpus_for_nccl_backend(2, 'nccl')", ""),
            ("requires_nccl_shrink()", ""),
            ("skip_if_win32()", ""),
            ("skip_if_rocm_ver_lessthan_multiprocess((7, 0))", ""),
            ("skip_if_rocm_ver_atleast_multiprocess((7, 0))", ""),
        ],
    )
    def test_reason(self, decorator, words):
        if words and not accelerator.current().is_cpu:
            self.skipTest("which of these skip is known for the CPU")
        ran = []
        call = eval(decorator, vars(common_distributed))(lambda: ran.append(1))
        with mock.patch.dict(os.environ, {"WORLD_SIZE": "2" if "worldsize" in decorator else "1"}):
            if words:
                with self.assertRaisesRegex(unittest.SkipTest, words):
                    call()
            else:
                call()
        self.assertEqual(len(ran), not words)

    @requires_capabilities(Capability.distributed.backend, Capability.distributed.fsdp, Capability.lib.json)
    def test_capabilities(self):
        self.assertEqual(Capability.dtype.fp8, "dtype.fp8")
        with self.assertRaisesRegex(unittest.SkipTest, "needs lib.nothing, which .* does not have as far as is known"):
            requires_capabilities(Capability.lib.nothing)(self.fail)()


class TestThreads(TestCase):
    """Without it, a test in threads of the calling process could pass although a rank failed."""

    def test_a_rank_that_fails(self):
        @spawn_threads_and_init_comms
        def fails():
            dist.barrier()
            self.assertEqual(dist.get_rank(), 0)

        @spawn_threads_and_init_comms(world_size=2)
        def raises():
            if dist.get_rank() == 1:
                raise ZeroDivisionError
            dist.barrier()

        with self.assertRaisesRegex(RanksFailed, "rank"):
            fails()
        with self.assertRaisesRegex(RanksErred, r"rank 1 of 2 raised:(.|\n)*ZeroDivisionError"):
            raises()


class TestOneProcess(DynamoDistributedSingleProcTestCase):
    """Without it, a test of compiled models in one process would have no group."""

    def test_group(self):
        self.assertEqual((dist.get_world_size(), dist.get_backend()), (1, accelerator.current().backend))
        self.assertEqual(torch.ones(1, device=self.device).device.type, accelerator.current().type)


class TestUpstreamsBase(FSDPTest, torch._dynamo.test_case.TestCase):
    """Without it, a test case of PyTorch among the bases could keep ranks from starting."""

    world_size = 2

    def test_order(self):
        wrong = type("Wrong", (torch._dynamo.test_case.TestCase, FSDPTest), {})()
        words = "name FSDPTest before torch._dynamo.test_case.TestCase in its bases"
        self.assertEqual(wrong._how_to_start(), words)
        self.assertEqual(self._how_to_start(), "call self._spawn_processes() in its setUp")


class TestUpstreamsDecorators(TestCase):
    """Without it, a decorator of upstream could be a failure here, or leave a test without its arguments."""

    @onlyMPS
    def test_only_for_another_device(self, device):
        self.fail("it ran")

    @dtypes(torch.float64, torch.int32)
    def test_data_types(self, device, dtype):
        self.assertTrue(self._testMethodName.endswith(str(dtype).removeprefix("torch.")))
        self.assertIn(dtype, (torch.float64, torch.int32))

    @dtypes((torch.float64, torch.int32))
    def test_tuple_of_data_types(self, device, dtypes):
        self.assertEqual(dtypes, (torch.float64, torch.int32))

    def test_number_of_variants(self):
        self.assertEqual(sum(name.startswith("test_data_types_") for name in dir(self)), 2)


instantiate_parametrized_tests(TestDecorators)
instantiate_device_type_tests(TestUpstreamsDecorators, globals())

if __name__ == "__main__":
    run_tests()
