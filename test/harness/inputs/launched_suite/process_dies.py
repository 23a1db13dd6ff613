"""The last rank's process of this file dies, and leaves another one running."""

import os
import signal
import subprocess

import torch.distributed as dist

from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests

PROCESS = os.getpid()
if int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"]):
    subprocess.Popen(["sleep", "1001"], start_new_session=True)


class TestRanks(FSDPTest):
    def test_1_dies(self):
        if self.rank == dist.get_world_size() - 1:
            os.kill(PROCESS, signal.SIGKILL)
        dist.barrier()

    def test_2_comes_after(self):
        pass


if __name__ == "__main__":
    run_tests()
