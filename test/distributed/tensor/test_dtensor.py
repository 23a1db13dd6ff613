"""What ``distribute_tensor``, ``from_local``, ``to_local``, ``full_tensor`` and ``redistribute`` promise.

Shards are even, uneven and empty. Meshes have one or two dimensions, are slices, or consist of the last ranks alone.

Expected shards follow from ``torch.chunk``, applied for one mesh dimension after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import of_all_ranks
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.fsdp.shards import chunk_of
from torch_fsdp_tests.installed_torch import torch_facts

MESHES: dict[str, Callable[[], DeviceMesh]] = {
    "1-D": lambda: make_mesh(4),
    "2-D": lambda: make_mesh(2, 2),
    "rows of 2-D": lambda: make_mesh(2, 2, names=("outer", "inner"))["inner"],
    "columns of 2-D": lambda: make_mesh(2, 2, names=("outer", "inner"))["outer"],
    "last ranks": lambda: DeviceMesh(accelerator.current().type, [2, 3]),
}
# Of a mesh dimension. The first of them is that of the mesh's first dimension.
PLACEMENTS: list[tuple[Placement, ...]] = [
    *((Shard(0), Shard(0)), (Shard(0), Replicate()), (Replicate(), Shard(1)), (Replicate(), Replicate())),
    (Shard(1), Shard(0)),
]


def local_part(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """This rank's shard of ``whole``."""
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            whole = chunk_of(whole, mesh.get_local_rank(dim), mesh.size(dim), placement.dim)
    return whole


class TestMixin(DTensorTestBase):
    world_size = 4

    def _numbers(self, rows: int, columns: int = 3) -> torch.Tensor:
        return torch.arange(1.0, rows * columns + 1, device=self.device).view(rows, columns)

    def _takes_part(self, mesh: DeviceMesh) -> bool:
        return mesh.get_coordinate() is not None

    def _sharded(self, mesh: DeviceMesh, placements: Sequence[Placement], rows: int) -> torch.Tensor:
        return distribute_tensor(self._numbers(rows), mesh, placements).requires_grad_()


class TestDistributedTensors(TestMixin):
    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(
        pairwise=True,
        mesh=list(MESHES),
        placements=PLACEMENTS,
        rows=[8, 5, 1],
        source=[0, 1, None],
        trains=[True, False],
    )
    def test_distribute(self, mesh, placements, rows, source, trains):
        """Each rank gets its shard of the source rank's tensor, or of its own if there is no source rank."""
        mesh = MESHES[mesh]()
        if not self._takes_part(mesh):
            return
        placements = placements[: mesh.ndim]
        coordinate = (source,) * mesh.ndim
        rank = self.rank if source is None else int(mesh.mesh[coordinate])
        mine = (self._numbers(rows) + 100 * self.rank).requires_grad_(trains)
        actual = distribute_tensor(mine, mesh, placements, src_data_rank=source)
        expected = local_part(self._numbers(rows) + 100 * rank, mesh, placements)
        self.assertEqual(actual.to_local(), expected, may_be="empty")
        self.assertEqual((actual.placements, actual.device_mesh), (placements, mesh))
        self.assertEqual((actual.shape, actual.stride(), actual.dtype), (mine.shape, mine.stride(), mine.dtype))
        self.assertEqual((actual.requires_grad, actual.is_leaf, mine.requires_grad), (trains, True, trains))
        if source is not None:
            self.assertEqual(actual.full_tensor(), self._numbers(rows) + 100 * rank)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(mesh=["1-D", "2-D", "columns of 2-D"], placement=[Replicate(), Shard(0), Shard(-1)])
    def test_run_check(self, mesh, placement):
        """``from_local(run_check=True)`` sends the first rank's replica along each replicated mesh dimension."""
        mesh = MESHES[mesh]()
        placements = (placement, Replicate())[: mesh.ndim]
        local = torch.full((2, 2), 1.0 + self.rank, device=self.device)
        actual = DTensor.from_local(local, mesh, placements, run_check=True)
        source = mesh.mesh
        for dim, each in enumerate(placements):
            source = source[0 if each.is_replicate() else mesh.get_local_rank(dim)]
        self.assertEqual(actual.to_local(), torch.full((2, 2), 1.0 + int(source)))
        sizes = [2, 2]
        if not placement.is_replicate():
            dim = placement.dim % 2
            sizes[dim] *= mesh.size(0)
            self.assertEqual(actual.placements[0], Shard(dim))
        self.assertEqual(list(actual.shape), sizes)

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_run_check_of_unlike_tensors(self):
        """``from_local(run_check=True)`` raises on all ranks if one has another shape or dtype."""
        for other in (torch.zeros(3, 2), torch.zeros(2, 2).double()):
            local = (other if self.rank == 1 else torch.zeros(2, 2)).to(self.device)
            with self.assertRaises((ValueError, RuntimeError)):
                DTensor.from_local(local, make_mesh(4), [Replicate()], run_check=True)

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_counted_collectives(self):
        """A ``CommDebugMode`` that is entered again counts from zero."""
        tensor, mode = self._sharded(make_mesh(4), [Shard(0)], 8), CommDebugMode()
        for _ in range(2):
            with mode:
                tensor.full_tensor()
            self.assertEqual(mode.get_total_counts(), 1)


