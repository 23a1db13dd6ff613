"""What the tests cover of FSDP's interface: for each parameter its values and situations, and the test that has each.

``ROWS`` goes from the public name to its parameter to the case. A callable without parameters has the parameter "". A
case has the id of a test, or a :class:`Gap` with the reason why none has it. ``test/harness/test_interface.py`` checks
the table against the installed torch and against the tests. ``FILES`` has what the first parts of the ids
stand for.
"""

from __future__ import annotations

import dataclasses

FILES = {
    "fsdp1/": "distributed/fsdp/test_",
    "fsdp2/": "distributed/_composable/fsdp/test_fully_shard_",
    "checkpoint/": "distributed/checkpoint/test_",
}


@dataclasses.dataclass(frozen=True)
class Gap:
    """A case that no test has."""

    why: str


Case = str | Gap
Parameters = dict[str, dict[str, Case]]

_INIT = "fsdp2/init::TestFullyShard"
_COMM = "fsdp2/comm::TestFullyShard"
_TRAINING = "fsdp2/training::TestFullyShard"
_FROZEN = "fsdp2/frozen::TestFullyShardFrozen::test_"
_CASTS = "fsdp2/mixed_precision::TestFullyShardMixedPrecisionCasts::test_"
_FINALIZATION = "fsdp2/manual_finalization::TestFullyShardManualFinalization::test_"
_STORAGE = "fsdp2/unsharded_storage::TestFullyShardUnshardedStorage::test_"
_DTENSOR = "fsdp2/dtensor::TestFullyShardDTensor::test_"
_SUMMON = "fsdp1/fsdp_unshard_params::TestUnshardParams::test_"
_SUMMON_ERRORS = "fsdp1/fsdp_unshard_params::TestUnshardParamsErrors::test_"
_MISC = "fsdp1/fsdp_misc::TestFSDPMisc"
_PRECISION = "fsdp1/fsdp_mixed_precision::TestFSDPMixedPrecisionSharded::test_"
_SUBMODULES = "fsdp1/fsdp_mixed_precision::TestFSDPDifferentSubmodulePrecision::test_"
_OPTIM = "fsdp1/fsdp_optim_state::TestFSDPOptimState::test_"
_STATES = "fsdp1/fsdp_state_dict::TestFSDPStateDict::test_"
_IGNORED = "fsdp1/fsdp_ignored_modules::TestFSDPIgnoredModules::test_"
_HYBRID = "fsdp1/fsdp_hybrid_shard::TestFSDPHybridShard::test_"
_HOOKS = "fsdp1/fsdp_comm_hooks::TestCommunicationHooks::test_"
_SCALER = "fsdp1/fsdp_sharded_grad_scaler::TestShardGradScaler::test_"
_SCALER_PARITY = "fsdp1/fsdp_sharded_grad_scaler::TestShardedGradScalerParityWithDDP::test_"
_META = "fsdp1/fsdp_meta::TestFSDPWithMetaDevice::test_"
_DSD = "checkpoint/state_dict::TestStateDict::test_"
_OPTIONS = "checkpoint/state_dict_options::TestStateDictOptions::test_"

_CLIP = "fsdp1/fsdp_clip_grad_norm::TestClipGradNorm::test_"
_AUTOGRAD = "fsdp2/autograd::TestFullyShardAutograd::test_"
_STATE = "fsdp2/state::TestFullyShardState::test_"
_IGNORE = "fsdp2/ignore_params::TestFullyShardIgnoreParamsAlone::test_"
_STATE_DICT = "fsdp2/state_dict::TestFullyShardStateDictMultiProcess::test_"
_PREFETCH = "fsdp1/fsdp_backward_prefetch::TestBackwardPrefetch::test_"

