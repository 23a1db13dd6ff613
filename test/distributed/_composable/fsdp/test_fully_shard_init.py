"""FSDP2 before its first step: which modules and states ``fully_shard`` manages, and how it moves and shards them.

Other tests initialize a model before its first forward: on the meta device, by loading or broadcasting values, on a
mesh made from process groups, or with parameters that the user replaces.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call

from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import MLP, FSDPTest, check_sharded_parity
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed._tensor.common_dtensor import ModelArgs, Transformer
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.collectives import recorded
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.init_cases import InitTest, full_tensors
from torch_fsdp_tests.fsdp.internals import fsdp2_init
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import average_gradients, check_defaults, of_all_ranks
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.fsdp.shards import chunk_of, shard_largest_dim
from torch_fsdp_tests.fsdp.training import optimizers, shard_each, take_step
from torch_fsdp_tests.installed_torch import torch_facts
from torch_fsdp_tests.two_tensor import TwoTensor

HOST = torch.device("cpu")  # the CPU is the subject: states start there, whatever the device under test
META = torch.device("meta")
MARK = 1337.0
RECURSING = [
    *("set_requires_gradient_sync", "set_requires_all_reduce", "set_reshard_after_forward"),
    *("set_reshard_after_backward", "set_reduce_scatter_unused_params", "set_separate_reduce_scatter_group"),
    *("set_reduce_scatter_max_input_buffers", "set_keep_unsharded_storage"),
]  # methods that apply to all FSDP modules inside by default


def three_layer_transformer() -> Transformer:
    return filled(Transformer(ModelArgs(n_layers=3, dropout_p=0.0)))


def tensor_parallel_mlp(mlp: MLP, tp_mesh: DeviceMesh) -> MLP:
    return parallelize_module(mlp, tp_mesh, {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()})


class TestFullyShardDeviceTensor(InitTest):
    world_size = 1

    @skip_if_lt_x_gpu(1)
    def test_move_states_to_device_tensor(self):
        model = MLP(8, HOST, with_buffer=True)
        before = {name: state.clone() for name, state in model.state_dict().items()}
        buffer = model.get_buffer("buffer")
        fully_shard(model)
        for param in model.parameters():
            self.assertIsInstance(param, DTensor)
            self.assertEqual((param.device, param.to_local().device), (self.device, self.device))
        self.assertIs(model.buffer, buffer)
        self.assertEqual(buffer.device, self.device)
        for name, state in model.state_dict().items():
            self.assertEqual((state.to_local() if name != "buffer" else state).to(HOST), before[name])

    @skip_if_lt_x_gpu(1)
    def test_move_states_to_device_ignored_param_device(self):
        model = MLP(8, HOST, with_buffer=True)
        # FSDP does not manage out_proj, all parameters of which are ignored. Of in_proj one parameter is ignored.
        ignored = {name: model.get_parameter(name) for name in ("out_proj.weight", "out_proj.bias", "in_proj.bias")}
        fully_shard(model, ignored_params=set(ignored.values()))
        for name, param in ignored.items():
            self.assertIs(model.get_parameter(name), param)
            self.assertNotIsInstance(param, DTensor)
            self.assertEqual(param.device, HOST)
        self.assertIsInstance(model.in_proj.weight, DTensor)
        self.assertEqual(model.in_proj.weight.device, self.device)
        model.to(self.device)
        self.assertEqual({param.device for param in model.parameters()}, {self.device})
        self.assertNotIsInstance(model.out_proj.weight, DTensor)

    @skip_if_lt_x_gpu(1)
    def test_move_subclass_keeps_the_object(self):
        """Moving a parameter of a wrapper subclass moves its inner tensors and keeps the parameter object.

        The target is the meta device, which exists on every machine.
        """
        param = nn.Parameter(TwoTensor(torch.ones(2), torch.zeros(2)), requires_grad=True)
        buffer = TwoTensor(torch.ones(2), torch.zeros(2))
        held = nn.ParameterList([param])
        fsdp2_init._move_states_to_device([param], [buffer], META)
        self.assertIs(held[0], param)
        for tensor in (param, buffer):
            self.assertIsInstance(tensor, TwoTensor)
            self.assertEqual([part.device for part in (tensor.a, tensor.b)], [META, META])
        self.assertTrue(param.requires_grad)


class TestFullyShardDeviceDTensor(InitTest):
    world_size = 4

    @skip_if_lt_x_gpu(1)
    def test_move_states_to_device_dtensor_valid(self):
        mesh = make_mesh(2, 2, names=("dp", "tp"))
        model = tensor_parallel_mlp(MLP(8, HOST, with_buffer=True), mesh["tp"])
        for param in model.parameters():
            self.assertIsInstance(param, DTensor)
            self.assertEqual((param.device, param.to_local().device), (self.device, self.device))
        self.assertEqual(model.get_buffer("buffer").device, HOST)
        fully_shard(model, mesh=mesh["dp"])
        for param in model.parameters():
            self.assertEqual(param.device_mesh.mesh_dim_names, ("dp", "tp"))
            self.assertEqual((param.device, param.to_local().device), (self.device, self.device))
        self.assertEqual(model.get_buffer("buffer").device, self.device)

    @skip_if_lt_x_gpu(1)
    def test_move_states_to_device_dtensor_invalid(self):
        # Any device type other than the DTensor's is an error. The meta device exists on every machine.
        host_mesh = init_device_mesh(HOST.type, (2, 2), mesh_dim_names=("dp", "tp"))
        model = tensor_parallel_mlp(MLP(8, HOST, with_buffer=True), host_mesh["tp"])
        message = (
            "Requires DTensor to have mesh of the same type as the FSDP mesh but got {} for DTensor and {} for FSDP"
        )
        with self.assertRaisesRegex(ValueError, message.format(HOST.type, META.type)):
            fsdp2_init._move_states_to_device(list(model.parameters()), [], META)
        if accelerator.current().has("device_memory"):
            mesh = make_mesh(2, 2, names=("dp", "tp"))
            with self.assertRaisesRegex(ValueError, message.format(HOST.type, self.device.type)):
                fully_shard(model, mesh=mesh["dp"])


class RunnableDict(nn.ModuleDict):
    """A container with a forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.values():
            x = module(x)
        return x