class TestGradients(TestMixin):
    @with_comms
    @needs(torch_facts.KEEPS_PLACEMENTS_OF_UNEVEN_COLUMNS)
    @skip_if_lt_x_gpu(4)
    @subtests(pairwise=True, mesh=list(MESHES), placements=PLACEMENTS, rows=[8, 5, 1], partial=[False, True])
    def test_of_to_local(self, mesh, placements, rows, partial):
        """The gradient has the tensor's shape and placements, or those of ``grad_placements``."""
        mesh = MESHES[mesh]()
        if not self._takes_part(mesh):
            return
        placements = placements[: mesh.ndim]
        tensor = self._sharded(mesh, placements, rows)
        hints = tuple(Partial() if partial and each.is_replicate() else each for each in placements)
        local = tensor.to_local(grad_placements=hints if partial else None)
        (local * self.rank).sum().backward()
        self.assertEqual((tensor.grad.shape, tensor.grad.placements), (tensor.shape, hints))
        expected = torch.full_like(local.detach(), float(self.rank))
        self.assertEqual(tensor.grad.to_local(), expected, may_be=("empty", "zero"))

    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(pairwise=True, mesh=list(MESHES), placements=PLACEMENTS, rows=[8, 5, 1], partial=[False, True])
    def test_of_full_tensor(self, mesh, placements, rows, partial):
        """The gradient is taken as that of a replica, or is summed if ``grad_placements`` are partial."""
        mesh = MESHES[mesh]()
        if not self._takes_part(mesh):
            return
        placements = placements[: mesh.ndim]
        tensor = self._sharded(mesh, placements, rows)
        factor = 1.0 + self.rank if partial else 7.0
        (tensor.full_tensor(grad_placements=[Partial()] * mesh.ndim if partial else None) * factor).sum().backward()
        total = float(mesh.mesh.sum() + mesh.size()) if partial else 7.0
        self.assertEqual(tensor.grad.full_tensor(), torch.full((rows, 3), total))

    @with_comms
    @needs(torch_facts.TAKES_GRADIENT_PLACEMENTS_OF_LOCAL_TENSORS)
    @skip_if_lt_x_gpu(4)
    @subtests(mesh=["1-D", "rows of 2-D", "columns of 2-D"], partial=[False, True])
    def test_of_from_local(self, mesh, partial):
        """The gradient of a replica is reduced, or stays partial if ``grad_placements`` say so."""
        mesh = MESHES[mesh]()
        weight = distribute_tensor(self._numbers(3, 4), mesh, [Shard(1)])
        local = self._numbers(2).requires_grad_()
        hints = [Partial()] if partial else None
        replica = DTensor.from_local(local, mesh, [Replicate()], grad_placements=hints)
        (replica @ weight).sum().backward()
        used = weight.to_local() if partial else self._numbers(3, 4)
        self.assertEqual(local.grad, used.sum(1).expand(2, 3))

    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(mesh=["1-D", "2-D"], rows=[8, 5, 1])
    def test_of_from_local_with_a_shape(self, mesh, rows):
        """An uneven shard gets its part of the gradient."""
        mesh = MESHES[mesh]()
        placements = [Shard(0)] * mesh.ndim
        whole = self._numbers(rows)
        local = local_part(whole, mesh, placements).clone().requires_grad_()
        made = DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())
        self.assertEqual(made.full_tensor(), whole)
        (made.redistribute(placements=[Replicate()] * mesh.ndim).to_local() * whole).sum().backward()
        self.assertEqual(local.grad, local.detach(), may_be="empty")


