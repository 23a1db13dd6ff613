"""Full tensors are cut along the first dimension into the shards of state dicts. Each row is in one shard."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_fsdp_tests.installed_torch import torch_names

shard_utils = torch_names.module("torch.distributed.fsdp._shard_utils")

# One row for two ranks, an even number of rows, and an odd number. With one dimension and with two.
SIZES = ((1,), (1, 6), (12,), (12, 6), (25,), (25, 6))


def device_of(rank: int) -> torch.device:
    return accelerator.current().device(rank)


def devices_per_node() -> int:
    return max(accelerator.current().count, 1)


def _create_tensor(rank: int, *size: int) -> torch.Tensor:
    """The same numbers on every rank."""
    torch.manual_seed(0)
    return torch.rand(*size).to(device_of(rank))


def rows_of(tensor: torch.Tensor, index: int, world_size: int) -> torch.Tensor:
    """The local shard of the rank with this index. All ranks get as many rows as the first one, until none are left."""
    rows = math.ceil(len(tensor) / world_size)
    return tensor[index * rows : (index + 1) * rows]


class TestShardUtilsDistributed(FSDPTest):
    world_size = 2

    def _chunked(self, tensor: torch.Tensor) -> Any:
        return shard_utils._create_chunk_sharded_tensor(
            tensor, self.rank, self.world_size, devices_per_node(), dist.group.WORLD
        )

    @skip_if_lt_x_gpu(2)
    def test_create_chunk_sharded_tensor(self):
        """The gathered shards equal the tensor. Their metadata are right on each rank."""
        for size in SIZES:
            tensor = _create_tensor(self.rank, *size)
            sharded = self._chunked(tensor)
            gathered = torch.empty_like(tensor) if self.rank == 0 else None
            sharded.gather(0, gathered)
            if gathered is not None:
                self.assertEqual(gathered, tensor, rtol=0, atol=0)
            check_metadata(self, sharded, tensor, list(range(self.world_size)), self.rank)

    @skip_if_lt_x_gpu(2)
    def test_sharded_tensor_is_a_copy(self):
        """Later changes to the tensor do not change its shards."""
        tensor = _create_tensor(self.rank, 5, 3)
        mine = rows_of(tensor, self.rank, self.world_size).clone()
        sharded = self._chunked(tensor)
        tensor.zero_()
        (shard,) = sharded.local_shards()
        self.assertEqual(shard.tensor, mine, rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    def test_dtypes_of_sharded_tensors(self):
        """Shards have the tensor's dtype. A tensor that requires a gradient is rejected."""
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            tensor = (_create_tensor(self.rank, 5, 3) * 100).to(dtype)
            sharded = self._chunked(tensor)
            (shard,) = sharded.local_shards()
            self.assertEqual(shard.tensor, rows_of(tensor, self.rank, self.world_size), rtol=0, atol=0)
            properties = sharded.metadata().tensor_properties
            self.assertEqual((sharded.dtype, properties.dtype, properties.requires_grad), (dtype, dtype, False))
        with self.assertRaisesRegex(ValueError, "requires_grad property is incompatible"):
            self._chunked(_create_tensor(self.rank, 5, 3).requires_grad_())


def check_metadata(case: TestCase, sharded: Any, tensor: torch.Tensor, ranks: list[int], rank: int) -> None:
    """Every rank must know the offset, size and rank of each shard, and must have its own shard."""
    world_size = len(ranks)
    expected = [(index, rows_of(tensor, index, world_size)) for index in range(world_size)]
    offsets = [[math.ceil(len(tensor) / world_size) * index, *[0] * (tensor.dim() - 1)] for index, _ in expected]
    holders = [index for index, rows in expected if len(rows) > 0]
    actual = sharded.metadata()
    case.assertEqual(actual.size, tensor.size())
    case.assertEqual([each.shard_offsets for each in actual.shards_metadata], [offsets[index] for index in holders])
    sizes = [list(rows.size()) for _, rows in expected if len(rows) > 0]
    case.assertEqual([each.shard_sizes for each in actual.shards_metadata], sizes)
    places = [f"rank:{ranks[index]}/{device_of(ranks[index])}" for index in holders]
    case.assertEqual([str(each.placement) for each in actual.shards_metadata], places)

    mine = expected[ranks.index(rank)][1]
    case.assertEqual(len(sharded.local_shards()), 1 if len(mine) > 0 else 0)
    for shard in sharded.local_shards():
        case.assertEqual(shard.tensor, mine, rtol=0, atol=0)
        case.assertEqual(shard.metadata.shard_offsets, offsets[ranks.index(rank)])
        case.assertEqual(shard.metadata.shard_sizes, list(mine.size()))


