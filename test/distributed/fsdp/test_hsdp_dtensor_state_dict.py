"""State dicts of FSDP1 with HSDP on a 2-D mesh are saved and loaded, and training continues.

They contain DTensors, replicated over one mesh dimension and sharded over the other, with the same values as
ShardedTensors. The four ranks are two replicas of two shards. Each rank trains on its own rows. The reference is DDP or
the plain model.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import parametrize, run_tests
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.dtensor_states import DTensorStatesMixin, plain_parameters_and_moments
from torch_fsdp_tests.fsdp.references import full_parameters, of_all_ranks
from torch_fsdp_tests.fsdp.sharded_states import (
    FourLayers,
    Trained,
    parameters_and_moments,
    sharded_state_dicts,
    train_on_share,
    use_sharded_state_dicts,
)

HYBRID = ShardingStrategy.HYBRID_SHARD
PLACEMENTS = (Replicate(), Shard(0))
OFFLOAD = parametrize("offload_to_cpu", [True, False])


class UnevenModel(nn.Module):
    """A model whose numbers of rows and elements are odd."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net1 = nn.Linear(3, 5)
        self.net2 = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.net1(x).tanh())

    def get_input(self, generator: torch.Generator | None = None) -> torch.Tensor:
        return torch.rand(4, 3, generator=generator)


