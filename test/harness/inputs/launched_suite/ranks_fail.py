"""Ranks that fail in every way, and tests that run after them."""

import os
import signal
import time

import torch
import torch.distributed as dist

from torch_fsdp_tests.common_distributed import TIMEOUT_OVERRIDE
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.device import accelerator

FOREVER = 1000  # seconds
TIMEOUT_OVERRIDE["test_4_hangs"] = 3


class TestRanks(FSDPTest):
    @property
    def is_last(self) -> bool:
        return self.rank == dist.get_world_size() - 1

    def meet(self) -> None:
        dist.all_reduce(torch.ones(1, device=accelerator.current().device(self.rank)))

    def test_1_raises(self):
        if self.is_last:
            raise KeyError("only here")
        self.meet()

    def test_2_exits(self):
        if self.is_last:
            os._exit(7)
        self.meet()

    def test_3_is_killed(self):
        if self.is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        self.meet()

    def test_4_hangs(self):
        if self.is_last:
            time.sleep(FOREVER)

    def test_5_passes(self):
        self.meet()


if __name__ == "__main__":
    run_tests()
