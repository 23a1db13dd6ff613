"""A file in upstream's style, with only its import prefix changed."""

import importlib
import os
import unittest

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import (
    DistributedTestBase,
    MultiProcContinuousTest,
    MultiProcessTestCase,
    MultiThreadedTestCase,
    requires_nccl,
    requires_nccl_version,
    requires_world_size,
    run_subtests,
    skip_if_lt_x_gpu,
)
from torch_fsdp_tests.common_fsdp import FSDPTest, FSDPTestContinuous, FSDPTestMultiThread, get_devtype
from torch_fsdp_tests.common_utils import (
    FILE_SCHEMA,
    TEST_WITH_DEV_DBG_ASAN,
    TestCase,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

NAMES = {
    "common_utils": (
        "TestCase run_tests parametrize subtest instantiate_parametrized_tests set_rng_seed FILE_SCHEMA find_free_port "
        "get_cycles_per_ms TEST_CUDA TEST_HPU TEST_XPU TEST_WITH_ROCM TEST_WITH_DEV_DBG_ASAN skipIfRocm "
        "skip_but_pass_in_sandcastle_if wrapSwapTensorsTest skipIfTorchDynamo"
    ),
    "common_device_type": "instantiate_device_type_tests",
    "common_cuda": "TEST_CUDA TEST_MULTIGPU",
    "two_tensor": "TwoTensor",
    "logging_utils": "LoggingTestCase",
    "inductor_utils": "HAS_GPU HAS_CUDA",
    "common_distributed": (
        "MultiProcessTestCase MultiThreadedTestCase MultiProcContinuousTest DistributedTestBase skip_if_lt_x_gpu "
        "requires_nccl requires_nccl_version requires_world_size at_least_x_gpu sm_is_or_higher_than run_subtests "
        "TEST_SKIPS SaveForwardInputsModule SaveForwardInputsModel"
    ),
    "common_fsdp": "FSDPTestMixin FSDPTestContinuous compiled_fsdp_test test_compiled_fsdp DEVICE_TYPE DEVICE_COUNT",
    "distributed.fake_pg": "FakeStore",
    "distributed.multi_threaded_pg": "_install_threaded_pg _uninstall_threaded_pg ProcessLocalGroup",
    "distributed.checkpoint_utils": "with_temp_dir",
    "distributed._tensor.common_dtensor": (
        "DTensorTestBase with_comms skip_if_lt_x_gpu MLPModule RMSNormPython ModelArgs Attention FeedForward "
        "TransformerBlock Transformer"
    ),
}


class TestNames(TestCase):
    @parametrize("module", sorted(NAMES))
    def test_importable(self, module):
        found = importlib.import_module(f"torch_fsdp_tests.{module}")
        self.assertEqual([name for name in NAMES[module].split() if not hasattr(found, name)], [])


class TestProcesses(MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def tearDown(self):
        super().tearDown()
        try:
            os.remove(self.file_name)
        except OSError:
            pass

    @property
    def world_size(self) -> int:
        return 3

    @property
    def device(self) -> int:
        return self.rank

    @requires_nccl()
    @requires_nccl_version((2, 10), "for the sake of the test")
    @skip_if_lt_x_gpu(2)
    def test_file_name(self):
        dist.init_process_group(
            "gloo", init_method=f"{FILE_SCHEMA}{self.file_name}", rank=self.rank, world_size=self.world_size
        )
        ranks = [None] * self.world_size
        dist.all_gather_object(ranks, self.rank)
        self.assertEqual(ranks, [0, 1, 2])
        self.assertEqual(self.is_master, dist.get_rank() == 0)

    @skip_if_lt_x_gpu(2, allow_cpu=False)
    def test_accelerator_only(self):
        self.assertNotEqual(get_devtype().type, "cpu")

    @requires_world_size(2)
    def test_requires_world_size(self):
        self.assertEqual(vars(type(self).test_requires_world_size)["_required_world_size"], 2)


class TestBase(DistributedTestBase):
    @property
    def world_size(self) -> int:
        return 2

    def test_create_pg(self, device):
        group = self.create_pg(device)
        total = torch.full((2,), float(self.rank), device=device)
        dist.all_reduce(total, group=group)
        self.assertEqual(total, torch.ones(2, device=device))


class TestThreads(MultiThreadedTestCase):
    @property
    def world_size(self) -> int:
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def perThreadSetUp(self):
        self.prepared = True

    def test_ranks(self):
        ranks = [None] * self.world_size
        dist.all_gather_object(ranks, self.rank)
        self.assertEqual(ranks, [0, 1])
        self.assertTrue(self.prepared)
        self.assertEqualOnRank(self.rank, 1, rank=1)


class TestContinuous(MultiProcContinuousTest):
    world_size = 2

    def test_group(self):
        ranks = [None] * self.world_size
        dist.all_gather_object(ranks, self.rank, group=self.pg)
        self.assertEqual(ranks, [0, 1])


class TestFSDP(FSDPTest):
    @property
    def world_size(self) -> int:
        return 2

    def _sharded(self) -> FSDP:
        return FSDP(torch.nn.Linear(4, 4, device=get_devtype()), self.process_group)

    def _test_step(self, scale: float, offset: float) -> None:
        model = self._sharded()
        model(torch.full((1, 4), float(scale * self.rank + offset), device=get_devtype())).sum().backward()
        with FSDP.summon_full_params(model):
            self.assertEqual(model.weight.numel(), 16)
        grad = next(model.parameters()).grad
        grads = [torch.empty_like(grad) for _ in range(self.world_size)]
        dist.all_gather(grads, grad)
        # Every rank's input is constant, so every entry of the weight's gradient is the mean of the inputs.
        mean = offset + scale * (self.world_size - 1) / 2
        self.assertEqual(torch.cat(grads)[:16].cpu(), torch.full((16,), float(mean)))

    @skip_if_lt_x_gpu(2)
    def test_run_subtests(self):
        self.run_subtests({"scale": [1, 2], "offset": [0, 3]}, self._test_step)

    @skip_if_lt_x_gpu(2)
    @parametrize("reshard", [True, False])
    def test_parametrized(self, reshard):
        model = torch.nn.Linear(4, 4, device=get_devtype())
        fully_shard(model, reshard_after_forward=reshard)
        model(torch.ones(1, 4, device=get_devtype())).sum().backward()
        self.assertEqual(model.weight.to_local().shape[0], 2)
        self.assertEqual(model.weight.grad.full_tensor(), torch.ones(4, 4, device=get_devtype()))

    @unittest.skipIf(TEST_WITH_DEV_DBG_ASAN, "a build with address sanitizer")
    def test_default_group(self):
        self.assertIs(self.process_group, dist.distributed_c10d._get_default_group())
        self.assertEqual(self.process_group.size(), 2)


class TestFSDPContinuous(FSDPTestContinuous):
    world_size = 2

    def test_group(self):
        self.assertEqual(self.process_group.size(), 2)


class TestFSDPThreads(FSDPTestMultiThread):
    @property
    def world_size(self) -> int:
        return 2

    def test_run_subtests(self):
        seen = []
        self.run_subtests({"value": [1, 2]}, lambda value: seen.append(value))
        self.assertEqual(seen, [1, 2])
        with self.assertRaisesRegex(ValueError, "no subtest to run"):
            run_subtests(self, {"value": []}, print)


instantiate_parametrized_tests(TestNames)
instantiate_parametrized_tests(TestFSDP)
instantiate_device_type_tests(TestBase, globals())

if __name__ == "__main__":
    run_tests()
