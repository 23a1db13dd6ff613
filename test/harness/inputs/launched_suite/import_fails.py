"""A file that the last rank cannot import."""

import os

from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests

if int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"]):
    raise ImportError("not to be had here")


class TestRanks(FSDPTest):
    def test_1(self):
        pass

    def test_2(self):
        pass


if __name__ == "__main__":
    run_tests()
