"""The rows of a tensor on each rank if FSDP shards a parameter that TP has sharded before.

The expected rows follow from ``torch.chunk``: TP takes its chunk of the full tensor, and FSDP takes its chunk of the TP
shard.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import local_map
from torch.nn import functional as F

from torch_fsdp_tests.common_distributed import MultiProcessTestCase, at_most, needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.distributed.fake_pg import FakeStore
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.fsdp.shards import by_hand, chunk_of, strided
from torch_fsdp_tests.installed_torch import torch_facts


class LayoutMixin(DTensorTestBase):
    def _check_layout(self, shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
        """Check the local shape and offsets that PyTorch computes. The offset of an empty dimension is ignored."""
        expected = by_hand(shape, mesh, placements)
        local_shape, offsets = internals.local_shape_and_offsets(torch.Size(shape), mesh, placements)
        self.assertEqual(tuple(local_shape), tuple(map(len, expected)), f"shape of {shape} as {placements}")
        for indices, offset in zip(expected, offsets, strict=True):
            if indices:
                self.assertEqual(offset, indices[0], f"offset in {shape} as {placements}")


class UtilTest(LayoutMixin):
    world_size = at_most(8)
    power_of_two_ranks = True

    @with_comms
    @skip_if_lt_x_gpu(2)
    def test_fsdp_tp_meta_compute(self):
        """With two TP ranks, each has half of the rows, and FSDP shards this half."""
        mesh = make_mesh(self.world_size // 2, 2, names=("dp", "tp"))
        placements = [strided(0, 2), Shard(0)]
        shape, offsets = internals.local_shape_and_offsets(torch.Size([2 * self.world_size, 2]), mesh, placements)
        self.assertEqual(tuple(shape), (2, 2))
        first_row = 2 * (mesh.get_local_rank("tp") * mesh.size(0) + mesh.get_local_rank("dp"))
        self.assertEqual(tuple(offsets), (first_row, 0))

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_hsdp_tp_meta_compute(self):
        """With HSDP and TP, each replica has all rows, each TP rank has a block of them, and FSDP shards this block."""
        mesh = make_mesh(2, 2, self.world_size // 4, names=("replicate", "shard", "tp"))
        placements = [Replicate(), strided(0, mesh.size(2)), Shard(0)]
        shape, offsets = internals.local_shape_and_offsets(torch.Size([2 * self.world_size, 2]), mesh, placements)
        self.assertEqual(tuple(shape), (4, 2))
        first_row = 4 * (mesh.get_local_rank("tp") * mesh.size(1) + mesh.get_local_rank("shard"))
        self.assertEqual(tuple(offsets), (first_row, 0))

    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(dim=[0, 1])
    def test_strided_sharding_assumption_in_meta_compute(self, dim):
        """Local shapes and offsets are right if other mesh dimensions shard before, between or after the strided ones,
        in either tensor dimension, and with even and uneven sizes.
        """
        other = 1 - dim
        plane, cube = make_mesh(2, self.world_size // 2), make_mesh(2, 2, self.world_size // 4)
        deep, wide = make_mesh(2, 2, self.world_size // 4, 1), make_mesh(2, 1, 2, self.world_size // 4)
        cases: list[tuple[DeviceMesh, list[Placement]]] = [
            (plane, [strided(dim, plane.size(1)), Shard(dim)]),
            (plane, [Shard(dim), Shard(dim)]),
            (cube, [strided(dim, cube.size(1)), Shard(dim), Shard(other)]),
            (cube, [strided(dim, cube.size(2)), Shard(other), Shard(dim)]),
            (cube, [Shard(other), strided(dim, cube.size(2)), Shard(dim)]),
            (deep, [strided(dim, 2 * deep.size(2)), strided(dim, deep.size(2)), Shard(dim), Shard(other)]),
            (wide, [strided(dim, wide.size(3)), strided(other, wide.size(2)), Shard(other), Shard(dim)]),
        ]
        for mesh, placements in cases:
            # With two strided placements of one tensor dimension, the order of uneven rows is not defined.
            for shape in ((16, 24), (13, 11)) if mesh is not deep else ((16, 24), (24, 16)):
                self._check_layout(shape, mesh, placements)


class Test2DStridedLocalShard(LayoutMixin):
    world_size = 4

    def _whole(self) -> torch.Tensor:
        return torch.arange(8.0, device=self.device).view(4, 2)

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_fsdp1_tp_2d_dtensor_local_shards_and_offsets(self):
        """FSDP1 redistributes rows with an all-gather, so that rank i has row i."""
        mesh = make_mesh(2, 2, names=("dp", "tp"))
        cut = distribute_tensor(self._whole(), mesh["tp"], [Shard(0)])
        extension = internals.tensor_parallel_fsdp.DTensorExtensions(device_handle=None)
        with CommDebugMode() as communication:
            actual = extension.chunk_dtensor(cut, self.rank, mesh["dp"])
        self.assertEqual(dict(communication.get_comm_counts()), {torch.ops.c10d_functional.all_gather_into_tensor: 1})
        self.assertEqual((actual.device_mesh, actual.placements), (mesh, (Shard(0), Shard(0))))
        self.assertEqual(actual.to_local(), self._whole()[self.rank : self.rank + 1])
        self.assertEqual(actual.full_tensor(), self._whole())
        shape, offsets = internals.local_shape_and_offsets(actual.shape, mesh, actual.placements)
        self.assertEqual((tuple(shape), tuple(offsets)), ((1, 2), (self.rank, 0)))

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_fsdp2_tp_2d_dtensor_local_shards_and_offsets(self):
        """FSDP2 does not communicate: it shards the rows that the TP rank already has."""
        mesh = make_mesh(2, 2, names=("dp", "tp"))
        module = nn.Module()
        module.weight = nn.Parameter(distribute_tensor(self._whole(), mesh["tp"], [Shard(0)]))
        with CommDebugMode() as communication:
            fully_shard(module, mesh=mesh["dp"])
        self.assertEqual(communication.get_total_counts(), 0)
        actual: Any = module.weight
        self.assertEqual((actual.device_mesh, actual.placements), (mesh, (strided(0, 2), Shard(0))))
        row = 2 * mesh.get_local_rank("tp") + mesh.get_local_rank("dp")
        self.assertEqual(actual.to_local(), self._whole()[row : row + 1])
        self.assertEqual(actual.full_tensor(), self._whole())
        shape, offsets = internals.local_shape_and_offsets(actual.shape, mesh, actual.placements)
        self.assertEqual((tuple(shape), tuple(offsets)), ((1, 2), (row, 0)))

    @needs(torch_facts.GATHERS_UNEVEN_STRIDED_SHARDS)
    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(mesh_shape=[(2, 2), (1, 4), (4, 1), (1, 2, 2), (2, 1, 2)])
    def test_rows_of_fully_shard(self, mesh_shape):
        """For 1 to 17 rows, ``fully_shard`` gives each rank the rows that ``by_hand`` predicts."""
        names = ("replicate", "shard", "tp")[-len(mesh_shape) :]
        mesh = make_mesh(*mesh_shape, names=names)
        wholes = [torch.arange(1.0, rows + 1, device=self.device).view(rows, 1) for rows in range(1, 18)]
        module = nn.ParameterList(nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)])) for whole in wholes)
        module.forward = lambda: None  # fully_shard rejects a list without a forward
        fully_shard(module, mesh=mesh[names[:-1]])
        for whole, param in zip(wholes, module.parameters(), strict=True):
            self.assertIsInstance(param, DTensor)
            rows, _ = by_hand(tuple(whole.shape), mesh, param.placements)
            self.assertEqual(param.to_local().flatten().tolist(), [row + 1.0 for row in rows], may_be="empty")
            self._check_layout(tuple(whole.shape), mesh, param.placements)
            self.assertEqual(param.full_tensor(), whole)


class TestRowsInFakeWorlds(MultiProcessTestCase):
    """All ranks of meshes of many shapes, simulated one by one in one process with the fake backend."""

    world_size = 1

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _check_partition(self, mesh_shape: tuple[int, ...], placements: Sequence[Placement]) -> None:
        """For 1 to 17 rows, each rank has the expected elements, and each element is on exactly one rank of a replica.

        The size of the tensor's second dimension is that of the last mesh dimension.
        """
        shapes = [(rows, mesh_shape[-1]) for rows in range(1, 18)]
        found: dict[tuple[int, int], list[tuple[int, ...]]] = {shape: [] for shape in shapes}
        for rank in range(torch.Size(mesh_shape).numel()):
            dist.init_process_group("fake", rank=rank, world_size=torch.Size(mesh_shape).numel(), store=FakeStore())
            mesh = make_mesh(*mesh_shape)
            for shape in shapes:
                sizes, offsets = internals.local_shape_and_offsets(torch.Size(shape), mesh, placements)
                mine = [list(range(offset, offset + size)) for offset, size in zip(offsets, sizes, strict=True)]
                if all(mine):
                    self.assertEqual(mine, by_hand(shape, mesh, placements), f"{shape}, rank {rank} of {mesh_shape}")
                if placements[0] != Replicate() or mesh.get_local_rank(0) == 0:
                    found[shape] += itertools.product(*mine)
            dist.destroy_process_group()
        for shape, elements in found.items():
            self.assertEqual(sorted(elements), list(itertools.product(*map(range, shape))), f"{shape} on {mesh_shape}")

    def _check_partitions(self, sizes: Sequence[int]) -> None:
        """Check meshes with these numbers of FSDP ranks: with TP, with HSDP and TP, with expert parallelism and TP."""
        for shard, tp in itertools.product(sizes, range(1, 5)):
            self._check_partition((shard, tp), [strided(0, tp), Shard(0)])
        for shard, tp in itertools.product(sizes, (1, 2)):
            self._check_partition((2, shard, tp), [Replicate(), strided(0, tp), Shard(0)])
        # Expert parallelism shards the dimension of the experts, and TP shards each expert.
        for shard, ep, tp in itertools.product(sizes, (1, 2, 3), (1, 2)):
            self._check_partition((shard, ep, tp), [strided(0, ep), Shard(0), Shard(1)])

    def test_each_row_lies_on_one_rank(self):
        self._check_partitions([1, 2])

    def test_each_row_lies_on_one_of_more_ranks(self):
        """With three or more FSDP ranks, a rank can have an empty shard of one TP shard and not of another."""
        with torch_defect("dtensor_checkpoint_loses_uneven_rows_with_tp"):
            self._check_partitions([3, 4])


class TestCheckpointOfUnevenRows(DTensorTestBase):
    """DCP uses the computed offsets to place each local shard in the full tensor."""

    world_size = 6

    @with_comms
    @skip_if_lt_x_gpu(6)
    @with_temp_dir
    def test_rows_come_back(self):
        """Rows are saved and loaded if three FSDP ranks shard a TP shard of 4 rows and one of 3 rows."""
        mesh = make_mesh(3, 2, names=("dp", "tp"))
        module = nn.Module()
        whole = torch.arange(7.0, device=self.device).view(7, 1)
        module.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)]))
        fully_shard(module, mesh=mesh["dp"])
        local = module.weight.to_local().detach()
        expected = local.clone()
        dcp.save(module.state_dict(), checkpoint_id=self.temp_dir)
        local.fill_(-1)
        dcp.load(module.state_dict(), checkpoint_id=self.temp_dir)
        with torch_defect("dtensor_checkpoint_loses_uneven_rows_with_tp"):
            self.assertEqual(local, expected, may_be="empty")

    @with_comms
    @skip_if_lt_x_gpu(6)
    @with_temp_dir
    def test_more_rows_can_be_saved(self):
        """Rows are saved and loaded if three FSDP ranks shard a TP shard of 7 rows and one of 6 rows."""
        mesh = make_mesh(3, 2, names=("dp", "tp"))
        module = nn.Module()
        whole = torch.arange(13.0, device=self.device).view(13, 1)
        module.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)]))
        fully_shard(module, mesh=mesh["dp"])
        local = module.weight.to_local().detach()
        expected = local.clone()
        with torch_defect("dtensor_checkpoint_of_uneven_rows_with_tp_raises"):
            dcp.save(module.state_dict(), checkpoint_id=self.temp_dir)
            local.fill_(-1)
            dcp.load(module.state_dict(), checkpoint_id=self.temp_dir)
        self.assertEqual(local, expected, may_be="empty")


class TestLocalMap(DTensorTestBase):
    world_size = 2

    @with_comms
    @skip_if_lt_x_gpu(2)
    @subtests(rows=[4, 5, 1])
    def test_result_has_the_shape_of_the_parameter(self, rows):
        """The result of ``local_map`` has the global shape of its argument, also with uneven shards."""
        plain = filled(nn.Linear(2, rows, bias=False)).to(self.device)
        weight = fully_shard(copy.deepcopy(plain)).weight.detach()
        placements = list(weight.placements)
        double = local_map(
            lambda shard: 2 * shard, placements, in_placements=(placements,), device_mesh=weight.device_mesh
        )
        with torch_defect("dtensor_local_map_of_uneven_shards_has_wrong_shape", when=rows % 2 == 1):
            self.assertEqual(double(weight).shape, plain.weight.shape)
            self.assertEqual(double(weight).full_tensor(), 2 * plain.weight)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @subtests(is_decorator=[False, True])
    def test_gradient_placements(self, is_decorator):
        """``in_grad_placements`` says that the gradient of a replicated weight is a partial sum over the rows."""
        mesh, rows = make_mesh(2), torch.arange(8.0, device=self.device).view(4, 2)
        plain = filled(nn.Linear(2, 3, bias=False)).to(self.device)
        weight = distribute_tensor(plain.weight.detach(), mesh, [Replicate()]).requires_grad_()
        arguments = {
            "out_placements": [Shard(0)],
            "in_placements": ([Shard(0)], [Replicate()]),
            "in_grad_placements": ([Shard(0)], [Partial()]),
            "device_mesh": mesh,
        }
        call = local_map(**arguments)(F.linear) if is_decorator else local_map(F.linear, **arguments)
        output = call(distribute_tensor(rows, mesh, [Shard(0)]), weight)
        self.assertEqual(output.full_tensor(), plain(rows))
        output.square().sum().backward()
        plain(rows).square().sum().backward()
        self.assertEqual(weight.grad.full_tensor(), plain.weight.grad)


class TestRedistribute(DTensorTestBase):
    world_size = 2

    @with_comms
    @skip_if_lt_x_gpu(2)
    @subtests(placement=[Replicate(), Shard(0), Shard(1)])
    def test_dtypes(self, placement):
        """``redistribute`` converts a weight to ``forward_dtype``, and its gradient back to the weight's dtype."""
        plain = filled(nn.Linear(4, 4, bias=False)).to(self.device)
        weight = fully_shard(copy.deepcopy(plain)).weight
        low = weight.redistribute(placements=[placement], forward_dtype=torch.bfloat16)
        self.assertEqual((low.dtype, low.to_local().dtype), (torch.bfloat16,) * 2)
        self.assertEqual(low.placements, (placement,))
        self.assertEqual(low.full_tensor(), plain.weight.bfloat16())
        (3 * low).sum().backward()
        self.assertEqual((weight.grad.dtype, weight.grad.to_local().dtype), (torch.float32,) * 2)
        self.assertEqual(weight.grad.full_tensor(), torch.full((4, 4), 3.0))

    @with_comms
    @needs(torch_facts.KEEPS_PARTIAL)
    @skip_if_lt_x_gpu(2)
    def test_partial(self):
        """A tensor that is partial may stay so. No other tensor can become partial."""
        mesh = make_mesh(self.world_size)
        partial = DTensor.from_local(torch.full((2,), 1.0 + self.rank, device=self.device), mesh, [Partial()])
        self.assertEqual(partial.redistribute(placements=[Partial()]).full_tensor(), torch.full((2,), 3.0))
        with self.assertRaisesRegex(RuntimeError, "Can not redistribute .*to P"):
            partial.redistribute(placements=[Replicate()]).redistribute(placements=[Partial()])

    @with_comms
    @skip_if_lt_x_gpu(2)
    @subtests(reduce_op=["sum", "avg"], rows=[4, 3])
    def test_partial_becomes_sharded(self, reduce_op, rows):
        """Each rank gets its rows of the reduced tensor."""
        mesh, rows_of_rank = make_mesh(self.world_size), torch.arange(2.0 * rows, device=self.device).view(rows, 2)
        partial = DTensor.from_local((1.0 + self.rank) * rows_of_rank, mesh, [Partial(reduce_op)])
        sharded = partial.redistribute(placements=[Shard(0)])
        reduced = {"sum": 3.0, "avg": 1.5}[reduce_op] * rows_of_rank
        self.assertEqual(sharded.placements, (Shard(0),))
        self.assertEqual(sharded.to_local(), chunk_of(reduced, self.rank, self.world_size))


