"""The default of each parameter of the public interface."""

from __future__ import annotations

from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.fsdp.references import check_defaults


class TestDefaults(TestCase):
    def test_defaults(self):
        """The defaults are the documented ones."""
        states = {"state_dict_config": None, "optim_state_dict_config": None}
        gathered = {"recurse": True, "writeback": True, "rank0_only": False, "offload_to_cpu": False}
        check_defaults(
            self,
            {
                FSDP: {
                    **dict.fromkeys(("process_group", "sharding_strategy", "cpu_offload", "auto_wrap_policy"), None),
                    **dict.fromkeys(("mixed_precision", "param_init_fn", "device_id", "device_mesh"), None),
                    "ignored_modules": None,
                    "ignored_states": None,
                    "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
                    "forward_prefetch": False,
                    "sync_module_states": False,
                    "limit_all_gathers": True,
                    "use_orig_params": False,
                },
                CPUOffload: {"offload_params": False},
                MixedPrecision: {
                    "param_dtype": None,
                    "reduce_dtype": None,
                    "buffer_dtype": None,
                    "keep_low_precision_grads": False,
                    "cast_forward_inputs": False,
                    "cast_root_forward_inputs": True,
                },
                StateDictConfig: {"offload_to_cpu": False},
                FullStateDictConfig: {"offload_to_cpu": False, "rank0_only": False},
                LocalStateDictConfig: {"offload_to_cpu": False},
                ShardedStateDictConfig: {"offload_to_cpu": False, "_use_dtensor": False},
                OptimStateDictConfig: {"offload_to_cpu": True},
                FullOptimStateDictConfig: {"offload_to_cpu": True, "rank0_only": False},
                LocalOptimStateDictConfig: {"offload_to_cpu": False},
                ShardedOptimStateDictConfig: {"offload_to_cpu": True, "_use_dtensor": False},
                FSDP.clip_grad_norm_: {"norm_type": 2.0},
                FSDP.fsdp_modules: {"root_only": False},
                FSDP.summon_full_params: {**gathered, "with_grads": False},
                FSDP.set_state_dict_type: states,
                FSDP.state_dict_type: states,
                FSDP.optim_state_dict: {"optim_state_dict": None, "group": None},
                FSDP.optim_state_dict_to_load: {"is_named_optimizer": False, "load_directly": False, "group": None},
                FSDP.full_optim_state_dict: {"optim_input": None, "rank0_only": True, "group": None},
                FSDP.scatter_full_optim_state_dict: {"optim_input": None, "optim": None, "group": None},
                FSDP.shard_full_optim_state_dict: {"optim_input": None, "optim": None},
            },
        )


if __name__ == "__main__":
    run_tests()
