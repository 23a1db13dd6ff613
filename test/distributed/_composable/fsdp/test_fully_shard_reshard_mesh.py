"""The mesh over which a module reshards after forward."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.init_cases import InitTest
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.installed_torch import torch_names


class TestFullyShardMeshArg(InitTest):
    world_size = 4

    def _resharding_mesh(self, mesh: DeviceMesh, reshard_after_forward: Any) -> Any:
        """The mesh over which a layer is sharded after forward, or None."""
        layer = fully_shard(nn.Linear(4, 4), mesh=mesh, reshard_after_forward=reshard_after_forward)
        info = internals.group_of(layer).post_forward_mesh_info
        return None if info is None else info.mesh

    @skip_if_lt_x_gpu(1)
    def test_reshard_after_forward_values(self):
        """``reshard_after_forward`` must be a bool, None, or an int that is a factor of the shard world size."""
        hybrid = make_mesh(1, 4, names=("replicate", "shard"))
        for mesh in (make_mesh(4), hybrid, make_mesh(2, 2, names=("replicate", "shard"))["shard"]):
            shards = mesh.size()
            for factor in (0, -1, -2, 3, 5, 8):
                message = f"reshard_after_forward as an int, it should be a factor of {shards}, not {factor}"
                with self.assertRaisesRegex(ValueError, message):
                    self._resharding_mesh(mesh, factor)
            for wrong in ("2", 2.0, (2,)):
                message = f"should be a bool or an int .*, not {re.escape(str(wrong))}"
                with self.assertRaisesRegex(ValueError, message):
                    self._resharding_mesh(mesh, wrong)
            for value in (None, True, shards):
                self.assertIs(self._resharding_mesh(mesh, value), mesh)
            self.assertIsNone(self._resharding_mesh(mesh, False))
        self.assertEqual(self._resharding_mesh(make_mesh(4), 2).mesh.tolist(), [[0, 1], [2, 3]])
        self.assertEqual(self._resharding_mesh(hybrid, 2).mesh.tolist(), [[0, 1], [2, 3]])

    @skip_if_lt_x_gpu(1)
    def test_reshard_after_forward_one(self):
        """The int 1 gives a warning and keeps parameters unsharded after forward, like False."""
        warning_once = torch_names.module("torch._logging").warning_once
        mesh = make_mesh(4)
        layer = nn.Linear(4, 4, device=self.device)
        shard = functools.partial(fully_shard, layer, mesh=mesh, reshard_after_forward=1)
        if self.rank == 0:  # ranks are threads of one process, which logs the warning only once
            warning_once.cache_clear()
            with self.assertLogs("torch.distributed.fsdp.fully_shard", "WARNING") as logs:
                shard()
            (record,) = logs.records
            self.assertIn("reshard_after_forward=1 (int)", record.getMessage())
        dist.barrier()
        if self.rank != 0:
            shard()
        model = fully_shard(nn.Sequential(layer), mesh=mesh)  # so that the layer is not the root
        model(self._input(2, 4))
        self.assertNotIsInstance(layer.weight, DTensor)


if __name__ == "__main__":
    run_tests()
