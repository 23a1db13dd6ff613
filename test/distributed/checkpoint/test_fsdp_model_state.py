"""The sharded model state of FSDP1, saved and loaded into a model with the same or another number of ranks."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision

from torch_fsdp_tests.common_distributed import at_most, skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.fsdp.checkpoints import LayoutsMixin
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import full_parameters
from torch_fsdp_tests.fsdp.sharded_states import use_sharded_state_dicts
from torch_fsdp_tests.fsdp.shards import chunk_of


class WithBuffer(nn.Linear):
    """A linear layer that counts its forwards in a buffer."""

    def __init__(self, rows: int) -> None:
        super().__init__(8, rows)
        self.register_buffer("forwards", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return super().forward(x)


def step(model: nn.Module, batch: torch.Tensor) -> None:
    """A step that changes every parameter."""
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch).square().sum().backward()
    optim.step()


class FsdpModelStateCheckpoint(LayoutsMixin, DTensorTestBase):
    world_size = at_most(4)

    def _create_new_dist_group(self) -> dist.ProcessGroup:
        """This rank's group: one group has the even ranks, the other the odd ones."""
        group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        assert group is not None
        return group

    def _on_meta(self, seed: int, group: dist.ProcessGroup | None = None) -> FSDP:
        """FSDP materializes this meta model. Each rank has its own random numbers, and keeps its shard of them."""
        manual_seed(10 * seed + self.rank)
        model = FSDP(nn.Linear(8, 8, device="meta"), group)
        use_sharded_state_dicts(model)
        return model

    def _inputs(self, seed: int) -> torch.Tensor:
        """This rank's own rows."""
        return torch.rand(4, 8, generator=torch.Generator().manual_seed(10 * seed + self.rank)).to(self.device)

    def _test_fsdp_model_state(self, process_group: dist.ProcessGroup | None) -> None:
        source = self._on_meta(seed=0)
        step(source, self._inputs(0))
        expected = full_parameters(source)
        dcp.save(source.state_dict(), checkpoint_id=self.temp_dir)
        model = self._on_meta(seed=1, group=process_group)
        for name, param in full_parameters(model).items():
            self.assertNotEqual(param, expected[name], msg=name)
        state = model.state_dict()
        dcp.load(state, checkpoint_id=self.temp_dir)
        model.load_state_dict(state)
        self.assertEqual(full_parameters(model), expected, rtol=0, atol=0)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_fsdp_model_state_no_resharding(self):
        self._test_fsdp_model_state(None)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_fsdp_model_state_with_resharding(self):
        self._test_fsdp_model_state(self._create_new_dist_group())

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_two_groups_train_on(self):
        """Two groups load one checkpoint. Each then trains on its own data, independently."""
        group = self._create_new_dist_group()
        source = self._on_meta(seed=0)
        reference = nn.Linear(8, 8, device=self.device)
        reference.load_state_dict(full_parameters(source))
        dcp.save(source.state_dict(), checkpoint_id=self.temp_dir)
        model = self._on_meta(seed=1, group=group)
        state = model.state_dict()
        dcp.load(state, checkpoint_id=self.temp_dir, process_group=group)
        model.load_state_dict(state)
        ours = self._inputs(self.rank % 2)  # the ranks of a group have the same rows, as their gradients are averaged
        dist.broadcast(ours, src=self.rank % 2, group=group)
        for each in (model, reference):
            step(each, ours)
        self.assertEqual(full_parameters(model), dict(reference.named_parameters()))

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_sizes(self):
        """The same number of ranks, fewer, more, or one rank load a checkpoint, with uneven rows and a buffer."""
        groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 4)}
        config = {
            "sizes": [(4, 4), (4, 2), (2, 4), (4, 1)],
            "use_orig_params": [False, True],
            "low_precision": [False, True],
        }
        self.run_subtests(config, self._test_sizes, groups)

    def _test_sizes(
        self, groups: dict[int, dist.ProcessGroup], sizes: tuple[int, int], use_orig_params: bool, low_precision: bool
    ) -> None:
        saved_by, loaded_by = sizes
        path = os.path.join(self.temp_dir, f"{sizes} {use_orig_params} {low_precision}")
        kwargs: dict[str, Any] = {"use_orig_params": use_orig_params}
        if low_precision:
            kwargs["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16)

        def model_of(size: int, seed: int) -> FSDP:
            manual_seed(seed)
            model = FSDP(WithBuffer(5).to(self.device), groups[size], **kwargs)
            use_sharded_state_dicts(model)
            for _ in range(3 - seed):
                model(self._inputs(0))
            return model

        if self.rank < saved_by:
            dcp.save(model_of(saved_by, 0).state_dict(), checkpoint_id=path, process_group=groups[saved_by])
        dist.barrier()
        if self.rank < loaded_by:
            model = model_of(loaded_by, 1)
            state = model.state_dict()
            dcp.load(state, checkpoint_id=path, process_group=groups[loaded_by])
            model.load_state_dict(state)
            manual_seed(0)
            expected = WithBuffer(5).to(self.device)
            self.assertEqual(full_parameters(model), dict(expected.named_parameters()), rtol=0, atol=0)
            self.assertEqual(model.module.forwards.tolist(), [3.0])
            for name, value in model.state_dict().items() if loaded_by > 1 else ():
                if name != "forwards":
                    rows = chunk_of(expected.get_parameter(name), self.rank, loaded_by)
                    shards = [shard.tensor for shard in value.local_shards()]
                    self.assertEqual(shards, [rows] if len(rows) else [], msg=name, rtol=0, atol=0, may_be="empty")

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @subtests(
        saved=["plain", "FSDP1 on 2", "FSDP1 on 4", "FSDP2 on 2", "FSDP2 on 4"],
        loaded=["plain", "FSDP1 on 2", "FSDP1 on 4", "FSDP2 on 2", "FSDP2 on 4"],
    )
    def test_training_goes_on(self, saved, loaded):
        """Training resumes with the optimizer between FSDP1, FSDP2 and a plain model."""
        self._check_goes_on(saved, loaded)


if __name__ == "__main__":
    run_tests()
