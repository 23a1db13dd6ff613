"""FSDP1 over one mesh dimension and TP over the other: outputs, gradients, collectives and state dicts."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed._tensor.common_dtensor import MLPModule, RMSNormPython
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.fsdp1_cases import states_may_be_synced
from torch_fsdp_tests.fsdp.references import full, of_all_ranks
from torch_fsdp_tests.fsdp.shards import local_of

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
Trained = tuple[Any, torch.optim.Optimizer]  # a model, with or without FSDP, and its optimizer
SGD_LR = 0.05  # large enough for a wrong gradient to show in the next output


class SimpleModel(nn.Module):
    """Three layers. TP shards the first column-wise and the second row-wise, and does not shard the third."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(5, 12)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(12, 4)
        self.net3 = nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net3(self.net2(self.relu(self.net1(x))))

    @staticmethod
    def get_sharded_param_names() -> dict[str, int]:
        """The parameters that TP shards, and the sharded dimension of each."""
        return {"net1.weight": 0, "net1.bias": 0, "net2.weight": 1}

    @staticmethod
    def get_non_sharded_param_names() -> list[str]:
        """The parameters that are not in the TP plan. Their gradients differ between the TP ranks."""
        return ["net3.weight", "net3.bias"]


class NormThenMLP(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.norm = RMSNormPython(10).to(device)
        self.mlp = MLPModule(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.norm(x))


def distribute_rmsnorm(module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
    """Make the ranks' inputs local shards of a DTensor along the first dimension, and return local outputs."""

    def prepare_input(module: nn.Module, inputs: tuple[torch.Tensor, ...], mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(inputs[0], mesh, [Shard(0)])

    def prepare_output(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        return output.to_local()

    return distribute_module(module, device_mesh, input_fn=prepare_input, output_fn=prepare_output)


def set_state_dict_type(model: FSDP, kind: StateDictType) -> None:
    """Do not offload optimizer states: a workaround for the defect ``fsdp1_offloaded_optim_states_are_one``."""
    config = FullOptimStateDictConfig if kind is FULL else ShardedOptimStateDictConfig
    FSDP.set_state_dict_type(model, kind, optim_state_dict_config=config(offload_to_cpu=False))


class TPTest(FSDPTest):
    """A test case with models under TP and FSDP1, and a plain reference model that trains on all ranks' batches."""

    world_size = 4

    def _mesh(self) -> DeviceMesh:
        """A mesh of two FSDP ranks ("dp") by half of the ranks for TP ("tp")."""
        shape = (2, self.world_size // 2)
        return init_device_mesh(accelerator.current().type, shape, mesh_dim_names=("dp", "tp"))

    def _model(self) -> SimpleModel:
        torch.manual_seed(0)
        return SimpleModel().to(self.device)

    def _input(self, seed: int) -> torch.Tensor:
        """A batch that differs by rank, also between TP ranks."""
        generator = torch.Generator().manual_seed(self.rank + seed)
        return torch.rand((2, 3, 5), generator=generator).to(self.device)

    def _tp_model(self, tp_mesh: DeviceMesh) -> nn.Module:
        plan = {
            "net1": ColwiseParallel(input_layouts=Shard(0)),
            "net2": RowwiseParallel(output_layouts=Shard(0)),
        }
        model = parallelize_module(self._model(), tp_mesh, plan)
        self.assertIsInstance(model.net1.weight, DTensor)
        self.assertIsInstance(model.net2.weight, DTensor)
        return model

    def _tp_fsdp_model(self, mesh: DeviceMesh, **fsdp_kwargs: Any) -> FSDP:
        return FSDP(self._tp_model(mesh["tp"]), device_mesh=mesh["dp"], **fsdp_kwargs)

    def _local_grads(self, model: FSDP) -> dict[str, torch.Tensor]:
        """This rank's elements of each parameter's gradient, as flat views of the flat parameter's gradient."""
        flat_param = internals.flat_param_of(model)
        grads = {}
        for name, info in zip(internals.names_in(flat_param), internals.shard_infos(flat_param), strict=True):
            start, count = (info.offset_in_shard, info.numel_in_shard) if info.in_shard else (0, 0)
            grads[name] = flat_param.grad[start : start + count]
        return grads

    def _sync_tp_grads(self, model: FSDP, tp_group: dist.ProcessGroup) -> None:
        """Average gradients over the TP ranks, as FSDP averages them over its ranks.

        TP has already summed the gradients of the parameters in its plan. The others are summed here.
        """
        grads = self._local_grads(model)
        for name in SimpleModel.get_non_sharded_param_names():
            summed = grads[name].to(self.device, copy=True)  # offloaded gradients are on another device
            dist.all_reduce(summed, group=tp_group)
            grads[name].copy_(summed)
        internals.flat_param_of(model).grad.div_(tp_group.size())

    def _full_grads(self, model: FSDP, mesh: DeviceMesh | None = None) -> dict[str, torch.Tensor]:
        """The full gradients by name, concatenated over the FSDP ranks and then, with a ``mesh``, over its TP ranks."""
        mine = {name: grad.detach().cpu() for name, grad in self._local_grads(model).items()}
        shards = of_all_ranks(mine, model.process_group)
        full = {name: torch.cat([shard[name] for shard in shards]) for name in mine}
        shapes = {name: list(param.shape) for name, param in self._model().named_parameters()}
        self.assertEqual(list(full), list(shapes))
        if mesh is not None:
            tp_group = mesh.get_group("tp")
            splits = of_all_ranks(full, tp_group)
            for name, dim in SimpleModel.get_sharded_param_names().items():
                shape = [size // (tp_group.size() if index == dim else 1) for index, size in enumerate(shapes[name])]
                full[name] = torch.cat([split[name].view(shape) for split in splits], dim=dim)
            for name in set(shapes) - set(SimpleModel.get_sharded_param_names()):
                for split in splits:  # a parameter that TP does not shard is complete on each TP rank
                    self.assertEqual(split[name], full[name], rtol=0, atol=0)
        return {name: grad.view(shapes[name]) for name, grad in full.items()}

    def _reference_step(self, model: nn.Module, optim: torch.optim.Optimizer, seed: int) -> dict[str, torch.Tensor]:
        """One step of the reference model on all ranks' batches. Returns the gradients of the ranks' mean loss."""
        batches = []
        for rank in range(self.world_size):
            generator = torch.Generator().manual_seed(rank + seed)
            batches.append(torch.rand((2, 3, 5), generator=generator))
        optim.zero_grad()
        (model(torch.cat(batches).to(self.device)).sum() / self.world_size).backward()
        grads = {name: param.grad.detach().cpu().clone() for name, param in model.named_parameters()}
        optim.step()
        return grads

    def _trained_with_reference(self, mesh: DeviceMesh, **kwargs: Any) -> tuple[Trained, Trained]:
        """A model with TP and FSDP1 and the reference model, each with Adam, after two steps."""
        model, reference = self._tp_fsdp_model(mesh, **kwargs), self._model()
        optim, ref_optim = (torch.optim.Adam(each.parameters(), lr=SGD_LR) for each in (model, reference))
        for step in range(2):
            optim.zero_grad()
            model(self._input(seed=10 * step)).sum().backward()
            self._sync_tp_grads(model, mesh.get_group("tp"))
            optim.step()
            self._reference_step(reference, ref_optim, seed=10 * step)
        return (model, optim), (reference, ref_optim)

    def _optim_state(self, trained: Trained, kind: StateDictType) -> dict[str, Any]:
        model, optim = trained
        set_state_dict_type(model, kind)
        return FSDP.optim_state_dict(model, optim)

    def _test_sharded_state_dict(self, use_orig_params: bool) -> None:
        """A sharded state dict contains DTensors over both mesh dimensions, and can be loaded."""
        mesh = self._mesh()
        model = self._tp_fsdp_model(mesh, use_orig_params=use_orig_params)
        reference = {name: param.detach() for name, param in self._model().named_parameters()}
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state_dict = copy.deepcopy(model.state_dict())
            self.assertEqual(list(state_dict), list(reference))
            for name, value in state_dict.items():
                self.assertIsInstance(value, DTensor)
                self.assertEqual(value.device_mesh.mesh_dim_names, ("dp", "tp"))
                self.assertEqual(value.full_tensor(), reference[name], rtol=0, atol=0)
                # TP and FSDP shard the parameters of the TP plan over all ranks. FSDP shards the others over two.
                parts = self.world_size if name in SimpleModel.get_sharded_param_names() else 2
                self.assertEqual(value.to_local().numel() * parts, value.numel(), msg=name)
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            model.load_state_dict(state_dict)
        inp = self._input(seed=1)
        self.assertEqual(model(inp), self._model()(inp))

    def _test_optim_state_dict(self, kind: StateDictType, use_orig_params: bool) -> None:
        """The full tensors of the optimizer state match those of the reference model."""
        trained, (reference, ref_optim) = self._trained_with_reference(self._mesh(), use_orig_params=use_orig_params)
        states = self._optim_state(trained, kind)["state"]
        self.assertEqual(set(states), {name for name, _ in reference.named_parameters()})
        for name, param in reference.named_parameters():
            for moment in ("exp_avg", "exp_avg_sq"):
                self.assertEqual(full(states[name][moment]), ref_optim.state[param][moment], f"{moment} of {name}")

    def _test_optim_state_dict_is_loaded(self, kind: StateDictType, use_orig_params: bool) -> None:
        mesh = self._mesh()
        trained, (reference, ref_optim) = self._trained_with_reference(mesh, use_orig_params=use_orig_params)
        state_dict = self._optim_state(trained, kind)
        model = self._tp_fsdp_model(mesh, use_orig_params=use_orig_params)
        optim = torch.optim.Adam(model.parameters(), lr=SGD_LR)
        for each in (trained[0], model):
            set_state_dict_type(each, SHARDED)
        model.load_state_dict(copy.deepcopy(trained[0].state_dict()))
        set_state_dict_type(model, kind)
        optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, state_dict))

        model(self._input(seed=20)).sum().backward()
        self._sync_tp_grads(model, mesh.get_group("tp"))
        optim.step()
        self._reference_step(reference, ref_optim, seed=20)
        inp = self._input(seed=16)
        self.assertEqual(model(inp), reference(inp))


class TestTPFSDPIntegration(TPTest):
    @skip_if_lt_x_gpu(4)
    @subtests(
        cpu_offload=[CPUOffload(offload_params=False), CPUOffload(offload_params=True)],
        sharding_strategy=[None, ShardingStrategy.SHARD_GRAD_OP],
        use_orig_params=[False, True],
    )
    def test_fsdp_tp_integration(self, **fsdp_kwargs):
        """Outputs, gradients and the outputs after a step match those of FSDP over all ranks and of a plain model."""
        mesh = self._mesh()
        all_ranks = init_device_mesh(accelerator.current().type, (self.world_size,))
        fsdp_model = FSDP(self._model(), device_mesh=all_ranks, **fsdp_kwargs)
        tp_fsdp_model = self._tp_fsdp_model(mesh, **fsdp_kwargs)
        models = fsdp_model, tp_fsdp_model
        optims = [torch.optim.SGD(model.parameters(), lr=SGD_LR) for model in models]
        reference = self._model()
        ref_optim = torch.optim.SGD(reference.parameters(), lr=SGD_LR)

        inp = self._input(seed=1)
        outputs = [model(inp) for model in models]
        self.assertEqual(outputs[0], reference(inp))
        self.assertEqual(outputs[1], reference(inp))
        for output in outputs:
            output.sum().backward()
        self._sync_tp_grads(tp_fsdp_model, mesh.get_group("tp"))
        grads = self._full_grads(fsdp_model), self._full_grads(tp_fsdp_model, mesh)
        self.assertEqual(grads[1], grads[0])
        # Compare with the reference model, which gets the batches of all ranks.
        wanted = self._reference_step(reference, ref_optim, seed=1)
        self.assertEqual(grads[0], wanted)
        self.assertEqual(grads[1], wanted)

        for optim in optims:
            optim.step()
        inp = self._input(seed=16)
        expected = reference(inp)
        self.assertNotEqual(expected, self._model()(inp))
        for model in models:
            self.assertEqual(model(inp), expected)

    @skip_if_lt_x_gpu(4)
    @subtests(synchronizes=[True, False])
    def test_replicas_stay_alike(self, synchronizes):
        """Parameters that TP does not shard stay equal on all TP ranks only if their gradients are synchronized."""
        mesh = self._mesh()
        tp_group = mesh.get_group("tp")
        model = self._tp_fsdp_model(mesh, use_orig_params=True)
        optim = torch.optim.SGD(model.parameters(), lr=SGD_LR, momentum=0.9)
        reference = self._model()
        ref_optim = torch.optim.SGD(reference.parameters(), lr=SGD_LR, momentum=0.9)
        for step in range(3):
            optim.zero_grad()
            model(self._input(seed=10 * step)).sum().backward()
            if synchronizes:
                self._sync_tp_grads(model, tp_group)
            optim.step()
            self._reference_step(reference, ref_optim, seed=10 * step)
            alike = self._alike(model, tp_group)
            if synchronizes:
                self.assertEqual(alike, {"net2.bias": True, "net3.weight": True, "net3.bias": True})
            elif step == 0:
                # The loss sums all outputs, and each output uses one row of net3.weight. So biases have the same
                # gradient on all ranks.
                self.assertEqual(alike, {"net2.bias": True, "net3.weight": False, "net3.bias": True})
            else:
                self.assertFalse(alike["net3.weight"])
        inp = self._input(seed=16)
        if synchronizes:
            self.assertEqual(model(inp), reference(inp))
        else:
            self.assertNotEqual(model(inp), reference(inp))

    def _alike(self, model: FSDP, group: dist.ProcessGroup) -> dict[str, bool]:
        """For each parameter that TP does not shard: whether it is bitwise equal on all ranks of the group."""
        with FSDP.summon_full_params(model, writeback=False):
            full = {
                name: local_of(param.detach()).cpu().clone()
                for name, param in model.module.named_parameters()
                if name not in SimpleModel.get_sharded_param_names()
            }
        everywhere = of_all_ranks(full, group)
        return {name: all(torch.equal(other[name], value) for other in everywhere) for name, value in full.items()}

    @skip_if_lt_x_gpu(4)
    def test_fsdp_tp_extension_grad(self):
        """The flat parameter handles gradients of DTensors, without additional collectives."""
        mesh = self._mesh()
        model = NormThenMLP(self.device)
        plan = {
            "net1": ColwiseParallel(input_layouts=Shard(0)),
            "net2": RowwiseParallel(output_layouts=Shard(0)),
        }
        parallelize_module(model.mlp, mesh["tp"], plan)
        distribute_rmsnorm(model.norm, mesh["tp"])
        fsdp_model = FSDP(model, device_mesh=mesh["dp"])
        torch.manual_seed(self.rank)
        with CommDebugMode() as comm_mode:
            fsdp_model(torch.rand(2, 10, device=self.device)).sum().backward()

        functional, c10d = torch.ops.c10d_functional, torch.ops.c10d
        counts = {op: count for op, count in comm_mode.get_comm_counts().items() if count}
        # FSDP gathers CPU tensors into a list of tensors, and others into one tensor.
        in_list = self.device == torch.device("cpu")  # the CPU is the subject
        self.assertEqual(
            counts,
            {
                functional.reduce_scatter_tensor: 2,
                functional.all_gather_into_tensor: 2,
                functional.all_reduce: 1,
                c10d.allgather_ if in_list else c10d._allgather_base_: 1,
                c10d._reduce_scatter_base_: 1,
            },
        )
        self.assertEqual(comm_mode.get_total_counts(), 7)
        (grad,) = (param.grad for param in fsdp_model.parameters())
        self.assertEqual(grad.isfinite().all().item(), True)
        self.assertGreater(grad.count_nonzero().item(), 0)

    @skip_if_lt_x_gpu(4)
    def test_fsdp_tp_sync_module_state(self):
        """Parameters and buffers that are DTensors are synchronized from the first rank of each FSDP group."""
        mesh = self._mesh()
        dp_group, tp_mesh = mesh.get_group("dp"), mesh["tp"]
        torch.manual_seed(self.rank)
        model = nn.Module()
        model.param = nn.Parameter(self._replicated(tp_mesh))
        model.register_buffer("buffer", self._replicated(tp_mesh))

        def local_of_all(module: nn.Module) -> list[list[torch.Tensor]]:
            """The local tensors of each rank in the group."""
            mine = [tensor.to_local().detach().cpu().clone() for tensor in (module.param, module.buffer)]
            return of_all_ranks(mine, dp_group)

        first, second = local_of_all(model)
        for mine, theirs in zip(first, second, strict=True):
            self.assertNotEqual(mine, theirs)
        with states_may_be_synced():
            fsdp_model = FSDP(model, device_mesh=mesh["dp"], sync_module_states=True)
        with FSDP.summon_full_params(fsdp_model):
            synced = local_of_all(fsdp_model.module)
        self.assertEqual(synced, [first, first], rtol=0, atol=0)

    def _replicated(self, tp_mesh: DeviceMesh) -> DTensor:
        """A DTensor with a ``Replicate`` placement whose local tensor differs by rank."""
        return DTensor.from_local(torch.rand(8, 8).to(self.device), tp_mesh, [Replicate()], run_check=False)

    @skip_if_lt_x_gpu(4)
    @subtests(use_orig_params=[False, True])
    def test_sharded_state_dict(self, use_orig_params):
        self._test_sharded_state_dict(use_orig_params)

    @skip_if_lt_x_gpu(4)
    def test_sharded_state_dict_of_uneven_columns(self):
        """A DTensor in a sharded state dict has the parameter's shape, also if TP shards it unevenly.

        The test shards columns unevenly, which needs no communication. With uneven rows the ranks would hang.
        """
        mesh = self._mesh()
        model = nn.Sequential(nn.Linear(3, 2, bias=False, device=self.device))
        parallelize_module(model, mesh["tp"], {"0": RowwiseParallel()})
        whole = model[0].weight.full_tensor()
        model = FSDP(model, device_mesh=mesh["dp"], use_orig_params=True)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            actual = model.state_dict()["0.weight"]
        with torch_defect("fsdp1_uneven_tp_shard_has_a_wrong_shape"):
            self.assertEqual(actual.shape, whole.shape)
            self.assertEqual(actual.full_tensor(), whole, rtol=0, atol=0)

    @skip_if_lt_x_gpu(4)
    @subtests(kind=[FULL, SHARDED], use_orig_params=[True, False])
    def test_optim_state_dict(self, kind, use_orig_params):
        self._test_optim_state_dict(kind, use_orig_params)

    @skip_if_lt_x_gpu(4)
    @subtests(use_orig_params=[True, False])
    def test_full_optim_state_dict(self, use_orig_params):
        """A full optimizer state dict has full tensors on each rank, also for parameters that TP shards."""
        trained, (reference, ref_optim) = self._trained_with_reference(self._mesh(), use_orig_params=use_orig_params)
        states = self._optim_state(trained, FULL)["state"]
        for name, param in reference.named_parameters():
            for moment in ("exp_avg", "exp_avg_sq"):
                is_split = name in SimpleModel.get_sharded_param_names()
                with torch_defect("fsdp1_full_optim_state_stays_split_by_tp", when=is_split):
                    actual = local_of(states[name][moment])
                    self.assertEqual(actual, ref_optim.state[param][moment], f"{moment} of {name}")

    @skip_if_lt_x_gpu(4)
    @subtests(kind=[SHARDED, FULL])
    def test_optim_state_dict_is_loaded(self, kind):
        """Another model loads the optimizer state and continues the training."""
        with torch_defect("fsdp1_optim_state_is_loaded_wrong_with_tp"):
            self._test_optim_state_dict_is_loaded(kind, use_orig_params=True)

    @skip_if_lt_x_gpu(4)
    @subtests(kind=[SHARDED, FULL])
    def test_optim_state_dict_of_flat_parameters(self, kind):
        """It raises: states have global shapes, and the flat parameter has only this rank's TP shard."""
        with self.assertRaises((RuntimeError, ValueError)):
            self._test_optim_state_dict_is_loaded(kind, use_orig_params=False)


class TestTPFSDPOverThreeRanks(TPTest):
    """FSDP over two ranks and TP over three, so that the two world sizes differ."""

    world_size = 6

    @skip_if_lt_x_gpu(6)
    @subtests(use_orig_params=[False, True])
    def test_sharded_state_dict(self, use_orig_params):
        self._test_sharded_state_dict(use_orig_params)

    @skip_if_lt_x_gpu(6)
    @subtests(kind=[FULL, SHARDED], use_orig_params=[True, False])
    def test_optim_state_dict(self, kind, use_orig_params):
        self._test_optim_state_dict(kind, use_orig_params)


if __name__ == "__main__":
    run_tests()
