"""Checkpoints of HSDP models are loaded on the same mesh or without replication, and HSDP models load checkpoints that
were saved without replication.
"""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate, Shard

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.fsdp.checkpoints import LAYOUTS, LayoutsMixin, SavedRun, plain_run
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import of_all_ranks
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.fsdp.sharded_states import (
    SimpleModel,
    SimpleModelUneven,
    moments,
    parameters_and_moments,
    sharded_state_dicts,
    train_on_share,
    use_sharded_state_dicts,
)

HYBRID = ["FSDP1 on 2x2", "FSDP2 on 2x2"]
SHARDED = ["FSDP1 on 4", "FSDP2 on 2"]


EVEN = parametrize("is_even_sharded_model", [True, False])


class TestHSDPCheckpoint(LayoutsMixin, DTensorTestBase):
    world_size = 4

    def _square(self) -> DeviceMesh:
        return init_device_mesh(self.device_type, (2, 2))

    def _create_model(
        self, mesh: DeviceMesh, is_even: bool, seed: int, steps: range
    ) -> tuple[FSDP, torch.optim.Optimizer]:
        """An FSDP1 model on the mesh and its Adam optimizer, trained for ``steps``."""
        plain = filled((SimpleModel if is_even else SimpleModelUneven)().to(self.device), seed=seed)
        strategy = ShardingStrategy.HYBRID_SHARD if mesh.ndim == 2 else ShardingStrategy.FULL_SHARD
        model = FSDP(plain, device_mesh=mesh, sharding_strategy=strategy)
        use_sharded_state_dicts(model)
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        train_on_share(model, optim, steps, self.rank, self.world_size)
        return model, optim

    def _load(self, model: FSDP, optim: torch.optim.Optimizer) -> None:
        state = sharded_state_dicts(model, optim)
        dcp.load(state, checkpoint_id=self.temp_dir)
        model.load_state_dict(state["model"])
        FSDP.optim_state_dict_to_load(model, optim, state["optim"], load_directly=True)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @EVEN
    def test_hsdp_checkpoint(self, is_even_sharded_model):
        """Loading restores all local shards of parameters and moments, which a step after saving has changed."""
        mesh = self._square()
        model, optim = self._create_model(mesh, is_even_sharded_model, 0, range(2))
        saved = copy.deepcopy(sharded_state_dicts(model, optim))
        dcp.save(saved, checkpoint_id=self.temp_dir)
        train_on_share(model, optim, range(2, 3), self.rank, self.world_size)
        expected = {**saved["model"], **moments(saved["optim"])}
        self.assertEqual(len(expected), 6 + 12)
        for name, value in parameters_and_moments(model, optim).items():
            self.assertEqual((value.device_mesh, value.placements), (mesh, (Replicate(), Shard(0))))
            self.assertNotEqual(value.to_local(), expected[name].to_local(), msg=name)
        self._load(model, optim)
        for name, value in parameters_and_moments(model, optim).items():
            self.assertEqual((value.device_mesh, value.placements), (mesh, (Replicate(), Shard(0))))
            self.assertEqual(value.to_local(), expected[name].to_local(), msg=name, rtol=0, atol=0)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @EVEN
    def test_hsdp_fsdp_checkpoint_conversion(self, is_even_sharded_model):
        """A checkpoint of two replicas of two shards, with optimizer state, is loaded into four shards."""
        source = self._create_model(self._square(), is_even_sharded_model, 0, range(2))
        dcp.save(sharded_state_dicts(*source), checkpoint_id=self.temp_dir)
        expected = self._whole(*source)
        line = init_device_mesh(self.device_type, (4,))
        model, optim = self._create_model(line, is_even_sharded_model, 1, range(5, 6))
        for name, value in self._whole(model, optim).items():
            self.assertNotEqual(value, expected[name], msg=name)
        self._load(model, optim)
        for value in parameters_and_moments(model, optim).values():
            self.assertEqual((value.device_mesh, value.placements), (line, (Shard(0),)))
        self.assertEqual(self._whole(model, optim), expected, rtol=0, atol=0)

    def _whole(self, model: FSDP, optim: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        return {name: value.full_tensor() for name, value in parameters_and_moments(model, optim).items()}

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @subtests(saved=HYBRID, loaded=[*SHARDED, *HYBRID])
    def test_from_hybrid(self, saved, loaded):
        """Training that was saved with HSDP continues in other layouts, with uneven and empty shards."""
        self._check_goes_on(saved, loaded)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @subtests(saved=["plain", *SHARDED], loaded=HYBRID)
    def test_to_hybrid(self, saved, loaded):
        """Training that was saved in other layouts continues with HSDP."""
        self._check_goes_on(saved, loaded)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_one_replica_of_four(self):
        """A checkpoint of two replicas of two shards is loaded into one replica of four shards."""
        source = self._create_model(self._square(), False, 0, range(2))
        dcp.save(sharded_state_dicts(*source), checkpoint_id=self.temp_dir)
        mesh = init_device_mesh(self.device_type, (1, 4))
        other = self._create_model(mesh, False, 1, range(5, 6))
        self._load(*other)
        self.assertEqual(self._whole(*other), self._whole(*source), rtol=0, atol=0)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @subtests(layout=HYBRID)
    def test_each_element_is_stored_once(self, layout):
        """Each local shard is written by only one replica, so the chunks of a tensor add up to its size."""
        path = os.path.join(self.temp_dir, layout)
        SavedRun(LAYOUTS[layout]).train(range(1)).save(path)
        stored = FileSystemReader(path).read_metadata().state_dict_metadata
        tensors = {name: value for name, value in stored.items() if hasattr(value, "chunks") and value.size}
        self.assertEqual(len(tensors), 4 + 8)
        for name, value in tensors.items():
            sizes = [chunk.sizes.numel() for chunk in value.chunks]
            self.assertEqual(sum(sizes), value.size.numel(), name)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @subtests(layout=HYBRID)
    def test_replicas_differ(self, layout):
        """If replicas differed when they were saved, they are equal after loading.

        Each local shard is then that of one of the replicas.
        """
        path = os.path.join(self.temp_dir, layout)
        run = SavedRun(LAYOUTS[layout])
        state = run.state_dict()["model"]
        for value in state.values():
            value.to_local().fill_(1 + run.mesh.get_local_rank("replicate"))
        dcp.save(state, checkpoint_id=path)
        for value in state.values():
            value.to_local().fill_(0)
        dcp.load(state, checkpoint_id=path)
        for name, value in state.items():
            self.assertIsInstance(value, DTensor)
            first, second = of_all_ranks(value.to_local().cpu(), run.mesh.get_group("replicate"))
            self.assertEqual(first, second, msg=name, rtol=0, atol=0)
            if first.numel():
                self.assertEqual(first.unique().numel(), 1, name)
                self.assertIn(first.unique().item(), (1, 2), name)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_replicas_agree_after_loading(self):
        """After a load and one step, the local shards of FSDP2's replicas are bitwise equal."""
        SavedRun(LAYOUTS["FSDP2 on 4"]).train(range(2)).save(self.temp_dir)
        run = SavedRun(LAYOUTS["FSDP2 on 2x2"], seed=1).train(range(5, 6))
        run.load(self.temp_dir)
        run.train(range(2, 3))
        for name, param in run.model.named_parameters():
            first, second = of_all_ranks(param.detach().to_local().cpu(), run.mesh.get_group("replicate"))
            self.assertEqual(first, second, msg=name, rtol=0, atol=0)
        self.assertEqual(run.full(), plain_run(range(3)))


instantiate_parametrized_tests(TestHSDPCheckpoint)

if __name__ == "__main__":
    run_tests()
