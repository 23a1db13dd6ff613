"""State dicts of FSDP1 on a device mesh: DTensors with what ShardedTensors would have, saved, loaded, trained on with.

Each rank trains on rows of its own. The reference is the plain model, which sees the rows of all ranks.
"""

from __future__ import annotations

import copy
import io
import os
import shutil
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.fully_sharded_data_parallel import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
)
from torch.distributed.tensor import DTensor, Shard

from torch_fsdp_tests import accelerator
from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import parametrize, run_tests
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir

SHARDED = StateDictType.SHARDED_STATE_DICT
EVEN = parametrize("is_even_sharded_model", [True, False])
OFFLOAD = parametrize("offload_to_cpu", [True, False])
Trained = tuple[FSDP, torch.optim.Optimizer]


class TestDummyModel(nn.Module):
    """Every dimension divides by the number of ranks."""

    __test__ = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net1 = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.net2 = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.net3 = nn.Sequential(nn.Linear(32, 64), nn.ReLU())
        self.net4 = nn.Sequential(nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net4(self.net3(self.net2(self.net1(x))))

    def get_input(self) -> torch.Tensor:
        return torch.rand(8, 8)


class TestDummyModelUneven(nn.Module):
    """No dimension divides by four."""

    __test__ = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net1 = nn.Linear(5, 10)
        self.net2 = nn.Linear(10, 15)
        self.net3 = nn.Linear(15, 30)
        self.net4 = nn.Sequential(nn.ReLU(), nn.Linear(30, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net4(self.net3(self.net2(self.net1(x))))

    def get_input(self) -> torch.Tensor:
        return torch.rand(5, 5)


def set_sharded(model: FSDP, offload_to_cpu: bool = False) -> None:
    FSDP.set_state_dict_type(
        model, SHARDED, ShardedStateDictConfig(offload_to_cpu), ShardedOptimStateDictConfig(offload_to_cpu)
    )


def states(osd: dict[str, Any]) -> dict[str, Any]:
    """Every state but the step counts, by the parameter's name and its own."""
    return {
        f"{name}.{key}": value for name, state in osd["state"].items() for key, value in state.items() if key != "step"
    }


def steps(osd: dict[str, Any]) -> list[float]:
    return [float(state["step"]) for state in osd["state"].values()]


def full_parameters(model: FSDP) -> dict[str, torch.Tensor]:
    with FSDP.summon_full_params(model, writeback=False):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


class TestFSDPWithDeviceMeshAndDTensor(DTensorTestBase):
    @property
    def device(self) -> torch.device:
        return accelerator.current().device(self.rank)

    def init_pg(self, *args: Any, **kwargs: Any) -> None:
        # FSDP's ways to say what kind of state dict it shall give call themselves deprecated, every time.
        warnings.filterwarnings("ignore", category=FutureWarning)
        super().init_pg(*args, **kwargs)

    def _mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device_type, (self.world_size,))

    def _plain(self, is_even_sharded_model: bool) -> nn.Module:
        return (TestDummyModel() if is_even_sharded_model else TestDummyModelUneven()).to(self.device)

    def _create_model(
        self, is_even_sharded_model: bool, device_mesh: DeviceMesh | None = None, **kwargs: Any
    ) -> Trained:
        """FSDP and Adam after a step, on the mesh or without one."""
        model = FSDP(self._plain(is_even_sharded_model), device_mesh=device_mesh, **kwargs)
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        self._train(model, optim, range(1))
        return model, optim

    def _train(self, model: nn.Module, optim: torch.optim.Optimizer, iterations: range) -> None:
        """The batch of an iteration has four parts, of which each rank has its share, and a plain model all."""
        size = dist.get_world_size(model.process_group) if isinstance(model, FSDP) else 1
        for iteration in iterations:
            optim.zero_grad()
            torch.manual_seed(iteration)
            parts = [getattr(model, "module", model).get_input().to(self.device) for _ in range(4)]
            mine = parts if size == 1 else parts[self.rank * 4 // size : (self.rank + 1) * 4 // size]
            model(torch.cat(mine)).sum().div(len(mine)).backward()
            optim.step()

    def _check_same(self, found: dict[str, Any], wanted: dict[str, Any]) -> None:
        """DTensors of the same names with the same values, bit for bit, in every shard."""
        self.assertEqual(list(found), list(wanted))
        for name in wanted:
            self.assertEqual([type(found[name]), type(wanted[name])], [DTensor, DTensor])
            self.assertEqual(found[name].placements, wanted[name].placements)
            self.assertEqual(found[name].to_local(), wanted[name].to_local(), msg=name, rtol=0, atol=0)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @EVEN
    def test_fsdp_init_with_device_mesh(self, is_even_sharded_model):
        mesh = self._mesh()
        model, optim = self._create_model(is_even_sharded_model, mesh)
        set_sharded(model)
        state_dict, osd = model.state_dict(), FSDP.optim_state_dict(model, optim)
        self.assertEqual((len(state_dict), len(states(osd))), (8, 16))
        for name, value in {**state_dict, **states(osd)}.items():
            self.assertIs(type(value), DTensor, name)
            self.assertEqual((value.device_mesh, value.placements), (mesh, (Shard(0),)))
        settings = FSDP.get_state_dict_type(model)
        self.assertTrue(settings.state_dict_config._use_dtensor)
        self.assertTrue(settings.optim_state_dict_config._use_dtensor)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @OFFLOAD
    @EVEN
    def test_dtensor_sharded_tensor_state_dict_identical(self, offload_to_cpu, is_even_sharded_model):
        """On a mesh and without one, each rank has the same rows."""
        dicts = []
        for mesh in (self._mesh(), None):
            model, optim = self._create_model(is_even_sharded_model, mesh)
            set_sharded(model, offload_to_cpu)
            osd = FSDP.optim_state_dict(model, optim)
            dicts.append(({**model.state_dict(), **states(osd)}, steps(osd)))
        (dtensors, mesh_steps), (sharded_tensors, group_steps) = dicts
        self.assertEqual(mesh_steps, group_steps)
        self.assertEqual(list(dtensors), list(sharded_tensors))
        empty = []
        for name, dtensor in dtensors.items():
            sharded = sharded_tensors[name]
            self.assertEqual((type(dtensor), type(sharded)), (DTensor, ShardedTensor))
            local, shards = dtensor.to_local(), sharded.local_shards()
            where = "cpu" if offload_to_cpu else self.device.type  # the CPU is the subject
            self.assertEqual(local.device.type, where)
            if shards:
                self.assertEqual(local, shards[0].tensor, rtol=0, atol=0, exact_device=True)
            else:
                self.assertEqual(local.numel(), 0)
                empty.append(name)
        last_of_four = self.rank == 3 and not is_even_sharded_model and self.world_size == 4
        wanted = ["net4.1.weight", "net4.1.bias"] if last_of_four else []
        self.assertEqual([name for name in empty if "exp_avg" not in name], wanted)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @OFFLOAD
    @EVEN
    def test_dtensor_sharded_optim_load_state_dict(self, offload_to_cpu, is_even_sharded_model):
        model, optim = self._create_model(is_even_sharded_model, self._mesh())
        set_sharded(model, offload_to_cpu)
        saved = FSDP.optim_state_dict(model, optim)
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        wanted, parameters = copy.deepcopy(saved), full_parameters(model)

        self._train(model, optim, range(1, 2))
        changed = states(FSDP.optim_state_dict(model, optim))
        for name, value in states(wanted).items():
            self.assertNotEqual(changed[name].full_tensor(), value.full_tensor(), msg=name)
        self.assertEqual(steps(FSDP.optim_state_dict(model, optim)), [2] * 8)
        loaded = FSDP.optim_state_dict_to_load(model, optim, torch.load(file))
        optim.load_state_dict(loaded)
        found = FSDP.optim_state_dict(model, optim)
        self._check_same(states(found), states(wanted))
        self.assertEqual((steps(found), found["param_groups"]), ([1] * 8, wanted["param_groups"]))
        self.assertNotEqual(full_parameters(model), parameters)  # those were not saved

    @with_comms
    @skip_if_lt_x_gpu(2)
    @OFFLOAD
    @EVEN
    def test_dtensor_sharded_model_load_state_dict(self, offload_to_cpu, is_even_sharded_model):
        """The step in between changes every parameter, and after loading the model computes what it did before."""
        model, optim = self._create_model(is_even_sharded_model, self._mesh())
        set_sharded(model, offload_to_cpu)
        saved = model.state_dict()
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        wanted, parameters = copy.deepcopy(saved), full_parameters(model)
        probe = self._plain(is_even_sharded_model).get_input().to(self.device)
        output = model(probe).detach()

        self._train(model, optim, range(1, 2))
        for name, param in full_parameters(model).items():
            self.assertNotEqual(param, parameters[name], msg=name)
        model.load_state_dict(torch.load(file))
        self._check_same(model.state_dict(), wanted)
        self.assertEqual(full_parameters(model), parameters, rtol=0, atol=0)
        self.assertEqual(model(probe).detach(), output, rtol=0, atol=0)

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_raises_warning_or_errors(self):
        model, optim = self._create_model(True, self._mesh())
        self._train(model, optim, range(1, 2))
        message = "DeviceMesh is not compatible with LOCAL_STATE_DICT."
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            with self.assertRaisesRegex(RuntimeError, message):
                model.state_dict()
            with self.assertRaisesRegex(RuntimeError, message):
                FSDP.optim_state_dict(model, optim)

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_local_shapes_of_uneven_shards(self):
        """Beyond upstream: of 5 rows four ranks have 2, 2, 1 and none, of 10 they have 3, 3, 3 and 1."""
        self.assertEqual(self.world_size, 4)
        model, optim = self._create_model(False, self._mesh())
        set_sharded(model)
        state_dict, osd = model.state_dict(), FSDP.optim_state_dict(model, optim)
        rows = {"net1.weight": (3, 3, 3, 1), "net1.bias": (3, 3, 3, 1), "net4.1.bias": (2, 2, 1, 0)}
        rows["net2.bias"] = (4, 4, 4, 3)
        for name, of_ranks in rows.items():
            for value in (state_dict[name], osd["state"][name]["exp_avg"], osd["state"][name]["exp_avg_sq"]):
                self.assertEqual(value.to_local().shape, (of_ranks[self.rank], *value.shape[1:]))
                self.assertEqual(value.shape[0], sum(of_ranks))

    @with_comms
    @skip_if_lt_x_gpu(2)
    @EVEN
    def test_full_tensors(self, is_even_sharded_model):
        """Beyond upstream: every shard, put together, is what FULL_STATE_DICT says, and what the plain model has."""
        plain = self._plain(is_even_sharded_model)
        optim = torch.optim.Adam(plain.parameters(), lr=0.1)
        self._train(plain, optim, range(1))
        wanted = {name: param.detach() for name, param in plain.named_parameters()}
        for name, param in plain.named_parameters():
            moments = optim.state[param]
            wanted |= {f"{name}.{key}": value for key, value in moments.items() if key != "step"}

        model, optim = self._create_model(is_even_sharded_model, self._mesh())
        set_sharded(model)
        sharded = {**model.state_dict(), **states(FSDP.optim_state_dict(model, optim))}
        found = {name: value.full_tensor() for name, value in sharded.items()}
        full = FullOptimStateDictConfig(rank0_only=False)
        FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), full)
        gathered = {**model.state_dict(), **states(FSDP.optim_state_dict(model, optim))}
        self.assertEqual(found, gathered, rtol=0, atol=0, exact_device=False)
        # The reference adds the rows of all ranks up in another order.
        self.assertEqual(found, wanted)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @EVEN
    def test_training_goes_on(self, is_even_sharded_model):
        """Beyond upstream: another model, into which both dicts are loaded, trains on as if it had been the first."""
        mesh = self._mesh()
        plain = self._plain(is_even_sharded_model)
        plain_optim = torch.optim.Adam(plain.parameters(), lr=0.1)
        self._train(plain, plain_optim, range(3))
        for use_orig_params in (False, True):
            model, optim = self._create_model(is_even_sharded_model, mesh, use_orig_params=use_orig_params)
            other, other_optim = self._create_model(is_even_sharded_model, mesh, use_orig_params=use_orig_params)
            self._train(other, other_optim, range(50, 52))
            for each in (model, other):
                set_sharded(each)
            other.load_state_dict(model.state_dict())
            osd = FSDP.optim_state_dict(model, optim)
            FSDP.optim_state_dict_to_load(other, other_optim, osd, load_directly=True)
            for each, each_optim in ((model, optim), (other, other_optim)):
                self._train(each, each_optim, range(1, 3))
            self.assertEqual(full_parameters(other), full_parameters(model), rtol=0, atol=0)
            self.assertEqual(full_parameters(other), dict(plain.named_parameters()))

    @with_comms
    @with_temp_dir
    @skip_if_lt_x_gpu(4)
    def test_checkpoint_on_disk(self):
        """Beyond upstream: saved by some ranks, loaded by as many, more or fewer, trained on as if uninterrupted."""
        sizes, orig = [(4, 4), (2, 4), (4, 2), (4, 1)], "use_orig_params"
        config = {"sizes": sizes, "is_even_sharded_model": [False], orig: [False, True]}
        self.run_subtests(config, self._test_checkpoint_on_disk)
        config = {"sizes": sizes[1:3], "is_even_sharded_model": [True], orig: [False]}
        self.run_subtests(config, self._test_checkpoint_on_disk)

    def _test_checkpoint_on_disk(
        self, sizes: tuple[int, int], is_even_sharded_model: bool, use_orig_params: bool
    ) -> None:
        path = os.path.join(self.temp_dir, f"{sizes}-{is_even_sharded_model}-{use_orig_params}")
        meshes = [DeviceMesh(self.device_type, list(range(size))) for size in sizes]
        plain = self._plain(is_even_sharded_model)
        plain_optim = torch.optim.Adam(plain.parameters(), lr=0.1)
        self._train(plain, plain_optim, range(1))

        def state_of(model: FSDP, optim: torch.optim.Optimizer, mesh: DeviceMesh) -> dict[str, Any]:
            set_sharded(model, offload_to_cpu=not use_orig_params)
            osd = FSDP.optim_state_dict(model, optim, group=mesh.get_group())
            return {"model": model.state_dict(), "optim": osd}

        if self.rank < sizes[0]:
            trained = self._create_model(is_even_sharded_model, meshes[0], use_orig_params=use_orig_params)
            dcp.save(state_of(*trained, meshes[0]), checkpoint_id=path, process_group=meshes[0].get_group())
        dist.barrier()
        if self.rank < sizes[1]:
            model, optim = self._create_model(is_even_sharded_model, meshes[1], use_orig_params=use_orig_params)
            self._train(model, optim, range(50, 52))
            group = meshes[1].get_group()
            state = state_of(model, optim, meshes[1])
            dcp.load(state, checkpoint_id=path, process_group=group)
            model.load_state_dict(state["model"])
            FSDP.optim_state_dict_to_load(model, optim, state["optim"], load_directly=True, group=group)
            self.assertEqual(full_parameters(model), dict(plain.named_parameters()))
            for trained in ((model, optim), (plain, plain_optim)):
                self._train(*trained, range(1, 3))
            self.assertEqual(full_parameters(model), dict(plain.named_parameters()))

    @with_comms
    @with_temp_dir
    @skip_if_lt_x_gpu(2)
    def test_damaged_checkpoint(self):
        """Beyond upstream: every rank hears of it, and the live model and optimizer are as they were."""
        mesh = self._mesh()
        good, wide, short = (os.path.join(self.temp_dir, name) for name in ("good", "wide", "short"))

        def state_of(model: FSDP, optim: torch.optim.Optimizer) -> dict[str, Any]:
            set_sharded(model)
            return {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optim)}

        dcp.save(state_of(*self._create_model(False, mesh)), checkpoint_id=good)
        state = state_of(*self._create_model(False, mesh))
        state["optim"]["state"]["net2.weight"]["exp_avg"] = state["optim"]["state"]["net1.weight"]["exp_avg"]
        dcp.save(state, checkpoint_id=wide)
        del state["optim"]["state"]["net2.weight"]["exp_avg"]
        dcp.save(state, checkpoint_id=short)
        missing, truncated = (os.path.join(self.temp_dir, name) for name in ("missing", "truncated"))
        if self.rank == 0:
            for path in (missing, truncated):
                shutil.copytree(good, path)
            os.remove(os.path.join(missing, "__1_0.distcp"))
            os.truncate(os.path.join(truncated, "__1_0.distcp"), 100)
        dist.barrier()

        model, optim = self._create_model(False, mesh)
        self._train(model, optim, range(1, 3))
        before = full_parameters(model), copy.deepcopy(optim.state_dict())
        for path, message in {
            missing: r"__1_0\.distcp",
            truncated: "PytorchStreamReader failed|EOFError|unexpected end",
            wide: "Size mismatch between saved .* and current: .* for optim.state.net2.weight.exp_avg",
            short: "Missing key in checkpoint state_dict: optim.state.net2.weight.exp_avg",
        }.items():
            with self.subTest(os.path.basename(path)), self.assertRaisesRegex(CheckpointException, message):
                dcp.load(state_of(model, optim), checkpoint_id=path)
        self.assertEqual((full_parameters(model), optim.state_dict()), before, rtol=0, atol=0)


instantiate_device_type_tests(TestFSDPWithDeviceMeshAndDTensor, globals(), allow_xpu=True)

if __name__ == "__main__":
    run_tests()
