"""FSDP2 over parameters that the package spmd-types has annotated: plain tensors with a type for each mesh axis.

On an axis a tensor is R (replicated, its gradients are not summed yet), I (invariant, its gradients are summed), V
(varying), P (partial) or S(dim) (sharded). FSDP stores such parameters as DTensors over the whole mesh. The forward
gets plain parameters with their original types.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torch_fsdp_tests.common_distributed import needs, requires, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import average_gradients
from torch_fsdp_tests.fsdp.seeded import uniform
from torch_fsdp_tests.fsdp.shards import chunk_of
from torch_fsdp_tests.fsdp.training import Loop, TrainingMixin, loss_of
from torch_fsdp_tests.installed_torch import torch_facts, torch_names
from torch_fsdp_tests.verdict import Reason

spmd = torch_names.module("spmd_types")
checker = torch_names.module("spmd_types.checker")

needs_package = requires(
    lambda: (
        None if importlib.util.find_spec("spmd_types") else Reason('needs the package spmd-types (the extra "spmd")')
    )
)
WHOLE = {"rows": (4, 3), "scale": (3,), "shift": (3,)}


def mesh_dims(**names: Any) -> Any:
    """The names of the mesh dimensions over which FSDP shards and replicates."""
    return torch_names.module("torch.distributed.fsdp").DataParallelMeshDims(**names)


class Case(NamedTuple):
    """A mesh, and the dimensions that FSDP uses. A dimension "tp" is for tensor parallelism."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    shard: tuple[str, ...] = ()
    replicate: tuple[str, ...] = ()

    @property
    def dims(self) -> Any:
        return mesh_dims(shard=self.shard or None, replicate=self.replicate or None)

    def index_in(self, mesh: DeviceMesh, dims: tuple[str, ...]) -> int:
        """This rank's index among the ranks of these dimensions."""
        index = 0
        for name in dims:
            index = index * mesh.size(self.names.index(name)) + mesh.get_local_rank(name)
        return index

    def size_of(self, dims: tuple[str, ...]) -> int:
        return math.prod(self.shape[self.names.index(name)] for name in dims)


WITH_TP = Case(("dp", "tp"), (2, 2), shard=("dp",))
CASES = [
    WITH_TP,
    Case(("dp", "tp"), (2, 2), replicate=("dp",)),
    Case(("dp",), (4,), shard=("dp",)),
    Case(("dp", "cp"), (2, 2), shard=("dp", "cp")),
    Case(("rep", "dp"), (2, 2), shard=("dp",), replicate=("rep",)),
    Case(("rep", "dp", "tp"), (2, 1, 2), shard=("dp",), replicate=("rep",)),
]


def whole_values() -> dict[str, torch.Tensor]:
    return {name: uniform(*shape, seed=seed) for seed, (name, shape) in enumerate(WHOLE.items())}


@functools.cache
def mesh_of(names: tuple[str, ...], shape: tuple[int, ...]) -> DeviceMesh:
    """Return the same mesh object each time, because ``fully_shard`` confuses equal meshes."""
    return make_mesh(*shape, names=names)