class TestRedistributeTo2D(DTensorTestBase):
    world_size = 4

    @with_comms
    @needs(torch_facts.VIEWS_SHARDED_DIMS_AS_ONE)
    @skip_if_lt_x_gpu(4)
    @subtests(shape=[(32,), (8, 4)])
    def test_update_of_a_sharded_view(self, shape):
        """An update in place shards the other tensor like a view that has joined sharded dimensions."""
        mesh, plain = make_mesh(2, 2, names=("outer", "inner")), torch.arange(32.0, device=self.device)
        view = distribute_tensor(plain.view(2, 4, 4), mesh, [Shard(1), Shard(2)]).reshape(shape)
        placements = view.placements
        view.add_(distribute_tensor(10 * plain.view(shape), mesh, [Replicate()] * 2))
        self.assertEqual(view.placements, placements)
        self.assertEqual(view.full_tensor(), 11 * plain.view(shape))

    @with_comms
    @needs(torch_facts.NORMALIZES_STRIDED_DIMS)
    @skip_if_lt_x_gpu(4)
    def test_negative_strided_dims(self):
        """They count from the last dimension of the tensor, as other sharded dimensions do."""
        mesh, plain = make_mesh(2, 2, names=("outer", "inner")), torch.arange(16.0, device=self.device).view(4, 4)
        whole = distribute_tensor(plain, mesh, [Replicate()] * 2)
        sharded = whole.redistribute(placements=[Shard(-1), strided(-2, 2)])
        self.assertEqual(sharded.placements, (Shard(1), strided(0, 2)))
        columns = plain.chunk(2, dim=1)[mesh.get_local_rank("outer")]
        self.assertEqual(sharded.to_local(), columns[mesh.get_local_rank("inner") :: 2])


