"""DTensors that are loaded from a checkpoint with other placements, on another mesh, or on fewer ranks.

Every element has a different value, so lost or exchanged rows are detected. The tests cut the expected local shard of
each rank from the whole tensor.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor, zeros

from torch_fsdp_tests.common_distributed import at_most, skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.internals import sharded_tensors
from torch_fsdp_tests.fsdp.shards import chunk_of, local_of, shard_of

ONE_DIM: list[tuple[Placement, ...]] = [(Replicate(),), (Shard(0),)]
TWO_DIMS: list[tuple[Placement, ...]] = list(itertools.product([Replicate(), Shard(0)], repeat=2))
Layout = Callable[[torch.Tensor], torch.Tensor]


def counted(*shape: int) -> torch.Tensor:
    """A tensor of this shape with the values 1, 2, 3, ..."""
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


def part_of(whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> torch.Tensor:
    """This rank's local shard of the whole tensor. The first dimension of the mesh shards first."""
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            whole = chunk_of(whole, mesh.get_local_rank(dim), mesh.size(dim), placement.dim)
    return whole


class ReshardingTest(DTensorTestBase):
    """Tests that save a tensor in one layout and load it in another."""

    world_size = at_most(4)

    def _check_resharding(
        self,
        meshes: tuple[DeviceMesh, DeviceMesh],
        placements: tuple[tuple[Placement, ...], tuple[Placement, ...]],
        *shape: int,
    ) -> None:
        whole = counted(*shape).to(self.device)
        path = os.path.join(self.temp_dir, str(placements))
        dcp.save({"tensor": distribute_tensor(whole, meshes[0], placements[0])}, checkpoint_id=path)
        actual = zeros(*shape, device_mesh=meshes[1], placements=placements[1])
        dcp.load({"tensor": actual}, checkpoint_id=path)
        self.assertEqual((actual.device_mesh, actual.placements), (meshes[1], placements[1]))
        self.assertEqual(actual.to_local(), part_of(whole, meshes[1], placements[1]), rtol=0, atol=0, may_be="empty")
        self.assertEqual(actual.full_tensor(), whole, rtol=0, atol=0)


