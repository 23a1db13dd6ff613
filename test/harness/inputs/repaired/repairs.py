"""Repairs of torch in memory, one for each defect that a small patch repairs. They are for torch 2.13.

A repair shows that a defect is reported as absent after its cause is gone. It changes the place that the registry
names, and nothing in the reproduction itself.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from editing import edit
from repairs_fsdp1 import REPAIRS as REPAIRS_OF_FSDP1

from torch_fsdp_tests.installed_torch import torch_names

_fully_shard = torch_names.module("torch.distributed.fsdp._fully_shard._fully_shard")
_collectives = torch_names.module("torch.distributed.fsdp._fully_shard._fsdp_collectives")
_param = torch_names.module("torch.distributed.fsdp._fully_shard._fsdp_param")
_param_group = torch_names.module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
_state = torch_names.module("torch.distributed.fsdp._fully_shard._fsdp_state")
_state_dict = torch_names.module("torch.distributed.checkpoint.state_dict")
_filesystem = torch_names.module("torch.distributed.checkpoint.filesystem")
_clip_grad = torch_names.module("torch.nn.utils.clip_grad")
_foreach = torch_names.module("torch.utils._foreach_utils")
_format_utils = torch_names.module("torch.distributed.checkpoint.format_utils")


def divide_once() -> None:
    edit(
        _collectives,
        "foreach_reduce",
        (
            "if gradient_divide_factor is not None:",
            "if gradient_divide_factor is not None and postdivide_factor is None:",
        ),
    )


def drop_gradients_at_reset() -> None:
    reset = _fully_shard.FSDPModule.reset_iter_state

    @functools.wraps(reset)
    def reset_and_drop(self: Any) -> None:
        reset(self)
        for module in self.modules():
            if isinstance(module, _fully_shard.FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    for param in group.fsdp_params:
                        param.unsharded_accumulated_grad = None
                        if hasattr(param, "_unsharded_param"):
                            param._unsharded_param.grad = None

    _fully_shard.FSDPModule.reset_iter_state = reset_and_drop


def norm_of_nothing_is_zero() -> None:
    foreach_norm, vector_norm = torch._foreach_norm, torch.linalg.vector_norm

    def foreach(tensors: Any, order: float = 2, **kwargs: Any) -> Any:
        return (
            [vector(each, order) for each in tensors]
            if order == float("inf")
            else foreach_norm(tensors, order, **kwargs)
        )

    def vector(tensor: Any, order: float = 2, *args: Any, **kwargs: Any) -> Any:
        if order != float("inf") or not isinstance(tensor, dist.tensor.DTensor):
            return vector_norm(tensor, order, *args, **kwargs)
        local = tensor.to_local()
        largest = vector_norm(local, order) if local.numel() else local.new_zeros(())
        partial = dist.tensor.DTensor.from_local(
            largest, tensor.device_mesh, [dist.tensor.Partial("max")] * tensor.device_mesh.ndim, run_check=False
        )
        return partial.redistribute(placements=[dist.tensor.Replicate()] * tensor.device_mesh.ndim)

    torch._foreach_norm, torch.linalg.vector_norm = foreach, vector


def largest_is_nan_where_one_is() -> None:
    """Make a reduction with MAX keep a NaN: all ranks compare the values of all ranks."""
    collectives = torch_names.module("torch.distributed._functional_collectives")
    all_reduce = collectives.all_reduce

    def keeping_nan(self: torch.Tensor, reduceOp: str, group: Any, tag: str = "") -> torch.Tensor:
        if reduceOp != "max":
            return all_reduce(self, reduceOp, group, tag)
        tensor, (mesh, dim) = self, group
        everywhere = [torch.empty_like(tensor) for _ in range(mesh.size(dim))]
        dist.all_gather(everywhere, tensor.contiguous(), group=mesh.get_group(dim))
        return torch.stack(everywhere).amax(dim=0)  # ``max`` keeps a NaN

    collectives.all_reduce = keeping_nan


def gather_every_payload() -> None:
    edit(
        _param_group.FSDPParamGroup,
        "wait_for_unshard",
        ("all_gather_input = fsdp_param.all_gather_inputs[0]", "inputs = fsdp_param.all_gather_inputs"),
        ("[all_gather_input.numel()]", "[each.numel() for each in inputs]"),
        ("[all_gather_input.dtype]", "[each.dtype for each in inputs]"),
        ("tensor = fsdp_param.all_gather_outputs[0]", "outputs = fsdp_param.all_gather_outputs"),
        ("alloc_storage(tensor)", "fsdp_param.alloc_all_gather_outputs()"),
        ("_unsafe_preserve_version_counter(tensor)", "_unsafe_preserve_version_counter(tuple(outputs))"),
        ("tensor.copy_(all_gather_input)", "torch._foreach_copy_(outputs, inputs)"),
    )


def settle_dtypes_when_there_are_gradients() -> None:
    post_backward = _param_group.FSDPParamGroup.post_backward

    @functools.wraps(post_backward)
    def settled(self: Any, *unused: Any) -> Any:
        if self._orig_dtype is None:
            first = self.fsdp_params[0]
            self._orig_dtype, self._reduce_dtype = first.orig_dtype, first.reduce_dtype
        return post_backward(self, *unused)

    _param_group.FSDPParamGroup.post_backward = settled


def allocate_outside_of_inference_mode() -> None:
    allocate, unshard = _param.FSDPParam.init_all_gather_outputs, _param.FSDPParam.init_unsharded_param

    def allocated(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False):
            return allocate(self, *args, **kwargs)

    def unsharded(self: Any) -> Any:
        with torch.inference_mode(False):
            return unshard(self)

    _param.FSDPParam.init_all_gather_outputs, _param.FSDPParam.init_unsharded_param = allocated, unsharded


def ask_all_ranks_for_infinities() -> None:
    check = torch._amp_foreach_non_finite_check_and_unscale_

    def on_all(tensors: Any, found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
        check(tensors, found_inf, inverse_scale)
        if dist.is_initialized():
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)

    torch._amp_foreach_non_finite_check_and_unscale_ = on_all


def leave_out_gradients_without_elements() -> None:
    copy_in = _collectives.foreach_reduce_scatter_copy_in

    def copied(gradients: list[torch.Tensor], output: torch.Tensor, world_size: int) -> None:
        if some := [gradient for gradient in gradients if gradient.numel()]:
            copy_in(some, output, world_size)

    _collectives.foreach_reduce_scatter_copy_in = copied


def accept_equal_meshes() -> None:
    edit(
        _param.FSDPParam,
        "_init_sharding_spec_spmd",
        ("spmd_mesh is not self.mesh_info.spmd_mesh", "spmd_mesh != self.mesh_info.spmd_mesh"),
    )


def note_forwards_with_gradients() -> None:
    record = _param_group.FSDPParamGroup._record_post_forward

    def recorded(self: Any) -> None:
        if torch.is_grad_enabled():
            record(self)

    _param_group.FSDPParamGroup._record_post_forward = recorded


def label_as_all_else() -> None:
    edit(
        _param_group.FSDPParamGroup,
        "post_backward",
        ('f"FSDP::post_backward_rs_wait ({self._module_fqn})"', 'self._with_fqn("FSDP::post_backward_rs_wait")'),
    )


def reduce_every_parameter() -> None:
    """Let parameters without a gradient contribute zeros, so that all microbatches reduce the same parameters."""
    init = _param_group.FSDPParamGroup.__init__

    def inited(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.reduce_scatter_unused_params = True

    _param_group.FSDPParamGroup.__init__ = inited


def cast_before_accumulated_gradients_are_reduced() -> None:
    edit(
        _param_group.FSDPParamGroup,
        "post_backward",
        *(
            (
                f"unsharded_grads.append(fsdp_param.{grad})",
                f"grad = fsdp_param.{grad}; unsharded_grads.append(grad.to(self._reduce_dtype or grad.dtype))",
            )
            for grad in ("unsharded_grad_data", "unsharded_zero_grad_data")
        ),
    )


def cast_before_reduction_over_tensor_parallelism() -> None:
    inner = _param.FSDPParam._get_grad_inner_tensor

    def of_cast(self: Any, grad: torch.Tensor) -> torch.Tensor:
        return inner(self, grad.to(self.reduce_dtype or grad.dtype))

    _param.FSDPParam._get_grad_inner_tensor = of_cast


def keep_grad_dtype() -> None:
    shard, init_dtypes = _param.FSDPParam._init_sharded_param, _param_group.FSDPParamGroup._init_mp_dtypes

    def sharded(self: Any, param: torch.nn.Parameter, *args: Any) -> None:
        shard(self, param, *args)
        self.sharded_param.grad_dtype = param.grad_dtype

    def with_dtypes(self: Any) -> None:
        init_dtypes(self)
        self._orig_dtype = self.fsdp_params[0].sharded_param.grad_dtype

    _param.FSDPParam._init_sharded_param, _param_group.FSDPParamGroup._init_mp_dtypes = sharded, with_dtypes


def keep_partial_sums_in_original_dtype() -> None:
    edit(
        _collectives,
        "foreach_reduce",
        ("partial_reduce_output = reduce_output\n", "partial_reduce_output = reduce_output.to(orig_dtype)\n"),
        ("reduce_output += partial_reduce_output", "reduce_output = reduce_output + partial_reduce_output"),
    )


def watch_every_output_of_a_group() -> None:
    edit(
        _state,
        "_register_group_forward_hooks",
        (
            "return cast_output_dtype(output)",
            "return cast_output_dtype(post_hook.__self__._register_pre_backward_hook(output))",
        ),
    )


def record_the_columns_of_empty_shards() -> None:
    edit(_param, "_get_dim_chunked_size", ("chunk.numel() > 0", "chunk.ndim == len(unchunked_size)"))
    edit(
        _param.FSDPParam,
        "_init_sharded_param",
        (
            "length = sharded_param.size(shard_dim) if sharded_param.numel() > 0 else 0",
            "length = self.sharded_size[shard_dim]",
        ),
    )


def keep_parameters_for_another_backward() -> None:
    post_backward = _param_group.FSDPParamGroup.post_backward

    def keep_or_not(self: Any, *unused: Any) -> Any:
        reshards = self.reshard_after_backward and not torch.is_grad_enabled()
        with mock.patch.object(self, "reshard_after_backward", reshards):
            return post_backward(self, *unused)

    _param_group.FSDPParamGroup.post_backward = keep_or_not


def leave_out_what_never_ran() -> None:
    cast = _param.FSDPParam.to_accumulated_grad_if_needed

    def cast_if_it_ran(self: Any) -> None:
        if hasattr(self, "_unsharded_param"):
            cast(self)

    _param.FSDPParam.to_accumulated_grad_if_needed = cast_if_it_ran


def reduce_at_the_end_of_backward() -> None:
    """With unused parameters, reduce no group before the end of backward, where all ranks have the same order."""
    backward = _param_group.RegisterPostBackwardFunction.backward

    def without_reduction(ctx: Any, *grads: torch.Tensor) -> Any:
        return (None, *grads) if ctx.param_group.reduce_scatter_unused_params else backward(ctx, *grads)

    _param_group.RegisterPostBackwardFunction.backward = staticmethod(without_reduction)


def clip_by_a_number() -> None:
    """Compute the norm of gradients of different kinds from whole numbers, and clip them by a number."""
    edit(
        _clip_grad,
        "_get_total_norm",
        ("norm.to(first_device) for", "getattr(norm, 'full_tensor', lambda norm=norm: norm)().to(first_device) for"),
    )
    edit(
        _clip_grad,
        "_clip_grads_with_norm_",
        ("clip_coef_clamped = torch.clamp(clip_coef, max=1.0)", "clip_coef_clamped = min(clip_coef.item(), 1.0)"),
        ("clip_coef_clamped.to(device))", "clip_coef_clamped)"),
        ("= clip_coef_clamped.to(device)\n", "= clip_coef_clamped\n"),
    )


class _Apart:
    """Groups of tensors whose keys may be equal."""

    def __init__(self, groups: list[Any]) -> None:
        self._groups = groups

    def items(self) -> list[Any]:
        return self._groups

    def values(self) -> list[Any]:
        return [group for _, group in self._groups]


def group_tensors_by_type_too() -> None:
    clip_by_a_number()
    group = _foreach._group_tensors_by_device_and_dtype

    def by_type(lists: list[list[Any]], with_indices: bool = False) -> Any:
        places: dict[bool, list[int]] = {}
        for index, tensor in enumerate(lists[0]):
            places.setdefault(isinstance(tensor, dist.tensor.DTensor), []).append(index)
        groups: list[Any] = []
        for indices in places.values():
            part = group([[each[i] for i in indices] if each else each for each in lists], with_indices)
            for key, (tensors, found) in part.items():
                groups.append((key, (tensors, [indices[i] for i in found])))
        return _Apart(groups)

    _foreach._group_tensors_by_device_and_dtype = by_type
    _clip_grad._group_tensors_by_device_and_dtype = by_type
    torch_names.module("torch.optim.optimizer")._group_tensors_by_device_and_dtype = by_type


def make_states_that_are_missing() -> None:
    edit(
        _state_dict,
        "_init_optim_state",
        (
            "if optim.state:",
            "if all(p in optim.state for group in optim.param_groups for p in group[_PARAMS] if p.requires_grad):",
        ),
        ("if param.requires_grad:", "if param.requires_grad and param not in optim.state:"),
    )


def set_gradients_aside() -> None:
    """Set gradients aside while the states of an optimizer are made."""
    init = _state_dict._init_optim_state

    def init_beside_gradients(optim: torch.optim.Optimizer) -> None:
        params = [param for group in optim.param_groups for param in group["params"]]
        grads = [param.grad for param in params]
        for param in params:
            param.grad = None
        init(optim)
        for param, grad in zip(params, grads):
            param.grad = grad

    _state_dict._init_optim_state = init_beside_gradients


def accept_file_systems_without_sync() -> None:
    def sync(descriptor: int) -> None:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise

    _filesystem._sync = sync
    edit(_filesystem, "_write_files_from_queue", ("os.fsync(", "_sync("))
    edit(_filesystem._FileSystemWriter, "finish", ("os.fsync(", "_sync("))


def copy_what_is_kept_after_forward() -> None:
    edit(
        _collectives,
        "foreach_all_gather_copy_out",
        (
            "if fsdp_param.fsdp_placement.dim != 0:",
            "if fsdp_param.fsdp_placement.dim != 0 and fsdp_param.sharded_state == ShardedState.SHARDED:",
        ),
    )


def initialize_before_a_reset() -> None:
    reset = _fully_shard.FSDPModule.reset_iter_state

    @functools.wraps(reset)
    def initialize_and_reset(self: Any) -> None:
        self._get_fsdp_state()._lazy_init()
        reset(self)

    _fully_shard.FSDPModule.reset_iter_state = initialize_and_reset


def reshard_before_the_optimizer_is_asked() -> None:
    ask = _state_dict._get_optim_state_dict

    def reshard_and_ask(model: torch.nn.Module, *args: Any) -> Any:
        for module in model.modules():
            if isinstance(module, dist.fsdp.FSDPModule):
                module.reshard()
        return ask(model, *args)

    _state_dict._get_optim_state_dict = reshard_and_ask


def receive_whole_tensors() -> None:
    target = "planner.state_dict[req.storage_index.fqn]"
    device = "dist.distributed_c10d._get_pg_default_device()"
    edit(
        _format_utils.BroadcastingTorchSaveReader,
        "read_data",
        (f"torch.empty_like({target})", f"torch.empty({target}.size(), dtype={target}.dtype, device={device})"),
    )
    whole = "torch.distributed.checkpoint.metadata.ChunkStorageMetadata(torch.Size([0] * tensor.ndim), tensor.size())"
    edit(
        _format_utils.DynamicMetaLoadPlanner,
        "set_up_planner",
        ("_create_chunk_list(tensor)", f"[{whole}]"),
        ("super()", "super(DynamicMetaLoadPlanner, self)"),
    )


REPAIRS: dict[str, Callable[[], None]] = {
    **REPAIRS_OF_FSDP1,
    "fsdp2_accumulation_of_later_parameter_raises": cast_before_accumulated_gradients_are_reduced,
    "fsdp2_accumulation_before_first_use_raises": leave_out_what_never_ran,
    "fsdp2_clip_grad_norm_over_two_meshes_raises": clip_by_a_number,
    "fsdp2_columns_of_empty_parameter_raise": record_the_columns_of_empty_shards,
    "fsdp2_divides_twice": divide_once,
    "fsdp2_extension_gets_one_payload": gather_every_payload,
    "fsdp2_extra_all_gather_after_evaluation": note_forwards_with_gradients,
    "fsdp2_frozen_first_forward_breaks_training": settle_dtypes_when_there_are_gradients,
    "fsdp2_frozen_first_forward_ignores_reduce_dtype": settle_dtypes_when_there_are_gradients,
    "fsdp2_full_optim_state_beside_gradients_is_not_loaded": set_gradients_aside,
    "fsdp2_grad_dtype_is_lost": keep_grad_dtype,
    "fsdp2_group_is_gathered_for_one_output": watch_every_output_of_a_group,
    "fsdp2_ignored_parameters_break_foreach": group_tensors_by_type_too,
    "fsdp2_inf_norm_loses_nan": largest_is_nan_where_one_is,
    "fsdp2_inf_norm_of_empty_shard_hangs": norm_of_nothing_is_zero,
    "fsdp2_inference_mode_breaks_training": allocate_outside_of_inference_mode,
    "fsdp2_inference_mode_with_columns_raises": allocate_outside_of_inference_mode,
    "fsdp2_inference_mode_with_one_rank_raises": allocate_outside_of_inference_mode,
    "fsdp2_label_of_wait_has_no_name": label_as_all_else,
    "fsdp2_optim_state_of_some_parameters_is_refused": make_states_that_are_missing,
    "fsdp2_partial_reduction_adds_up_in_low_precision": keep_partial_sums_in_original_dtype,
    "fsdp2_partial_reduction_of_unused_group_is_left": reduce_every_parameter,
    "fsdp2_partial_reduction_reaches_another_parameter": reduce_every_parameter,
    "fsdp2_optimizer_state_while_gathered_raises": reshard_before_the_optimizer_is_asked,
    "fsdp2_rank_without_rows_after_tp": leave_out_gradients_without_elements,
    "fsdp2_real_reduce_dtype_breaks_complex_gradients": functools.partial(
        edit,
        _param.FSDPParam,
        "init_dtype_attrs",
        (
            "self.reduce_dtype = reduce_dtype",
            "self.reduce_dtype = reduce_dtype if self.orig_dtype.is_floating_point else None",
        ),
    ),
    "fsdp2_reset_before_first_forward_raises": initialize_before_a_reset,
    "fsdp2_reset_keeps_gradients_of_broken_backward": drop_gradients_at_reset,
    "fsdp2_reset_keeps_unreduced_gradients": drop_gradients_at_reset,
    "fsdp2_scaler_disagrees_over_two_meshes": ask_all_ranks_for_infinities,
    "fsdp2_second_order_gradients_raise": keep_parameters_for_another_backward,
    "fsdp2_second_of_equal_meshes_refused": accept_equal_meshes,
    "fsdp2_smaller_mesh_with_columns_raises": copy_what_is_kept_after_forward,
    "fsdp2_torch_save_file_is_not_loaded": receive_whole_tensors,
    "fsdp2_tp_reduction_ignores_reduce_dtype": cast_before_reduction_over_tensor_parallelism,
    "fsdp2_unsupported_fsync_fails_the_save": accept_file_systems_without_sync,
    "fsdp2_unused_parameters_are_reduced_out_of_order": reduce_at_the_end_of_backward,
}
