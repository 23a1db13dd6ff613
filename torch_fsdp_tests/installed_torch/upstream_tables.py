"""What becomes of each name of upstream's modules about ranks that this project does not define.

``python -m torch_fsdp_tests.tools.names_left`` prints the names that have no place here. Does not import
torch.
"""

from __future__ import annotations

from collections.abc import Mapping

_SHARDED_TENSOR = "distributed._shard.sharded_tensor"
_DTENSOR = "distributed._tensor.common_dtensor"
_THREADS = "distributed.multi_threaded_pg"

# The modules of which every name has a place: it is defined there, or in a table below.
OF_RANKS = (
    "common_distributed",
    "common_fsdp",
    "common_dist_composable",
    _DTENSOR,
    _THREADS,
    "distributed.fake_pg",
    "distributed.checkpoint_utils",
    "distributed.common_state_dict",
    _SHARDED_TENSOR,
)

# Names that neither start, watch nor judge ranks, compare no values and decide no skip. The installed torch has them.
BORROWED: Mapping[str, tuple[str, ...]] = {
    "common_distributed": (
        *("ACCELERATOR_DIST_BACKENDS", "DDP_RANK_DEVICES", "DistTestCases", "EFA_PROBE_RESULT"),
        *("PLATFORM_SUPPORTS_SYMM_MEM", "TORCHCOMM_HAS_GLOO", "TORCHCOMM_HAS_NCCL", "TORCHCOMM_HAS_NCCLX"),
        *("TORCHCOMM_HAS_RCCL", "TORCHCOMM_HAS_RCCLX", "TORCHCOMM_HAS_XCCL", "_TORCHCOMM_AVAILABLE"),
        *("_backend", "_flag", "_rocm_version_tuple", "captured_output", "create_device", "create_tcp_store"),
        *("evaluate_platform_supports_symm_mem", "has_efa", "init_multigpu_helper", "requires_ddp_rank"),
        *("setup_torchcomms_pg", "simple_sparse_reduce_tests", "tp_transports", "verify_ddp_error_logged"),
        "with_nccl_blocking_wait",
    ),
    "common_fsdp": ("acc",),
    "common_dist_composable": ("CompositeModel", "FakeSequential", "NestedSequentialModel", "UnitParamModule"),
    _DTENSOR: (
        *("ExpertParallelWithTP", "T", "TensorParallelForExpert", "TestFunc"),
        "_convert_shard_order_dict_to_ShardOrder",
        *("generate_shard_orders", "make_full_tensor", "map_local_for_rank", "map_local_tensor_for_rank"),
        *("op_strategy_context", "patched_distribute_tensor", "redistribute", "shard_order_to_placement"),
    ),
    _THREADS: ("_premul_sum_reduce", "_reduce_ops", "binop_reduce", "bitwise_reduce", "flatten_list"),
    "distributed.checkpoint_utils": ("Rot13Example", "get_test_extension_registry", "with_checkpoint_logging"),
    "distributed.common_state_dict": ("FusionEmbedding",),
}

_OTHER_THREADS = "the ranks in threads here have another engine: call the methods of ProcessLocalGroup"
_LOCAL_TENSOR = "a test of DTensor alone, with all ranks simulated in one process, runs with PyTorch's source tree"

# Names that belong to upstream's own way to run ranks, with what to do instead.
INSTEAD: Mapping[str, Mapping[str, str]] = {
    "common_distributed": {
        "C10dTorchCommsTestBase": (
            "derive from MultiProcContinuousTest, and set torch.distributed.config.use_torchcomms in its _init_pg"
        ),
        "_maybe_handle_skip_if_lt_x_gpu": "raise unittest.SkipTest",
        "retrieve_result_from_completion_queue": "ranks report over connections of their own: assert in the rank",
    },
    _DTENSOR: dict.fromkeys(
        ("make_wrapped", "validate_sharding_rule_sample", "validate_sharding_rule_sample_backward"), _LOCAL_TENSOR
    ),
    _THREADS: dict.fromkeys(
        (
            *("AllGather", "AllReduce", "AllToAll", "AllToAllBase", "Broadcast", "Collective", "Gather"),
            *(
                "ReduceScatter",
                "Scatter",
                "ThreadLocalWorld",
                "WorldData",
                "_accelerator_devices",
                "_create_threaded_pg",
            ),
            *("_ctx_manager", "_old_pg_world", "_record_current_stream_events", "_wait_current_stream_events"),
        ),
        _OTHER_THREADS,
    ),
}