class RunnableList(nn.ModuleList):
    """A container with a forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = module(x)
        return x


@needs(torch_facts.WRAPS_CONTAINERS_WITH_FORWARD)
class TestFullyShardContainerSubclasses(InitTest):
    """``fully_shard`` accepts a container that has a forward, and the container trains."""

    world_size = 2

    def _check_container(self, ref_model: nn.Module) -> None:
        filled(ref_model).to(self.device)
        model = fully_shard(copy.deepcopy(ref_model))
        self.assertEqual(type(model).__name__, f"FSDP{type(ref_model).__name__}")
        optims = optimizers(ref_model, model)
        for _ in range(3):
            for each in (ref_model, model):
                each(self._input(2, 4)).square().sum().backward()
            average_gradients(ref_model)
            check_sharded_parity(self, ref_model, model)
            take_step(optims)
        check_sharded_parity(self, ref_model, model)

    @skip_if_lt_x_gpu(1)
    def test_moduledict_subclass_with_forward(self):
        self._check_container(RunnableDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)}))

    @skip_if_lt_x_gpu(1)
    def test_modulelist_subclass_with_forward(self):
        self._check_container(RunnableList([nn.Linear(4, 4), nn.Linear(4, 4)]))


class TestFullyShardMeshArg(InitTest):
    world_size = 4

    @skip_if_lt_x_gpu(1)
    def test_invalid_mesh_ndim(self):
        mesh = make_mesh(self.world_size, 1, 1)
        with self.assertRaisesRegex(ValueError, "fully_shard expects a 1D or 2D DeviceMesh but got DeviceMesh"):
            fully_shard(MLP(8), mesh=mesh)

    @skip_if_lt_x_gpu(1)
    def test_2d_mesh_without_mesh_dim_names(self):
        message = "Please init the 2D mesh for HSDP with mesh_dim_names specified"
        with self.assertRaisesRegex(AssertionError, message):
            fully_shard(MLP(8), mesh=make_mesh(2, 2))


class TestFullyShardManagedModulesAndStates(InitTest):
    world_size = 1

    def _check_managed_modules(
        self, *roots: nn.Module, expected: Iterable[nn.Module], ignored: set[nn.Parameter] | None = None
    ) -> None:
        managed, expected = fsdp2_init._get_managed_modules(roots, ignored), list(expected)
        self.assertEqual(len(managed), len(expected))
        self.assertTrue(set(managed) == set(expected), f"{managed} is not {expected}")

    def _check_managed_states(
        self,
        *roots: nn.Module,
        params: Iterable[nn.Parameter],
        buffers: Iterable[torch.Tensor],
        ignored: set[nn.Parameter] | None = None,
    ) -> list[int]:
        """Returns the numbers of parameters and buffers."""
        managed = fsdp2_init._get_managed_states(fsdp2_init._get_managed_modules(roots, ignored), ignored)
        for found, expected in zip(managed, (list(params), list(buffers)), strict=True):
            self.assertEqual(len(found), len(expected))
            self.assertTrue(set(found) == set(expected))
        return [len(found) for found in managed]

    @skip_if_lt_x_gpu(1)
    def test_managed_modules_single(self):
        model = MLP(8)
        self._check_managed_modules(model, expected=model.modules())

    @skip_if_lt_x_gpu(1)
    def test_managed_modules_nested(self):
        model = nn.Sequential(*(MLP(8) for _ in range(2)))
        fully_shard(model[0])
        self._check_managed_modules(model, expected=[*model[1].modules(), model])

    @skip_if_lt_x_gpu(1)
    def test_managed_modules_nested_fully_shard_and_replicate(self):
        model = nn.Sequential(*(MLP(8, self.device) for _ in range(3)))
        internals.composable.replicate(model[0])
        fully_shard(model[2])
        self._check_managed_modules(model, expected=[*model[1].modules(), model])

    @skip_if_lt_x_gpu(1)
    def test_managed_modules_duplicate(self):
        mlp = MLP(8)
        model = nn.Sequential(mlp, mlp)
        self._check_managed_modules(model, expected=[*mlp.modules(), model])
        model = nn.Sequential(MLP(8), MLP(8))
        model[1].in_proj = model[0].in_proj  # one module with two parents
        self._check_managed_modules(model, expected=model.modules())

    @skip_if_lt_x_gpu(1)
    def test_managed_modules_list_of_mlps(self):
        model = nn.Sequential(*(MLP(8) for _ in range(5)))
        for chosen in ((0, 1, 2), (1, 3)):
            roots = tuple(model[i] for i in chosen)
            expected = itertools.chain.from_iterable(root.modules() for root in roots)
            self._check_managed_modules(*roots, expected=expected)

    @skip_if_lt_x_gpu(1)
    def test_managed_states_shared_params_and_buffers(self):
        model = nn.Sequential(*(MLP(8, with_buffer=True) for _ in range(3)))
        for mlp in model[1:]:
            mlp.in_proj.weight = model[0].in_proj.weight
        model[2].buffer = model[1].buffer
        counts = self._check_managed_states(model, params=model.parameters(), buffers=model.buffers())
        self.assertEqual(counts, [3 * 4 - 2, 3 - 1])

    @skip_if_lt_x_gpu(1)
    def test_managed_states_nested_fully_shard(self):
        model = nn.Sequential(*(MLP(8, with_buffer=True) for _ in range(2)))
        fully_shard(model[0])
        self._check_managed_states(model, params=model[1].parameters(), buffers=model[1].buffers())

    @skip_if_lt_x_gpu(1)
    def test_managed_states_list_of_mlps(self):
        model = nn.Sequential(*(MLP(8, with_buffer=True) for _ in range(5)))
        roots = tuple(model[:3])
        params = itertools.chain.from_iterable(root.parameters() for root in roots)
        buffers = itertools.chain.from_iterable(root.buffers() for root in roots)
        self._check_managed_states(*roots, params=params, buffers=buffers)

    @skip_if_lt_x_gpu(1)
    def test_managed_states_with_ignored_params(self):
        """A module with only ignored parameters is not managed, unless it or a child has a buffer."""
        model = nn.Sequential(MLP(8), MLP(8, with_buffer=True), MLP(8))
        ignored = {
            *model[0].parameters(),
            *model[1].parameters(),
            *model[2].in_proj.parameters(),
            model[2].out_proj.bias,
        }
        modules = [model, model[1], model[2], model[2].out_proj]
        self._check_managed_modules(model, expected=modules, ignored=ignored)
        states = {"params": [model[2].out_proj.weight], "buffers": [model[1].buffer]}
        self._check_managed_states(model, **states, ignored=ignored)


class TestFullyShardParamModuleInfos(InitTest):
    world_size = 2

    def _infos(self, *roots: nn.Module) -> list[Any]:
        params, _ = fsdp2_init._get_managed_states(fsdp2_init._get_managed_modules(roots))
        return internals.fsdp2_param_group._get_param_module_infos(params, roots)

    def _info(self, owner: nn.Linear, name: str, *sharers: nn.Linear) -> Any:
        return internals.fsdp2_param.ParamModuleInfo(owner, name, list(sharers), [name] * len(sharers))

    def _unshared(self, *linears: nn.Linear) -> list[Any]:
        return [self._info(linear, name) for linear in linears for name in ("weight", "bias")]

    @skip_if_lt_x_gpu(1)
    def test_get_param_module_infos_shared_params(self):
        first, second = MLP(8), MLP(8)
        second.in_proj.weight = first.in_proj.weight
        expected = [
            self._info(first.in_proj, "weight", second.in_proj),
            self._info(first.in_proj, "bias"),
            *self._unshared(first.out_proj),
            self._info(second.in_proj, "bias"),
            *self._unshared(second.out_proj),
        ]
        infos = self._infos(nn.Sequential(first, second))
        self.assertEqual(len(infos), 7)
        self.assertTrue(infos == expected, infos)

    @skip_if_lt_x_gpu(1)
    def test_get_param_module_infos_duplicates(self):
        mlp = MLP(8)
        infos = self._infos(nn.Sequential(mlp, mlp))
        linears, names = (mlp.in_proj, mlp.out_proj), ("weight", "bias")
        expected = [self._info(linear, name, linear) for linear in linears for name in names]
        self.assertTrue(infos == expected, infos)

        first, second = MLP(8), MLP(8)
        second.in_proj = shared = first.in_proj
        infos = self._infos(nn.Sequential(first, second))
        expected = [self._info(shared, name, shared) for name in names]
        expected += self._unshared(first.out_proj, second.out_proj)
        self.assertTrue(infos == expected, infos)

    @skip_if_lt_x_gpu(1)
    def test_get_param_module_infos_list_of_mlps(self):
        first, second = MLP(8), MLP(8)
        infos = self._infos(first, second)
        expected = self._unshared(first.in_proj, first.out_proj, second.in_proj, second.out_proj)
        self.assertEqual(len(infos), 8)
        self.assertTrue(infos == expected, infos)


class TestFullyShardShardedParameterTensor(InitTest):
    world_size = 2

    def _check_1d_sharded_parameters(self, originals: list[torch.Tensor], sharded: list[nn.Parameter]) -> None:
        self.assertEqual(len(originals), len(sharded))
        mesh = make_mesh(self.world_size)
        for original, param in zip(originals, sharded):
            self.assertIsInstance(param, DTensor)
            self.assertEqual(param.device_mesh, mesh)
            self.assertEqual((param.size(), param.stride()), (original.size(), original.stride()))
            self.assertEqual(param.placements, (Shard(0),))
            self.assertEqual(param.to_local().detach(), chunk_of(original, self.rank, self.world_size))

    @skip_if_lt_x_gpu(1)
    def test_shard_tensor_parameters(self):
        for shared in (False, True):
            model = filled(nn.Sequential(*(MLP(3, self.device, dim_multiplier=3) for _ in range(3))))
            if shared:
                model[1].in_proj = model[0].in_proj
            originals = [param.detach().clone() for param in model.parameters()]
            fully_shard(model)
            self._check_1d_sharded_parameters(originals, list(model.parameters()))
            self.assertEqual(len(originals), 10 if shared else 12)

    @skip_if_lt_x_gpu(1)
    def test_raise_scalar_parameter(self):
        model = nn.Sequential(*(MLP(3, dim_multiplier=3) for _ in range(3)))
        model.register_parameter("scalar_p", nn.Parameter(torch.tensor(1.0)))
        with self.assertRaisesRegex(ValueError, "Change scalar_p to a 1D tensor with numel equal to 1."):
            fully_shard(model)

    @skip_if_lt_x_gpu(1)
    def test_raise_noncontiguous_parameter(self):
        conv = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
        with self.assertRaisesRegex(NotImplementedError, "FSDP does not support non-contiguous parameters"):
            fully_shard(conv)


class TestFullyShardShardedParameterDTensor(InitTest):
    world_size = 4

    @skip_if_lt_x_gpu(1)
    def test_shard_dtensor_parameters(self):
        mesh = make_mesh(2, 2, names=("dp", "tp"))
        strided = (internals.strided_shard()(0, split_factor=2), Shard(0))
        expected = {
            "in_proj.weight": (strided, 0),
            "in_proj.bias": (strided, 0),
            "out_proj.weight": ((Shard(0), Shard(1)), 1),
            "out_proj.bias": ((Shard(0), Replicate()), None),
        }
        for dim in (8, 9):
            model = filled(MLP(dim, self.device, dim_multiplier=3))
            originals = {name: param.detach().clone() for name, param in model.named_parameters()}
            tensor_parallel_mlp(model, mesh["tp"])
            fully_shard(model, mesh=mesh["dp"])
            self.assertEqual(list(originals), list(expected))
            for name, param in model.named_parameters():
                placements, tp_dim = expected[name]
                self.assertIsInstance(param, DTensor)
                self.assertEqual(param.device_mesh, mesh)
                self.assertEqual(
                    (param.size(), param.stride()), (originals[name].size(), originals[name].stride()), msg=name
                )
                self.assertEqual(param.placements, placements, msg=name)
                of_tp = originals[name]
                if tp_dim is not None:
                    of_tp = of_tp.chunk(2, dim=tp_dim)[mesh.get_local_rank("tp")]
                self.assertEqual(param.to_local().detach(), chunk_of(of_tp, mesh.get_local_rank("dp"), 2), msg=name)


class TestFullyShardLazyInit(InitTest):
    world_size = 2

    def _two_mlps(self) -> nn.Sequential:
        """Wrap both projections of the first MLP, and the root, which manages the rest."""
        model = nn.Sequential(MLP(8), MLP(8))
        return shard_each((model[0].in_proj, model[0].out_proj, model))

    @skip_if_lt_x_gpu(1)
    def test_fully_shard_is_root(self):
        model = self._two_mlps()
        modules = (model, model[0].in_proj, model[0].out_proj)
        internals.initialize_lazily(model)
        states = [internals.state_of(module) for module in modules]
        self.assertEqual([internals.is_root(state) for state in states], [True, False, False])
        context = internals.iteration_context(model)
        self.assertEqual(len(context.all_states), 3)
        for module, state, actual in zip(modules, states, context.all_states):
            self.assertIs(actual, state)
            self.assertIs(internals.iteration_context(module), context)
            self.assertIs(internals.group_of(module).comm_ctx, internals.comm_context(model))

    @skip_if_lt_x_gpu(1)
    def test_fully_shard_module_and_param_fqns(self):
        model = self._two_mlps()
        internals.initialize_lazily(model)
        expected = {
            "": [f"1.{linear}.{name}" for linear in ("in_proj", "out_proj") for name in ("weight", "bias")],
            "0.in_proj": ["0.in_proj.weight", "0.in_proj.bias"],
            "0.out_proj": ["0.out_proj.weight", "0.out_proj.bias"],
        }
        groups = internals.groups_of(model)
        actual = {group._module_fqn: [param._param_fqn for param in group.fsdp_params] for group in groups}
        self.assertEqual(actual, expected)

    @skip_if_lt_x_gpu(1)
    def test_fully_shard_double_lazy_init(self):
        model = self._two_mlps()
        internals.initialize_lazily(model[0].in_proj)
        message = (
            "FSDP state has already been lazily initialized for 0.in_proj\n"
            "FSDP requires running forward through the root module first"
        )
        with self.assertRaisesRegex(RuntimeError, message):
            internals.initialize_lazily(model)

    @skip_if_lt_x_gpu(1)
    def test_fully_shard_multi_module_root(self):
        model = nn.Sequential(MLP(8), MLP(8))
        fully_shard([model[0], model[1]])
        with self.assertRaisesRegex(RuntimeError, "FSDP requires a single root module but got "):
            internals.initialize_lazily(model[0])

    @skip_if_lt_x_gpu(1)
    def test_reset_sharded_param_in_lazy_init(self):
        # With three rows on two ranks, lazy init must pad the parameter that replaces the meta one.
        ref_model = filled(Magnitude().to(self.device))
        ref_model.set_magnitude()
        with META:
            model = Magnitude()
        shard_each((model.left, model.right, model))
        for name in ("left", "right"):
            getattr(model, name).to_empty(device=self.device)
        for name in ("left.weight", "right.weight"):
            whole = ref_model.get_parameter(name).detach()
            with torch.no_grad():
                model.get_parameter(name).to_local().copy_(chunk_of(whole, self.rank, self.world_size))
        model.set_magnitude()
        self.assertIsInstance(model.magnitude, DTensor)

        optim, ref_optim = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, ref_model))
        for step in range(2):
            inp = self._input(3, 3, seed=10 * step + self.rank)
            out, ref_out = model(inp), ref_model(inp)
            self.assertEqual(out, ref_out)
            out.square().sum().backward()
            ref_out.square().sum().backward()
            average_gradients(ref_model)
            check_sharded_parity(self, ref_model, model)
            take_step((optim, ref_optim))


class Magnitude(nn.Module):
    """Scales each feature of the sum of two layers. ``set_magnitude`` computes the scale from the layers' weights."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 3, bias=False)
        self.right = nn.Linear(3, 3, bias=False)
        self.magnitude = nn.Parameter(torch.empty(3))

    def set_magnitude(self) -> None:
        with torch.no_grad():
            norms = [layer.weight.norm(dim=1) for layer in (self.left, self.right)]
        self.magnitude = nn.Parameter(norms[0] + norms[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.magnitude * (self.left(x) + self.right(x))


class TestFullyShardMetaDeviceInit(InitTest):
    world_size = 4

    @skip_if_lt_x_gpu(1)
    @subtests(
        mesh_on_meta=[False, True],
        dim=[8, 3, 1],
        mp_policy=[MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)],
        valid=lambda mesh_on_meta, dim, mp_policy: not mesh_on_meta or (dim == 8 and mp_policy.param_dtype is None),
    )
    def test_meta_device_1d_init(self, mesh_on_meta, dim, mp_policy):
        mesh = None if mesh_on_meta else make_mesh(self.world_size)
        with META:
            mesh = mesh or make_mesh(self.world_size)
            model = nn.Sequential(*self._two_mlps(dim))
            shard_each((*model, model), mesh=mesh, mp_policy=mp_policy)
        for param in model.parameters():
            self.assertEqual((param.device, param.to_local().device), (META, META))
        ref_model = nn.Sequential(*self._two_mlps(dim)).to(self.device)
        self._test_to_empty_and_reset_parameters(ref_model, model, dim, mesh, mp_policy.param_dtype)

    def _two_mlps(self, dim: int) -> list[MLP]:
        return [MLP(dim, bias=with_bias, dim_multiplier=1, with_buffer=with_bias) for with_bias in (True, False)]

    @skip_if_lt_x_gpu(1)
    @subtests(dim=[8, 3])
    def test_meta_device_2d_init(self, dim):
        mesh = make_mesh(2, 2, names=("dp", "tp"))
        with META:
            model = nn.Sequential(tensor_parallel_mlp(MLP(dim, with_buffer=True), mesh["tp"]))
            shard_each((model[0].in_proj, model[0].out_proj, model), mesh=mesh["dp"])
        for param in model.parameters():
            self.assertEqual((param.device, param.to_local().device), (META, META))
        ref_model = nn.Sequential(MLP(dim, with_buffer=True)).to(self.device)
        self._test_to_empty_and_reset_parameters(ref_model, model, dim, mesh["dp"])

    def _test_to_empty_and_reset_parameters(
        self,
        ref_model: nn.Sequential,
        model: nn.Sequential,
        dim: int,
        dp_mesh: DeviceMesh,
        param_dtype: torch.dtype | None = None,
    ) -> None:
        """Materialize and initialize ``model``, copy its values to ``ref_model``, and compare one iteration of both."""
        model.to_empty(device=self.device)
        states = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        locals_ = {name: state.to_local() if isinstance(state, DTensor) else state for name, state in states.items()}
        self.assertEqual({each.device for each in (*states.values(), *locals_.values())}, {self.device})
        with torch.no_grad():
            for state in states.values():
                state.fill_(MARK)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for name, local in locals_.items():
            self.assertFalse((local == MARK).any().item(), name)
        with torch.no_grad():
            for param in model.parameters():
                if Replicate() in param.placements:  # replicas have different random values on some devices
                    param.zero_()
                else:
                    param.abs_()  # so that every ReLU is active
            for buffer in model.buffers():
                buffer.abs_()

        ref_model.load_state_dict({**full_tensors(model), **dict(model.named_buffers())})
        optim, ref_optim = optimizers(model, ref_model)
        inp = self._input(4, dim, seed=dp_mesh.get_local_rank())
        out, ref_out = model(inp), inp
        for mlp in ref_model:
            rounded = {name: param.to(param_dtype) for name, param in mlp.named_parameters()}
            ref_out = functional_call(mlp, rounded, ref_out.to(param_dtype))
        self.assertEqual(out, ref_out)
        out.sum().backward()
        ref_out.sum().backward()
        average_gradients(ref_model, dp_mesh.get_group())
        ref_optim.step()
        optim.step()
        self.assertEqual(full_tensors(model), {name: param.detach() for name, param in ref_model.named_parameters()})

    @skip_if_lt_x_gpu(1)
    @subtests(cls=[nn.Embedding, nn.EmbeddingBag], padding_idx=[1, -1], sharded_dim=[0, 1], device=[HOST, META])
    def test_padding_row_of_an_embedding_is_zero(self, cls, padding_idx, sharded_dim, device):
        """The row of ``padding_idx`` is zero after construction and after ``reset_parameters``."""
        with device:
            model = cls(2 * self.world_size, 2 * self.world_size, padding_idx=padding_idx)
        mesh = make_mesh(self.world_size)
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda param: Shard(sharded_dim))
        if device is META:
            model.to_empty(device=self.device)
            model.reset_parameters()
        zeros = (full_tensors(model)["weight"] == 0).all(dim=1).nonzero().flatten().tolist()
        with torch_defect("dtensor_padding_row_is_not_zeroed", when=device is META and sharded_dim == 0):
            self.assertEqual(zeros, [padding_idx % (2 * self.world_size)])

    @skip_if_lt_x_gpu(1)
    def test_invalid_meta_device_init(self):
        mesh = make_mesh(self.world_size)
        with META:
            model = nn.Sequential(MLP(8), MLP(8))
            shard_each((*model, model), mesh=mesh)
        model[0].to_empty(device=self.device)
        names = [f"1.{linear}.{name}" for linear in ("in_proj", "out_proj") for name in ("weight", "bias")]
        message = (
            "FSDP parameters should be materialized from meta device before training, "
            f"but the following were still on meta device: {names}\nFor example, call module.to_empty(device)"
        )
        with self.assertRaisesRegex(RuntimeError, f"^{re.escape(message)}"):
            model(self._input(4, 8))

    @skip_if_lt_x_gpu(1)
    def test_rank0_broadcast_meta_device_init(self):
        args = ModelArgs(dropout_p=0.0)
        ref_model = filled(Transformer(args), seed=self.rank)  # only rank 0's values are used
        saved = ref_model.state_dict() if self.rank == 0 else {}
        with META:
            model = self._wrapped(Transformer(args))
        loaded = {}
        for name, param in model.state_dict().items():
            self.assertEqual(param.device, META)
            whole = saved[name] if self.rank == 0 else torch.empty(param.size())
            whole = whole.detach().to(self.device)
            dist.broadcast(whole, src=0)
            loaded[name] = nn.Parameter(distribute_tensor(whole, param.device_mesh, param.placements))
        if self.rank == 0:
            self.assertEqual(list(loaded), list(saved))
        model.load_state_dict(loaded, assign=True)
        for param in model.parameters():
            self.assertIsInstance(param, DTensor)
            self.assertEqual((param.device, param.to_local().device), (self.device, self.device))

        ref_model.to(self.device)
        for param in ref_model.parameters():
            dist.broadcast(param.detach(), src=0)
        plain_model = copy.deepcopy(ref_model)
        self._wrapped(ref_model)
        self.assertEqual(list(model.state_dict()), list(ref_model.state_dict()))
        for step in range(2):
            losses = []
            for each in (model, ref_model, plain_model):
                each.zero_grad()
                losses.append(each(self._tokens(seed=10 * step + self.rank)).square().mean())
                losses[-1].backward()
            self.assertEqual(losses[0], losses[1], rtol=0, atol=0)
            self.assertEqual(losses[0], losses[2])
        average_gradients(plain_model)
        check_sharded_parity(self, plain_model, model)
        check_sharded_parity(self, plain_model, ref_model)

    def _wrapped(self, model: Transformer) -> Transformer:
        return shard_each((*model.layers, model))


