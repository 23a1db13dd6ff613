"""FSDP2 over some dimensions of a mesh on which the parameters are already DTensors (``dp_mesh_dims``).

Training equals data parallelism over the named dimensions, whatever the other dimensions do. The sharded parameters
have the right placements. Invalid combinations are rejected.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import math
import unittest
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_fsdp_tests.common_distributed import at_most, needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_distributed.requirements import skip_unless
from torch_fsdp_tests.common_fsdp import MLP, FSDPTest
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import NO_DEFECT, torch_defect
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.optimizers import ShardAdam
from torch_fsdp_tests.fsdp.references import average_gradients, full
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.fsdp.training import take_step
from torch_fsdp_tests.installed_torch import torch_facts, torch_names

needs_dp_mesh_dims = needs(torch_facts.HAS_DP_MESH_DIMS)
TP_DIM = {"in_proj": 0, "out_proj": 1}  # of the weights
_names = itertools.count()


class Case(NamedTuple):
    """The sizes and roles of a mesh's dimensions, and how the model is wrapped."""

    shape: tuple[int, ...]
    shard: tuple[int, ...] = ()
    replicate: tuple[int, ...] = ()
    tp: bool = False  # on the last dimension
    reshard_after_forward: bool = True
    with_replicate: bool = False  # wrap with replicate_with_fsdp, not with fully_shard
    tp_dims_differ: bool = True  # FSDP and tensor parallelism shard different dimensions of a weight


class Training(NamedTuple):
    """How :meth:`TestFullyShardDTensor._run_train_parity` trains."""

    optim_cls: Any = ShardAdam
    mlp_dim: int = 16
    num_iters: int = 5


def mesh_dims(**names: Any) -> Any:
    """The names of the mesh dimensions over which FSDP shards and replicates."""
    return torch_names.module("torch.distributed.fsdp").DataParallelMeshDims(**names)


