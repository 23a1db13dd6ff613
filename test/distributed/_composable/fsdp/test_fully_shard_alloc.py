"""Communication buffers allocated by a process group of some ranks, or by an unknown symmetric memory backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.common_distributed import (
    needs,
    skip_if_lt_x_gpu,
)
from torch_fsdp_tests.common_fsdp import (
    FSDPTest,
)
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.installed_torch import torch_facts


class TestFullyShardAllocFromPartOfRanks(FSDPTest):
    world_size = 4

    @skip_if_lt_x_gpu(4)
    def test_alloc_from_a_part_of_the_ranks(self):
        """Gradients are unchanged if the allocating process group contains only some of the ranks."""
        mesh = make_mesh(2, 2, names=("replicate", "shard"))["shard"]
        twin, model = (fully_shard(filled(nn.Linear(3, 4, device=self.device)), mesh=mesh) for _ in range(2))
        model.set_allocate_memory_from_process_group_for_comm(True)
        inp = torch.full((2, 3), self.rank + 1.0, device=self.device)
        for each in (twin, model):
            each(inp).square().sum().backward()
        for param, expected in zip(model.parameters(), twin.parameters(), strict=True):
            self.assertEqual(param.grad.to_local(), expected.grad.to_local(), rtol=0, atol=0)


class TestFullyShardSymmMemBackend(FSDPTest):
    world_size = 2

    @needs(torch_facts.HAS_SYMMETRIC_MEMORY_FOR_COMMUNICATION)
    @skip_if_lt_x_gpu(2)
    def test_unknown_backend(self):
        """An unknown symmetric memory backend is rejected. The model still trains without one."""
        model: Any = nn.Linear(8, 4, bias=False, device=self.device)
        fully_shard(model)
        with self.assertRaisesRegex(RuntimeError, "does not find allocation backend no such backend"):
            model.set_symm_mem_for_comm("no such backend")
        model(torch.full((1, 8), 1.0 + self.rank, device=self.device)).sum().backward()
        self.assertEqual(model.weight.grad.to_local(), torch.full((2, 8), 1.5, device=self.device))


if __name__ == "__main__":
    run_tests()
