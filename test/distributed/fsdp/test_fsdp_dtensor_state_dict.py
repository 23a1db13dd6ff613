"""State dicts of FSDP1 models on a device mesh have DTensors, with the same values as ShardedTensors without a mesh.

Each rank trains on its own rows. The reference is the plain model, which gets the rows of all ranks.
"""

from __future__ import annotations

import copy
import os
import shutil
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import Shard

from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import parametrize, run_tests
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.dtensor_states import DTensorStatesMixin, plain_parameters_and_moments
from torch_fsdp_tests.fsdp.references import full_parameters
from torch_fsdp_tests.fsdp.sharded_states import (
    FourLayers,
    Trained,
    parameters_and_moments,
    sharded_state_dicts,
    train_on_share,
    use_sharded_state_dicts,
)

EVEN = parametrize("is_even_sharded_model", [True, False])
OFFLOAD = parametrize("offload_to_cpu", [True, False])


class TestDummyModelUneven(nn.Module):
    """A model in which no dimension is a multiple of four."""

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

    def get_input(self, generator: torch.Generator | None = None) -> torch.Tensor:
        return torch.rand(5, 5, generator=generator)


class TestFSDPWithDeviceMeshAndDTensor(DTensorStatesMixin, DTensorTestBase):
    def _mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device_type, (self.world_size,))

    def _plain(self, is_even_sharded_model: bool) -> nn.Module:
        return (FourLayers() if is_even_sharded_model else TestDummyModelUneven()).to(self.device)

    def _create_model(
        self,
        is_even_sharded_model: bool,
        device_mesh: DeviceMesh | None = None,
        steps: range = range(1),
        **kwargs: Any,
    ) -> Trained:
        """An FSDP1 model and Adam, trained for ``steps``, on the mesh or without one."""
        model = FSDP(self._plain(is_even_sharded_model), device_mesh=device_mesh, **kwargs)
        return self._trained(model, steps, model.process_group.size())

    def _reference(self, is_even_sharded_model: bool, steps: range) -> Trained:
        return self._trained(self._plain(is_even_sharded_model), steps, 1)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @EVEN
    def test_fsdp_init_with_device_mesh(self, is_even_sharded_model):
        mesh = self._mesh()
        self._check_laid_out(*self._create_model(is_even_sharded_model, mesh), mesh, (Shard(0),))

    @with_comms
    @skip_if_lt_x_gpu(2)
    @OFFLOAD
    @EVEN
    def test_dtensor_sharded_tensor_state_dict_identical(self, offload_to_cpu, is_even_sharded_model):
        """Each rank has the same local shards with and without a mesh."""
        on_mesh, on_group = (self._create_model(is_even_sharded_model, mesh) for mesh in (self._mesh(), None))
        empty = self._check_same_rows(on_mesh, on_group, offload_to_cpu)
        last_of_four = self.rank == 3 and not is_even_sharded_model and self.world_size == 4
        expected = ["net4.1.weight", "net4.1.bias"] if last_of_four else []
        self.assertEqual([name for name in empty if "exp_avg" not in name], expected, may_be="empty")

    @with_comms
    @skip_if_lt_x_gpu(2)
    @OFFLOAD
    @EVEN
    def test_dtensor_sharded_optim_load_state_dict(self, offload_to_cpu, is_even_sharded_model):
        model, optim = self._create_model(is_even_sharded_model, self._mesh())
        use_sharded_state_dicts(model, offload_to_cpu)
        self._check_optim_comes_back(model, optim)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @OFFLOAD
    @EVEN
    def test_dtensor_sharded_model_load_state_dict(self, offload_to_cpu, is_even_sharded_model):
        model, optim = self._create_model(is_even_sharded_model, self._mesh())
        use_sharded_state_dicts(model, offload_to_cpu)
        self._check_model_comes_back(model, optim)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @EVEN
    def test_load_into_fresh_model(self, is_even_sharded_model):
        """A model that has not run a forward or ``state_dict`` loads the DTensors of another model (#109648)."""
        model, _ = self._create_model(is_even_sharded_model, self._mesh())
        fresh, _ = self._create_model(is_even_sharded_model, self._mesh(), range(0))
        for each in (model, fresh):
            use_sharded_state_dicts(each, offload_to_cpu=False)
        expected = full_parameters(model)
        self.assertNotEqual(full_parameters(fresh), expected)
        fresh.load_state_dict(model.state_dict())
        self.assertEqual(full_parameters(fresh), expected, rtol=0, atol=0)

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_raises_warning_or_errors(self):
        model, optim = self._create_model(True, self._mesh(), range(2))
        message = "DeviceMesh is not compatible with LOCAL_STATE_DICT."
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            with self.assertRaisesRegex(RuntimeError, message):
                model.state_dict()
            with self.assertRaisesRegex(RuntimeError, message):
                FSDP.optim_state_dict(model, optim)

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_local_shapes_of_uneven_shards(self):
        """Four ranks have 2, 2, 1 and 0 of 5 rows, and 3, 3, 3 and 1 of 10 rows."""
        self.assertEqual(self.world_size, 4)
        model, optim = self._create_model(False, self._mesh())
        use_sharded_state_dicts(model)
        found = parameters_and_moments(model, optim)
        rows = {"net1.weight": (3, 3, 3, 1), "net1.bias": (3, 3, 3, 1), "net4.1.bias": (2, 2, 1, 0)}
        rows["net2.bias"] = (4, 4, 4, 3)
        for name, of_ranks in rows.items():
            for value in (found[name], found[f"{name}.exp_avg"], found[f"{name}.exp_avg_sq"]):
                self.assertEqual(value.to_local().shape, (of_ranks[self.rank], *value.shape[1:]))
                self.assertEqual(value.shape[0], sum(of_ranks))

    @with_comms
    @skip_if_lt_x_gpu(2)
    @EVEN
    def test_full_tensors(self, is_even_sharded_model):
        """The full tensors equal those of FULL_STATE_DICT and the plain model's values."""
        expected = plain_parameters_and_moments(*self._reference(is_even_sharded_model, range(1)))
        model, optim = self._create_model(is_even_sharded_model, self._mesh())
        use_sharded_state_dicts(model)
        actual = {name: value.full_tensor() for name, value in parameters_and_moments(model, optim).items()}
        full = FullOptimStateDictConfig(rank0_only=False)
        FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), full)
        self.assertEqual(actual, parameters_and_moments(model, optim), rtol=0, atol=0, exact_device=False)
        # Not bitwise, because the plain model adds the rows of all ranks in another order.
        self.assertEqual(actual, expected)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @EVEN
    def test_training_goes_on(self, is_even_sharded_model):
        """Another model loads the model and optimizer state dicts and then trains bitwise like the first one."""
        mesh = self._mesh()
        plain, _ = self._reference(is_even_sharded_model, range(3))
        for use_orig_params in (False, True):
            kwargs = {"device_mesh": mesh, "use_orig_params": use_orig_params}
            model, optim = self._create_model(is_even_sharded_model, **kwargs)
            other, other_optim = self._create_model(is_even_sharded_model, steps=range(50, 52), **kwargs)
            use_sharded_state_dicts(other)
            saved = sharded_state_dicts(model, optim)
            other.load_state_dict(saved["model"])
            FSDP.optim_state_dict_to_load(other, other_optim, saved["optim"], load_directly=True)
            for trained in ((model, optim), (other, other_optim)):
                train_on_share(*trained, range(1, 3), self.rank, self.world_size)
            self.assertEqual(full_parameters(other), full_parameters(model), rtol=0, atol=0)
            self.assertEqual(full_parameters(other), dict(plain.named_parameters()))

    @with_comms
    @with_temp_dir
    @skip_if_lt_x_gpu(4)
    @subtests(
        is_even_sharded_model=[False, True],
        sizes=[(4, 4), (2, 4), (4, 2), (4, 1)],
        use_orig_params=[False, True],
        valid=lambda is_even_sharded_model, sizes, use_orig_params: (
            not is_even_sharded_model or (sizes in [(2, 4), (4, 2)] and not use_orig_params)
        ),
    )
    def test_checkpoint_on_disk(self, is_even_sharded_model, sizes, use_orig_params):
        """A checkpoint loads on as many, more or fewer ranks, and training continues like that of the plain model."""
        path = os.path.join(self.temp_dir, f"{sizes}-{is_even_sharded_model}-{use_orig_params}")
        saving, loading = (DeviceMesh(self.device_type, list(range(size))) for size in sizes)
        kwargs: dict[str, Any] = {"use_orig_params": use_orig_params}

        def state_of(model: FSDP, optim: torch.optim.Optimizer, mesh: DeviceMesh) -> dict[str, Any]:
            return sharded_state_dicts(model, optim, offload_to_cpu=not use_orig_params, group=mesh.get_group())

        if self.rank < saving.size():
            trained = self._create_model(is_even_sharded_model, saving, **kwargs)
            dcp.save(state_of(*trained, saving), checkpoint_id=path, process_group=saving.get_group())
        dist.barrier()
        if self.rank < loading.size():
            model, optim = self._create_model(is_even_sharded_model, loading, range(50, 53), **kwargs)
            group = loading.get_group()
            state = state_of(model, optim, loading)
            dcp.load(state, checkpoint_id=path, process_group=group)
            model.load_state_dict(state["model"])
            FSDP.optim_state_dict_to_load(model, optim, state["optim"], load_directly=True, group=group)
            plain, plain_optim = self._reference(is_even_sharded_model, range(1))
            self.assertEqual(full_parameters(model), dict(plain.named_parameters()))
            train_on_share(model, optim, range(1, 3), self.rank, loading.size())
            train_on_share(plain, plain_optim, range(1, 3))
            self.assertEqual(full_parameters(model), dict(plain.named_parameters()))

    @with_comms
    @with_temp_dir
    @skip_if_lt_x_gpu(2)
    def test_damaged_checkpoint(self):
        """Loading a damaged checkpoint raises on every rank. The model and the optimizer do not change."""
        mesh = self._mesh()
        good, wide, short = (os.path.join(self.temp_dir, name) for name in ("good", "wide", "short"))

        trained = self._create_model(False, mesh)
        dcp.save(sharded_state_dicts(*trained), checkpoint_id=good)
        state = sharded_state_dicts(*trained)
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

        model, optim = self._create_model(False, mesh, range(3))
        before = full_parameters(model), copy.deepcopy(optim.state_dict())
        for path, message in {
            missing: r"__1_0\.distcp",
            truncated: "PytorchStreamReader failed|EOFError|unexpected end",
            wide: "Size mismatch between saved .* and current: .* for optim.state.net2.weight.exp_avg",
            short: "Missing key in checkpoint state_dict: optim.state.net2.weight.exp_avg",
        }.items():
            with self.subTest(os.path.basename(path)), self.assertRaisesRegex(CheckpointException, message):
                dcp.load(sharded_state_dicts(model, optim), checkpoint_id=path)
        self.assertEqual((full_parameters(model), optim.state_dict()), before, rtol=0, atol=0)


instantiate_device_type_tests(TestFSDPWithDeviceMeshAndDTensor, globals(), allow_xpu=True)

if __name__ == "__main__":
    run_tests()