class TestDistribute(DTensorTestBase):
    world_size = 2

    @with_comms
    @skip_if_lt_x_gpu(2)
    @subtests(placements=[(Shard(0), Shard(-1)), (Replicate(), Shard(-2)), (Shard(-1), Shard(0))])
    def test_negative_dims(self, placements):
        """They count from the last dimension of the tensor, on each mesh dimension."""
        mesh = make_mesh(1, self.world_size, names=("outer", "inner"))
        plain = torch.arange(8.0, device=self.device).reshape(4, 2)
        sharded = distribute_tensor(plain, mesh, placements)
        dim = placements[1].dim % 2
        self.assertEqual(sharded.placements[1], Shard(dim))
        self.assertEqual(sharded.to_local(), plain.chunk(2, dim)[self.rank])
        again = sharded.redistribute(placements=[Replicate()] * 2).redistribute(placements=placements)
        self.assertEqual((again.placements, again.to_local()), (sharded.placements, sharded.to_local()))

    @with_comms
    @skip_if_lt_x_gpu(2)
    def test_meta_tensor(self):
        """``distribute_tensor`` keeps a tensor on the meta device."""
        made = distribute_tensor(torch.empty(4, 2, device="meta"), make_mesh(self.world_size), [Shard(0)])
        self.assertEqual((made.shape, made.to_local().shape, made.is_meta), ((4, 2), (2, 2), True))

    @with_comms
    @skip_if_lt_x_gpu(2)
    def test_shape_and_stride_of_local_shards(self):
        """``from_local`` takes a shape and a stride together, for example of uneven shards, but not one of them."""
        mesh, plain = make_mesh(self.world_size), torch.arange(6.0, device=self.device).view(3, 2)
        local = chunk_of(plain, self.rank, self.world_size)
        layout: dict[str, Any] = {"shape": plain.shape, "stride": plain.stride()}
        self.assertEqual(DTensor.from_local(local, mesh, [Shard(0)], **layout).full_tensor(), plain)
        for name, value in layout.items():
            with self.assertRaisesRegex(RuntimeError, "pass both shape and stride at the same time"):
                DTensor.from_local(local, mesh, [Shard(0)], **{name: value})

    @with_comms
    @skip_if_lt_x_gpu(2)
    def test_module_without_parameters(self):
        """``distribute_module`` replicates the buffers of a module without parameters."""
        module: Any = nn.Module()
        module.register_buffer("steps", torch.ones(2, device=self.device))
        distribute_module(module, make_mesh(self.world_size))
        self.assertEqual(module.steps.placements, (Replicate(),))

    @with_comms
    @skip_if_lt_x_gpu(2)
    def test_module_only_once(self):
        mesh = make_mesh(self.world_size)
        model = distribute_module(nn.Linear(4, 4, device=self.device), mesh)
        with self.assertRaisesRegex(RuntimeError, "should only be called once on a module"):
            distribute_module(model, mesh)


if __name__ == "__main__":
    run_tests()