def _tp_partition_fn(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the weight of a linear layer over the last mesh dimension. Replicate everything else."""
    layer = name.rpartition(".")[2]
    for param_name, param in list(module.named_parameters(recurse=False)):
        sharded = isinstance(module, nn.Linear) and param_name == "weight"
        last = Shard(TP_DIM[layer]) if sharded else Replicate()
        placements = [Replicate()] * (mesh.ndim - 1) + [last]
        setattr(module, param_name, nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))


def _tp_shard_fn(param: nn.Parameter) -> Shard:
    """Shard the dimension that tensor parallelism does not shard."""
    return Shard(1 if Shard(0) in param.placements else 0)


class Collectives(TorchDispatchMode):
    """Counts the collectives of FSDP and of DTensor by (name of the operation, name of its group)."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor goes first and calls this again with local tensors
        if func.namespace == "c10d":
            script_objects = (arg for arg in args if isinstance(arg, torch.ScriptObject))
            groups = [dist.ProcessGroup.unbox(each) for each in script_objects if "ProcessGroup" in str(each._type())]
            self.counts[func.overloadpacket.__name__, groups[0].group_name] += 1
        elif func.namespace == "_c10d_functional" and isinstance(args[-1], str):  # others only wait or wrap
            self.counts[func.overloadpacket.__name__, args[-1]] += 1
        return func(*args, **(kwargs or {}))


@needs_dp_mesh_dims
class TestFullyShardDTensor(FSDPTest):
    world_size = at_most(4)
    power_of_two_ranks = True

    @functools.cached_property
    def world_mesh(self) -> DeviceMesh:
        return make_mesh(self.world_size, names=("world",))

    @functools.cached_property
    def named_mesh(self) -> DeviceMesh:
        return self._new_named_mesh()

    def _new_named_mesh(self) -> DeviceMesh:
        return make_mesh(2, self.world_size // 2, names=("fsdp", "tp"))

    def _mesh(self, *shape: int) -> DeviceMesh:
        """The world mesh in another shape. All shapes of the world need different dimension names."""
        return self.world_mesh._unflatten(0, shape, tuple(f"d{next(_names)}" for _ in shape))

    def _dims(self, mesh: DeviceMesh, shard: tuple[int, ...] = (), replicate: tuple[int, ...] = ()) -> Any:
        """Convert indices of mesh dimensions to names. A single dimension becomes a plain string."""

        def names(dims: tuple[int, ...]) -> str | tuple[str, ...] | None:
            found = tuple(mesh.mesh_dim_names[dim] for dim in dims)
            return found[0] if len(found) == 1 else found or None

        return mesh_dims(shard=names(shard), replicate=names(replicate))

    def _mlp(self, dim: int = 16) -> MLP:
        manual_seed(42)
        return MLP(dim, self.device)

    def _mlp_of_signs(self) -> MLP:
        """An MLP that is exact in bfloat16: each input feeds four hidden features, and each of these one output."""
        model = self._mlp()
        with torch.no_grad():
            for weight in (model.in_proj.weight, model.out_proj.weight.t()):
                ones = torch.eye(16).repeat(4, 1)[torch.randperm(64)]
                weight.copy_(ones * torch.tensor([1, 1, -1, 1]).repeat(16).unsqueeze(1))
            for bias in (model.in_proj.bias, model.out_proj.bias):
                bias.copy_(torch.randint(0, 2, bias.shape))
        return model

    def _distributed(self, model: nn.Module, mesh: DeviceMesh, tp: bool = False) -> nn.Module:
        return distribute_module(model, mesh, _tp_partition_fn if tp else None)

    def _replicated(self, rows: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        """This rank's rows as a "replicated" DTensor, although the rows differ between dp ranks."""
        return DTensor.from_local(rows, mesh, [Replicate()] * mesh.ndim, run_check=False)

    def _wrapped(self, model: nn.Module, mesh: DeviceMesh, case: Case, **kwargs: Any) -> nn.Module:
        """Wrap one layer as a group, and the rest as another group."""
        kwargs |= {"mesh": mesh, "dp_mesh_dims": self._dims(mesh, case.shard, case.replicate)}
        wrap: Callable = fully_shard
        if case.with_replicate:
            wrap = torch_names.module("torch.distributed._composable.replicate_with_fsdp").replicate
        elif case.shard:
            kwargs["reshard_after_forward"] = case.reshard_after_forward
        if case.tp and case.shard and case.tp_dims_differ:
            kwargs["shard_placement_fn"] = _tp_shard_fn
        wrap(model.out_proj, **kwargs)
        return wrap(model, **kwargs)

    def _dp_group(self, mesh: DeviceMesh, case: Case) -> dist.ProcessGroup:
        """The ranks with different data: the whole mesh, or with tensor parallelism all dimensions but the last."""
        if not case.tp:
            return dist.group.WORLD
        return make_mesh(self.world_size // case.shape[-1], case.shape[-1]).get_group(0)

    def _run_train_parity(
        self, ref_model: MLP, model: nn.Module, mesh: DeviceMesh, dp_pg: dist.ProcessGroup, training: Training
    ) -> None:
        """Train both models. The reference is a plain module whose gradients are averaged over ``dp_pg``."""
        optims = [training.optim_cls(each.parameters(), lr=1e-2, foreach=False) for each in (ref_model, model)]
        ref_params = dict(ref_model.named_parameters())
        manual_seed(42 + dist.get_rank(dp_pg) + 1)
        ref_losses = []
        for step in range(training.num_iters):
            rows = torch.rand((2, training.mlp_dim), device=self.device)
            # The loss is the distance to 1. A plain sum would soon be at its minimum, with no active ReLU.
            ref_loss = (ref_model(rows) - 1).square().sum()
            loss = (model(self._replicated(rows, mesh)) - 1).square().sum()
            ref_losses.append(ref_loss)
            self.assertEqual(loss.full_tensor(), ref_loss)
            ref_loss.backward()
            loss.backward()
            average_gradients(ref_model, dp_pg)
            for name, param in model.named_parameters():
                ref_grad = ref_params[name].grad
                self.assertGreater(ref_grad.abs().max().item(), 0)
                self.assertEqual(param.grad.full_tensor(), ref_grad, name)
            take_step(optims, set_to_none=step % 2 == 0)
        check_losses(ref_losses)
        for name, param in model.named_parameters():
            self.assertEqual(param.full_tensor(), ref_params[name], name)

    @skip_if_lt_x_gpu(2)
    def test_dtensor_train_parity(self):
        """The optimizer steps on DTensors in the first four cases, and on local shards in the others.

        Two ranks run only the cases with one mesh dimension.
        """
        cases = [
            Case((self.world_size,), shard=(0,)),
            Case((2, 2), shard=(0, 1)),
            Case((1, 2, 2), replicate=(0,), shard=(1,), tp=True),
            Case((2, 1, 2), shard=(0, 1), tp=True),
        ]
        self.run_subtests({"case": self._that_fit(cases)}, self._test_dtensor_train_parity, Training(torch.optim.Adam))
        cases = [
            Case((self.world_size,), shard=(0,), reshard_after_forward=False),
            Case((self.world_size,), replicate=(0,)),
            Case((self.world_size,), replicate=(0,), with_replicate=True),
            Case((2, 2), shard=(1,), replicate=(0,)),
            Case((2, 2), shard=(0,), tp=True),
            Case((2, 2), shard=(0,), tp=True, reshard_after_forward=False),
            Case((1, 2, 2), replicate=(0, 1), shard=(2,)),
        ]
        self.run_subtests({"case": self._that_fit(cases)}, self._test_dtensor_train_parity, Training())

    def _that_fit(self, cases: list[Case]) -> list[Case]:
        return [case for case in cases if math.prod(case.shape) == self.world_size]

    def _test_dtensor_train_parity(self, training: Training, case: Case) -> None:
        mesh, ref_model = self._mesh(*case.shape), self._mlp(training.mlp_dim)
        model = self._wrapped(self._distributed(copy.deepcopy(ref_model), mesh, case.tp), mesh, case)
        self._run_train_parity(ref_model, model, mesh, self._dp_group(mesh, case), training)

    @skip_if_lt_x_gpu(4)
    def test_dtensor_train_parity_more(self):
        """Uneven sizes, mesh dimensions in another order, and FSDP within a TP shard."""
        cases = [
            Case((4,), shard=(0,)),
            Case((2, 2), shard=(0,), replicate=(1,)),
            Case((2, 2), shard=(0, 1)),
            Case((2, 1, 2), replicate=(0,), shard=(1,), tp=True),
            Case((2, 2, 1), replicate=(0,), shard=(1, 2)),
            Case((2, 2), replicate=(0,), tp=True),
            Case((2, 2), shard=(0,), tp=True, tp_dims_differ=False),
        ]
        self.run_subtests({"case": cases}, self._test_dtensor_train_parity, Training(mlp_dim=15, num_iters=3))

    @skip_if_lt_x_gpu(2)
    def test_sharded_param_correctness_1d(self):
        mesh = make_mesh(self.world_size, names=("fsdp",))
        whole = self._mlp().state_dict()
        model = fully_shard(self._distributed(self._mlp(), mesh), mesh=mesh, dp_mesh_dims=mesh_dims(shard="fsdp"))
        for name, param in model.named_parameters():
            self.assertIsInstance(param, DTensor)
            self.assertIs(param.device_mesh, mesh)
            self.assertEqual(param.placements, (Shard(0),))
            self.assertEqual(param.to_local(), whole[name].chunk(self.world_size)[self.rank])

    @skip_if_lt_x_gpu(2)
    def test_fsdp_tp_dtensor_sharded_params(self):
        mesh = self.named_mesh
        model = self._distributed(self._mlp(), mesh, tp=True)
        dims = mesh_dims(shard="fsdp")
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims, shard_placement_fn=_tp_shard_fn)
        expected = {
            "in_proj.weight": (Shard(1), Shard(0)),
            "in_proj.bias": (Shard(0), Replicate()),
            "out_proj.weight": (Shard(0), Shard(1)),
            "out_proj.bias": (Shard(0), Replicate()),
        }
        whole = self._mlp().state_dict()
        self.assertEqual({name: param.placements for name, param in model.named_parameters()}, expected)
        for name, param in model.named_parameters():
            self.assertIs(param.device_mesh, mesh)
            local = whole[name]
            for dim, placement in enumerate(expected[name]):
                if isinstance(placement, Shard):
                    local = local.chunk(mesh.size(dim), placement.dim)[mesh.get_local_rank(dim)]
            self.assertEqual(param.to_local(), local, name)

    @skip_if_lt_x_gpu(2)
    @subtests(on_whole_mesh=[False, True])
    def test_reduce_scatter_unused_dtensor_param(self, on_whole_mesh):
        """The unused parameter is on the expert mesh or on the whole mesh."""

        class Experts(nn.Module):
            def forward(self, x: DTensor) -> DTensor:
                return x @ self.used.t()

        mesh = make_mesh(self.world_size // 2, 2, names=("dp", "ep"))
        param_mesh, placements = (mesh, [Replicate(), Shard(0)]) if on_whole_mesh else (mesh["ep"], [Shard(0)])
        manual_seed(42)
        model, ref_model = Experts(), Experts()
        for name in ("used", "unused"):
            whole = torch.rand(8, 4, device=self.device)
            ref_model.register_parameter(name, nn.Parameter(whole.clone()))
            model.register_parameter(name, nn.Parameter(distribute_tensor(whole, param_mesh, placements)))
        on = {"mesh": mesh, "dp_mesh_dims": mesh_dims(shard="dp")} if on_whole_mesh else {"mesh": mesh["dp"]}
        fully_shard(model, reshard_after_forward=True, **on)
        model.set_reduce_scatter_unused_params(True)
        all_rows = torch.rand(mesh.size(0), 3, 4, device=self.device)  # for each dp rank
        rows = all_rows[mesh.get_local_rank("dp")]
        model(self._replicated(rows, param_mesh)).square().sum().backward()
        (ref_model(all_rows).square().sum() / mesh.size(0)).backward()
        self.assertEqual(model.used.grad.full_tensor(), ref_model.used.grad)
        self.assertIsInstance(model.unused.grad, DTensor)
        self.assertEqual(model.unused.grad.placements, model.unused.placements)
        self.assertEqual(model.unused.grad.full_tensor(), torch.zeros(8, 4, device=self.device), may_be="zero")

    @skip_if_lt_x_gpu(2)
    def test_validation_non_replicate_dp_placement(self):
        mesh = self.named_mesh
        for role in ("shard", "replicate"):
            model = nn.Linear(8, 8, bias=False, device=self.device)
            model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0), Replicate()]))
            other = {"shard": "replicate", "replicate": "shard"}[role]
            dims = mesh_dims(**{role: "fsdp", other: "tp"})
            with self.assertRaisesRegex(ValueError, rf"Expected Replicate\(\) on DP {role} dim 'fsdp'"):
                fully_shard(model, mesh=mesh, dp_mesh_dims=dims)

    @skip_if_lt_x_gpu(2)
    def test_validation_invalid_dim_names(self):
        mesh = self.named_mesh
        for dims in ({"shard": "nowhere"}, {"shard": "fsdp", "replicate": "nowhere"}, {"shard": ("fsdp", "nowhere")}):
            model = self._distributed(self._mlp(), mesh)
            with self.assertRaisesRegex(ValueError, "'nowhere' not found in mesh.mesh_dim_names"):
                fully_shard(model, mesh=mesh, dp_mesh_dims=mesh_dims(**dims))

    @skip_if_lt_x_gpu(2)
    def test_validation_mesh_mismatch(self):
        mesh, other = self.named_mesh, self._new_named_mesh()
        self.assertEqual(mesh, other)  # equal, but a different object
        # The same with replicas, and with replicas alone.
        for dims in ({"shard": "fsdp"}, {"shard": "fsdp", "replicate": "tp"}, {"replicate": "fsdp"}):
            with self.assertRaisesRegex(
                ValueError, "^Expected param's DTensor mesh to be the same mesh passed to fully_shard"
            ):
                fully_shard(self._distributed(self._mlp(), mesh), mesh=other, dp_mesh_dims=mesh_dims(**dims))

    @skip_if_lt_x_gpu(1)
    def test_validation_at_least_one_required(self):
        with self.assertRaisesRegex(ValueError, "At least one of shard or replicate"):
            mesh_dims()

    @skip_if_lt_x_gpu(2)
    def test_validation_spmd_mesh_non_dtensor_params(self):
        with self.assertRaisesRegex(ValueError, "must be DTensors"):
            fully_shard(self._mlp(), mesh=self.named_mesh, dp_mesh_dims=mesh_dims(shard="fsdp"))

    @skip_if_lt_x_gpu(2)
    def test_validation_reshard_after_forward_int_spmd(self):
        mesh = self.named_mesh
        model = self._distributed(self._mlp(), mesh)
        with self.assertRaisesRegex(NotImplementedError, "reshard_after_forward as int"):
            fully_shard(model, mesh=mesh, reshard_after_forward=2, dp_mesh_dims=mesh_dims(shard="fsdp"))

    @skip_if_lt_x_gpu(2)
    def test_validation_mesh_without_names(self):
        """``dp_mesh_dims`` needs a mesh with dimension names."""
        mesh = make_mesh(self.world_size)
        with self.assertRaisesRegex(ValueError, "must have mesh_dim_names"):
            fully_shard(self._distributed(self._mlp(), mesh), mesh=mesh, dp_mesh_dims=mesh_dims(shard="fsdp"))

    @skip_if_lt_x_gpu(4)
    @subtests(
        case=[
            Case((4,), shard=(0,)),
            Case((4,), shard=(0,), reshard_after_forward=False),
            Case((4,), replicate=(0,)),
            Case((2, 2), shard=(1,), replicate=(0,)),
            Case((2, 2), shard=(0,), replicate=(1,)),
            Case((2, 2), shard=(0,), tp=True),
            Case((2, 2), replicate=(0,), tp=True),
        ],
        rows_are_sharded=[False, True],
    )
    def test_collectives(self, case, rows_are_sharded):
        """Each parameter group is gathered and reduced once, over its own process groups only.

        DTensor issues no collectives on the dp dimensions, whether the rows are replicated or sharded there. With
        sharded rows the gradients are partial sums, and FSDP's reduction adds them up. The sum over the global batch is
        still divided by the number of ranks.
        """
        mesh, ref_model = self._mesh(*case.shape), self._mlp()
        model = self._wrapped(self._distributed(copy.deepcopy(ref_model), mesh, case.tp), mesh, case)
        groups = 2  # parameter groups
        expected: collections.Counter[tuple[str, str]] = collections.Counter()
        for dim in case.shard:
            name = mesh.get_group(dim).group_name
            expected["_allgather_base_", name] = groups * (1 + case.reshard_after_forward)
            expected["_reduce_scatter_base_", name] = groups
        for dim in case.replicate:
            expected["allreduce_", mesh.get_group(dim).group_name] = groups

        dp_pg = self._dp_group(mesh, case)
        manual_seed(43)
        all_rows = torch.rand((dp_pg.size(), 2, 16), device=self.device)
        (ref_model(all_rows).square().sum() / dp_pg.size()).backward()
        rows = self._replicated(all_rows[dist.get_rank(dp_pg)], mesh)
        if rows_are_sharded:
            placements = [Shard(0) if dim in case.shard + case.replicate else Replicate() for dim in range(mesh.ndim)]
            rows = DTensor.from_local(rows.to_local(), mesh, placements, run_check=False)
        for _ in range(2):
            model.zero_grad()
            with Collectives() as collectives:
                model(rows).square().sum().backward()
            counts = collectives.counts
            if case.tp:
                tp_name = mesh.get_group(1).group_name
                of_tp = {key: counts.pop(key) for key in list(counts) if key[1] == tp_name}
                self.assertGreater(of_tp.get(("all_reduce", tp_name), 0), 0)
            self.assertEqual(counts, expected)
            for name, param in ref_model.named_parameters():
                self.assertEqual(model.get_parameter(name).grad.full_tensor(), param.grad, name)

    @skip_if_lt_x_gpu(4)
    @subtests(rows=[16, 15, 5], tp_is_last=[True, False])
    def test_strided_shard(self, rows, tp_is_last):
        """FSDP and tensor parallelism shard the same dimension, in either order of mesh dimensions."""
        mesh = self.named_mesh if tp_is_last else self._mesh(2, 2)
        fsdp, tp = (0, 1) if tp_is_last else (1, 0)
        manual_seed(42)
        model = nn.Linear(4, rows, bias=False, device=self.device)
        whole = model.weight.detach().clone()
        placements = [Replicate(), Replicate()]
        placements[tp] = Shard(0)
        model.weight = nn.Parameter(distribute_tensor(whole, mesh, placements))
        fully_shard(model, mesh=mesh, dp_mesh_dims=self._dims(mesh, shard=(fsdp,)))
        # DTensor shards from left to right. FSDP's shard is strided if tensor parallelism, to its right, sharded first.
        of_fsdp = internals.strided_shard()(0, split_factor=2) if tp_is_last else Shard(0)
        self.assertEqual(model.weight.placements[fsdp], of_fsdp)
        self.assertEqual(model.weight.placements[tp], Shard(0))
        of_tp = whole.chunk(2)[mesh.get_local_rank(tp)]
        self.assertEqual(model.weight.to_local(), of_tp.chunk(2)[mesh.get_local_rank(fsdp)])
        self.assertEqual(model.weight.full_tensor(), whole)

    @skip_if_lt_x_gpu(4)
    @subtests(
        case=[Case((4,), shard=(0,)), Case((2, 2), shard=(1,), replicate=(0,)), Case((2, 2), shard=(0,), tp=True)]
    )
    def test_mixed_precision(self, case):
        """Forward sees bfloat16 DTensors, and gradients are reduced in float32.

        Each rank computes integers up to 256, which are exact in bfloat16. The means over ranks are not.
        """
        mesh, ref_model = self._mesh(*case.shape), self._mlp_of_signs()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = self._wrapped(self._distributed(copy.deepcopy(ref_model), mesh, case.tp), mesh, case, mp_policy=policy)
        seen = []

        def look(module: nn.Module, args: Any) -> None:
            for param in module.parameters():
                self.assertIsInstance(param, DTensor)
                self.assertEqual(internals.spec_dtype(param), torch.bfloat16)
                seen.append((param.dtype, param.to_local().dtype, param.device_mesh is mesh))

        model.in_proj.register_forward_pre_hook(look)
        model.out_proj.register_forward_pre_hook(look)
        dp_pg = self._dp_group(mesh, case)
        manual_seed(42 + dist.get_rank(dp_pg) + 1)
        rows = torch.randint(0, 63, (4, 16), device=self.device).float()
        model(self._replicated(rows, mesh)).full_tensor().sum().backward()
        self.assertEqual(seen, [(torch.bfloat16, torch.bfloat16, True)] * 4)

        ref_model(rows).sum().backward()
        average_gradients(ref_model, dp_pg)
        for name, param in ref_model.named_parameters():
            if name.endswith("weight"):
                self.assertNotEqual(param.grad.bfloat16().float(), param.grad, rtol=0, atol=0)
            grad = model.get_parameter(name).grad
            self.assertEqual((grad.dtype, grad.to_local().dtype), (torch.float32, torch.float32))
            self.assertEqual(grad.full_tensor(), param.grad, rtol=0, atol=0)


