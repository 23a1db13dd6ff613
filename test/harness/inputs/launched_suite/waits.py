"""A test that runs until it is ended from outside."""

import os
import time
from pathlib import Path

from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests


class TestRanks(FSDPTest):
    def test_1_waits(self):
        Path(os.environ["STARTED"], "waits").touch()
        time.sleep(1000)


if __name__ == "__main__":
    run_tests()
