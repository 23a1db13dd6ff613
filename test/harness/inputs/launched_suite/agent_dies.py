"""The agent of the last rank is killed in the middle of a test."""

import os
import signal
import time
from pathlib import Path

import torch.distributed as dist

from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests

AGENT = os.getppid()


class TestRanks(FSDPTest):
    def test_1_kills(self):
        if self.rank == dist.get_world_size() - 1:
            Path(os.environ["STARTED"], "fault").touch()
            os.kill(AGENT, signal.SIGKILL)
        time.sleep(1000)

    def test_2(self):
        pass


if __name__ == "__main__":
    run_tests()
