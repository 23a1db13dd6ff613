"""A test case for FSDP with as few ranks as will do."""

from __future__ import annotations

from torch_fsdp_tests import accelerator
from torch_fsdp_tests.common_fsdp import FSDPTest

__unittest = True


class FewRanksTest(FSDPTest):
    """On the CPU two ranks are enough; a device is tested with all that there are."""

    @property
    def world_size(self) -> int:
        """2 on the CPU, elsewhere that of the device under test."""
        return accelerator.current().few_ranks