class Scale(nn.Module):
    """Multiplies a sequence by a weight. The last mesh dimension shards the sequence, and replicates the weight."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.everywhere = mesh, [Replicate()] * mesh.ndim
        self.weight = nn.Parameter(distribute_tensor(torch.ones(2, device=mesh.device_type), mesh, self.everywhere))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        split = [*self.everywhere[1:], Shard(0)]
        return (self.weight * DTensor.from_local(rows, self.mesh, split, run_check=False)).to_local()


class TestReductionOverTensorParallelism(FSDPTest):
    world_size = 2

    @functools.cached_property  # DTensor keeps the first of equal meshes, and ``fully_shard`` rejects the others
    def _mesh_of_tp(self) -> DeviceMesh:
        return make_mesh(1, 2, names=("dp", "tp"))

    @skip_if_lt_x_gpu(2)
    @subtests(on_whole_mesh=[False, True], accumulates=[False, True])
    def test_partial_gradients_are_added_in_reduce_dtype(self, on_whole_mesh, accumulates):
        """TP ranks that share a sequence have partial gradients of its weight, and FSDP adds them in reduce_dtype.

        Accumulated gradients are cast before they are added.
        """
        if on_whole_mesh:
            skip_unless([torch_facts.HAS_DP_MESH_DIMS.lacks])
        mesh = self._mesh_of_tp
        model = Scale(mesh if on_whole_mesh else mesh["tp"])
        on = {"mesh": mesh, "dp_mesh_dims": mesh_dims(shard="dp")} if on_whole_mesh else {"mesh": mesh["dp"]}
        fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32), **on)
        mine = 256.0 if self.rank == 0 else 1.0  # bfloat16 has 256 and 258, but not 257
        for value in (mine, 0.0) if accumulates else (mine,):
            model.set_requires_gradient_sync(value == 0 or not accumulates)
            model(torch.full((1, 2), value, device=self.device)).sum().backward()
        grad = model.weight.grad.full_tensor()
        with torch_defect("fsdp2_tp_reduction_ignores_reduce_dtype", when=not accumulates):
            self.assertEqual(grad, torch.full_like(grad, 257.0), rtol=0, atol=0)


ITEM, NUMBER = torch_defect("dtensor_item_is_of_one_rank"), torch_defect("dtensor_number_is_added_on_each_rank")
NORMS = torch_defect("dtensor_sum_of_column_norms_is_wrong")
# What programs compute from a parameter between steps, and the defect that it shows.
EXPRESSIONS: dict[str, tuple[Callable[[Any], Any], torch_defect]] = {
    "item of a norm": (lambda w: w.norm().item(), ITEM),
    "item of a mean": (lambda w: w.mean().item(), ITEM),
    "item of a maximum": (lambda w: w.max().item(), ITEM),
    "float of a sum": (lambda w: float(w.sum()), ITEM),
    "int of a count": (lambda w: int((w > 0).sum()), ITEM),
    "bool of a count": (lambda w: str(bool((w > 6).sum())), ITEM),
    "item of an element": (lambda w: w[-1, 0].item(), NO_DEFECT),
    "index of the maximum": (lambda w: w.argmax().item(), NO_DEFECT),
    "sum of stacked norms": (lambda w: torch.stack([w.norm(), w[0].norm()]).sum(), NORMS),
    "norm of stacked norms": (lambda w: torch.stack([w.norm(), w[0].norm()]).norm(), NO_DEFECT),
    "sum of two norms": (lambda w: w.norm() + w.norm(1), NUMBER),
    "ratio of two norms": (lambda w: w.norm() / w.square().norm(), NO_DEFECT),
    "parameter over its norm": (lambda w: w / w.norm(), NO_DEFECT),
    "sum and a number": (lambda w: w.sum() + 10, NUMBER),
    "norm and a number": (lambda w: w.norm() + 1, NUMBER),
    "root of a sum and a number": (lambda w: (w.square().sum() + 1).sqrt(), NUMBER),
    "number and column sums": (lambda w: 1 + w.sum(0), NUMBER),
    "number minus a sum": (lambda w: 1 - w.sum(), NO_DEFECT),
    "clamped sum": (lambda w: (-w.sum()).clamp(min=-1), NO_DEFECT),
    "largest of each row": (lambda w: w.topk(2, dim=1).values, NO_DEFECT),
    "largest of each column": (lambda w: w.topk(3, dim=0).values, NO_DEFECT),
    "largest of all": (lambda w: w.flatten().topk(9).values, NO_DEFECT),
    "ninth of all": (lambda w: w.flatten().kthvalue(9).values, NO_DEFECT),
    "sorted columns": (lambda w: w.sort(dim=0, descending=True).values, NO_DEFECT),
    "median": (lambda w: w.square().median(), NO_DEFECT),
}


class TestOperatorsOnShards(FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    @subtests(expression=list(EXPRESSIONS))
    def test_expressions(self, expression):
        """What programs log, add to a loss or use as a threshold is that of the whole parameter."""
        compute, shows = EXPRESSIONS[expression]
        whole = torch.arange(-7.0, 9.0, device=self.device).view(4, 4)
        model = nn.Linear(4, 4, bias=False, device=self.device)
        model.weight.detach().copy_(whole)
        fully_shard(model)
        try:
            actual = full(compute(model.weight.detach()))
        except NotImplementedError as error:
            raise unittest.SkipTest(str(error)) from error
        with shows:
            self.assertEqual(actual, compute(whole))

    @skip_if_lt_x_gpu(2)
    def test_gradient_of_topk(self):
        """A penalty on the largest entries has a gradient for these only."""
        whole, sharded = self._whole_and_sharded(0)
        with torch_defect("dtensor_backward_of_topk_raises"):
            for weight in (whole, sharded):
                full(weight.topk(2, dim=0).values.sum()).backward()
            self.assertEqual(sharded.grad.full_tensor(), whole.grad)

    @skip_if_lt_x_gpu(2)
    @subtests(name=["weight", "bias"], what=["parameter", "gradient", "optimizer"])
    def test_deep_copies(self, name, what):
        """After backward, ``copy.deepcopy`` copies parameters, gradients and optimizers."""
        model = fully_shard(filled(nn.Linear(4, 4, device=self.device)))
        param = model.get_parameter(name)
        optim = torch.optim.SGD([param], lr=0.1)
        model(torch.ones(1, 4, device=self.device)).sum().backward()
        copies: dict[str, Callable[[], Any]] = {
            "parameter": lambda: copy.deepcopy(param).grad,
            "gradient": lambda: copy.deepcopy(param.grad),
            "optimizer": lambda: copy.deepcopy(optim).param_groups[0]["params"][0].grad,
        }
        with torch_defect("dtensor_gradients_are_not_deeply_copied", when=name == "bias"):
            grad = copies[what]()
            param.grad.zero_()
            self.assertEqual(grad.full_tensor(), torch.ones_like(grad.full_tensor()))

    def _whole_and_sharded(self, dim: int) -> tuple[nn.Parameter, nn.Parameter]:
        ref_model = filled(nn.Linear(4, 4, bias=False)).to(self.device)
        model = fully_shard(copy.deepcopy(ref_model), shard_placement_fn=lambda param: Shard(dim))
        return ref_model.weight, model.weight

    @skip_if_lt_x_gpu(2)
    @subtests(dim=[0, 1, -1, -2], sharded_dim=[0, 1])
    def test_cumulative_sum(self, dim, sharded_dim):
        whole, sharded = self._whole_and_sharded(sharded_dim)
        with torch_defect("dtensor_cumulative_sum_restarts_on_each_rank", when=dim + 2 == sharded_dim):
            self.assertEqual(sharded.cumsum(dim).full_tensor(), whole.cumsum(dim))

    @skip_if_lt_x_gpu(2)
    @subtests(dim=[0, 1, -1, -2], sharded_dim=[0, 1], order=[1, 2])
    def test_sum_of_norms(self, dim, sharded_dim, order):
        """The norms of rows or columns, as in the group lasso."""
        whole, sharded = self._whole_and_sharded(sharded_dim)
        with torch_defect("dtensor_sum_of_column_norms_is_wrong", when=order == 2 and dim % 2 == sharded_dim):
            self.assertEqual(sharded.norm(order, dim=dim).sum().full_tensor(), whole.norm(order, dim=dim).sum())


if __name__ == "__main__":
    run_tests()
