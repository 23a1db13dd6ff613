"""Local shards of parameters whose number of rows is not a multiple of the number of ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp.init_cases import InitTest, full_tensors
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import average_gradients
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.installed_torch import torch_facts


class TestFullyShardShardedParameterDTensor(InitTest):
    world_size = 4

    def _layer(self, layout: str, rows: int) -> tuple[nn.Linear, DeviceMesh]:
        """A linear layer with this number of rows in the given layout, and its data-parallel mesh."""
        layer = filled(nn.Linear(4, rows, device=self.device))
        if layout in ("colwise", "rowwise"):
            mesh = make_mesh(2, 2, names=("dp", "tp"))
            style = ColwiseParallel(output_layouts=Replicate()) if layout == "colwise" else None
            parallelize_module(layer, mesh["tp"], style or RowwiseParallel(input_layouts=Replicate()))
            return fully_shard(layer, mesh=mesh["dp"]), mesh["dp"]
        mesh = make_mesh(2, 2, names=("replicate", "shard")) if layout == "hsdp" else make_mesh(4)
        return fully_shard(layer, mesh=mesh), mesh

    @skip_if_lt_x_gpu(1)
    def test_uneven_and_empty_shards(self):
        """A layer may have fewer rows than ranks, or rows that do not divide evenly.

        Unsharded parameters have the initial values, Adam steps like on a plain layer, and another model loads the
        state dict.
        """
        self.run_subtests({"layout": ["fsdp", "hsdp"], "rows": [1, 2, 3, 5]}, self._test_uneven_and_empty_shards)

    @skip_if_lt_x_gpu(1)
    def test_rows_stay_in_order_with_tensor_parallelism(self):
        """``full_tensor()`` has all rows in order if FSDP shards the three rows of each TP rank unevenly."""
        layer, _ = self._layer("colwise", 6)
        actual = layer.weight.full_tensor()
        with torch_defect("dtensor_uneven_rows_with_tp_are_reordered"):
            self.assertEqual(actual, filled(nn.Linear(4, 6, device=self.device)).weight)

    @needs(torch_facts.GATHERS_UNEVEN_STRIDED_SHARDS)
    @skip_if_lt_x_gpu(1)
    def test_uneven_and_empty_shards_with_tensor_parallelism(self):
        """Like :meth:`test_uneven_and_empty_shards`, after TP has sharded the same or another dimension."""
        self.run_subtests({"layout": ["rowwise"], "rows": [1, 2, 3, 5]}, self._test_uneven_and_empty_shards)
        self.run_subtests({"layout": ["colwise"], "rows": [2, 3, 5]}, self._test_uneven_and_empty_shards)

    @torch_defect("fsdp2_unit_without_elements_raises")
    @skip_if_lt_x_gpu(1)
    def test_rank_without_rows(self):
        """If tensor parallelism leaves a rank without rows, FSDP has an empty parameter to shard.

        With the known defect, the all-gather works, but the reduction raises, because it rejects an empty gradient.
        """
        self._test_uneven_and_empty_shards("colwise", 1)

    def _test_uneven_and_empty_shards(self, layout: str, rows: int) -> None:
        ref_layer = filled(nn.Linear(4, rows, device=self.device))
        layer, dp_mesh = self._layer(layout, rows)
        if rows == 1:
            empty = torch.tensor([float(layer.weight.to_local().numel() == 0)], device=self.device)
            dist.all_reduce(empty)
            self.assertEqual(empty.item(), {"fsdp": 3, "hsdp": 2, "colwise": 3, "rowwise": 2}[layout])
        self._check_same_names_and_values(ref_layer, layer)

        ref_optim, optim = (torch.optim.Adam(each.parameters(), lr=0.1) for each in (ref_layer, layer))
        replicas = 2 if layout in ("colwise", "rowwise") else 1
        for step in range(2):
            # Ranks 0 and 1 are one tensor-parallel group, and 2 and 3 the other. A group shares its data.
            inp = self._input(3, 4, seed=10 * step + self.rank // replicas)
            for each in (ref_layer, layer):
                each.zero_grad()
                each(inp).square().sum().backward()
            average_gradients(ref_layer, None if replicas == 1 else dp_mesh.get_group())
            ref_optim.step()
            optim.step()
        wholes = full_tensors(layer)
        for name, param in ref_layer.named_parameters():
            self.assertEqual(wholes[name], param.detach(), msg=name)

        other, _ = self._layer(layout, rows)
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        other.load_state_dict(layer.state_dict())
        self.assertEqual(full_tensors(other), wholes, rtol=0, atol=0)
        self.assertEqual(other(inp), layer(inp), rtol=0, atol=0)


if __name__ == "__main__":
    run_tests()