ROWS: dict[str, Parameters] = {
    # --- FSDP2 --------------------------------------------------------------------------------------------------------
    "fully_shard": {
        "module": {
            "a list": _INIT + "ManagedModulesAndStates::test_managed_modules_list_of_mlps",
            "a list, of which forward runs a part": _TRAINING + "1DTrainingCompose::test_gradients_of_partial_group",
            "without parameters": _COMM + "UnshardMultiThread::test_unshard_no_param_group",
            "without inputs": _TRAINING + "ForwardInputs::test_root_no_forward_inputs",
            "a scalar parameter": _INIT + "ShardedParameterTensor::test_raise_scalar_parameter",
            "a parameter that is not contiguous": _INIT + "ShardedParameterTensor::test_raise_noncontiguous_parameter",
            "fewer rows than ranks": _INIT + "ShardedParameterDTensor::test_uneven_and_empty_shards",
            "integer, boolean and complex parameters, frozen": _FROZEN + "frozen_parameter_of_any_dtype",
            "complex parameters, trained": _COMM + "Communication::test_complex_gradients",
            "trained parameters of two dtypes": _INIT + "MixedDtypeParam::test_mixed_dtypes_of_trained_params",
            "frozen parameters": _FROZEN + "frozen_parameters_stay",
            "a shared parameter": _TRAINING + "SharedParams::test_train_parity_with_shared_params",
            "a parameter that two groups share": _TRAINING
            + "SharedParams::test_shared_params_separate_fsdp_groups_error",
            "on the meta device": _INIT + "MetaDeviceInit::test_meta_device_1d_init",
            "still on the meta device in forward": _INIT + "MetaDeviceInit::test_invalid_meta_device_init",
            "part of it not run": _AUTOGRAD + "unused_forward_module",
            "run several times": _TRAINING + "1DTrainingCore::test_multi_forward_module",
            "containers as inputs and outputs": _AUTOGRAD + "container_kinds",
            "dataclasses as inputs and outputs": _AUTOGRAD + "dataclasses_between_modules",
            "in inference mode before the first step": _TRAINING
            + "GradientAccumulation::test_inference_before_first_step",
            "in inference mode between steps": _TRAINING + "GradientAccumulation::test_eval_between_steps",
            "under jvp": _AUTOGRAD + "backward_through_jvp",
            "under vjp and vmap": _AUTOGRAD + "backward_through_vjp_and_vmap",
            "after an exception": _TRAINING + "1DTrainingCompose::test_reset_iter_state_then_parity",
            "one rank": _TRAINING + "WorldSize1::test_train_parity_single_worldsize1",
            "wrapped twice": _STATE + "fully_shard_reapply",
            "a class that cannot be wrapped": _STATE + "fully_shard_unsupported_module_cls",
        },
        "mesh": {
            "one dimension, and the default": _INIT + "ProcessGroupInit::test_1d_process_group_init",
            "two dimensions": _INIT + "ProcessGroupInit::test_2d_process_group_init",
            "three dimensions": _INIT + "MeshArg::test_invalid_mesh_ndim",
            "two dimensions without names": _INIT + "MeshArg::test_2d_mesh_without_mesh_dim_names",
            "one shard in each group": _COMM + "Communication::test_hsdp_of_one_shard_fp16",
        },
        "reshard_after_forward": {
            "True, False, None, a number": _COMM + "Communication::test_fully_shard_communication_count",
            "0, negative, no factor, of another type": _INIT + "MeshArg::test_reshard_after_forward_values",
            "1": _INIT + "MeshArg::test_reshard_after_forward_one",
            "a number, integer parameters": _FROZEN + "frozen_parameter_of_any_dtype",
            "a number, frozen parameters": _FROZEN + "requires_grad_on_smaller_mesh",
            "a number, uneven rows": _TRAINING + "RegisteredParams::test_param_registration_after_partial_reshard",
            "a number, with tensor parallelism": _TRAINING + "NDTraining::test_what_is_refused_with_tp",
        },
        "shard_placement_fn": {
            "the largest dimension": _INIT + "ShardPlacementFn::test_init_1d_transformer_shard_largest_dim",
            "a negative dimension": _INIT + "ShardPlacementFn::test_init_1d_transformer_shard_dim_neg1",
            "a dimension that does not divide": _INIT + "ShardPlacementFn::test_init_1d_uneven_shard_largest_dim",
            "a dimension that is not there": _INIT + "ShardPlacementFn::test_invalid_shard_dim",
            "two meshes": _INIT + "ShardPlacementFn::test_two_meshes_in_one_module",
            "a wrong result": _INIT + "ShardPlacementFn::test_invalid_placement_result",
        },
        "mp_policy": {
            "each dtype": "fsdp2/mixed_precision::TestFullyShardMixedPrecisionTraining::test_compute_dtype",
        },
        "offload_policy": {
            "to the CPU": _TRAINING + "1DTrainingCore::test_train_parity_multi_group_cpu_offload_eager",
        },
        "ignored_params": {
            "one of a layer": _IGNORE + "one_parameter_of_a_layer",
            "shared": _IGNORE + "tied_parameter",
            "on the meta device": _IGNORE + "ignored_parameters_on_meta",
            "all": _INIT + "ManagedModulesAndStates::test_managed_states_with_ignored_params",
            "a parameter of another model": _IGNORE + "parameter_of_another_model",
        },
        "dp_mesh_dims": {
            "shards, replicas, both": _DTENSOR + "collectives",
            "no DTensors": _DTENSOR + "validation_spmd_mesh_non_dtensor_params",
            "wrong names": _DTENSOR + "validation_invalid_dim_names",
            "another mesh": _DTENSOR + "validation_mesh_mismatch",
            "with a number to reshard": _DTENSOR + "validation_reshard_after_forward_int_spmd",
        },
    },
    "MixedPrecisionPolicy": {
        "param_dtype": {
            "bfloat16, float16": "fsdp2/mixed_precision::TestFullyShardMixedPrecisionTraining::test_compute_dtype",
            "integer parameters": _CASTS + "integers_are_not_cast",
            "inputs in containers": _CASTS + "param_dtype_of_containers",
            "in recomputation": _CASTS + "checkpoint_recompute_casts_forward_inputs",
        },
        "reduce_dtype": {
            "without reduction": "fsdp2/mixed_precision::TestFullyShardMixedPrecisionTraining"
            "::test_grad_acc_with_reduce_dtype",
            "the dtype of parameters": _CASTS + "clamp_reduce_dtype",
            "float16": "fsdp2/mixed_precision::TestFullyShardMixedPrecisionReduction"
            "::test_float16_divides_before_and_after",
            "first forward with frozen parameters": _FROZEN + "reduce_dtype_after_frozen_forward",
            "complex parameters": _COMM + "Communication::test_complex_gradients",
        },
        "output_dtype": {"containers": _CASTS + "output_dtype_of_containers"},
        "cast_forward_inputs": {
            "False": _CASTS + "submodules_with_external_inputs",
            "a group of modules": _CASTS + "grouped_modules_cast_inputs",
        },
        "param_dtype_override_fn": {
            "each answer": "fsdp2/mixed_precision::TestFullyShardMixedPrecisionOverride::test_answers",
            "a wrong answer": "fsdp2/mixed_precision::TestFullyShardMixedPrecisionOverride"
            "::test_other_answers_are_refused",
        },
    },
    "OffloadPolicy": {"": {"the default": "fsdp2/init::TestDefaults::test_defaults"}},
    "CPUOffloadPolicy": {
        "pin_memory": {
            "True, False": _STATE_DICT + "offloaded_parameters_are_pinned",
        }
    },
    "DataParallelMeshDims": {
        "shard": {
            "one name": _DTENSOR + "collectives",
            "neither shard nor replicate": _DTENSOR + "validation_at_least_one_required",
        },
        "replicate": {"one name": _DTENSOR + "collectives"},
    },
    "register_fsdp_forward_method": {
        "module": {"with and without FSDP": _TRAINING + "CustomForwardMethod::test_register_fsdp_forward_method"},
        "method_name": {"unknown": _TRAINING + "CustomForwardMethod::test_register_fsdp_forward_method"},
    },
    "share_comm_ctx": {
        "modules": {
            "none, not FSDP": _STATE + "share_comm_ctx",
            "three roots": _TRAINING + "ShareCommContext::test_share_comm_context",
        }
    },
    "UnshardHandle.wait": {
        "": {
            "after unshard": _COMM + "UnshardMultiProcess::test_unshard_async",
            "nothing to unshard": _COMM + "UnshardMultiThread::test_unshard_no_param_group",
        }
    },
    "FSDPModule.reshard": {
        "": {
            "between forward and backward": _COMM
            + "Communication::test_manual_reshard_with_reshard_after_forward_false",
        }
    },
    "FSDPModule.unshard": {
        "async_op": {
            "True": _COMM + "UnshardMultiProcess::test_unshard_async",
            "before the first forward": _COMM + "UnshardMultiThread::test_unshard_without_lazy_init",
        }
    },
    "FSDPModule.reset_iter_state": {
        "": {
            "after an exception": _TRAINING + "1DTrainingCompose::test_reset_iter_state_then_parity",
            "below the root": _STATE + "reset_iter_state",
            "before the first forward": _STATE + "reset_iter_state_before_first_forward",
        }
    },
    "FSDPModule.set_is_last_backward": {
        "is_last_backward": {"False": _TRAINING + "GradientAccumulation::test_1f1b_microbatching"}
    },
    "FSDPModule.set_requires_gradient_sync": {
        "requires_gradient_sync": {"False": _TRAINING + "GradientAccumulation::test_gradient_accumulation"},
        "recurse": {"False": _TRAINING + "GradientAccumulation::test_gradient_accumulation"},
    },
    "FSDPModule.set_requires_all_reduce": {
        "requires_all_reduce": {"False": _TRAINING + "GradientAccumulation::test_gradient_accumulation"},
        "recurse": {"False": _TRAINING + "GradientAccumulation::test_gradient_accumulation"},
    },
    "FSDPModule.set_reshard_after_forward": {
        "reshard_after_forward": {
            "True, False": _COMM + "Communication::test_set_reshard_after_forward",
            "a number": _STATE + "reshard_setter",
        },
        "recurse": {"True, False": _COMM + "Communication::test_set_reshard_after_forward"},
    },
    "FSDPModule.set_reshard_after_backward": {
        "reshard_after_backward": {"False": _TRAINING + "GradientAccumulation::test_gradient_accumulation"},
        "recurse": {"False": _TRAINING + "GradientAccumulation::test_gradient_accumulation"},
    },
    "FSDPModule.set_modules_to_forward_prefetch": {
        "modules": {
            "one, two": _COMM + "Prefetch::test_set_modules_to_forward_prefetch",
            "not FSDP": _STATE + "prefetch_setters",
        }
    },
    "FSDPModule.set_modules_to_backward_prefetch": {
        "modules": {
            "one, two": _COMM + "Prefetch::test_set_modules_to_backward_prefetch",
            "not FSDP": _STATE + "prefetch_setters",
        }
    },
    "FSDPModule.set_custom_all_gather": {
        "comm": {
            "uneven rows, replicas": _COMM + "Communication::test_set_custom_comms",
            "two groups": _COMM + "Communication::test_set_custom_comms_of_two_groups",
        }
    },
    "FSDPModule.set_custom_reduce_scatter": {
        "comm": {
            "uneven rows, replicas": _COMM + "Communication::test_set_custom_comms",
            "two groups": _COMM + "Communication::test_set_custom_comms_of_two_groups",
        }
    },
    "FSDPModule.set_all_reduce_hook": {
        "hook": {
            "shards alone": "fsdp2/init::TestHSDPWithCustomHook::test_custom_hsdp_all_reduce_hook",
            "two groups": _INIT + "ShardPlacementFn::test_two_meshes_in_one_module",
        },
        "stream": {"a stream": "fsdp2/init::TestHSDPWithCustomHook::test_custom_hook_custom_stream"},
    },
    "FSDPModule.set_post_optim_event": {
        "event": {"recorded by a hook": _TRAINING + "1DTrainingCore::test_post_optim_event"}
    },
    "FSDPModule.set_reduce_scatter_divide_factor": {
        "factor": {"deprecated": _COMM + "Communication::test_set_reduce_scatter_divide_factor"}
    },
    "FSDPModule.set_gradient_divide_factor": {
        "factor": {
            "below 1, 1, no power of two": _COMM + "Communication::test_any_divide_factor",
            "below 1, multiplied before the sum": _COMM + "Communication::test_divide_factor_of_a_custom_reduction",
            "the world size, the number of shards": _COMM + "Communication::test_set_reduce_scatter_divide_factor",
            "one rank": _COMM + "ReduceOpWorldSize1::test_singleton_copy_division",
            "0": _COMM + "Communication::test_divide_factor_of_zero",
        }
    },
    "FSDPModule.set_force_sum_reduction_for_comms": {
        "enable": {
            "shards": _COMM + "ForceSumReduction::test_fully_shard_force_sum_reduce_scatter",
            "replicas": _COMM + "ForceSumReduction::test_fully_shard_force_sum_both_reductions",
            "one rank": _COMM + "ReduceOpWorldSize1::test_singleton_force_sum",
        }
    },
    "FSDPModule.set_reduce_scatter_unused_params": {
        "reduce_scatter_unused_params": {
            "used by some ranks": _AUTOGRAD + "rank_dependent_use",
            "with accumulation": _TRAINING + "GradientAccumulation::test_rank_dependent_branches_and_masked_losses",
        },
        "recurse": {"True, False": _TRAINING + "GradientAccumulation::test_rank_dependent_branches_and_masked_losses"},
    },
    "FSDPModule.set_reduce_scatter_max_input_buffers": {
        "max_input_buffers": {
            "1, 2, 3, 10": "fsdp2/memory::TestFullyShardMemory::test_reduce_scatter_max_input_buffers",
            "0, negative, of another type": _COMM
            + "Communication::test_set_reduce_scatter_max_input_buffers_validation",
        },
        "recurse": {"False": _COMM + "Communication::test_reduce_scatter_max_input_buffers_resolves_to_max"},
    },
    "FSDPModule.set_separate_reduce_scatter_group": {
        "enable": {"True, False": _COMM + "Communication::test_set_separate_reduce_scatter_group"},
        "recurse": {"False": _COMM + "Communication::test_set_separate_reduce_scatter_group"},
    },
    "FSDPModule.set_unshard_in_backward": {
        "unshard_in_backward": {
            "False, of an embedding": _TRAINING + "1DTrainingCompose::test_train_parity_with_activation_checkpointing"
        }
    },
    "FSDPModule.set_allocate_memory_from_process_group_for_comm": {
        "enable": {
            "True, False": _COMM + "AllocFromPG::test_fully_shard_alloc_from_pg",
            "beside a custom collective": _COMM + "AllocFromPG::test_exception_when_used_together_with_comm_hooks",
        }
    },
    "FSDPModule.set_symm_mem_for_comm": {
        "backend": {
            "the default": _COMM + "SymmMem::test_fully_shard_symm_mem",
            "another": _COMM + "SymmMemBackend::test_unknown_backend",
        }
    },
    "FSDPModule.set_keep_unsharded_storage": {
        "keep": {"True, False": _STORAGE + "switch"},
        "recurse": {"False": _STORAGE + "recurse"},
    },
    "FSDPModule.set_manual_backward_finalization": {
        "enabled": {
            "by turns": _FINALIZATION + "manual_and_automatic_by_turns",
            "below the root": _FINALIZATION + "below_the_root",
        }
    },
    "FSDPModule.finalize_backward": {
        "async_op": {
            "before the first forward": _FINALIZATION + "before_the_first_forward",
            "after an exception": _FINALIZATION + "exception_in_backward",
            "without a wait": _FINALIZATION + "handle_is_never_waited_on",
        }
    },
    # --- FSDP1 --------------------------------------------------------------------------------------------------------
    "FullyShardedDataParallel": {
        "module": {
            "without parameters": "fsdp1/fsdp_flatten_params::TestFlattenParams::test_empty_module",
            "one element": "fsdp1/fsdp_uneven::TestUnevenParamShard::test_empty_shard",
            "fewer elements than ranks": "fsdp1/fsdp_uneven::TestUnevenParamShardFourRanks::test_rank_of_padding_alone",
            "integer parameters": "fsdp1/fsdp_flatten_params::TestFlattenParams::test_refused",
            "complex parameters": "fsdp1/fsdp_flatten_params::TestFlattenParams::test_refused",
            "frozen parameters": "fsdp1/fsdp_freezing_weights::TestFreezingWeights::test_frozen_beside_trainable",
            "a shared parameter": "fsdp1/fsdp_flatten_params::ShardsTest::test_gradients_of_shared_params",
            "on the meta device": _META + "simple_model_with_meta_device_default_init",
            "half of it on the meta device": _META + "module_beside_one_on_meta",
            "without inputs": "fsdp1/fsdp_input::TestInputSharded::test_no_inputs",
            "inputs by keyword alone": "fsdp1/fsdp_input::TestInputSharded::test_keyword_only",
            "containers as inputs and outputs": "fsdp1/fsdp_input::TestInputSharded::test_containers",
            "outputs that the loss does not use": _MISC + "MultiProcess::test_fsdp_not_all_outputs_used_in_loss",
            "run several times": "fsdp1/fsdp_multiple_forward::TestMultiForward::test_multi_forward",
            "evaluated between steps": _MISC + "MultiProcess::test_fsdp_zero2_eval_with_prefetch",
            "without gradients": "fsdp1/fsdp_core::TestNoGrad::test_transformer_no_grad",
            "in inference mode between steps": "fsdp1/fsdp_core::TestNoGrad::test_evaluation_in_inference_mode",
            "in inference mode first": "fsdp1/fsdp_core::TestNoGrad::test_first_evaluation_in_inference_mode",
            "under torch.func": _MISC + "MultiProcess::test_transforms_of_torch_func",
            "after an exception in forward": _MISC + "MultiProcess::test_train_after_exception_in_forward",
            "one rank": _MISC + "WorldSize1::test_world_size_1_sharding_strategy_warning",
            "a class that cannot be wrapped": _MISC + "MultiThread::test_fsdp_unsupported_module_cls",
        },
        "process_group": {
            "of some ranks": "fsdp1/fsdp_unshard_params::TestUnshardParamsSubgroups::test_unshard_within_the_group",
            "a pair": _HYBRID + "parity_on_data_of_each_rank",
            "wrong for the strategy": _HYBRID + "invalid_pg_specification_raises",
        },
        "sharding_strategy": {
            "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD": _MISC + "MultiProcess::test_fsdp_cpu_training",
            "hybrid": _HYBRID + "fsdp_hybrid_shard_parity",
            "one rank": _MISC + "WorldSize1::test_world_size_1_sharding_strategy_warning",
        },
        "cpu_offload": {
            "with each strategy": "fsdp1/fsdp_use_orig_params::TestFSDPUseOrigParamsWriteback"
            "::test_param_writeback_with_offload",
            "pinned": _MISC + "MultiThread::test_offloaded_parameters_are_pinned",
        },
        "auto_wrap_policy": {"classes": "fsdp1/wrap::TestAutoWrap::test_module_wrap_policy"},
        "backward_prefetch": {"each mode, None": _PREFETCH + "backward_prefetch"},
        "mixed_precision": {"each dtype": _PRECISION + "parity_with_casts_by_hand"},
        "ignored_modules": {
            "inside a unit": _IGNORED + "ignored_modules_transformer",
            "of another model": _IGNORED + "ignored_modules_not_under_wrapped_root",
            "FSDP instances, all": _IGNORED + "ignored_modules_invalid",
            "others on each rank": _IGNORED + "diff_ignored_modules_across_ranks",
        },
        "param_init_fn": {
            "a function": _META + "simple_model_with_meta_device_reset_params",
            "not callable": _META + "bad_arg_meta",
            "called once": _META + "init_fn_is_called_once_for_each_module",
        },
        "device_id": {
            "a device, an index": _MISC + "MultiProcess::test_fsdp_device_id",
            "without an index": _MISC + "MultiProcess::test_device_id_without_index",
            "another device": _MISC + "MultiThread::test_module_device_mismatches_device_id",
        },
        "sync_module_states": {
            "True": _MISC + "MultiThread::test_fsdp_same_model_across_ranks",
            "in host memory": _MISC + "MultiProcess::test_cpu_init_with_sync_module_states",
        },
        "forward_prefetch": {
            "True, False": "fsdp1/fsdp_comm::TestCommunication::test_prefetch_adds_nothing",
        },
        "limit_all_gathers": {
            "True, False": "fsdp1/fsdp_overlap::TestForwardOverlapWorldSizeTwo::test_limit_of_all_gathers",
        },
        "use_orig_params": {
            "groups of parameters": "fsdp1/fsdp_use_orig_params::TestFSDPUseOrigParamsMultipleParamGroups"
            "::test_diff_hyperparams",
            "a parameter that was replaced": "fsdp1/fsdp_use_orig_params::TestFSDPUseOrigParamsWriteback"
            "::test_param_writeback",
            "a gradient that was replaced": "fsdp1/fsdp_use_orig_params::TestFSDPUseOrigParamsWriteback"
            "::test_grad_writeback",
            "replaced before use, offloaded": "fsdp1/fsdp_use_orig_params::TestFSDPUseOrigParamsWriteback"
            "::test_param_writeback_before_use_with_offload",
        },
        "ignored_states": {
            "parameters": _IGNORED + "ignored_states_auto_wrap",
            "parameters and modules": _IGNORED + "ignored_states_check",
        },
        "device_mesh": {
            "one dimension": "fsdp1/fsdp_dtensor_state_dict::TestFSDPWithDeviceMeshAndDTensor"
            "::test_fsdp_init_with_device_mesh",
            "wrong": _HYBRID + "invalid_mesh_specification_raises",
            "with two ranks of tensor parallelism": "fsdp1/fsdp_tp_integration::TestTPFSDPIntegration"
            "::test_fsdp_tp_integration",
            "with three ranks of tensor parallelism": "fsdp1/fsdp_tp_integration::TestTPFSDPOverThreeRanks"
            "::test_optim_state_dict",
        },
    },
    "FullyShardedDataParallel.check_is_root": {"": {"roots and others": _HOOKS + "registering_hook_non_root"}},
    "FullyShardedDataParallel.fsdp_modules": {
        "module": {"without FSDP": "fsdp1/fsdp_traversal::TestTraversal::test_without_fsdp"},
        "root_only": {"True, False": "fsdp1/fsdp_traversal::TestTraversal::test_fsdp_modules"},
    },
    "FullyShardedDataParallel.apply": {
        "fn": {
            "writes parameters": "fsdp1/fsdp_apply::TestApply::test_each_rank_writes_its_shard",
            "raises": "fsdp1/fsdp_apply::TestApply::test_function_raises",
        }
    },
    "FullyShardedDataParallel.set_state_dict_type": {
        "module": {"the root": _STATES + "state_dict_type"},
        "state_dict_type": {"each type": _STATES + "fsdp_state_dict_keys"},
        "state_dict_config": {
            "of another type": _STATES + "wrong_state_dict_config",
            "of two models": _STATES + "models_with_one_config",
        },
        "optim_state_dict_config": {"of another type": _OPTIM + "optim_state_dict_nested"},
    },
    "FullyShardedDataParallel.get_state_dict_type": {"module": {"in contexts": _STATES + "state_dict_type"}},
    "FullyShardedDataParallel.state_dict_type": {
        "module": {"the root": _STATES + "state_dict_type"},
        "state_dict_type": {"after an exception": _STATES + "state_dict_type_after_exception"},
        "state_dict_config": {"nested contexts": _STATES + "configs_of_an_outer_context_come_back"},
        "optim_state_dict_config": {"nested contexts": _STATES + "configs_of_an_outer_context_come_back"},
    },
    "FullyShardedDataParallel.forward": {"": {"without inputs": "fsdp1/fsdp_input::TestInputSharded::test_no_inputs"}},
    "FullyShardedDataParallel.summon_full_params": {
        "module": {
            "a submodule": _SUMMON + "unshard_submodule",
            "in forward": _SUMMON_ERRORS + "unshard_params_from_forward_raises",
            "in backward": _SUMMON_ERRORS + "unshard_params_from_backward_raises",
            "twice at once": _SUMMON_ERRORS + "nested_contexts_raise",
        },
        "recurse": {"False": _SUMMON + "unshard_params_recurse"},
        "writeback": {
            "True, False": _SUMMON + "unshard_params_writeback",
            "one element": _SUMMON + "unshard_singleton_param_writeback",
        },
        "rank0_only": {
            "True": _SUMMON + "grads_on_rank_0_only",
            "replicas": _HYBRID + "rank0_only_is_one_rank",
            "with writeback": _SUMMON_ERRORS + "rank0_only_with_writeback_raises",
        },
        "offload_to_cpu": {
            "True": _SUMMON + "offloaded_parameters_have_memory",
            "without shards": _SUMMON_ERRORS + "offload_to_cpu_no_shard_raises",
        },
        "with_grads": {
            "True": _SUMMON + "with_grads_core",
            "of each dtype": _SUMMON + "grads_of_any_dtype",
            "in low precision": _SUMMON + "low_precision_grads",
            "of some ranks": _SUMMON + "grads_that_only_some_ranks_have",
            "of some ranks, of another dtype": _SUMMON + "grads_of_another_dtype_on_some_ranks",
            "without original parameters": _SUMMON_ERRORS + "with_grads_needs_orig_params",
        },
    },
    "FullyShardedDataParallel.named_buffers": {"": {"summoned": _SUMMON + "named_parameters_and_buffers"}},
    "FullyShardedDataParallel.named_parameters": {"": {"summoned": _SUMMON + "named_parameters_and_buffers"}},
    "FullyShardedDataParallel.no_sync": {
        "": {
            "each strategy": "fsdp1/fsdp_grad_acc::TestGradAcc::test_grad_acc",
            "a unit that only it runs": "fsdp1/fsdp_grad_acc::TestGradAcc::test_unit_that_is_used_only_in_no_sync",
            "one element": "fsdp1/fsdp_grad_acc::TestGradAcc::test_unit_of_one_element",
        }
    },
    "FullyShardedDataParallel.clip_grad_norm_": {
        "max_norm": {"above and below the norm": _CLIP + "norm_of_the_whole_gradient"},
        "norm_type": {
            "1, 2, 3, infinity": _CLIP + "norm_of_the_whole_gradient",
            "no gradients": _CLIP + "no_gradients",
            "0": _CLIP + "norm_type_of_zero",
        },
    },
    "FullyShardedDataParallel.full_optim_state_dict": {
        "model": {"nested": _OPTIM + "optim_state_dict_nested"},
        "optim": {"without state": _OPTIM + "with_empty_optimizer_state"},
        "optim_input": {"deprecated": _OPTIM + "optim_input_warning"},
        "rank0_only": {"True, False": _OPTIM + "optim_state_dict_nested"},
        "group": {"another": _OPTIM + "shard_full_optim_state_dict_nested_halve_world_size"},
    },
    "FullyShardedDataParallel.sharded_optim_state_dict": {
        "model": {"nested": _OPTIM + "flatten_sharded_optim_state_dict_nested"},
        "optim": {"nested": _OPTIM + "flatten_sharded_optim_state_dict_nested"},
        "group": {"another": _OPTIM + "sharded_state_in_a_group_of_its_own"},
    },
    "FullyShardedDataParallel.shard_full_optim_state_dict": {
        "full_optim_state_dict": {"nested": _OPTIM + "shard_full_optim_state_dict_nested"},
        "model": {"of fewer ranks": _OPTIM + "shard_full_optim_state_dict_nested_halve_world_size"},
        "optim_input": {"deprecated": _OPTIM + "optim_input_warning"},
        "optim": {"parameters outside FSDP": _OPTIM + "shard_full_optim_state_dict_unmanaged_params"},
    },
    "FullyShardedDataParallel.flatten_sharded_optim_state_dict": {
        "sharded_optim_state_dict": {"nested": _OPTIM + "flatten_sharded_optim_state_dict_nested"},
        "model": {"shared parameters": _OPTIM + "flatten_sharded_optim_state_dict_transformer"},
        "optim": {"nested": _OPTIM + "flatten_sharded_optim_state_dict_nested"},
    },
    "FullyShardedDataParallel.scatter_full_optim_state_dict": {
        "full_optim_state_dict": {"nested": _OPTIM + "scatter_full_optim_state_dict_nested"},
        "model": {"of fewer ranks": _OPTIM + "scatter_full_optim_state_dict_nested_halve_world_size"},
        "optim_input": {"deprecated": _OPTIM + "optim_input_warning"},
        "optim": {"shared parameters": _OPTIM + "scatter_full_optim_state_dict_transformer"},
        "group": {"of fewer ranks": _OPTIM + "scatter_full_optim_state_dict_nested_halve_world_size"},
    },
    "FullyShardedDataParallel.rekey_optim_state_dict": {
        "optim_state_dict": {"of FSDP, of a plain model": _OPTIM + "rekey_optim_state_dict_to_names"},
        "optim_state_key_type": {
            "ids": _OPTIM + "rekey_optim_state_dict_to_ids",
            "names": _OPTIM + "rekey_optim_state_dict_to_names",
        },
        "model": {"nested": _OPTIM + "rekey_optim_state_dict_to_ids"},
        "optim_input": {"a list, groups": _OPTIM + "rekey_optim_state_dict_to_ids"},
        "optim": {"several groups": _OPTIM + "rekey_optim_state_dict_to_ids"},
    },
    "FullyShardedDataParallel.optim_state_dict": {
        "model": {
            "nested": _OPTIM + "optim_state_dict_nested",
            "uneven rows, ranks without rows": _OPTIM + "uneven_shards",
        },
        "optim": {
            "without state": _OPTIM + "with_empty_optimizer_state",
            "frozen parameters": _OPTIM + "no_grad",
            "fused": _OPTIM + "state_of_fused_optimizer",
            "numbers, None, scalar tensors in states": _OPTIM + "state_dict_with_none_tensor_state",
            "states of two dtypes": _OPTIM + "states_of_two_dtypes",
        },
        "optim_state_dict": {"without groups": _OPTIM + "optim_state_without_param_groups"},
        "group": {"of fewer ranks": "checkpoint/fsdp_optim_state::FsdpOptimStateCheckpoint::test_fewer_ranks"},
    },
    "FullyShardedDataParallel.optim_state_dict_to_load": {
        "model": {"nested": _OPTIM + "use_orig_params"},
        "optim": {"a parameter without state": _OPTIM + "save_load_without_0th_param_state"},
        "optim_state_dict": {"damaged": _OPTIM + "damaged_state_is_refused"},
        "is_named_optimizer": {"True": _OPTIM + "compatible_with_trec"},
        "load_directly": {"True": _OPTIM + "interface_arguments"},
        "group": {"of fewer ranks": "checkpoint/fsdp_optim_state::FsdpOptimStateCheckpoint::test_fewer_ranks"},
    },
    "FullyShardedDataParallel.register_comm_hook": {
        "state": {"of a low precision": _HOOKS + "bf16_hook"},
        "hook": {
            "below the root": _HOOKS + "registering_hook_non_root",
            "not callable": _HOOKS + "hook_that_is_not_callable",
            "hybrid strategies": _HOOKS + "registering_hook_hybrid_strategy",
            "in no_sync": _HOOKS + "hook_and_no_sync",
        },
    },
    "MixedPrecision": {
        "param_dtype": {
            "each": _PRECISION + "parity_with_casts_by_hand",
            "a forward without backward": _PRECISION + "forward_without_backward",
        },
        "reduce_dtype": {"each": _PRECISION + "grads_reduced_precision"},
        "buffer_dtype": {"evaluation": _PRECISION + "full_precision_in_eval_buffers"},
        "keep_low_precision_grads": {"offloaded": _PRECISION + "offloaded_low_grads_after_zero_grad"},
        "cast_forward_inputs": {"False": _SUBMODULES + "float16_on_one_submodule_skip_inputs"},
        "cast_root_forward_inputs": {"evaluation": _PRECISION + "eval_root_cast_inputs"},
        "_module_classes_to_ignore": {"norms": _PRECISION + "mp_batchnorm"},
    },
    "CPUOffload": {
        "offload_params": {
            "True": "fsdp1/fsdp_use_orig_params::TestFSDPUseOrigParamsWriteback::test_param_writeback_with_offload"
        }
    },
    "StateDictConfig": {"offload_to_cpu": {"the default": "fsdp1/fsdp_misc::TestDefaults::test_defaults"}},
    "FullStateDictConfig": {
        "offload_to_cpu": {"True": _STATES + "state_dict_rank0_offload_save_load_flow"},
        "rank0_only": {
            "True": _STATES + "peak_memory_of_rank0_only",
            "replicas": _HYBRID + "rank0_only_is_one_rank",
        },
    },
    "LocalStateDictConfig": {"offload_to_cpu": {"True": _STATES + "trained_local_state_dict_offloaded"}},
    "ShardedStateDictConfig": {
        "offload_to_cpu": {
            "True": "fsdp1/fsdp_dtensor_state_dict::TestFSDPWithDeviceMeshAndDTensor"
            "::test_dtensor_sharded_tensor_state_dict_identical"
        },
        "_use_dtensor": {
            "set by a mesh": "fsdp1/fsdp_dtensor_state_dict::TestFSDPWithDeviceMeshAndDTensor"
            "::test_fsdp_init_with_device_mesh"
        },
    },
    "OptimStateDictConfig": {"offload_to_cpu": {"the default": "fsdp1/fsdp_misc::TestDefaults::test_defaults"}},
    "FullOptimStateDictConfig": {
        "offload_to_cpu": {"True": _OPTIM + "offloaded_state_of_original_parameters"},
        "rank0_only": {"True": _OPTIM + "rank0_only_leaves_nothing_elsewhere"},
    },
    "LocalOptimStateDictConfig": {
        "offload_to_cpu": {"the default": _OPTIM + "flatten_sharded_optim_state_dict_nested"}
    },
    "ShardedOptimStateDictConfig": {
        "offload_to_cpu": {
            "True": "fsdp1/fsdp_dtensor_state_dict::TestFSDPWithDeviceMeshAndDTensor"
            "::test_dtensor_sharded_tensor_state_dict_identical"
        },
        "_use_dtensor": {
            "set by a mesh": "fsdp1/fsdp_dtensor_state_dict::TestFSDPWithDeviceMeshAndDTensor"
            "::test_fsdp_init_with_device_mesh"
        },
    },
    "StateDictSettings": {
        "state_dict_type": {"in contexts": _STATES + "state_dict_type"},
        "state_dict_config": {"in contexts": _STATES + "configs_of_an_outer_context_come_back"},
        "optim_state_dict_config": {"in contexts": _STATES + "configs_of_an_outer_context_come_back"},
    },
    "ShardedGradScaler": {
        "device": {"the device under test": _SCALER + "grad_scaling"},
        "init_scale": {"a number": _SCALER + "grad_scaling"},
        "backoff_factor": {
            "the default": _SCALER_PARITY + "growth",
            "others": _SCALER_PARITY + "factors",
        },
        "growth_factor": {
            "the default": _SCALER_PARITY + "growth",
            "others": _SCALER_PARITY + "factors",
        },
        "growth_interval": {"two": _SCALER_PARITY + "growth"},
        "enabled": {"False": _SCALER + "disabled"},
        "process_group": {"of some ranks": _SCALER_PARITY + "ranks_of_another_group"},
    },
    "ShardedGradScaler.scale": {"outputs": {"alone, in iterables, refused": _SCALER + "scaled_dtypes"}},
    "ShardedGradScaler.unscale_": {
        "optimizer": {
            "several dtypes": _SCALER + "unscaling_of_each_dtype",
            "sparse gradients": _SCALER + "scaling_unscaling_sparse",
            "twice": _SCALER + "order_of_calls",
            "a rank without gradients": _SCALER_PARITY + "rank_without_gradients",
            "two optimizers": _SCALER + "two_optimizers",
        }
    },
    "ShardedGradScaler.update": {
        "new_scale": {
            "a number, a tensor, refused": _SCALER + "update_with_a_new_scale",
            "a vector of one": _SCALER + "update_with_a_vector_of_one",
        }
    },
    # --- Distributed state dicts --------------------------------------------------------------------------------------
    "StateDictOptions": {
        "full_state_dict": {
            "True": _DSD + "cpu_offload_full_state_dict",
            "a part on the meta device": _DSD + "part_on_meta_device",
            "a wrong shape": _OPTIONS + "wrong_shape_is_refused",
            "tensor parallelism": _OPTIONS + "load_of_fsdp2_and_tp",
        },
        "cpu_offload": {"True": _DSD + "cpu_offload_full_state_dict"},
        "ignore_frozen_params": {"True": _DSD + "frozen"},
        "keep_submodule_prefixes": {"True, False": _OPTIONS + "submodules"},
        "strict": {
            "wrong keys": _OPTIONS + "missing_and_unexpected_keys",
            "wrong keys under DDP, torch.compile, checkpoints and FSDP1": _OPTIONS + "wrong_keys_under_wrappers",
            "an optimizer state is missing under wrappers": _OPTIONS + "missing_optim_state_under_wrappers",
            "an optimizer state is missing": _OPTIONS + "missing_optim_state",
            "an extra state is missing": _OPTIONS + "missing_extra_state",
        },
        "broadcast_from_rank0": {
            "True": _DSD + "broadcast_from_rank0",
            "replicas": _DSD + "broadcast_from_rank0_hsdp",
            "without full_state_dict": _OPTIONS + "refusals",
            "of another dtype": _OPTIONS + "broadcast_of_another_dtype",
        },
        "flatten_optimizer_state_dict": {
            "True": _DSD + "flattened_osd",
            "nested states": _OPTIONS + "flattened_nested_states",
            "a state is missing": _OPTIONS + "missing_state_of_flattened_optim_state",
            "full": _OPTIONS + "flattened_full_optim_state",
        },
        "dsd_fqn_modifiers": {
            "the default": _OPTIONS + "fqn_modifiers",
            "another": _OPTIONS + "fqn_modifiers_of_another_name",
        },
    },
    "get_model_state_dict": {
        "model": {
            "FSDP1": _DSD + "fsdp",
            "FSDP2": _DSD + "fsdp2",
            "compiled": _DSD + "compiled_fsdp",
            "before the first forward": _DSD + "fsdp_root_not_initialized",
            "inside an FSDP1 instance": _DSD + "module_inside_an_fsdp1_instance",
            "a shared parameter": _DSD + "shared_weight",
            "buffers that are not saved": _OPTIONS + "non_persistent_buffers",
            "buffers of each dtype, frozen parameters in low precision": _OPTIONS + "states_of_each_kind",
            "a shared module": _OPTIONS + "shared_module",
        },
        "submodules": {"deprecated": _OPTIONS + "submodules"},
        "options": {"the default, full, from rank 0, flattened": _OPTIONS + "trajectory"},
    },
    "get_optimizer_state_dict": {
        "model": {"FSDP2": _DSD + "fsdp2"},
        "optimizers": {
            "several": _DSD + "fsdp2_ddp",
            "of another model": _OPTIONS + "refusals",
            "before the first step": _OPTIONS + "asking_for_states_changes_nothing",
            "with learning rates of each group, or none": _OPTIONS + "learning_rates_after_asking_for_states",
            "frozen parameters": _OPTIONS + "state_of_frozen_parameter",
        },
        "submodules": {"deprecated": _OPTIONS + "submodules_with_optimizer"},
        "options": {"the default, full, from rank 0, flattened": _OPTIONS + "trajectory"},
    },
    "get_state_dict": {
        "model": {
            "each layout": "distributed/checkpoint/fsdp/test_fsdp_dsd::TestFullyShardWithDistributedStateDict"
            "::test_every_pair_of_layouts"
        },
        "optimizers": {"several": _DSD + "fsdp2_ddp"},
        "submodules": {"deprecated": _OPTIONS + "submodules_with_optimizer"},
        "options": {"the default, full, from rank 0, flattened": _OPTIONS + "trajectory"},
    },
    "set_model_state_dict": {
        "model": {
            "on the meta device": _DSD + "setting_meta_device_model",
            "in part on the meta device": _DSD + "part_on_meta_device",
            "DDP, torch.compile": _OPTIONS + "wrong_keys_under_wrappers",
        },
        "model_state_dict": {
            "empty": _OPTIONS + "refusals",
            "of a submodule": _OPTIONS + "submodules",
            "stays the caller's": _OPTIONS + "callers_dict_stays",
        },
        "options": {"the default, full, from rank 0, flattened": _OPTIONS + "trajectory"},
    },
    "set_optimizer_state_dict": {
        "model": {"FSDP2": _DSD + "fsdp2"},
        "optimizers": {
            "none": _OPTIONS + "refusals",
            "several groups": _DSD + "multi_param_groups",
            "without states": _OPTIONS + "several_stateless_optimizers",
        },
        "optim_state_dict": {
            "empty": _OPTIONS + "refusals",
            "without the state of a parameter": _OPTIONS + "missing_optim_state",
            "refused": _OPTIONS + "refused_loads_leave_the_optimizer",
        },
        "options": {"the default, full, from rank 0, flattened": _OPTIONS + "trajectory"},
    },
    "set_state_dict": {
        "model": {"FSDP1, FSDP2": _DSD + "frozen"},
        "optimizers": {"several": _DSD + "fsdp2_ddp"},
        "model_state_dict": {"whole, of shards, of rank 0": _OPTIONS + "trajectory"},
        "optim_state_dict": {"broadcast": _OPTIONS + "set_state_dict_broadcasts"},
        "options": {"the default, full, from rank 0, flattened": _OPTIONS + "trajectory"},
    },
}
