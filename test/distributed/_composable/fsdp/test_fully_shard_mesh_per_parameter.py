"""``shard_placement_fn`` returns a placement for each parameter, and may return a mesh for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import check_sharded_parity
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.init_cases import InitTest
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import average
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.installed_torch import torch_facts

needs_mesh_per_parameter = needs(torch_facts.HAS_MESH_PER_PARAMETER)


class TestFullyShardShardPlacementFn(InitTest):
    world_size = 8

    @skip_if_lt_x_gpu(1)
    @subtests(shape=[(0, 16), (16, 0), (16, 0, 8)])
    def test_parameter_without_elements(self, shape):
        """A frozen parameter may be sharded along a dimension of size 0."""
        model = nn.Linear(4, 8, device=self.device)
        model.empty = nn.Parameter(torch.ones(shape, device=self.device), requires_grad=False)
        fully_shard(model, shard_placement_fn=lambda param: Shard(param.shape.index(0) if 0 in param.shape else 0))
        self.assertEqual(model.empty.to_local().shape, shape)
        model(self._input(2, 4)).sum().backward()
        self.assertEqual(model.empty.full_tensor().shape, shape)

    @needs_mesh_per_parameter
    @skip_if_lt_x_gpu(1)
    def test_invalid_placement_result(self):
        """The function must return a Shard, a ShardPlacementResult or None."""
        for result in (Replicate(), 0, "0", (Shard(0),)):
            with self.assertRaisesRegex(ValueError, "Invalid shard_placement_fn result"):
                fully_shard(nn.Linear(8, 8), shard_placement_fn=lambda param, result=result: result)

    @needs_mesh_per_parameter
    @skip_if_lt_x_gpu(1)
    def test_distinct_mesh_infos_of_one_group(self):
        """Parameters on the same mesh must share one FSDPMeshInfo object. Equal objects are rejected."""
        mesh = make_mesh(self.world_size)

        def placed(param: nn.Parameter) -> Any:
            info = internals.fsdp2_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
            return internals.fsdp2_common.ShardPlacementResult(Shard(0), info)

        with self.assertRaisesRegex(ValueError, "must use the same FSDPMeshInfo object"):
            fully_shard(nn.Linear(8, 8), mesh=mesh, shard_placement_fn=placed)

    @needs_mesh_per_parameter
    @skip_if_lt_x_gpu(1)
    @subtests(reshard_after_forward=[True, False], replicated=[False, True])
    def test_two_meshes_in_one_module(self, reshard_after_forward, replicated):
        """Each parameter is all-gathered and averaged over the mesh that the function returns for it.

        With ``replicated`` the other parameters use HSDP, and both meshes shard over the same process group.
        """
        mesh = make_mesh(2, 4, names=("outer", "inner"))
        info = internals.fsdp2_common.FSDPMeshInfo(mesh["inner"], shard_mesh_dim=0)
        ref_layer, layer = (filled(nn.Linear(5, 8, device=self.device)) for _ in range(2))
        chosen = layer.bias

        def placed(param: nn.Parameter) -> Any:
            return internals.fsdp2_common.ShardPlacementResult(Shard(0), info) if param is chosen else None

        whole_mesh = mesh if replicated else make_mesh(self.world_size)
        fully_shard(layer, mesh=whole_mesh, shard_placement_fn=placed, reshard_after_forward=reshard_after_forward)
        groups = internals.groups_in(layer)
        self.assertEqual([group.mesh_info.mesh for group in groups], [whole_mesh, mesh["inner"]])
        self.assertEqual((layer.weight.device_mesh, layer.bias.device_mesh), (whole_mesh, mesh["inner"]))
        with self.assertRaisesRegex(ValueError, "set_all_reduce_hook is not supported with multiple param groups"):
            layer.set_all_reduce_hook(lambda reduced: None)
        with self.assertRaisesRegex(AssertionError, "at most 1 param group"):
            internals.own_group(layer)
        for step in range(2):
            inp = self._input(2, 5, seed=10 * step + self.rank)
            for each in (ref_layer, layer):
                each.zero_grad()
                each(inp).square().sum().backward()
            average([ref_layer.weight.grad])
            average([ref_layer.bias.grad], mesh.get_group("inner"))
            check_sharded_parity(self, ref_layer, layer)
            with torch.no_grad():  # from here on, the biases of the two inner meshes differ
                for param in (*ref_layer.parameters(), *layer.parameters()):
                    param.sub_(param.grad, alpha=0.01)

    @needs_mesh_per_parameter
    @skip_if_lt_x_gpu(1)
    @subtests(waits_later=[False, True], on_inner_mesh=["bias", "weight"])
    def test_unshard_with_two_meshes(self, waits_later, on_inner_mesh):
        """``unshard`` gathers the parameters of both meshes, and ``reshard`` frees both."""
        inner = make_mesh(2, 4, names=("outer", "inner"))["inner"]
        info = internals.fsdp2_common.FSDPMeshInfo(inner, shard_mesh_dim=0)
        ref_layer, layer = (filled(nn.Linear(5, 7, device=self.device)) for _ in range(2))
        chosen = layer.get_parameter(on_inner_mesh)

        def placed(param: nn.Parameter) -> Any:
            return internals.fsdp2_common.ShardPlacementResult(Shard(0), info) if param is chosen else None

        fully_shard(layer, mesh=make_mesh(self.world_size), shard_placement_fn=placed)
        for _ in range(2):
            handle = layer.unshard(async_op=waits_later)
            if waits_later:
                handle.wait()
            for name, param in ref_layer.named_parameters():
                self.assertEqual(layer.get_parameter(name).detach(), param.detach(), name, rtol=0, atol=0)
            layer.reshard()
            self.assertEqual(layer.get_parameter(on_inner_mesh).device_mesh, inner)
            check_sharded_parity(self, ref_layer, layer)


if __name__ == "__main__":
    run_tests()
