"""One test with two ranks."""

import os
from pathlib import Path

from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests

Path(os.environ["STARTED"], os.environ["RANK"]).touch()


class TestFirstTwo(FSDPTest):
    world_size = 2

    def test_passes(self):
        pass


if __name__ == "__main__":
    run_tests()