class TestFullyShardProcessGroupInit(InitTest):
    world_size = 4

    def _check_same_mesh(self, ref_mesh: DeviceMesh, mesh: DeviceMesh) -> None:
        self.assertEqual(mesh.mesh, ref_mesh.mesh, may_be="same")
        self.assertEqual(mesh.get_coordinate(), ref_mesh.get_coordinate())
        self.assertEqual(mesh._dim_group_names, ref_mesh._dim_group_names)
        for dim in range(mesh.ndim):
            ranks = [dist.get_process_group_ranks(each.get_group(dim)) for each in (mesh, ref_mesh)]
            self.assertEqual(ranks[0], ranks[1])

    def _train_on_both(self, ref_mesh: DeviceMesh, mesh: DeviceMesh, seed: int) -> tuple[nn.Module, nn.Module]:
        """Train an MLP on each mesh and a plain one for two steps, and check that all three agree."""
        plain = filled(MLP(8, self.device))
        models = [copy.deepcopy(plain) for _ in range(2)]
        for model, its_mesh in zip(models, (ref_mesh, mesh)):
            shard_each((model.in_proj, model.out_proj, model), mesh=its_mesh)
        optims = optimizers(plain, *models)
        group = None if mesh.ndim == 2 else ref_mesh.get_group()
        ref_losses = []
        for step in range(2):
            losses = [each(self._input(4, 8, seed=10 * step + seed)).sum() for each in (plain, *models)]
            ref_losses.append(losses[0])
            self.assertEqual(losses[1:], [losses[0]] * 2)
            for optim, loss in zip(optims, losses):
                optim.zero_grad()
                loss.backward()
            average_gradients(plain, group)
            for model in models:
                check_sharded_parity(self, plain, model)
            for optim in optims:
                optim.step()
        check_losses(ref_losses)
        return models[0], models[1]

    @skip_if_lt_x_gpu(1)
    def test_1d_process_group_init(self):
        mesh = make_mesh(2, 2, names=("dp", "tp"))
        ref_mesh = mesh["dp"]
        dp_mesh = DeviceMesh.from_group(mesh.get_group("dp"), accelerator.current().type, mesh_dim_names=("dp",))
        self._check_same_mesh(ref_mesh, dp_mesh)
        ref_model, model = self._train_on_both(ref_mesh, dp_mesh, seed=ref_mesh.get_local_rank())
        for ref_param, param in zip(ref_model.parameters(), model.parameters(), strict=True):
            self.assertEqual(param.to_local(), ref_param.to_local())
            self.assertEqual(param.grad.to_local(), ref_param.grad.to_local())
            self.assertEqual(param.device_mesh.mesh, ref_param.device_mesh.mesh, may_be="same")

    @skip_if_lt_x_gpu(1)
    def test_2d_process_group_init(self):
        names = ("replicate", "shard")
        ref_mesh = make_mesh(2, 2, names=names)
        groups = [ref_mesh.get_group(name) for name in names]
        device_type = accelerator.current().type
        mesh = DeviceMesh.from_group(groups, device_type, mesh=ref_mesh.mesh, mesh_dim_names=names)
        self._check_same_mesh(ref_mesh, mesh)
        for name in names:
            self.assertEqual(mesh[name], ref_mesh[name])
            self._check_same_mesh(ref_mesh[name], mesh[name])
        ref_model, model = self._train_on_both(ref_mesh, mesh, seed=self.rank)
        for ref_param, param in zip(ref_model.parameters(), model.parameters(), strict=True):
            self.assertEqual(param, ref_param)
            self.assertEqual(param.grad, ref_param.grad)
            self.assertEqual(param.device_mesh, ref_param.device_mesh)


