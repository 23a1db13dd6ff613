"""The fake process group: one process as one rank of 1,024."""

from __future__ import annotations

import importlib
import time
import unittest.mock
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from samples import Processes
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.common_distributed import needs
from torch_fsdp_tests.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed import fake_pg
from torch_fsdp_tests.distributed.fake_pg import FakeStore
from torch_fsdp_tests.installed_torch import torch_facts

WORLD = 1024
# 1,030 rows over 1,024 ranks are chunks of 2: the first 515 ranks have one each and the others nothing.
ROWS, COLUMNS = 1030, 3


class Watched(list):
    """The sizes, in elements, of the outputs and inputs of collectives of torch.distributed."""

    def around(self, name: str) -> AbstractContextManager[object]:
        original = getattr(dist, name)

        def watched(output, input, *args, **kwargs):
            self.append((output.numel(), input.numel()))
            return original(output, input, *args, **kwargs)

        return unittest.mock.patch.object(dist, name, watched)


@instantiate_parametrized_tests
class TestFakeWorld(Processes):
    """Without it, tests of 1,024 ranks in one process could see wrong ranks, shards or message sizes.

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

    @needs(torch_facts.FAKE_COLLECTIVES_CAN_RAISE)
    def test_any_collective_can_be_an_error(self):
        options = FakeProcessGroup.Options()
        options.error_on_collective = True
        self.fake(rank=0, pg_options=options)
        with self.assertRaisesRegex(RuntimeError, "error_on_collective"):
            dist.all_reduce(torch.ones(1, device=self.device()))

    @parametrize("rank,local_rows", [(514, 2), (1023, 0)])
    def test_fully_shard(self, rank, local_rows):
        self.fake(rank)
        mesh = init_device_mesh(self.device().type, (WORLD,))
        with torch.device("meta"):
            model = nn.Linear(COLUMNS, ROWS, bias=False)
        fully_shard(model, mesh=mesh)
        model.to_empty(device=self.device())
        nn.init.ones_(model.weight)
        self.assertEqual(model.weight.shape, (ROWS, COLUMNS))
        self.assertEqual(model.weight.to_local().shape, (local_rows, COLUMNS))
        # The shape has only the rank's own rows. Storage and messages are padded to the largest shard's 2 rows.
        self.assertEqual(model.weight.to_local().untyped_storage().nbytes(), 2 * COLUMNS * 4)

        gathers, scatters = Watched(), Watched()
        with gathers.around(torch_facts.all_gather_name()), scatters.around(torch_facts.reduce_scatter_name()):
            output = model(torch.ones(5, COLUMNS, device=self.device()))
            self.assertEqual(output.shape, (5, ROWS))
            output.sum().backward()
        padded = 2 * COLUMNS
        self.assertEqual(gathers, [(WORLD * padded, padded)])
        self.assertEqual(scatters, [(padded, WORLD * padded)])
        self.assertEqual(model.weight.grad.to_local().shape, (local_rows, COLUMNS))
        self.assertEqual(model.weight.to_local().shape, (local_rows, COLUMNS))

    def test_fsdp1_flat_parameter(self):
        self.fake(rank=1)
        model = FSDP(nn.Linear(COLUMNS, ROWS, bias=False).to(self.device()), device_id=self.device())
        # 3,090 elements over 1,024 ranks are 4 for each rank, with padding at the end.
        self.assertEqual(model._handle.flat_param.shape, (4,))
        model(torch.ones(2, COLUMNS, device=self.device())).sum().backward()
        self.assertEqual(model._handle.flat_param.grad.shape, (4,))

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