class Layer(nn.Module):
    """Uses its parameters according to their types on tp.

    Each rank of tp has some rows of ``rows`` (S(0)) and applies the whole ``scale`` to them (R), so the gradients of
    ``scale`` must be summed. All ranks use ``shift`` in the same way (I).
    """

    rows: nn.Parameter
    scale: nn.Parameter
    shift: nn.Parameter

    def __init__(self, tp_rank: int = 0, tp_size: int = 1) -> None:
        super().__init__()
        for name, value in whole_values().items():
            mine = chunk_of(value, tp_rank, tp_size) if name == "rows" else value
            setattr(self, name, nn.Parameter(mine.clone()))

    def forward(self, inp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (inp * self.scale) @ self.rows.t(), inp + self.shift


def all_experts() -> torch.Tensor:
    return uniform(4, 4, seed=2)


class Experts(nn.Module):
    """Holds two of four rows. All inputs use both."""

    def __init__(self, ep_rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(chunk_of(all_experts(), ep_rank, 2).clone())

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        with spmd.no_typecheck():  # inputs and weight are typed on different meshes
            return inp @ self.weight.t()


class Mixture(nn.Module):
    """A weight that all ranks share, and experts."""

    def __init__(self, ep_rank: int) -> None:
        super().__init__()
        self.dense = nn.Parameter(uniform(4, 4, seed=1))
        self.experts = Experts(ep_rank)

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        with spmd.no_typecheck():
            inp = inp @ self.dense
        return self.experts(inp)


@contextlib.contextmanager
def seen_in_forward(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Record the type and the partition spec of each parameter in the next forward."""
    seen: dict[str, Any] = {}

    def look(*unused: Any) -> None:
        for name, param in module.named_parameters(recurse=False):
            assert type(param) is nn.Parameter and type(param.data) is torch.Tensor, f"{name} is a {type(param.data)}"
            seen[name] = spmd.get_local_type(param), spmd.get_partition_spec(param)

    with module.register_forward_pre_hook(look):
        yield seen


@needs_package
@needs(torch_facts.KEEPS_SPMD_TYPES)
class TestFullyShardSpmdTypes(TrainingMixin, FSDPTest):
    world_size = 4

    def _layer(self, case: Case, mesh: DeviceMesh) -> Layer:
        dims = ("tp",) if "tp" in case.names else ()
        return Layer(case.index_in(mesh, dims), case.size_of(dims)).to(self.device)

    def _types(self, case: Case, mesh: DeviceMesh, on_dp: bool = True) -> dict[str, dict[Any, Any]]:
        """The types of the layer's parameters by process group. If ``on_dp`` is false, only those on tp."""
        of_tp = {"rows": spmd.S(0), "scale": spmd.R, "shift": spmd.I}
        found: dict[str, dict[Any, Any]] = {}
        for name in WHOLE:
            found[name] = {
                mesh.get_group(dim): of_tp[name] if dim == "tp" else spmd.R
                for dim in case.names
                if on_dp or dim == "tp"
            }
        return found

    def _annotated(self, layer: Layer, types: dict[str, dict[Any, Any]]) -> Any:
        for name, param in layer.named_parameters():
            spmd.assert_type(param, types[name])
        return layer

    def _step(self, layer: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        losses = [loss_of(output) for output in layer(batch)]
        with spmd.no_typecheck():  # the losses have different types
            torch.autograd.backward(losses)
            return torch.stack([loss.detach() for loss in losses])

    @skip_if_lt_x_gpu(4)
    @subtests(case=CASES, typecheck=[False, True])
    def test_train_parity(self, case, typecheck):
        """The layer trains like plain layers whose gradients are summed over tp if the type requires it."""
        mesh = mesh_of(case.names, case.shape)
        ref_layer = self._layer(case, mesh)
        layer = self._annotated(copy.deepcopy(ref_layer), self._types(case, mesh))
        fully_shard(layer, mesh=mesh, dp_mesh_dims=case.dims)
        dp = [name for name, size in zip(case.names, case.shape) if name != "tp" and size > 1]
        data_rank = case.index_in(mesh, tuple(dp))

        def step(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            if module is ref_layer or not typecheck:
                return self._step(module, batch)
            types = {mesh.get_group(name): spmd.R if name == "tp" else spmd.V for name in case.names}
            with spmd.set_current_mesh(mesh), checker.typecheck():
                return self._step(module, spmd.assert_type(batch, types))

        def average(module: nn.Module) -> None:
            if "tp" in case.names:
                dist.all_reduce(module.scale.grad, group=mesh.get_group("tp"))
            average_gradients(module, mesh.get_group(dp[0]) if len(dp) == 1 else None)

        def compare(test: Any, ref_layer: nn.Module, layer: nn.Module) -> None:
            self._compare(case, mesh, ref_layer, layer)

        self._check_training(
            ref_layer,
            layer,
            lambda: self._inputs(2, 3),
            Loop(step=step, average=average, compare=compare, data_rank=data_rank),
        )

    def _compare(self, case: Case, mesh: DeviceMesh, ref_layer: nn.Module, layer: nn.Module) -> None:
        """Each rank must have its shard of the parameters and gradients of the plain layer for its tp rank."""
        index, chunks = case.index_in(mesh, case.shard), case.size_of(case.shard)
        for (name, ref_param), param in zip(ref_layer.named_parameters(), layer.parameters(), strict=True):
            for whole, actual in ((ref_param, param), (ref_param.grad, param.grad)):
                expected = chunk_of(whole.detach(), index, chunks)
                self.assertEqual(actual.to_local().detach(), expected, msg=name, may_be="empty")  # 3 elements, 4 ranks

    @skip_if_lt_x_gpu(4)
    @subtests(case=CASES)
    def test_storage(self, case):
        """Parameters and gradients are DTensors over the whole mesh. Full parameters have the original values."""
        mesh = mesh_of(case.names, case.shape)
        layer = self._annotated(self._layer(case, mesh), self._types(case, mesh))
        fully_shard(layer, mesh=mesh, dp_mesh_dims=case.dims)
        self._step(layer, self._inputs(2, 3))
        for name, param in layer.named_parameters():
            self.assertEqual(param.full_tensor(), whole_values()[name], msg=name)
            self.assertEqual((param.grad.device_mesh, param.grad.placements), (param.device_mesh, param.placements))
            if "tp" in case.names:
                self.assertEqual(param.placements[-1], Shard(0) if name == "rows" else Replicate())
        self.assertEqual(layer.scale.device_mesh.shape, case.shape if len(case.shard) < 2 else (4,))

    @skip_if_lt_x_gpu(4)
    @subtests(typecheck=[True, False], reshard_after_forward=[True, False])
    def test_full_param_annotations_do_not_require_init_compute_mesh(self, typecheck, reshard_after_forward):
        """Parameters with types on all dimensions can be sharded without a current mesh."""
        self._check_types_in_forward(typecheck, reshard_after_forward, on_dp=True)

    @skip_if_lt_x_gpu(4)
    @subtests(typecheck=[True, False], reshard_after_forward=[True, False])
    def test_partial_param_annotations_infer_fsdp_axes_at_init(self, typecheck, reshard_after_forward):
        """Types on FSDP's dimensions must be R, and may be omitted if the current mesh is set."""
        self._check_types_in_forward(typecheck, reshard_after_forward, on_dp=False)

    def _check_types_in_forward(self, typecheck: bool, reshard_after_forward: bool, on_dp: bool) -> None:
        """With type checks on, each forward sees plain parameters with their original types."""
        case = WITH_TP
        mesh = mesh_of(case.names, case.shape)
        layer = self._annotated(self._layer(case, mesh), self._types(case, mesh, on_dp))
        with contextlib.nullcontext() if on_dp else spmd.set_current_mesh(mesh):
            fully_shard(layer, mesh=mesh, dp_mesh_dims=case.dims, reshard_after_forward=reshard_after_forward)
        dp, tp = (spmd.MeshAxis.of(mesh.get_group(name)) for name in case.names)
        expected = {
            "rows": ({dp: spmd.R, tp: spmd.V}, spmd.PartitionSpec(tp, None)),
            "scale": ({dp: spmd.R, tp: spmd.R}, None),
            "shift": ({dp: spmd.R, tp: spmd.I}, None),
        }
        for _ in range(2):
            inp = spmd.assert_type(self._inputs(2, 3), {dp: spmd.V, tp: spmd.R})
            with spmd.set_current_mesh(mesh), checker.typecheck() if typecheck else contextlib.nullcontext():
                with seen_in_forward(layer) as seen:
                    outputs = layer(inp)
                of_outputs = [spmd.get_local_type(output) for output in outputs]
                loss = loss_of(outputs[0])
                for axis in (dp, tp) if typecheck else ():
                    loss = spmd.reinterpret(loss, axis, src=spmd.V, dst=spmd.P)  # the loss is a sum over all ranks
                loss.backward()
            self.assertEqual(seen, expected if typecheck else dict.fromkeys(expected, ({}, None)))
            if typecheck:
                self.assertEqual(of_outputs, [{dp: spmd.V, tp: spmd.V}, {dp: spmd.V, tp: spmd.I}])
            self.assertEqual({type(param.data) for param in layer.parameters()}, {DTensor})

    @skip_if_lt_x_gpu(4)
    def test_mistake_in_forward(self):
        """The checker finds the same type errors under FSDP as in a plain module, and only while checks are on.

        It reports no errors for FSDP's own operations.
        """
        mesh = mesh_of(WITH_TP.names, WITH_TP.shape)
        dp, tp = (mesh.get_group(name) for name in WITH_TP.names)
        plain = nn.Linear(4, 2, bias=False, device=self.device)
        spmd.assert_type(plain.weight, {dp: spmd.R, tp: spmd.R})
        wrapped = copy.deepcopy(plain)
        spmd.assert_type(wrapped.weight, {dp: spmd.R, tp: spmd.R})
        fully_shard(wrapped, mesh=mesh, dp_mesh_dims=WITH_TP.dims)
        inp = self._inputs(2, 4)
        self.assertEqual(wrapped(inp.clone()).shape, (2, 2))
        right = spmd.assert_type(inp.clone(), {dp: spmd.V, tp: spmd.R})
        wrong = spmd.assert_type(inp.clone(), {dp: spmd.V, tp: spmd.P})
        with spmd.set_current_mesh(mesh), checker.typecheck():
            for module in (plain, wrapped):
                self.assertEqual(module(right).relu().shape, (2, 2))
                with self.assertRaises(spmd.SpmdTypeError):
                    module(wrong).relu()

    @skip_if_lt_x_gpu(4)
    @subtests(shard_placement=[Shard(0), Shard(1)])
    def test_placements(self, shard_placement):
        """Each type becomes the right placement. FSDP may shard the same dimension or another one."""
        mesh = mesh_of(("dp", "tp"), (2, 2))
        dp, tp = (mesh.get_group(name) for name in ("dp", "tp"))
        tp_rank = mesh.get_local_rank("tp")
        local = uniform(4, 6, seed=tp_rank)
        both = [uniform(4, 6, seed=seed) for seed in range(2)]
        same = uniform(4, 6, seed=3)
        cases = [
            (spmd.R, None, same, same, Replicate()),
            (spmd.I, None, same, same, Replicate()),
            (spmd.P, None, local, sum(both), Partial()),
            (spmd.S(0), None, local, torch.cat(both), Shard(0)),
            (spmd.S(1), None, local, torch.cat(both, 1), Shard(1)),
            (spmd.S(-1), None, local, torch.cat(both, 1), Shard(1)),
            (spmd.V, spmd.PartitionSpec(tp, None), local, torch.cat(both), Shard(0)),
            (spmd.V, spmd.PartitionSpec(None, tp), local, torch.cat(both, 1), Shard(1)),
        ]
        for of_tp, spec, mine, whole, placement in cases:
            linear = nn.Linear(6, 4, bias=False, device=self.device)
            linear.weight = nn.Parameter(mine.clone())
            spmd.assert_type(linear.weight, {dp: spmd.R, tp: of_tp}, partition_spec=spec)
            fully_shard(
                linear, mesh=mesh, dp_mesh_dims=mesh_dims(shard="dp"), shard_placement_fn=lambda _: shard_placement
            )
            self.assertEqual(linear.weight.placements[1], placement)
            self.assertEqual(linear.weight.full_tensor(), whole, msg=f"{of_tp} {spec}")
            dim = shard_placement.dim
            self.assertEqual(linear.weight.to_local(), chunk_of(mine, mesh.get_local_rank("dp"), 2, dim))

    @skip_if_lt_x_gpu(4)
    @subtests(types_on=["dp and cp", "both in one"], stored_on=["dp and cp", "both in one"])
    def test_restores_param_spmd_type_for_compute(self, types_on, stored_on):
        """Types and storage may use different meshes over the same ranks. The types keep their axes."""
        meshes = {
            "dp and cp": mesh_of(("dp", "cp"), (2, 2)),
            "both in one": mesh_of(("fsdp",), (4,)),
        }
        typed, stored = meshes[types_on], meshes[stored_on]
        layer = Layer().to(self.device)
        axes = [spmd.MeshAxis.of(typed.get_group(name)) for name in typed.mesh_dim_names]
        for param in layer.parameters():
            spmd.assert_type(param, dict.fromkeys(axes, spmd.R))
        fully_shard(layer, mesh=stored, dp_mesh_dims=mesh_dims(shard=stored.mesh_dim_names))
        inp = spmd.assert_type(self._inputs(2, 3), dict.fromkeys(axes, spmd.V))
        with spmd.set_current_mesh(typed), checker.typecheck(), seen_in_forward(layer) as seen:
            layer(inp)
        layer.reshard()
        self.assertEqual(seen, dict.fromkeys(WHOLE, (dict.fromkeys(axes, spmd.R), None)))
        for name, param in layer.named_parameters():
            self.assertEqual(param.full_tensor(), whole_values()[name])
            expected = chunk_of(whole_values()[name], self.rank, 4)
            self.assertEqual(param.to_local(), expected, may_be="empty")  # 3 elements, 4 ranks

    @skip_if_lt_x_gpu(4)
    @subtests(in_one_module=[False, True])
    def test_mixed_dense_sparse_params_use_per_param_restore_meshes(self, in_one_module):
        """Experts are stored on a separate mesh, next to a dense layer or in one module with it.

        Gradients of experts are averaged over the ranks with the same experts, those of the dense layer over all ranks.
        """
        dense, sparse = mesh_of(("dp",), (4,)), mesh_of(("efsdp", "ep"), (2, 2))
        ref_model = Mixture(sparse.get_local_rank("ep")).to(self.device)
        model: Any = copy.deepcopy(ref_model)
        dp, efsdp, ep = dense.get_group("dp"), sparse.get_group("efsdp"), sparse.get_group("ep")
        spmd.assert_type(model.dense, {dp: spmd.R})
        spmd.assert_type(model.experts.weight, {efsdp: spmd.R, ep: spmd.S(0)})
        of_dense = {"mesh": dense, "dp_mesh_dims": mesh_dims(shard="dp")}
        of_sparse = {"mesh": sparse, "dp_mesh_dims": mesh_dims(shard="efsdp")}
        if in_one_module:
            info = internals.fsdp2_init._get_mesh_info(**of_sparse)
            placed = internals.fsdp2_common.ShardPlacementResult(Shard(0), info)
            experts = model.experts.weight
            fully_shard(model, **of_dense, shard_placement_fn=lambda param: placed if param is experts else None)
            self.assertEqual(len(internals.groups_in(model)), 2)
        else:
            fully_shard(model.experts, **of_sparse)
            fully_shard(model, **of_dense)
        self.assertEqual(model.experts.weight.full_tensor(), all_experts())
        self.assertEqual(model.experts.weight.placements[1], Shard(0))
        self.assertEqual((model.dense.device_mesh, model.experts.weight.device_mesh), (dense, sparse))
        axes = {group: spmd.MeshAxis.of(group) for group in (dp, efsdp, ep)}
        of_experts = {axes[efsdp]: spmd.R, axes[ep]: spmd.V}, spmd.PartitionSpec(axes[ep], None)

        def step(module: Any, batch: torch.Tensor) -> torch.Tensor:
            with checker.typecheck(), seen_in_forward(module.experts) as seen, seen_in_forward(module) as seen_dense:
                output = module(batch)
            if module is model:
                self.assertEqual(seen_dense, {"dense": ({axes[dp]: spmd.R}, None)})
                self.assertEqual(seen, {"weight": of_experts})
            loss = loss_of(output)
            loss.backward()
            return loss.detach()

        def average(module: Any) -> None:
            for param, group in ((module.dense, dp), (module.experts.weight, efsdp)):
                dist.all_reduce(param.grad, group=group)
                param.grad /= dist.get_world_size(group)

        def compare(test: Any, ref_model: Any, model: Any) -> None:
            for ref_param, param, mesh in (
                (ref_model.dense, model.dense, dense),
                (ref_model.experts.weight, model.experts.weight, sparse),
            ):
                for whole, actual in ((ref_param, param), (ref_param.grad, param.grad)):
                    shard = chunk_of(whole.detach(), mesh.get_local_rank(0), mesh.size(0))
                    self.assertEqual(actual.to_local().detach(), shard)

        self._check_training(
            ref_model, model, lambda: self._inputs(2, 4), Loop(step=step, average=average, compare=compare)
        )

    def _check_error(self, message: str, of_dp: Any, of_tp: Any, current: Any = None, **kwargs: Any) -> None:
        """``fully_shard`` rejects a parameter with these types (None for no type) on a mesh of "dp" and "tp"."""
        mesh = mesh_of(("dp", "tp"), (2, 2))
        types = {mesh.get_group(name): of for name, of in (("dp", of_dp), ("tp", of_tp)) if of is not None}
        self._check_types_error(
            message, types, current, **{"mesh": mesh, "dp_mesh_dims": mesh_dims(shard="dp")} | kwargs
        )

    def _check_types_error(self, message: str, types: dict[Any, Any], current: Any, **kwargs: Any) -> None:
        linear = nn.Linear(4, 4, bias=False, device=self.device)
        if types:
            spmd.assert_type(linear.weight, types)
        with contextlib.nullcontext() if current is None else spmd.set_current_mesh(current):
            with self.assertRaisesRegex(ValueError, f"(?s){message}"):
                fully_shard(linear, **kwargs)

    @skip_if_lt_x_gpu(4)
    def test_spmd_params_require_dp_mesh_dims(self):
        """A parameter with types needs a mesh with names, and ``dp_mesh_dims``."""
        message = "require fully_shard.. to be called with both a named full DeviceMesh"
        self._check_error(message, spmd.R, None, mesh=mesh_of(("world",), (4,)), dp_mesh_dims=None)

    @skip_if_lt_x_gpu(4)
    def test_partial_non_storage_annotations_require_current_mesh(self):
        """Without a current mesh, types on some dimensions are not enough."""
        self._check_error("partial spmd_types annotations that cannot be restored", None, spmd.I)

    @skip_if_lt_x_gpu(4)
    def test_spmd_restore_mesh_must_contain_annotated_axes(self):
        """The current mesh must have the dimensions of the types, and the ranks of the mesh."""
        tp = spmd.MeshAxis.of(mesh_of(("dp", "tp"), (2, 2)).get_group("tp"))
        for message, current in (
            ("annotated on axes .*tp.* that are not in that mesh", mesh_of(("world",), (4,))),
            ("does not span the same ranks as its FSDP storage mesh", frozenset([tp])),
        ):
            self._check_error(message, None, spmd.I, current)

    @skip_if_lt_x_gpu(4)
    def test_fsdp_dp_axes_must_be_r(self):
        """Parameters must have the type R on the dimensions over which FSDP shards."""
        for of_dp, name in ((spmd.I, "I"), (spmd.S(0), "S.0.")):
            message = rf"Expected spmd.R on FSDP DP axis .*dp.* but got .*{name}\."
            self._check_error(message, of_dp, spmd.I)

    @skip_if_lt_x_gpu(4)
    def test_fully_annotated_sparse_param_requires_sparse_storage_mesh(self):
        """Types on the dimensions of another mesh are rejected."""
        types = {mesh_of(("world",), (4,)).get_group("world"): spmd.R}
        mesh, dims = mesh_of(("dp", "tp"), (2, 2)), mesh_dims(shard="dp")
        message = "which is neither a non-FSDP storage-mesh axis nor contained in"
        self._check_types_error(message, types, None, mesh=mesh, dp_mesh_dims=dims)

    @skip_if_lt_x_gpu(4)
    def test_partial_param_annotations_missing_non_fsdp_axis_errors(self):
        """Types on dimensions over which FSDP does not shard may not be omitted."""
        message = "incomplete spmd_types annotations .*Missing non-FSDP storage axes: .*tp"
        self._check_error(message, spmd.R, None, mesh_of(("dp", "tp"), (2, 2)))

    @skip_if_lt_x_gpu(4)
    def test_local_v_param_requires_partition_spec(self):
        """The type V does not say which dimension of the parameter is split."""
        self._check_error("Cannot convert plain Varying to a DTensor placement", spmd.R, spmd.V)

    @skip_if_lt_x_gpu(4)
    def test_parameter_without_types(self):
        """A parameter without types has to be a DTensor."""
        self._check_error("must be DTensors on the full SPMD mesh", None, None)

    @skip_if_lt_x_gpu(4)
    @subtests(order=[("ep", "tp"), ("tp", "ep")])
    def test_two_axes_shard_one_dimension(self, order):
        """The first axis of a partition spec shards first, whatever the order of mesh dimensions is."""
        mesh = mesh_of(("dp", "ep", "tp"), (1, 2, 2))
        case = Case(("dp", "ep", "tp"), (1, 2, 2))
        linear = nn.Linear(3, 1, bias=False, device=self.device)
        whole = uniform(4, 3, seed=0)
        linear.weight = nn.Parameter(chunk_of(whole, case.index_in(mesh, order), 4).clone())
        groups = tuple(mesh.get_group(name) for name in order)
        spec = spmd.PartitionSpec(groups, None)
        spmd.assert_type(linear.weight, dict.fromkeys(groups, spmd.V), partition_spec=spec)
        fully_shard(linear, mesh=mesh, dp_mesh_dims=mesh_dims(shard="dp"))
        actual = linear.weight.full_tensor()
        with torch_defect("fsdp2_order_of_spmd_axes_is_lost", when=order == ("tp", "ep")):
            self.assertEqual(actual, whole)

    @skip_if_lt_x_gpu(4)
    def test_axis_of_one_rank(self):
        """A mesh dimension of one rank is rejected: it has no type, because spmd-types omits it."""
        mesh = mesh_of(("dp", "tp"), (4, 1))
        layer = Layer().to(self.device)
        self._annotated(layer, self._types(Case(("dp", "tp"), (4, 1)), mesh))
        with self.assertRaises(ValueError):
            fully_shard(layer, mesh=mesh, dp_mesh_dims=mesh_dims(shard="dp"))


if __name__ == "__main__":
    run_tests()
