"""Rank 1 takes its machine off the network in a test that needs no other machine. The next test needs all machines."""

import os
import subprocess
from pathlib import Path

from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests


class TestFirstTwo(FSDPTest):
    world_size = 2

    def test_passes(self):
        if self.rank == 1:
            Path(os.environ["STARTED"], "fault").touch()
            subprocess.run(["ip", "link", "set", os.environ["LINK"], "down"], check=True)


class TestRanks(FSDPTest):
    def test_1(self):
        pass

    def test_2(self):
        pass


if __name__ == "__main__":
    run_tests()
