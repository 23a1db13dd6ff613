"""The last rank takes its machine off the network in the middle of a test."""

import os
import subprocess
import time
from pathlib import Path

import torch.distributed as dist

from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests


class TestRanks(FSDPTest):
    def test_1_goes(self):
        if self.rank == dist.get_world_size() - 1:
            Path(os.environ["STARTED"], "fault").touch()
            subprocess.run(["ip", "link", "set", os.environ["LINK"], "down"], check=True)
        time.sleep(1000)

    def test_2(self):
        pass


if __name__ == "__main__":
    run_tests()