class TestDTensorReshardPlacementChange(ReshardingTest):
    power_of_two_ranks = True

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(saved=ONE_DIM, loaded=ONE_DIM)
    def test_1d_to_1d_reshard_placement_change(self, saved, loaded):
        self._check_resharding((self.mesh, self.mesh), (saved, loaded), 4, 4)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(saved=TWO_DIMS, loaded=TWO_DIMS)
    def test_2d_to_2d_reshard_placement_change(self, saved, loaded):
        self.mesh = init_device_mesh(self.device_type, (2, self.world_size // 2))
        self._check_resharding((self.mesh, self.mesh), (saved, loaded), 4, 4)


class TestDTensorReshardMeshChange(ReshardingTest):
    power_of_two_ranks = True

    def _meshes(self) -> tuple[DeviceMesh, DeviceMesh]:
        return self.mesh, init_device_mesh(self.device_type, (2, self.world_size // 2))

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(saved=ONE_DIM, loaded=TWO_DIMS)
    def test_1d_to_2d_reshard_mesh_change(self, saved, loaded):
        self._check_resharding(self._meshes(), (saved, loaded), 4, 4)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(saved=TWO_DIMS, loaded=ONE_DIM)
    def test_2d_to_1d_reshard_mesh_change(self, saved, loaded):
        line, square = self._meshes()
        self._check_resharding((square, line), (saved, loaded), 4, 4)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_dtensor_checkpoint_resharding_with_empty_shard(self):
        """One element is sharded over all ranks, so all but one are empty, before and after."""
        self._check_resharding(self._meshes(), ((Shard(0),), (Shard(0), Shard(0))), 1)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_fewer_ranks(self):
        """Four ranks save. Each rank loads the whole tensor by itself, and two ranks load halves."""
        line, _ = self._meshes()
        pair = DeviceMesh(self.device_type, [0, 1])
        wholes = {f"{rows} rows": counted(rows, 2).to(self.device) for rows in (1, 3, 7, 8)}
        shards = {name: distribute_tensor(whole, line, [Shard(0)]) for name, whole in wholes.items()}
        dcp.save(shards, checkpoint_id=self.temp_dir)
        alone = {name: torch.zeros_like(whole) for name, whole in wholes.items()}
        dcp.load(alone, checkpoint_id=self.temp_dir, no_dist=True)
        self.assertEqual(alone, wholes, rtol=0, atol=0)
        if self.rank < 2:
            halves = {
                name: zeros(*whole.shape, device_mesh=pair, placements=[Shard(0)]) for name, whole in wholes.items()
            }
            dcp.load(halves, checkpoint_id=self.temp_dir, process_group=pair.get_group())
            for name, whole in wholes.items():
                self.assertEqual(
                    halves[name].to_local(), part_of(whole, pair, (Shard(0),)), rtol=0, atol=0, may_be="empty"
                )


class TestSeveralShards(ReshardingTest):
    """ShardedTensors with several local shards: the ranks get blocks of rows or columns in turn."""

    @with_comms
    @with_temp_dir
    @skip_if_lt_x_gpu(2)
    @subtests(saved=[1, 2, 3], loaded=[1, 2, 3], dim=[0, 1])
    def test_blocks_of_another_size(self, saved, loaded, dim):
        whole = counted(12, 2).to(self.device) if dim == 0 else counted(2, 12).to(self.device)
        path = os.path.join(self.temp_dir, f"{saved}, {loaded}, {dim}")
        dcp.save({"tensor": self._in_turn(whole, saved, dim)}, checkpoint_id=path)
        state = {"tensor": self._in_turn(torch.zeros_like(whole), loaded, dim)}
        dcp.load(state, checkpoint_id=path)
        actual, expected = (
            [shard.tensor for shard in each.local_shards()]
            for each in (state["tensor"], self._in_turn(whole, loaded, dim))
        )
        self.assertEqual(actual, expected)

    def _in_turn(self, whole: torch.Tensor, length: int, dim: int) -> Any:
        starts = range(self.rank * length, whole.size(dim), self.world_size * length)
        offsets = [[start, 0] if dim == 0 else [0, start] for start in starts]
        shards = [
            sharded_tensors.Shard.from_tensor_and_offsets(whole.narrow(dim, start, length).clone(), offset, self.rank)
            for start, offset in zip(starts, offsets, strict=True)
        ]
        return sharded_tensors.init_from_local_shards(shards, whole.size())


class FullySharded:
    """A layout of ``fully_shard`` on all mesh dimensions except "tensor"."""

    def __init__(self, mesh: DeviceMesh, shard_dim: int = 0, tensor_dim: int | None = None) -> None:
        self.mesh, self.shard_dim, self.tensor_dim = mesh, shard_dim, tensor_dim

    def __call__(self, whole: torch.Tensor) -> DTensor:
        """Return a parameter that holds this tensor."""
        holder, mesh = nn.Module(), self.mesh
        if self.tensor_dim is not None:
            whole = distribute_tensor(whole, mesh["tensor"], [Shard(self.tensor_dim)])
            mesh = mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "tensor")]
        holder.weight = nn.Parameter(whole)
        fully_shard(holder, mesh=mesh, shard_placement_fn=lambda param: Shard(self.shard_dim))
        return holder.weight.detach()


class TestFullyShardLayouts(DTensorTestBase):
    """What is saved in one layout of FSDP2 can be loaded in any other one, with even and uneven rows."""

    world_size = at_most(4)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_each_to_each(self):
        line = init_device_mesh(self.device_type, (4,))
        hybrid = init_device_mesh(self.device_type, (2, 2), mesh_dim_names=("replicate", "shard"))
        with_tensor = init_device_mesh(self.device_type, (2, 2), mesh_dim_names=("shard", "tensor"))
        self._check_each_to_each(
            {
                "whole": torch.clone,
                "rows": FullySharded(line),
                "columns": FullySharded(line, shard_dim=1),
                "hybrid": FullySharded(hybrid),
                "rows after TP's rows": FullySharded(with_tensor, tensor_dim=0),
                "rows after TP's columns": FullySharded(with_tensor, tensor_dim=1),
                "columns after TP's rows": FullySharded(with_tensor, shard_dim=1, tensor_dim=0),
            },
            rows=(3, 7, 8),
        )

    @with_comms
    @skip_if_lt_x_gpu(8)
    @with_temp_dir
    def test_3d(self):
        """Eight plain shards, and layouts on two replicas, two shards and two TP ranks."""
        cube = init_device_mesh(self.device_type, (2, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
        self._check_each_to_each(
            {
                "rows": FullySharded(init_device_mesh(self.device_type, (8,))),
                "rows after TP's rows": FullySharded(cube, tensor_dim=0),
                "rows after TP's columns": FullySharded(cube, tensor_dim=1),
            },
            rows=(7, 16),
        )

    def _check_each_to_each(self, layouts: dict[str, Layout], rows: tuple[int, ...]) -> None:
        wholes = {f"{each} rows": counted(each, 4).to(self.device) for each in rows}
        saved: dict[str, Any] = {
            name: {size: layout(whole) for size, whole in wholes.items()} for name, layout in layouts.items()
        }
        dcp.save(saved, checkpoint_id=self.temp_dir)
        for target, layout in layouts.items():
            loaded = {
                name: {size: layout(torch.zeros_like(whole)) for size, whole in wholes.items()} for name in layouts
            }
            dcp.load(loaded, checkpoint_id=self.temp_dir)
            for (name, tensors), (size, whole) in itertools.product(loaded.items(), wholes.items()):
                tensor = tensors[size]
                expected = shard_of(whole, tensor) if isinstance(tensor, DTensor) else whole
                self.assertEqual(
                    local_of(tensor), expected, msg=f"{size} from {name} to {target}", rtol=0, atol=0, may_be="empty"
                )
        dist.barrier()


if __name__ == "__main__":
    run_tests()
