"""Repairs of FSDP1 in memory, one for each defect. Each changes only what a patch of torch would change.

Most replace some text in the source of a function. The text must be as in torch 2.13.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from editing import edit
from torch import nn
from torch.distributed import utils
from torch.distributed._shard import sharded_tensor
from torch.distributed.checkpoint import _sharded_tensor_utils, format_utils, optimizer
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    _flat_param,
    _init_utils,
    _optim_utils,
    _runtime_utils,
    _shard_utils,
    _state_dict_utils,
    _traversal_utils,
    fully_sharded_data_parallel,
    sharded_grad_scaler,
    wrap,
)
from torch.distributed.tensor.parallel import fsdp as parallel_fsdp


def undo_lazy_initialization_also_after_an_exception() -> None:
    """Make ``apply`` on an inner instance undo its lazy initialization even if the function raises."""
    apply = FullyShardedDataParallel.apply

    def repaired(self: Any, fn: Callable[[nn.Module], None]) -> Any:
        was_uninitialized = self._is_root is None
        try:
            return apply(self, fn)
        except BaseException:
            if was_uninitialized:
                for state in _traversal_utils._get_fsdp_states(self):
                    state._reset_lazy_init()
            raise

    FullyShardedDataParallel.apply = repaired


def allocate_outside_of_inference_mode() -> None:
    allocate = _flat_param.FlatParamHandle.init_flat_param_attributes

    def allocated(self: Any) -> None:
        with torch.inference_mode(False):
            allocate(self)

    _flat_param.FlatParamHandle.init_flat_param_attributes = allocated


def synchronize_buffers_in_both_groups() -> None:
    """Make a hybrid strategy synchronize each buffer in both groups."""
    synchronize = _init_utils._sync_module_params_and_buffers

    def repaired(module: nn.Module, params: Any, process_group: Any) -> None:
        for buffer in module.buffers():
            setattr(buffer, _init_utils.FSDP_SYNCED, False)
        synchronize(module, params, process_group)

    _init_utils._sync_module_params_and_buffers = repaired


def leave_contexts_after_a_refused_load() -> None:
    """Make an exception in ``load_state_dict`` undo what the instances' hooks have begun, the inner ones first."""

    def repaired(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return nn.Module.load_state_dict(self, *args, **kwargs)
        except BaseException:
            for state in reversed(_traversal_utils._get_fsdp_states(self)):
                for module in list(state._unshard_params_ctx):
                    _state_dict_utils._exit_unshard_params_ctx(module, state)
            raise

    FullyShardedDataParallel.load_state_dict = repaired


def edit_with_copy(name: str, *replacements: tuple[str, str]) -> None:
    """The same for a function of ``torch.distributed.utils`` with a repair that copies containers."""
    utils.copy = copy
    edit(utils, name, *replacements)


# A unit may be gathered although its flat parameter points to the shard.
RESHARD_ALL_THAT_IS_GATHERED = partial(
    edit,
    _runtime_utils,
    "_catch_all_reshard",
    (
        "and not state._handle._skipped_use_sharded_views",
        "and not state._handle._skipped_use_sharded_views\n"
        "                and (state._handle.needs_unshard() or not state._handle.uses_sharded_strategy)",
    ),
)

# The end of backward reduces each gradient whose hook is still on another accumulator.
REDUCE_AT_THE_END = partial(
    edit,
    _runtime_utils,
    "_post_backward_final_callback",
    (
        "root_state = state\n",
        """root_state = state
    for each in state._all_fsdp_states:
        handle = each._handle
        if handle and handle._ran_pre_backward_hook:
            if handle.flat_param.grad is not None and not handle.flat_param._post_backward_called:
                _post_backward_hook(each, handle, handle.flat_param)
""",
    ),
)

# Parameters gathered for a forward are kept only if a backward may follow.
FREE_AFTER_A_FORWARD_WITHOUT_GRADIENTS = partial(
    edit,
    _runtime_utils,
    "_post_forward_reshard",
    ("not state._is_root", "handle.uses_sharded_strategy and not torch.is_grad_enabled() or not state._is_root"),
)


def keep_ignored_parameters_ignored() -> None:
    """Make a materialized parameter ignored if the one before it was."""
    edit(
        _init_utils,
        "_init_param_handle_from_module",
        (
            "    # Materialize the module if needed\n",
            """    places = [
        (each, name)
        for each in fully_sharded_module.modules()
        for name, param in each.named_parameters(recurse=False)
        if param in state._ignored_params
    ]
""",
        ),
        (
            "    ignored_buffers = {\n",
            "    state._ignored_params.update(getattr(each, name) for each, name in places)\n    ignored_buffers = {\n",
        ),
    )


def keep_values_beside_those_on_meta() -> None:
    former = _init_utils._materialize_meta_module

    def repaired(root_module: nn.Module, device: Any, ignored_modules: set[nn.Module], *args: Any) -> None:
        modules = _init_utils._get_modules_to_materialize(root_module, ignored_modules)
        kept = [
            (module, name, state.detach().clone())
            for module in modules
            for name, state in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            if not state.is_meta
        ]
        former(root_module, device, ignored_modules, *args)
        for module, name, value in kept:
            getattr(module, name).data.copy_(value)

    _init_utils._materialize_meta_module = repaired


class WeakInfo:
    """Takes the place of ``ParamInfo`` and ``SharedParamInfo``, which hold modules."""

    def __init__(self, *values: Any) -> None:
        self._values = [weakref.ref(value) if isinstance(value, nn.Module) else value for value in values]

    def __iter__(self) -> Any:
        return (value() if isinstance(value, weakref.ref) else value for value in self._values)

    module = property(lambda self: list(self)[1])
    module_name = property(lambda self: self._values[2])
    param_name = property(lambda self: self._values[0])


def hold_modules_weakly() -> None:
    _flat_param.ParamInfo = _flat_param.SharedParamInfo = WeakInfo
    edit(
        _flat_param.FlatParameter,
        "_init_metadata",
        (
            """self._modules = {pi.module for pi in self._param_infos}.union(
        {spi.module for spi in self._shared_param_infos}
    )""",
            "",
        ),
    )


def show_low_gradients() -> None:
    """Make FSDP1 assign a gradient of another dtype to ``grad.data``, where the parameter's dtype does not matter."""

    def set_grad(flat_param: Any, grad: torch.Tensor | None) -> None:
        flat_param.grad = None if grad is None else torch.empty_like(flat_param)
        if grad is not None:
            flat_param.grad.data = grad

    vars(_flat_param)["set_grad"] = set_grad
    edit(
        _flat_param.FlatParamHandle,
        "unshard_grad",
        (
            """flat_param.grad = padded_unsharded_grad[: unsharded_size.numel()].view(
        unsharded_size
    )""",
            "set_grad(flat_param, padded_unsharded_grad[: unsharded_size.numel()].view(unsharded_size))",
        ),
    )
    edit(
        _flat_param.FlatParamHandle,
        "reshard_grad",
        (
            "self.flat_param.grad = self.flat_param._saved_grad_shard",
            "set_grad(self.flat_param, self.flat_param._saved_grad_shard)",
        ),
    )


# Whether a gradient was reduced, which its size does not tell.
REMEMBER_WHAT_IS_REDUCED = partial(
    edit,
    _runtime_utils,
    "_post_backward_hook",
    (
        "        if not state._sync_gradients:\n",
        "        flat_param._unreduced = not state._sync_gradients\n        if not state._sync_gradients:\n",
    ),
)


def reduce_what_is_left() -> None:
    REMEMBER_WHAT_IS_REDUCED()
    edit(
        _runtime_utils,
        "_finalize_params",
        (
            "        if not handle._has_optim_in_backward:\n",
            """        if getattr(flat_param, "_unreduced", False):
            flat_param._unreduced, before = False, state.training_state
            state.training_state = TrainingState.FORWARD_BACKWARD
            handle._training_state = HandleTrainingState.BACKWARD_POST
            (_reduce_grad if handle.uses_sharded_strategy else _reduce_grad_no_shard)(state, handle)
            state.training_state = before
        if not handle._has_optim_in_backward:
""",
        ),
    )


def save_gradients_that_are_reduced() -> None:
    REMEMBER_WHAT_IS_REDUCED()
    edit(
        _flat_param.FlatParamHandle,
        "prepare_gradient_for_backward",
        (
            "or flat_param.grad.device != flat_param.device",
            "or (self.uses_sharded_strategy and not getattr(flat_param, '_unreduced', False))\n"
            "        or flat_param.grad.device != flat_param.device",
        ),
    )


def keep_memory_on_the_host() -> None:
    to_cpu = _flat_param.FlatParamHandle.to_cpu

    def repaired(self: Any) -> Any:
        return contextlib.nullcontext() if self.flat_param.device.type == "cpu" else to_cpu(self)

    _flat_param.FlatParamHandle.to_cpu = repaired


DETACH_LOCAL_SHARDS = partial(
    edit,
    _state_dict_utils,
    "_local_post_state_dict_hook",
    (".view(valid_data_size)", ".view(valid_data_size).detach()"),
)


def part_of_this_rank(whole: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """This rank's part of a state under tensor parallelism, if that is the last dimension of the mesh."""
    for dim, size in enumerate(shape):
        parts = whole.chunk(whole.size(dim) // size, dim)
        whole = parts[dist.get_rank() % len(parts)]
    return whole


def load_the_part_of_this_rank() -> None:
    vars(_optim_utils)["part_of_this_rank"] = part_of_this_rank
    edit(
        _optim_utils,
        "_shard_orig_param_state",
        ("value = value.flatten()[", "value = part_of_this_rank(value, flat_param._shapes[param_idx]).flatten()["),
    )


REPAIRS: dict[str, Callable[[], None]] = {
    "fsdp1_accumulated_gradient_is_lost": partial(
        edit,
        _flat_param.FlatParamHandle,
        "prepare_gradient_for_optim",
        (
            "if flat_param._post_backward_called:",
            "if flat_param._post_backward_called or flat_param._saved_grad_shard is not None:",
        ),
    ),
    "fsdp1_accumulation_of_one_element_is_wrong": save_gradients_that_are_reduced,
    "fsdp1_apply_leaves_an_inner_root": undo_lazy_initialization_also_after_an_exception,
    "fsdp1_checkpoint_of_empty_shards_is_not_loaded": partial(
        edit,
        _sharded_tensor_utils,
        "_flatten_sharded_tensors",
        ("if len(shards) == 0:\n            return\n        if len(shards) != 1:", "if len(shards) != 1:"),
    ),
    "fsdp1_dataclass_inputs_are_not_moved": partial(
        edit,
        utils,
        "_recursive_to",
        (
            "if _is_namedtuple(obj):",
            """if dataclasses.is_dataclass(obj):
            names = [field.name for field in dataclasses.fields(obj) if field.init]
            moved = zip(*(to_map(getattr(obj, name)) for name in names))
            return [dataclasses.replace(obj, **dict(zip(names, values))) for values in moved]
        if _is_namedtuple(obj):""",
        ),
    ),
    "fsdp1_dataclass_with_computed_field_raises": partial(
        edit,
        utils,
        "_apply_to_tensors",
        ("for f in dataclasses.fields(dc)", "for f in dataclasses.fields(dc) if f.init"),
    ),
    "fsdp1_defaultdict_input_raises": partial(
        edit_with_copy,
        "_recursive_to",
        (
            "return [type(obj)(i) for i in zip(*map(to_map, obj.items()))]",
            """made = []
            for items in zip(*map(to_map, obj.items())):
                made.append(copy.copy(obj))
                made[-1].update(items)
            return made""",
        ),
    ),
    "fsdp1_empty_named_tuple_swallows_inputs": partial(
        edit, utils, "_recursive_to", ("if _is_namedtuple(obj):", "if _is_namedtuple(obj) and len(obj) > 0:")
    ),
    "fsdp1_empty_shard_asks_cuda_for_its_device": partial(
        edit,
        sharded_tensor._ops.tensor_ops,
        "tensor_device",
        ("dev = torch.device(torch.cuda.current_device())", "dev = self_st._get_preferred_device()"),
    ),
    "fsdp1_evaluation_before_step_trains_old_weights": FREE_AFTER_A_FORWARD_WITHOUT_GRADIENTS,
    "fsdp1_exception_in_forward_replaces_parameters": partial(
        edit,
        _flat_param.FlatParamHandle,
        "_writeback_orig_params",
        (
            "param_changed = getattr(module, param_name) is not param",
            "param_changed = isinstance(now := getattr(module, param_name), nn.Parameter) and now is not param",
        ),
    ),
    "fsdp1_flat_model_is_never_freed": hold_modules_weakly,
    "fsdp1_frozen_replica_loses_its_parameters": partial(
        edit,
        _runtime_utils,
        "_catch_all_reshard",
        ("if already_resharded:", "if already_resharded and state._handle.uses_sharded_strategy:"),
    ),
    "fsdp1_frozen_unit_stays_gathered": RESHARD_ALL_THAT_IS_GATHERED,
    "fsdp1_full_optim_state_stays_split_by_tp": partial(
        edit,
        _optim_utils,
        "_unflatten_orig_param_states",
        ("value.redistribute(placements=(Replicate(),))", "value = value.redistribute(placements=(Replicate(),))"),
    ),
    "fsdp1_gradient_of_no_sync_is_not_reduced": reduce_what_is_left,
    "fsdp1_grad_scaler_refuses_a_vector_of_one": partial(
        edit,
        sharded_grad_scaler.ShardedGradScaler,
        "update",
        ("self._scale.copy_(new_scale)", "self._scale.copy_(new_scale.reshape(()))"),
    ),
    "fsdp1_hybrid_shard_leaves_buffers": synchronize_buffers_in_both_groups,
    "fsdp1_ignored_buffer_hides_its_namesake": partial(
        edit,
        _init_utils,
        "_get_ignored_buffer_names",
        ("for submodule in root_module.modules():", "for path, submodule in root_module.named_modules():"),
        (
            "all_ignored_buffer_names.update(optional_fsdp_state._ignored_buffer_names)",
            "all_ignored_buffer_names.update(clean_tensor_name(f'{path}.{name}' if path else name)"
            " for name in optional_fsdp_state._ignored_buffer_names)",
        ),
    ),
    "fsdp1_ignored_meta_parameter_is_managed": keep_ignored_parameters_ignored,
    "fsdp1_ignored_optim_state_is_loaded_sharded": partial(
        edit,
        optimizer,
        "load_sharded_optimizer_state_dict",
        (
            "if value.size.numel() == 1:",
            "if value.size.numel() == 1 or type(model_state_dict.get(key_path[2])) is torch.Tensor:",
        ),
    ),
    "fsdp1_inference_mode_breaks_training": allocate_outside_of_inference_mode,
    "fsdp1_inf_norm_only_grows": partial(
        edit, fully_sharded_data_parallel, "_get_grad_norm", ("return zero", "return zero.clone()")
    ),
    "fsdp1_inputs_lose_their_kind_of_dict": partial(
        edit_with_copy,
        "_apply_to_tensors",
        (
            "return {key: apply(value) for key, value in x.items()}",
            """made = copy.copy(x)
            made.update((key, apply(value)) for key, value in x.items())
            return made""",
        ),
    ),
    "fsdp1_local_state_dict_is_not_copied": DETACH_LOCAL_SHARDS,
    "fsdp1_local_state_dict_is_not_offloaded": DETACH_LOCAL_SHARDS,
    "fsdp1_lost_shard_becomes_zeros": partial(
        edit,
        _state_dict_utils,
        "_sharded_pre_load_state_dict_hook",
        (
            "if len(shards) >= 2:",
            """places = [shard.placement.rank() for shard in param.metadata().shards_metadata]
            is_lost = [None] * fsdp_state.world_size
            dist.all_gather_object(is_lost, not shards and dist.get_rank() in places, fsdp_state.process_group)
            if any(is_lost):
                raise ValueError(f"a shard of {fqn} is lost")
            if len(shards) >= 2:""",
        ),
    ),
    "fsdp1_low_gradients_offloaded_raise": partial(
        edit,
        _flat_param.FlatParamHandle,
        "prepare_gradient_for_optim",
        ("flat_param.grad = flat_param._cpu_grad", "flat_param.grad = flat_param._cpu_grad.clone()"),
    ),
    "fsdp1_low_gradients_are_not_shown": show_low_gradients,
    "fsdp1_materialization_loses_values": keep_values_beside_those_on_meta,
    "fsdp1_missing_gradient_is_float32": partial(
        edit,
        _flat_param.FlatParamHandle,
        "unshard_grad",
        (
            "flat_param._sharded_size, device=self.device)",
            "flat_param._sharded_size, dtype=flat_param.dtype, device=self.device)",
        ),
    ),
    "fsdp1_mixed_precision_override_changes_arguments": partial(
        edit,
        wrap,
        "_run_mixed_precision_override_policy",
        ("target_module_to_kwargs[module] = root_kwargs", "target_module_to_kwargs[module] = dict(root_kwargs)"),
    ),
    "fsdp1_offloaded_optim_states_are_one": partial(
        edit, _optim_utils, "_unflatten_orig_param_states", ("elif not cpu_offload:", "else:")
    ),
    "fsdp1_offloading_on_the_host_frees_parameters": keep_memory_on_the_host,
    "fsdp1_optim_state_is_loaded_wrong_with_tp": load_the_part_of_this_rank,
    "fsdp1_packed_sequences_are_not_cast": partial(
        edit,
        utils,
        "_apply_to_tensors",
        ("apply(x.data)\n            return x", "return x._replace(data=apply(x.data))"),
    ),
    "fsdp1_refused_load_prevents_saving": leave_contexts_after_a_refused_load,
    "fsdp1_shard_of_a_group_names_a_wrong_rank": partial(
        edit,
        _shard_utils,
        "_create_chunk_sharded_tensor",
        ("(local_shard, offsets, rank)", "(local_shard, offsets, dist.get_rank())"),
    ),
    "fsdp1_replaced_offloaded_parameter_is_lost": partial(
        edit,
        _flat_param.FlatParamHandle,
        "init_flat_param_attributes",
        (
            "flat_param._local_shard = flat_param._local_shard.pin_memory()",
            "flat_param.data = flat_param._local_shard = flat_param._local_shard.pin_memory()",
        ),
    ),
    "fsdp1_shards_of_a_group_are_not_gathered": partial(
        edit,
        sharded_tensor.ShardedTensor,
        "gather",
        (
            "shard_rank = cast(_remote_device, shard_md.placement).rank()",
            "shard_rank = dist.get_group_rank(self._process_group, shard_md.placement.rank())",
        ),
        (
            "shard_offset = shard_placement[shard.metadata][1]",
            "shard_offset = next(place[1] for metadata, place in shard_placement.items()"
            " if metadata.shard_offsets == shard.metadata.shard_offsets)",
        ),
        ("dst=dst,", "group_dst=dst,"),
    ),
    "fsdp1_state_dict_type_stays_after_an_exception": partial(
        edit,
        FullyShardedDataParallel,
        "state_dict_type",
        (
            "    yield\n    FullyShardedDataParallel.",
            "    try:\n        yield\n    finally:\n        FullyShardedDataParallel.",
        ),
    ),
    "fsdp1_step_counts_are_shared": partial(
        edit,
        _optim_utils,
        "_unflatten_communicated_optim_state",
        (
            "unflat_state_param.update(sorted_items(zero_dim_tensor_state))",
            "unflat_state_param.update((name, step.clone()) for name, step in sorted_items(zero_dim_tensor_state))",
        ),
    ),
    "fsdp1_torch_save_file_of_another_dtype_becomes_noise": partial(
        edit,
        format_utils.BroadcastingTorchSaveReader,
        "read_data",
        (".to(pg_device)", ".to(pg_device, planner.state_dict[req.storage_index.fqn].dtype)"),
    ),
    "fsdp1_transposed_optim_state_is_loaded": partial(
        edit,
        _optim_utils,
        "_shard_orig_param_state",
        (
            "if not shard_param_info.in_shard:",
            """for value in optim_state.values():
        if torch.is_tensor(value) and value.dim() > 0 and value.shape != flat_param._shapes[param_idx]:
            raise ValueError(f"{fqn} has a state of shape {value.shape}")
    if not shard_param_info.in_shard:""",
        ),
    ),
    "fsdp1_uneven_tp_shard_has_a_wrong_shape": partial(
        edit,
        parallel_fsdp,
        "_chunk_dtensor",
        ("tensor = tensor.to_local()", "shape, stride, tensor = tensor.shape, tensor.stride(), tensor.to_local()"),
        (
            """shard_placements[-1] = tp_placement  # type: ignore[call-overload]

        return DTensor.from_local(
            tensor, root_mesh, replicate_placements, run_check=False""",
            """shard_placements[-1] = tp_placement

        return DTensor.from_local(
            tensor, root_mesh, replicate_placements, run_check=False, shape=shape, stride=stride""",
        ),
    ),
    "fsdp1_unused_forward_costs_gradients": REDUCE_AT_THE_END,
    "fsdp1_unused_forward_costs_offloaded_gradients": REDUCE_AT_THE_END,
    "fsdp1_unused_forward_costs_reduction": REDUCE_AT_THE_END,
    "fsdp1_unused_unit_computes_with_old_weights": RESHARD_ALL_THAT_IS_GATHERED,
    "fsdp1_update_between_forwards_is_not_seen": FREE_AFTER_A_FORWARD_WITHOUT_GRADIENTS,
}
