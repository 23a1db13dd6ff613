"""A file whose import never ends at the last rank."""

import os
import time

from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests

if int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"]):
    time.sleep(1000)


class TestRanks(FSDPTest):
    def test_never_begins(self):
        pass


if __name__ == "__main__":
    run_tests()