class TestFullyShardHSDPBroadcast(InitTest):
    world_size = 4

    @skip_if_lt_x_gpu(1)
    def test_hsdp_broadcast_across_replicas(self):
        mesh = make_mesh(2, 2, names=("replicate", "shard"))
        group = mesh.get_group("replicate")
        model = filled(Transformer(ModelArgs(dropout_p=0.0)))
        model.register_buffer("extra", torch.arange(4.0))
        shard_each((*model.layers, model), mesh=mesh)
        states = [*(param.to_local().detach() for param in model.parameters()), *model.buffers()]
        if mesh.get_local_rank("replicate") == 1:
            for state in states:
                state.fill_(MARK)

        def agreements() -> list[bool]:
            gathered = [[torch.empty_like(state) for _ in range(2)] for state in states]
            for outs, state in zip(gathered, states):
                dist.all_gather(outs, state, group=group)
            return [torch.equal(*outs) for outs in gathered]

        self.assertEqual(agreements(), [False] * len(states))
        for state in states:
            dist.broadcast(state, src=dist.get_process_group_ranks(group)[0], group=group)
        self.assertEqual(agreements(), [True] * len(states))

        before = [state.clone() for state in states]
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        model(self._tokens()).square().sum().backward()
        optim.step()
        self.assertEqual(agreements(), [True] * len(states))
        changed = [not torch.equal(old, new) for old, new in zip(before, states)]
        self.assertEqual(changed, [True] * (len(states) - 1) + [False])


