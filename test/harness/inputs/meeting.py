"""A check that the harness ends the groups of all ranks together, for other files here. Not a test file."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_fsdp_tests.common_distributed.case import RankTestCase

WAIT = 1.0  # seconds after which a group would have ended if its ranks did not wait for each other


def ends_together(case: RankTestCase, store: dist.Store) -> None:
    """Rank 0 finishes at once. Fail unless its group stays until the other ranks have also finished."""
    if case.rank > 0:
        with case.assertRaises(RuntimeError):
            store.wait(["ended"], timedelta(seconds=WAIT))
        return
    end = dist.destroy_process_group

    def tell_and_end(*arguments: Any) -> None:
        dist.destroy_process_group = end
        store.set("ended", "yes")
        end(*arguments)

    dist.destroy_process_group = tell_and_end
