"""The fake process group: one process as one rank of 1,024."""

from __future__ import annotations

import importlib
import time
import unittest.mock
from typing import Any

import torch
import torch.distributed as dist
from samples import Processes

from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed import fake_pg
from torch_fsdp_tests.distributed.fake_pg import FakeStore

WORLD = 1024


class TestFakeWorld(Processes):
    """Without it, tests of 1,024 ranks in one process could see wrong ranks, or lack a store.

    The process is a rank of the harness, so that its group never affects another test.
    """

    world_size = 1

    def fake(self, rank: int, world_size: int = WORLD, **kwargs: Any) -> None:
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore(), **kwargs)
        self.addCleanup(dist.destroy_process_group)

    def device(self) -> torch.device:
        return accelerator.current().device(0)

    def test_init_is_instant_for_any_size(self):
        for size in (1, 2, 128, WORLD):
            start = time.monotonic()
            dist.init_process_group("fake", rank=size - 1, world_size=size, store=FakeStore())
            self.assertEqual((dist.get_rank(), dist.get_world_size(), dist.get_backend()), (size - 1, size, "fake"))
            dist.destroy_process_group()
            self.assertLess(time.monotonic() - start, 5)

    def test_collectives_return_with_outputs_of_the_right_shape(self):
        self.fake(rank=3)
        backend = dist.group.WORLD._get_backend(self.device())
        self.assertEqual((backend.rank(), backend.size()), (3, WORLD))
        gathered = torch.zeros(WORLD * 2, device=self.device())
        dist.all_gather_into_tensor(gathered, torch.tensor([1.0, 2.0], device=self.device()))
        self.assertEqual(gathered.view(WORLD, 2)[-1].tolist(), [1.0, 2.0])
        work = dist.all_reduce(torch.ones(2, device=self.device()), async_op=True)
        self.assertTrue(work.wait())
        dist.barrier()
        group = dist.new_group(list(range(0, WORLD, 2)))
        self.assertEqual(group, dist.GroupMember.NON_GROUP_MEMBER)
        self.assertEqual(dist.get_rank(dist.new_group([1, 3, 1000])), 1)

    def test_the_store_of_one_rank(self):
        store = dist.PrefixStore("group", FakeStore())
        store.set("key", "value")
        self.assertEqual(store.get("key"), b"value")
        self.assertEqual(store.add("count", 2), 2)
        with self.assertRaises(RuntimeError):
            store.wait(["key of another rank"])

    def test_registering_claims_no_device_type(self):
        known = {"some_device": "some_backend"}
        with unittest.mock.patch.object(dist.Backend, "default_device_backend_map", dict(known)):
            importlib.reload(fake_pg)
            self.assertEqual(dist.Backend.default_device_backend_map, known)
        importlib.reload(fake_pg)


if __name__ == "__main__":
    run_tests()