class TestRedistribution(TestMixin):
    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(
        pairwise=True, mesh=list(MESHES), before=PLACEMENTS, after=PLACEMENTS, rows=[8, 5, 1], waits=[False, True]
    )
    def test_layouts(self, mesh, before, after, rows, waits):
        """Each rank gets its shard in the new layout, and its gradient in the old one."""
        mesh = MESHES[mesh]()
        if not self._takes_part(mesh):
            return
        before, after = before[: mesh.ndim], after[: mesh.ndim]
        tensor = self._sharded(mesh, before, rows)
        actual = tensor.redistribute(placements=after, async_op=not waits)
        self.assertEqual((actual.placements, actual.shape), (after, tensor.shape))
        self.assertEqual(actual.to_local(), local_part(self._numbers(rows), mesh, after), may_be="empty")
        (actual * distribute_tensor(self._numbers(rows), mesh, after)).sum().backward()
        self.assertEqual((tensor.grad.placements, tensor.grad.shape), (before, tensor.shape))
        self.assertEqual(tensor.grad.full_tensor(), self._numbers(rows))

    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(backward_dtype=[None, torch.bfloat16])
    def test_dtype_of_gradients(self, backward_dtype):
        """The gradient is rounded to ``backward_dtype``, and keeps the dtype of the tensor."""
        fine = 1 + 2.0**-10
        tensor = self._sharded(make_mesh(4), [Shard(0)], 4)
        made = tensor.redistribute(placements=[Replicate()], backward_dtype=backward_dtype)
        self.assertEqual(made.dtype, torch.float32)
        made.to_local().backward(torch.full((4, 3), fine, device=self.device))
        self.assertEqual(tensor.grad.dtype, torch.float32)
        expected = torch.full((4, 3), 1.0 if backward_dtype else fine)
        self.assertEqual(tensor.grad.full_tensor(), expected, rtol=0, atol=0)


def _partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the weight of the first layer alone."""
    if name == "0":
        weight: Any = module.weight
        sharded = distribute_tensor(weight, mesh, [Shard(0)])
        module.register_parameter("weight", nn.Parameter(sharded, requires_grad=weight.requires_grad))


class TestModules(TestMixin):
    @with_comms
    @needs(torch_facts.REPLICAS_KEEP_REQUIRES_GRAD)
    @skip_if_lt_x_gpu(4)
    @subtests(mesh=["1-D", "rows of 2-D"], partition=[None, _partition], frozen=[False, True])
    def test_distribute_module(self, mesh, partition, frozen):
        """All parameters and buffers become DTensors of the first rank's values. Frozen ones stay frozen.

        A buffer that is not in the state dict stays out of it.
        """
        mesh = MESHES[mesh]()
        first = int(mesh.mesh[0])
        model, plain = (
            filled(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), seed=seed).to(self.device)
            for seed in (self.rank, first)
        )
        for each, seed in ((model, self.rank), (plain, first)):
            each[1].running_mean.fill_(1.0 + seed)
            each[0].register_buffer("cache", torch.full((2,), 3.0 + seed, device=self.device), persistent=False)
        for param in model.parameters():
            param.requires_grad_(not frozen)
        distribute_module(model, mesh, partition)
        self.assertEqual({name: value.full_tensor() for name, value in model.state_dict().items()}, plain.state_dict())
        self.assertEqual(model[0].cache.full_tensor(), plain[0].cache)
        is_sharded = {name for name, value in model.state_dict().items() if value.placements == (Shard(0),)}
        self.assertEqual(is_sharded, {"0.weight"} if partition else set(), may_be="empty")
        self.assertEqual([param.requires_grad for param in model.parameters()], [not frozen] * 4)

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_inputs_and_outputs(self):
        """``input_fn`` and ``output_fn`` convert the inputs and the output."""
        mesh = make_mesh(4)
        model = filled(nn.Linear(3, 4)).to(self.device)
        expected = model(self._numbers(2)).detach().cpu()
        distribute_module(
            model,
            mesh,
            lambda name, module, mesh: _partition("0", module, mesh),
            lambda module, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Replicate()]),
            lambda module, outputs, mesh: outputs.to_local(),
        )
        self.assertEqual(torch.cat(of_all_ranks(model(self._numbers(2)).detach().cpu()), 1), expected)


if __name__ == "__main__":
    run_tests()