class TestHSDPWithCustomHook(InitTest):
    world_size = 4

    def _meshes(self) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
        """The 2D mesh, its dimension between shard groups, and its dimension within a shard group."""
        mesh = make_mesh(2, 2, names=("inter", "intra"))
        return mesh, mesh["inter"], mesh["intra"]

    @skip_if_lt_x_gpu(1)
    def test_custom_hook_custom_stream(self):
        mesh, _, intra = self._meshes()
        device_module = torch.get_device_module(accelerator.current().type)
        stream = device_module.Stream()
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)
        with self.assertRaisesRegex(ValueError, "stream cannot be set when using native HSDP"):
            model.set_all_reduce_hook(lambda reduced: None, stream=stream)

        seen = []
        model = fully_shard(nn.Linear(4, 4), mesh=intra)
        model.set_all_reduce_hook(lambda reduced: seen.append(device_module.current_stream()), stream=stream)
        model(self._input(2, 4)).sum().backward()
        self.assertEqual(len(seen), 1)
        if accelerator.current().has("streams"):  # other devices have no current stream
            self.assertEqual(seen, [stream])

    @skip_if_lt_x_gpu(1)
    def test_custom_hsdp_all_reduce_hook(self):
        _, inter, intra = self._meshes()
        model = MLP(10, self.device, bias=False)
        index = inter.get_local_rank()
        nn.init.constant_(model.in_proj.weight, index)
        nn.init.constant_(model.out_proj.weight, 2 * index)
        fully_shard(model, mesh=intra)
        calls = []

        def average_between_groups(reduced: torch.Tensor) -> None:
            calls.append(reduced.numel())
            dist.all_reduce(reduced, op=dist.ReduceOp.AVG, group=inter.get_group())

        model.set_all_reduce_hook(average_between_groups)
        inp = torch.arange(10.0, device=self.device).view(1, 10).requires_grad_()
        model(inp).sum().backward()
        # In shard group 0 weights and gradients are zero. In shard group 1 each of the 40 hidden units is 45, the sum
        # of the inputs.
        self.assertEqual(calls, [2 * 10 * 40 // 2])
        self.assertEqual(model.out_proj.weight.grad.to_local(), torch.full((5, 40), 45 / 2, device=self.device))
        self.assertEqual(model.in_proj.weight.grad.to_local(), (10 * inp.detach()).expand(20, 10))


class TestFullyShardShardPlacementFn(InitTest):
    world_size = 8

    def _init_models(self) -> tuple[Transformer, Transformer]:
        return three_layer_transformer().to(self.device), three_layer_transformer()

    def _shard_transformer(self, model: Transformer, fn: Callable, mesh: DeviceMesh | None = None) -> None:
        shard_each((*model.layers, model), mesh=mesh, shard_placement_fn=fn)

    @skip_if_lt_x_gpu(1)
    def test_init_1d_transformer_shard_largest_dim(self):
        ref_model, model = self._init_models()
        self._shard_transformer(model, shard_largest_dim)
        dims = set()
        for name, param in model.named_parameters():
            (placement,) = param.placements
            self.assertEqual(placement, shard_largest_dim(ref_model.get_parameter(name)), name)
            dims.add(placement.dim)
        self.assertEqual(dims, {0, 1})
        self._check_same_names_and_values(ref_model, model)
        self._check_two_steps(ref_model, model)

    @skip_if_lt_x_gpu(1)
    def test_init_1d_transformer_shard_dim_neg1(self):
        ref_model, model = self._init_models()
        self._shard_transformer(model, lambda param: Shard(-1))
        for name, param in model.named_parameters():
            self.assertEqual(param.placements, (Shard(param.ndim - 1),), name)
        self._check_same_names_and_values(ref_model, model)
        self._check_two_steps(ref_model, model)

    def _check_two_steps(self, ref_model: nn.Module, model: nn.Module) -> None:
        """Compare two training steps, so that parameters sharded along another dimension are unsharded after an
        optimizer step as well.
        """
        optims = [torch.optim.SGD(each.parameters(), lr=1e-5) for each in (ref_model, model)]
        for step in range(2):
            for each, optim in zip((ref_model, model), optims):
                optim.zero_grad()
                # Without the factor, some gradients of the attention would be smaller than the tolerance.
                (100 * each(self._tokens(seed=10 * step + self.rank)).square().mean()).backward()
            average_gradients(ref_model)
            check_sharded_parity(self, ref_model, model)
            for optim in optims:
                optim.step()

    @skip_if_lt_x_gpu(1)
    def test_init_2d_transformer_shard_diff_dim(self):
        mesh = make_mesh(4, 2, names=("dp", "tp"))
        ref_model, model = self._init_models()
        model = Transformer.parallelize(model.to(self.device), mesh["tp"], use_seq_parallel=True)

        def other_dim(param: nn.Parameter) -> Shard:
            taken = [placement.dim for placement in param.placements if isinstance(placement, Shard)]
            return Shard(1 - taken[0]) if taken and param.ndim == 2 else Shard(0)

        self._shard_transformer(model, other_dim, mesh["dp"])
        kinds: Any = (Shard, internals.strided_shard())
        matrices = []
        for name, param in model.named_parameters():
            shards = [placement for placement in param.placements if isinstance(placement, kinds)]
            self.assertGreaterEqual(len(shards), 1, name)
            if re.search(r"(wq|wk|wv|wo|w1|w2)\.weight$", name):
                matrices.append(name)
                self.assertEqual(sorted(placement.dim for placement in shards), [0, 1], name)
        self.assertEqual(len(matrices), 3 * 6)
        self._check_same_names_and_values(ref_model, model)

    @skip_if_lt_x_gpu(1)
    def test_init_1d_uneven_shard_largest_dim(self):
        model = nn.Sequential(nn.Linear(16, 17), nn.Linear(17, 8))
        with self.assertRaisesRegex(NotImplementedError, "FSDP does not support uneven sharding on dim 1"):
            fully_shard(model, shard_placement_fn=shard_largest_dim)

    @skip_if_lt_x_gpu(1)
    def test_invalid_shard_dim(self):
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8))
        with self.assertRaisesRegex(AssertionError, "Shard dim 1 is invalid for 1D tensor"):
            fully_shard(model, shard_placement_fn=lambda param: Shard(1))


