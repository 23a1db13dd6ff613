"""DSD's state dicts of models with FSDP and tensor parallelism."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullOptimStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_fsdp_tests.common_distributed import needs, requires_world_size
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import NO_DEFECT, torch_defect
from torch_fsdp_tests.distributed.common_state_dict import EXACT, copied, is_sharded
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.state_dict_pairs import ModelPair, StateDictOptionsTest
from torch_fsdp_tests.fsdp.training import shard_each
from torch_fsdp_tests.installed_torch import torch_facts

FULL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class TestStateDictOptions(StateDictOptionsTest):
    @requires_world_size(4)
    def test_full_optim_state_of_fsdp1_and_tp(self):
        pair = self._with_tp(8, fsdp=1)
        config = FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=False)
        with FSDP.state_dict_type(pair.model, StateDictType.FULL_STATE_DICT, optim_state_dict_config=config):
            osd = FSDP.optim_state_dict(pair.model, pair.optims[0])
        with torch_defect("fsdp1_full_optim_state_stays_split_by_tp"):
            self.assertFalse(any(is_sharded(value) for state in osd["state"].values() for value in state.values()))
        self._verify_osd(pair.ref_model, pair.ref_optim, pair.ref_optim.state_dict(), osd)

    @requires_world_size(4)
    @subtests(fsdp=[1, 2], options=[StateDictOptions(), FULL])
    def test_tp(self, fsdp, options):
        """With tensor parallelism, DSD has each full parameter and state."""
        pair = self._with_tp(8, fsdp)
        self._verify_pair(pair, *pair.states(options), options=options)

    @requires_world_size(4)
    @subtests(options=[FULL, FROM_RANK_0])
    def test_load_of_fsdp2_and_tp(self, options):
        self._test_load_with_tp(8, options)

    @needs(torch_facts.GATHERS_UNEVEN_STRIDED_SHARDS)
    @requires_world_size(4)
    def test_broadcast_of_uneven_rows_to_fsdp2_and_tp(self):
        self._test_load_with_tp(6, FROM_RANK_0)

    @requires_world_size(4)
    def test_uneven_rows_of_fsdp2_and_tp(self):
        self._test_load_with_tp(6, FULL, torch_defect("dsd_tp_uneven_full_state_dict_is_not_loaded"))

    def _test_load_with_tp(self, rows: int, options: StateDictOptions, shows: torch_defect = NO_DEFECT) -> None:
        """Load a plain model's states. ``shows`` is the known defect that each of both loads shows."""
        pair, source = (self._with_tp(rows, fsdp=2, seed=seed) for seed in (0, 1))
        msd, osd = get_state_dict(source.ref_model, source.ref_optim)
        with shows:
            set_model_state_dict(pair.model, self._given(copied(msd), options), options=options)
            self._verify_msd(source.ref_model.state_dict(), get_model_state_dict(pair.model), **EXACT)
        with shows:
            set_optimizer_state_dict(pair.model, pair.optims, self._given(copied(osd), options), options=options)
            actual = get_optimizer_state_dict(pair.model, pair.optims)
            self._verify_osd(source.ref_model, source.ref_optim, source.ref_optim.state_dict(), actual, **EXACT)

    def _with_tp(self, rows: int, fsdp: int, seed: int = 0) -> ModelPair:
        """A trained pair on a mesh of two dimensions: tensor parallelism shards ``rows``, and FSDP each half."""
        mesh = make_mesh(2, 2, names=("dp", "tp"))

        def distribute(model: nn.Module) -> Any:
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
            if fsdp == 1:
                return FSDP(model, device_mesh=mesh["dp"], use_orig_params=True)
            return shard_each((*model.children(), model), mesh=mesh["dp"])

        manual_seed(seed)
        plain = nn.Sequential(nn.Linear(4, rows, device=self.device), nn.Linear(rows, 4, device=self.device))
        pair = self._pair(plain, distribute, data_rank=mesh.get_local_rank("dp"), width=4)
        pair.train(range(2))
        return pair


if __name__ == "__main__":
    run_tests()
