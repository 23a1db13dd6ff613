"""Checkpoints of FSDP are loaded under tensor parallelism, and vice versa."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_fsdp_tests.common_distributed import at_most, skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, MLPModule, with_comms
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.checkpoints import LayoutsMixin
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import full_parameters
from torch_fsdp_tests.fsdp.seeded import uniform
from torch_fsdp_tests.fsdp.sharded_states import use_sharded_state_dicts

FULLY_SHARDED = ["FSDP1 on 2", "FSDP1 on 4", "FSDP2 on 4"]
WITH_TENSOR = ["TP on 2", "TP on 4", "FSDP2 and TP on 2x2"]


class TestFsdpTpCheckpointConversion(LayoutsMixin, DTensorTestBase):
    world_size = at_most(4)
    power_of_two_ranks = True

    def _tensor_parallel(self) -> nn.Module:
        mesh = init_device_mesh(self.device_type, (self.world_size,))
        return parallelize_module(MLPModule(self.device), mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})

    def _step(self, model: nn.Module) -> None:
        """Take a step on the same rows on all ranks."""
        optim = torch.optim.SGD(model.parameters(), lr=0.25)
        model(uniform(20, 10, seed=0)).sum().backward()
        optim.step()

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_fsdp_to_tp(self):
        """Saved sharded tensors become the model's DTensors. Then both models compute the same."""
        fsdp_model = FSDP(MLPModule(self.device), use_orig_params=True)
        use_sharded_state_dicts(fsdp_model)
        saved = fsdp_model.state_dict()
        self.assertEqual({type(value) for value in saved.values()}, {internals.sharded_tensors.ShardedTensor})
        dcp.save(saved, checkpoint_id=self.temp_dir)
        expected = full_parameters(fsdp_model)

        model = self._tensor_parallel()
        self._step(model)
        state = model.state_dict()
        self.assertEqual(list(state), list(expected))
        for name, value in state.items():
            self.assertNotEqual(value.full_tensor(), expected[name], msg=name)
        dcp.load(state, checkpoint_id=self.temp_dir)
        model.load_state_dict(state)

        actual = model.state_dict()
        self.assertEqual({type(value) for value in actual.values()}, {DTensor})
        placements = {name: value.placements for name, value in actual.items()}
        columns, rows, whole = (Shard(0),), (Shard(1),), (Replicate(),)
        self.assertEqual(list(placements.values()), [columns, columns, rows, whole])
        full = {name: value.full_tensor() for name, value in actual.items()}
        self.assertEqual(full, expected, rtol=0, atol=0)
        probe = uniform(3, 10, seed=1)
        self.assertEqual(model(probe), fsdp_model(probe))

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_tp_to_fsdp(self):
        """A checkpoint of DTensors is loaded into FSDP1's sharded tensors. The parameters equal a plain model's."""
        model, plain = self._tensor_parallel(), MLPModule(self.device)
        for each in (model, plain):
            self._step(each)
        dcp.save(model.state_dict(), checkpoint_id=self.temp_dir)
        fsdp_model = FSDP(MLPModule(self.device), use_orig_params=True)
        use_sharded_state_dicts(fsdp_model)
        state = fsdp_model.state_dict()
        dcp.load(state, checkpoint_id=self.temp_dir)
        fsdp_model.load_state_dict(state)
        actual = full_parameters(fsdp_model)
        self.assertEqual(
            actual, {name: value.full_tensor() for name, value in model.state_dict().items()}, rtol=0, atol=0
        )
        self.assertEqual(actual, dict(plain.named_parameters()))

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @subtests(saved=FULLY_SHARDED, loaded=WITH_TENSOR)
    def test_to_tensor_parallel(self, saved, loaded):
        """Training under FSDP resumes under TP, with the optimizer, and with uneven rows and columns."""
        self._check_goes_on(saved, loaded)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @subtests(saved=WITH_TENSOR, loaded=FULLY_SHARDED)
    def test_from_tensor_parallel(self, saved, loaded):
        """Training under TP resumes under FSDP."""
        self._check_goes_on(saved, loaded)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @subtests(saved=WITH_TENSOR, loaded=WITH_TENSOR)
    def test_between_tensor_parallel(self, saved, loaded):
        """Training under TP resumes on another number of TP ranks, with FSDP2 and without."""
        self._check_goes_on(saved, loaded)


if __name__ == "__main__":
    run_tests()
