"""Tests of each kind. All of them pass."""

import torch
import torch.distributed as dist

from torch_fsdp_tests.common_fsdp import FSDPTest, FSDPTestMultiThread
from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.device import accelerator


def total(rank: int) -> int:
    """The sum of one tensor per rank, which shows the number of ranks."""
    tensor = torch.ones(1, device=accelerator.current().device(rank))
    dist.all_reduce(tensor)
    return int(tensor.item())


class TestFirstTwo(FSDPTest):
    world_size = 2

    def test_sum(self):
        self.assertEqual(total(self.rank), 2)


class TestAll(FSDPTest):
    def test_sum(self):
        self.assertEqual(total(self.rank), accelerator.current().ranks)


class TestThreads(FSDPTestMultiThread):
    world_size = 6

    def test_sum(self):
        self.assertEqual(total(self.rank), 6)


class TestAlone(TestCase):
    def test_passes(self):
        pass


if __name__ == "__main__":
    run_tests()