class FakeMPModel(nn.Module):
    """A sparse layer, whose name on rank 0 differs from that on other ranks, and a dense part with HSDP."""

    def __init__(self, mesh: DeviceMesh, rank: int, device: torch.device) -> None:
        super().__init__()
        self.dense = FSDP(FourLayers().to(device), use_orig_params=True, sharding_strategy=HYBRID, device_mesh=mesh)
        self.sparse_name = "sparse0" if rank == 0 else "sparse1"
        self.add_module(self.sparse_name, nn.Sequential(nn.Linear(8, 8, device=device), nn.ReLU()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sparse = getattr(self, self.sparse_name)(x)
        dist.all_reduce(sparse)
        return self.dense(sparse)


class TestHSDPWithDeviceMeshAndDTensor(DTensorStatesMixin, DTensorTestBase):
    world_size = 4

    def _mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device_type, (2, self.world_size // 2))

    def _create_model(
        self,
        mesh: DeviceMesh,
        use_mesh: bool = True,
        model_class: type[nn.Module] = FourLayers,
        steps: range = range(1),
        **kwargs: Any,
    ) -> Trained:
        """HSDP on a 2-D mesh or its groups, or full sharding on a 1-D mesh, with Adam and trained for ``steps``."""
        if mesh.ndim == 2:
            kwargs["sharding_strategy"] = HYBRID
        if use_mesh:
            kwargs["device_mesh"] = mesh
        else:
            kwargs["process_group"] = mesh.get_group(1), mesh.get_group(0)  # the shard group, then the replicate group
        return self._trained(FSDP(model_class().to(self.device), **kwargs), steps, mesh.size())

    def _reference(self, model_class: type[nn.Module], steps: range) -> Trained:
        return self._trained(model_class().to(self.device), steps, 1)

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_hsdp_init_with_device_mesh(self):
        mesh = self._mesh()
        self._check_laid_out(*self._create_model(mesh), mesh, PLACEMENTS)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @OFFLOAD
    def test_dtensor_sharded_tensor_state_dict_identical(self, offload_to_cpu):
        """Each rank has the same local shards with a mesh and with the mesh's two process groups."""
        mesh = self._mesh()
        on_mesh, on_groups = (self._create_model(mesh, use_mesh) for use_mesh in (True, False))
        self.assertEqual(self._check_same_rows(on_mesh, on_groups, offload_to_cpu), [], may_be="empty")

    @with_comms
    @skip_if_lt_x_gpu(4)
    @OFFLOAD
    def test_dtensor_sharded_optim_load_state_dict(self, offload_to_cpu):
        model, optim = self._create_model(self._mesh())
        use_sharded_state_dicts(model, offload_to_cpu)
        self._check_optim_comes_back(model, optim)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @OFFLOAD
    def test_dtensor_sharded_model_load_state_dict(self, offload_to_cpu):
        model, optim = self._create_model(self._mesh())
        use_sharded_state_dicts(model, offload_to_cpu)
        self._check_model_comes_back(model, optim)

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_root_module_is_not_FSDP(self):
        """Optimizer states of parameters outside FSDP are saved unchanged, on each rank those of its parameters."""
        model = FakeMPModel(self._mesh(), self.rank, self.device)
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        torch.manual_seed(self.rank)
        model(torch.rand(5, 8, device=self.device)).sum().backward()
        optim.step()
        sparse = getattr(model, model.sparse_name)[0]
        states = copy.deepcopy({name: optim.state[param] for name, param in sparse.named_parameters()})
        expected = {f"{model.sparse_name}.0.{name}": state for name, state in states.items()}
        FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        state = FSDP.optim_state_dict(model, optim)["state"]
        dense = {name for name in state if "dense" in name}
        self.assertEqual(dense, {f"dense.{name}" for name, _ in FourLayers().named_parameters()})
        for name in dense:
            for key in ("exp_avg", "exp_avg_sq"):
                self.assertIs(type(state[name][key]), DTensor)
                self.assertEqual(state[name][key].placements, PLACEMENTS)
        rest = {name: state[name] for name in state if name not in dense}
        self.assertEqual(len(rest), 2)
        self.assertEqual({type(value) for each in rest.values() for value in each.values()}, {torch.Tensor})
        self.assertEqual(rest, expected, rtol=0, atol=0, exact_device=False)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(model_class=[FourLayers, UnevenModel], use_orig_params=[False, True])
    def test_replicas_agree(self, model_class, use_orig_params):
        """Shards are bitwise equal on both replicas, and concatenated shards equal DDP's values."""
        mesh = self._mesh()
        ddp = self._trained(DDP(model_class().to(self.device)), range(3), self.world_size)
        expected = plain_parameters_and_moments(*ddp)

        hybrid = self._create_model(mesh, model_class=model_class, steps=range(3), use_orig_params=use_orig_params)
        use_sharded_state_dicts(hybrid[0])
        actual = parameters_and_moments(*hybrid)
        self.assertEqual(set(actual), set(expected))
        for name, value in actual.items():
            local = value.to_local().cpu()  # used by both calls below
            first, second = of_all_ranks(local, mesh.get_group(0))
            self.assertEqual(first, second, msg=name, rtol=0, atol=0, may_be="empty")
            whole = torch.cat(of_all_ranks(local, mesh.get_group(1)))
            self.assertEqual(whole, expected[name], msg=name, exact_device=False)

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_uneven_shards(self):
        """Of 5 rows, the two shards have 3 and 2. Of one row, the second has none."""
        mesh = self._mesh()
        model, optim = self._create_model(mesh, model_class=UnevenModel)
        use_sharded_state_dicts(model)
        found, shard = parameters_and_moments(model, optim), mesh.get_local_rank(1)
        for name, of_shards in {"net1.weight": (3, 2), "net1.bias": (3, 2), "net2.weight": (1, 0)}.items():
            for value in (found[name], found[f"{name}.exp_avg"], found[f"{name}.exp_avg_sq"]):
                self.assertEqual(value.to_local().shape, (of_shards[shard], *value.shape[1:]))
        full = {name: value.full_tensor() for name, value in found.items()}
        self.assertEqual(full, plain_parameters_and_moments(*self._reference(UnevenModel, range(1))))

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_load_into_full_shard(self):
        """A model of four shards loads the full tensors of two replicas of two shards."""
        source = self._create_model(self._mesh(), model_class=UnevenModel)
        line = init_device_mesh(self.device_type, (self.world_size,))
        model, optim = self._create_model(line, model_class=UnevenModel, steps=range(50, 52))
        saved = sharded_state_dicts(*source)
        full, osd = {name: value.full_tensor() for name, value in saved["model"].items()}, saved["optim"]
        for state in osd["state"].values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].full_tensor()
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            model.load_state_dict(full)
            FSDP.optim_state_dict_to_load(model, optim, osd, load_directly=True)
        self._check_trains_as_if_uninterrupted(model, optim, self.world_size)

    def _check_trains_as_if_uninterrupted(self, model: FSDP, optim: torch.optim.Optimizer, size: int) -> None:
        """The model has loaded the state after the first step. After two more steps, it matches the reference."""
        train_on_share(model, optim, range(1, 3), self.rank, size)
        plain, _ = self._reference(UnevenModel, range(3))
        self.assertEqual(full_parameters(model), dict(plain.named_parameters()))

    @with_comms
    @with_temp_dir
    @skip_if_lt_x_gpu(4)
    def test_checkpoint_on_disk(self):
        """A checkpoint of the 2x2 mesh loads on the same mesh and on other meshes of one to four ranks. Checkpoints of
        four and of two shards load on the 2x2 mesh.
        """
        meshes = {
            "2x2": self._mesh(),
            "1x2": DeviceMesh(self.device_type, [[0, 1]]),
            **{str(size): DeviceMesh(self.device_type, list(range(size))) for size in (4, 2, 1)},
        }
        ways = ["2x2 2x2", "2x2 4", "2x2 2", "2x2 1", "2x2 1x2", "4 2x2", "2 2x2"]
        config = {"way": [way.split() for way in ways], "use_orig_params": [False, True]}
        groups = {size: dist.new_group(list(range(size))) for size in (4, 2, 1)}
        self.run_subtests(config, self._test_checkpoint_on_disk, meshes, groups)

    def _test_checkpoint_on_disk(
        self,
        meshes: dict[str, DeviceMesh],
        groups: dict[int, dist.ProcessGroup],
        way: tuple[str, str],
        use_orig_params: bool,
    ) -> None:
        saving, loading = (meshes[name] for name in way)
        path = os.path.join(self.temp_dir, f"{way}-{use_orig_params}")
        kwargs: dict[str, Any] = {"model_class": UnevenModel, "use_orig_params": use_orig_params}

        def state_of(model: FSDP, optim: torch.optim.Optimizer, size: int) -> dict[str, Any]:
            return sharded_state_dicts(model, optim, offload_to_cpu=not use_orig_params, group=groups[size])

        if self.rank < (size := saving.size()):
            trained = self._create_model(saving, **kwargs)
            dcp.save(state_of(*trained, size), checkpoint_id=path, process_group=groups[size])
        dist.barrier()
        if self.rank < (size := loading.size()):
            model, optim = self._create_model(loading, steps=range(50, 52), **kwargs)
            state = state_of(model, optim, size)
            dcp.load(state, checkpoint_id=path, process_group=groups[size])
            model.load_state_dict(state["model"])
            FSDP.optim_state_dict_to_load(model, optim, state["optim"], load_directly=True, group=groups[size])
            self._check_trains_as_if_uninterrupted(model, optim, size)

    @with_comms
    @with_temp_dir
    @skip_if_lt_x_gpu(4)
    def test_damaged_checkpoint(self):
        """If a state is missing or the second shard's file is damaged, all ranks raise, and nothing changes."""
        mesh, good, short = self._mesh(), *(os.path.join(self.temp_dir, name) for name in ("good", "short"))
        state = sharded_state_dicts(*self._create_model(mesh, model_class=UnevenModel))
        dcp.save(state, checkpoint_id=good)
        del state["optim"]["state"]["net1.weight"]["exp_avg"]
        dcp.save(state, checkpoint_id=short)
        model, optim = self._create_model(mesh, model_class=UnevenModel, steps=range(2))
        before = full_parameters(model), copy.deepcopy(optim.state_dict())
        file = os.path.join(good, "__1_0.distcp")
        for path, damage, message in (
            (short, lambda: None, "Missing key in checkpoint state_dict: optim.state.net1.weight.exp_avg"),
            (good, lambda: os.truncate(file, 100), "PytorchStreamReader failed|EOFError|unexpected end"),
            (good, lambda: os.remove(file), r"__1_0\.distcp"),
        ):
            if self.rank == 0:
                damage()
            dist.barrier()
            with self.assertRaisesRegex(CheckpointException, message):
                dcp.load(sharded_state_dicts(model, optim), checkpoint_id=path)
        self.assertEqual((full_parameters(model), optim.state_dict()), before, rtol=0, atol=0)


instantiate_device_type_tests(TestHSDPWithDeviceMeshAndDTensor, globals(), allow_xpu=True)

if __name__ == "__main__":
    run_tests()