class TestFullyShardOldImport(InitTest):
    world_size = 2

    @skip_if_lt_x_gpu(1)
    def test_old_import_training(self):
        from torch.distributed._composable import fsdp as old
        from torch.distributed._composable.fsdp.fully_shard import FSDPModule as OldFSDPModule

        policy = old.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        ref_model = filled(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).to(self.device))
        model = copy.deepcopy(ref_model)
        for module in (*model, model):
            old.fully_shard(module, mp_policy=policy)
            self.assertIsInstance(module, OldFSDPModule)
        self.assertIs(OldFSDPModule, FSDPModule)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        inp = self._input(8, 16)
        out = model(inp)
        self.assertEqual(out, copy.deepcopy(ref_model).bfloat16()(inp.bfloat16()), rtol=0, atol=0)
        out.sum().backward()
        before = full_tensors(model)
        optim.step()
        for name, after in full_tensors(model).items():
            self.assertNotEqual(after, before[name], msg=name)


class Dequantizing(nn.Module):
    """Multiplies a frozen parameter of any dtype by a trained one. The input is not used."""

    def __init__(self, frozen_dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        # Small integers are exact in each of the dtypes.
        values = torch.arange(256 * 256, device=device).remainder(7).view(256, 256)
        self.frozen = nn.Parameter(values.to(frozen_dtype), requires_grad=False)
        self.trained = nn.Parameter(torch.ones(256, 256, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen.float() * self.trained


class TestFullyShardMixedDtypeParam(InitTest):
    world_size = 2

    def _test_frozen_dtype(self, frozen_dtype: torch.dtype) -> None:
        model = Dequantizing(frozen_dtype, self.device)
        expected = model.frozen.detach().float()
        fully_shard(model, reshard_after_forward=True)
        self.assertEqual(model.frozen.dtype, frozen_dtype)
        for _ in range(2):
            out = model(self._input(1))
            self.assertEqual(out, expected, rtol=0, atol=0)
            (out.sum() * (self.rank + 1)).backward()
            self.assertIsNone(model.frozen.grad)
            self.assertEqual(model.trained.grad.to_local(), 1.5 * chunk_of(expected, self.rank, 2))
            model.zero_grad()

    @skip_if_lt_x_gpu(1)
    def test_mixed_dtypes_no_grad_param(self):
        self._test_frozen_dtype(torch.float8_e4m3fn)

    @skip_if_lt_x_gpu(1)
    @subtests(dtype=[torch.int8, torch.uint8])
    def test_integer_no_grad_param(self, dtype):
        """A frozen parameter may have an integer dtype, which cannot require gradients (#177844)."""
        with torch_defect("fsdp2_integer_parameters_are_refused"):
            self._test_frozen_dtype(dtype)

    @skip_if_lt_x_gpu(1)
    def test_mixed_dtypes_of_trained_params(self):
        """All trainable parameters of one group must have the same dtype."""
        model = nn.Linear(8, 8, device=self.device)
        model.bias = nn.Parameter(model.bias.detach().bfloat16())
        fully_shard(model)
        with self.assertRaisesRegex(AssertionError, "FSDP expects uniform original parameter dtype"):
            model(self._input(2, 8))


@needs(torch_facts.SHARDS_INTEGER_PARAMETERS)
class TestFullyShardRandomInitialization(FSDPTest):
    world_size = 4

    @skip_if_lt_x_gpu(4)
    def test_rows_differ_and_replicas_agree(self):
        """If all ranks have the same seed, shards get different random numbers, and replicas the same."""
        with META:
            model = nn.Linear(4, 4, bias=False)
        fully_shard(model, mesh=make_mesh(2, 2, names=("replicate", "shard"))).to_empty(device=self.device)
        torch.manual_seed(42)
        model.reset_parameters()
        shards = of_all_ranks(model.weight.to_local().tolist())
        self.assertEqual(shards[:2], shards[2:])
        with torch_defect("dtensor_random_numbers_repeat_on_the_cpu"):
            self.assertNotEqual(shards[0], shards[1])


class TestFullyShardNonFloatParam(FSDPTest):
    world_size = 2

    @needs(torch_facts.SHARDS_INTEGER_PARAMETERS)
    @skip_if_lt_x_gpu(2)
    @subtests(
        dtypes=[[torch.uint8], [torch.int64], [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]],
        mp_policy=[MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)],
        frozen=[False, True],
    )
    def test_non_float_param(self, dtypes, mp_policy, frozen):
        """Integer parameters are all-gathered in their own dtype, even with a ``param_dtype``, and are not reduced."""
        model: Any = filled(nn.Linear(4, 4)).to(self.device)
        values = [torch.arange(4, device=self.device).to(dtype) + index for index, dtype in enumerate(dtypes)]
        model.tables = nn.ParameterList(nn.Parameter(value.clone(), requires_grad=False) for value in values)
        model.bias.requires_grad_(not frozen)
        floats = 16 + 4
        nbytes = floats * (mp_policy.param_dtype or torch.float32).itemsize + sum(value.nbytes for value in values)
        seen: list[list[torch.Tensor]] = []
        model.register_forward_hook(lambda module, *_: seen.append([each.detach().clone() for each in module.tables]))
        fully_shard(model, mp_policy=mp_policy, reshard_after_forward=True)
        for _ in range(2):
            with recorded() as calls:
                model(torch.ones(2, 4, device=self.device)).sum().backward()
            sent = [(call.dtype, call.nbytes) for call in calls if call.name == "all_gather"]
            self.assertEqual(sent, [(torch.uint8, nbytes // self.world_size)] * 2)
            reduced = [call.numel for call in calls if call.name == "reduce_scatter"]
            self.assertEqual(reduced, [16 if frozen else floats])
            self.assertEqual(seen.pop(), values, rtol=0, atol=0)
            self.assertEqual([each.grad for each in model.tables], [None] * len(values))


class TestDefaults(TestCase):
    def test_defaults(self):
        """The defaults of FSDP2's arguments are the documented ones."""
        check_defaults(
            self,
            {
                fully_shard: {
                    "mesh": None,
                    "reshard_after_forward": None,
                    "shard_placement_fn": None,
                    "mp_policy": MixedPrecisionPolicy(),
                    "offload_policy": OffloadPolicy(),
                    "ignored_params": None,
                },
                MixedPrecisionPolicy: {
                    "param_dtype": None,
                    "reduce_dtype": None,
                    "output_dtype": None,
                    "cast_forward_inputs": True,
                },
                CPUOffloadPolicy: {"pin_memory": True},
                FSDPModule.unshard: {"async_op": False},
                FSDPModule.set_all_reduce_hook: {"stream": None},
                **{getattr(FSDPModule, name): {"recurse": True} for name in RECURSING if hasattr(FSDPModule, name)},
            },
        )


if __name__ == "__main__":
    run_tests()