class TestShardUtilsDistributedDTensor(DTensorTestBase):
    world_size = 2

    @with_comms
    @skip_if_lt_x_gpu(2)
    def test_create_chunk_dtensor(self):
        """A rank has its chunk, or nothing if there are fewer chunks than ranks."""
        mesh = init_device_mesh(self.device_type, (self.world_size,))
        for size in SIZES:
            tensor = _create_tensor(self.rank, *size)
            actual = shard_utils._create_chunk_dtensor(tensor, self.rank, mesh)
            self.assertEqual((actual.size(), actual.placements, actual.device_mesh), (tensor.size(), (Shard(0),), mesh))
            chunks = torch.chunk(tensor, self.world_size, dim=0)
            local = actual.to_local()
            if local.numel() != 0:
                self.assertEqual(local, chunks[self.rank], rtol=0, atol=0)
            else:
                self.assertGreaterEqual(self.rank, len(chunks))
            # No rank loses rows.
            self.assertEqual(len(local), len(rows_of(tensor, self.rank, self.world_size)))
            self.assertEqual(actual.full_tensor(), tensor, rtol=0, atol=0)

    @with_comms
    @skip_if_lt_x_gpu(2)
    def test_dtensor_is_a_copy(self):
        """Later changes to the tensor do not change its shards, even if there is only one shard."""
        for shape in ((2,), (2, 1)):
            mesh = init_device_mesh(self.device_type, shape)
            tensor = _create_tensor(self.rank, 5, 3)
            mine = (rows_of(tensor, self.rank, 2) if len(shape) == 1 else tensor).clone()
            actual = shard_utils._create_chunk_dtensor(tensor, self.rank, mesh)
            tensor.zero_()
            self.assertEqual(actual.to_local(), mine, rtol=0, atol=0)

    @with_comms
    @skip_if_lt_x_gpu(2)
    def test_dtypes_of_dtensors(self):
        """Shards have the tensor's dtype and never require a gradient."""
        mesh = init_device_mesh(self.device_type, (self.world_size,))
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            tensor = (_create_tensor(self.rank, 5, 3) * 100).to(dtype).requires_grad_(dtype.is_floating_point)
            actual = shard_utils._create_chunk_dtensor(tensor, self.rank, mesh)
            self.assertEqual((actual.dtype, actual.to_local().dtype), (dtype, dtype))
            self.assertEqual(
                (actual.requires_grad, actual.is_leaf, actual.to_local().requires_grad), (False, True, False)
            )
            self.assertEqual(actual.full_tensor(), tensor.detach(), rtol=0, atol=0)


class TestShardUtilsFourRanks(FSDPTest):
    """Five rows over four ranks (shards of 2, 2, 1 and 0), and groups of a mesh."""

    world_size = 4

    @skip_if_lt_x_gpu(4)
    def test_five_rows_over_four_ranks(self):
        """With both helpers, the last rank is empty and no row is lost."""
        tensor = _create_tensor(self.rank, 5, 3)
        sharded = shard_utils._create_chunk_sharded_tensor(tensor, self.rank, 4, devices_per_node(), dist.group.WORLD)
        check_metadata(self, sharded, tensor, [0, 1, 2, 3], self.rank)
        self.assertEqual([each.shard_sizes[0] for each in sharded.metadata().shards_metadata], [2, 2, 1])
        gathered = torch.empty_like(tensor) if self.rank == 0 else None
        sharded.gather(0, gathered)
        if gathered is not None:
            self.assertEqual(gathered, tensor, rtol=0, atol=0)

        mesh = init_device_mesh(accelerator.current().type, (4,))
        actual = shard_utils._create_chunk_dtensor(tensor, self.rank, mesh)
        self.assertEqual(len(actual.to_local()), [2, 2, 1, 0][self.rank])
        self.assertEqual(actual.to_local(), rows_of(tensor, self.rank, 4), rtol=0, atol=0, may_be="empty")
        self.assertEqual(actual.full_tensor(), tensor, rtol=0, atol=0)

    def _sharded_over_a_pair(self) -> tuple[list[int], torch.Tensor, Any]:
        """The ranks of this rank's group, a tensor that differs by group, and its shards over the group."""
        pairs = [[0, 2], [1, 3]]
        groups = [dist.new_group(ranks) for ranks in pairs]
        group = groups[self.rank % 2]
        tensor = _create_tensor(self.rank, 5, 3) + self.rank % 2
        sharded = shard_utils._create_chunk_sharded_tensor(tensor, dist.get_rank(group), 2, devices_per_node(), group)
        return pairs[self.rank % 2], tensor, sharded

    @skip_if_lt_x_gpu(4)
    def test_sharded_tensor_of_one_group(self):
        """The shards of a smaller group have placements with ranks of the whole world."""
        ranks, tensor, sharded = self._sharded_over_a_pair()
        check_metadata(self, sharded, tensor, ranks, self.rank)
        # The local shard itself has the rank within the group. Loading and DCP do not read it.
        (shard,) = sharded.local_shards()
        self.assertEqual(shard.metadata.placement.rank(), ranks.index(self.rank))
        with self.assertRaises(IndexError):  # a list of the group's length is indexed by ranks of the world
            sharded.gather(0, torch.empty_like(tensor) if self.rank == ranks[0] else None)

    @skip_if_lt_x_gpu(4)
    def test_dtensor_of_two_dimensions(self):
        """On a mesh of replicas and shards, only the last dimension cuts the tensor."""
        mesh = init_device_mesh(accelerator.current().type, (2, 2), mesh_dim_names=("replicate", "shard"))
        for size in ((5, 3), (1, 3)):
            tensor = _create_tensor(self.rank, *size)
            actual = shard_utils._create_chunk_dtensor(tensor, self.rank, mesh)
            self.assertIsInstance(actual, DTensor)
            self.assertEqual((actual.size(), actual.placements), (tensor.size(), (Replicate(), Shard(0))))
            self.assertEqual(actual.to_local(), rows_of(tensor, self.rank % 2, 2), rtol=0, atol=0, may_be="empty")
            self.assertEqual(shard_utils._all_gather_dtensor(actual, mesh), tensor, rtol=0, atol=0)
            with self.assertRaisesRegex(AssertionError, "should be a root mesh"):
                shard_utils._all_gather_dtensor(actual, mesh["shard"])


if __name__ == "__main__":
    run_tests()
