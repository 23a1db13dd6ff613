"""FSDP's private parts under plain names.

Each function looks up its private name when it is called. If the installed torch does not have the name, the test
skips, and the reason names it. Then update this file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

from torch_fsdp_tests.installed_torch import torch_facts, torch_names
from torch_fsdp_tests.installed_torch.torch_names import attribute

# Each of these types is a class of torch with a private name, which the comment gives.
Handle = Any  # FlatParamHandle
FlatParam = Any  # FlatParameter
Group = Any  # FSDPParamGroup
State = Any  # FSDPState (FSDP2) or _FSDPState (FSDP1)

flat_param = torch_names.module("torch.distributed.fsdp._flat_param")
fsdp1_common = torch_names.module("torch.distributed.fsdp._common_utils")
fsdp1_init = torch_names.module("torch.distributed.fsdp._init_utils")
fsdp1_runtime = torch_names.module("torch.distributed.fsdp._runtime_utils")
fsdp1_traversal = torch_names.module("torch.distributed.fsdp._traversal_utils")
fsdp2 = torch_names.module("torch.distributed.fsdp._fully_shard._fully_shard")
fsdp2_collectives = torch_names.module("torch.distributed.fsdp._fully_shard._fsdp_collectives")
fsdp2_common = torch_names.module("torch.distributed.fsdp._fully_shard._fsdp_common")
fsdp2_init = torch_names.module("torch.distributed.fsdp._fully_shard._fsdp_init")
fsdp2_param = torch_names.module("torch.distributed.fsdp._fully_shard._fsdp_param")
fsdp2_param_group = torch_names.module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
fsdp2_state = torch_names.module("torch.distributed.fsdp._fully_shard._fsdp_state")
sharded_tensors = torch_names.module("torch.distributed._shard.sharded_tensor")
checkpoint_wrapping = torch_names.module("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
composable = torch_names.module("torch.distributed._composable")
composable_contract = torch_names.module("torch.distributed._composable.contract")
pytree = torch_names.module("torch.utils._pytree")
grad_mode = torch_names.module("torch.autograd.grad_mode")
pipeline_backward = torch_names.module("torch.distributed.pipelining._backward")
pipeline_schedules = torch_names.module("torch.distributed.pipelining.schedules")
placement_types = torch_names.module("torch.distributed.tensor.placement_types")
dsd = torch_names.module("torch.distributed.checkpoint.state_dict")
state_dict_utils = torch_names.module("torch.distributed._state_dict_utils")
replicate_on_fsdp2 = torch_names.module("torch.distributed._composable.replicate_with_fsdp")
dtensor_utils = torch_names.module("torch.distributed.tensor._utils")
tensor_parallel_fsdp = torch_names.module("torch.distributed.tensor.parallel.fsdp")
fsdp2_memory = torch_names.module("torch.distributed._tools.fsdp2_mem_tracker")
dispatcher = torch_names.module("torch._C")
dynamo_config = torch_names.module("torch._dynamo.config")
fake_tensors = torch_names.module("torch._subclasses.fake_tensor")


# --- Attributes, each with a function that reads it of the object that is passed -------------------------------------


def _reading(name: str, of: Callable[[Any], Any] = lambda owner: owner) -> Callable[[Any], Any]:
    return lambda owner: attribute(of(owner), name)


def state_of(module: nn.Module) -> State:
    """The FSDP2 state of a module to which ``fully_shard`` was applied."""
    return attribute(module, "_get_fsdp_state")()


# Of an FSDP1 instance:
handle = _reading("_handle")  # its handle, or None if it manages no parameters
execution_order = _reading("_exec_order_data")  # a root's record of the order in which its units run
tensor_extension = _reading("_fsdp_extension")  # it flattens and shards tensor subclasses, or is None
# Of a flat parameter:
unsharded_buffer = _reading("_full_param_padded")  # padded; its storage is empty while it is sharded
full_precision_buffer = _reading("_full_prec_full_param_padded")  # for ``summon_full_params`` in mixed precision
local_shard = _reading("_local_shard")  # this rank's shard, in the precision of the optimizer
low_precision_shard = _reading("_mp_shard")  # the same in the dtype of mixed precision; AttributeError if there is none
names_in = _reading("_fqns")  # the names of its parameters, relative to its module
shapes_in = _reading("_shapes")  # the shapes of its parameters
strides_in = _reading("_strides")  # their strides
shard_infos = _reading("_shard_param_infos")  # for each of its parameters, the elements that are in this rank's shard
sharded_size = _reading("_sharded_size")  # the shape of each rank's shard, padding included
unsharded_size = _reading("_unpadded_unsharded_size")  # the shape of the whole, without padding
padding_of = _reading("_shard_numel_padded")  # the number of padding elements at the end of this rank's shard
# Of a state of FSDP1 or FSDP2:
is_root = _reading("_is_root")  # None before its lazy initialization
# Of a handle (FSDP1) or a parameter group (FSDP2):
training_state = _reading("_training_state")
# Of a module to which ``fully_shard`` was applied:
comm_context = _reading("_comm_ctx", state_of)  # streams and pending collectives; a root shares it with those below
iteration_context = _reading("_state_ctx", state_of)  # the state of this iteration; a root shares it with those below
own_group = _reading("_fsdp_param_group", state_of)  # its parameter group; None without parameters of its own
groups_in = _reading("_fsdp_param_groups", state_of)  # its parameter groups, several if it is on several meshes
# Of a parameter group:
forward_positions = _reading("_post_forward_indices")  # in the order of those forwards whose backward has not run
pending_gather = _reading("_all_gather_result")  # the all-gather that has not been waited for, or None


# --- The collectives that FSDP calls ----------------------------------------------------------------------------------


def all_gather() -> Any:
    """The all-gather in ``torch.distributed`` that FSDP calls, including any patch."""
    return getattr(dist, torch_facts.all_gather_name())


def reduce_scatter() -> Any:
    """The reduce-scatter in ``torch.distributed`` that FSDP calls, including any patch."""
    return getattr(dist, torch_facts.reduce_scatter_name())


def keeping_version(tensor: torch.Tensor) -> Any:
    """A context in which writes do not change the tensor's version. FSDP2 writes unsharded parameters in it."""
    return grad_mode._unsafe_preserve_version_counter(tensor)


# --- FSDP1 ------------------------------------------------------------------------------------------------------------


def handles(model: nn.Module) -> list[Handle]:
    """The handles of all flat parameters of an FSDP1 model, the root's first."""
    return fsdp1_traversal._get_fsdp_handles(model)


def flat_params(model: nn.Module) -> list[FlatParam]:
    """All flat parameters of an FSDP1 model, the root's first."""
    return [each.flat_param for each in handles(model)]


def is_unsharded(flat_param: FlatParam) -> bool:
    """Whether the buffer of :func:`unsharded_buffer` has memory now."""
    return unsharded_buffer(flat_param).untyped_storage().size() > 0


def has_optional(owner: Any, name: str) -> bool:
    """Whether an object has an attribute that FSDP sets on some objects only."""
    try:
        attribute(owner, name)
    except AttributeError:
        return False
    return True


def numel_of(flat_param: FlatParam) -> int:
    """The number of elements of all parameters inside a flat parameter, without padding."""
    return sum(shape.numel() for shape in shapes_in(flat_param))


def clean_name(name: str) -> str:
    """The parameter's name in the plain model."""
    return fsdp1_common.clean_tensor_name(name)


def flat_param_of(module: nn.Module) -> FlatParam:
    """The flat parameter of this FSDP1 instance, which must manage parameters."""
    own_handle = handle(module)
    assert own_handle is not None, f"{type(module).__name__} manages no parameters"
    return own_handle.flat_param


def managing_instances(model: nn.Module) -> list[FSDP]:
    """The FSDP1 instances that manage parameters, in the order of ``modules()``."""
    return [module for module in FSDP.fsdp_modules(model) if handle(module) is not None]


def hybrid_strategies() -> list[ShardingStrategy]:
    """The two hybrid strategies. The second one keeps parameters unsharded after forward."""
    return [ShardingStrategy.HYBRID_SHARD, attribute(ShardingStrategy, "_HYBRID_SHARD_ZERO2")]


def gather_buffers(flat_param: FlatParam) -> list[torch.Tensor]:
    """The buffers of an unsharded flat parameter: that of :func:`unsharded_buffer`, and any similar ones."""
    return [
        getattr(flat_param, name)
        for name in ("_full_param_padded", "_full_prec_full_param_padded")
        if has_optional(flat_param, name)
    ]


def switched(variable: str, on: bool) -> AbstractContextManager[Any]:
    """Turn on or off a switch in the environment that FSDP1 reads when an instance is constructed."""
    return mock.patch.dict(os.environ, {variable: "1" if on else "0"})


def instances(model: nn.Module) -> dict[str, FSDP]:
    """The FSDP1 instances by their modules' names in the plain model. The root is first, and its name is empty."""
    return {clean_name(name): module for name, module in model.named_modules() if isinstance(module, FSDP)}


def names_managed(model: nn.Module) -> dict[str, list[str]]:
    """The plain model's names of the parameters that each FSDP1 instance manages, by the instance's name."""
    managing = {name: each.flat_param for name, module in instances(model).items() if (each := handle(module))}
    return {
        name: [clean_name(f"{name}.{inner}").lstrip(".") for inner in names_in(flat_param)]
        for name, flat_param in managing.items()
    }


@contextlib.contextmanager
def recorded_gathers(record: Callable[[Handle], object]) -> Iterator[None]:
    """Inside the context, call ``record`` with each handle before it gathers its flat parameter."""

    def gather(handle: Handle, *args: Any) -> Any:
        record(handle)
        return original(handle, *args)

    original = attribute(flat_param.FlatParamHandle, "_all_gather_flat_param")
    with torch_names.patched(flat_param.FlatParamHandle, "_all_gather_flat_param", gather):
        yield


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


def group_of(module: nn.Module) -> Group:
    """The parameter group of a module to which ``fully_shard`` was applied. Raises ``AssertionError`` without one."""
    group = own_group(module)
    assert group is not None, f"{type(module).__name__} has no parameters of its own to shard"
    return group


def groups_of(model: nn.Module) -> list[Group]:
    """The parameter groups of all modules below ``model``, each once, in the order of ``modules()``."""
    states = dict.fromkeys(state_of(module) for module in fsdp_modules(model))
    return [group for state in states for group in torch_names.groups_of_state(state)]


def cache_key(tensor: torch.Tensor) -> str:
    """What tells a DTensor apart from others in the cache of compiled graphs."""
    return attribute(tensor, "_stable_hash_for_caching")()


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules below ``model`` to which ``fully_shard`` was applied."""
    return [module for module in model.modules() if isinstance(module, dist.fsdp.FSDPModule)]


def initialize_lazily(module: nn.Module) -> None:
    """Run the lazy initialization of an FSDP2 root, which its first forward would run."""
    attribute(state_of(module), "_lazy_init")()


def scheduled(stages: list[Any], actions: list[str], num_microbatches: int, **kwargs: Any) -> Any:
    """A pipeline schedule on one rank that runs these actions in order, such as "0UNSHARD" and "0F1"."""
    schedule = pipeline_schedules._PipelineScheduleRuntime(stages, num_microbatches, **kwargs)
    schedule.pipeline_order_with_comms = {0: [pipeline_schedules._Action.from_str(action) for action in actions]}
    return schedule


# --- The compiler -----------------------------------------------------------------------------------------------------


def dynamo_switched(**switches: bool) -> AbstractContextManager[Any]:
    """Set these switches of ``torch._dynamo.config`` inside the context."""
    for name in switches:
        getattr(dynamo_config, name)
    return dynamo_config.patch(**switches)


# --- Tensors ----------------------------------------------------------------------------------------------------------


def strided_shard() -> type:
    """The placement of a dimension that tensor parallelism shards first, and FSDP2 after it."""
    return placement_types._StridedShard


def local_shape_and_offsets(shape: torch.Size, mesh: Any, placements: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's part of a DTensor, and its offset in each dimension."""
    return dtensor_utils.compute_local_shape_and_global_offset(shape, mesh, placements)


def spec_dtype(dtensor: Any) -> torch.dtype:
    """The dtype in the metadata of a DTensor, which may differ from that of its local tensor."""
    return attribute(dtensor, "_spec").tensor_meta.dtype


def has_own_kernel(operator: str, device: torch.device) -> bool:
    """Whether a device has its own kernel of an operator such as ``aten::add``."""
    key = dispatcher._dispatch_key_for_device(device.type)
    return dispatcher._dispatch_has_kernel_for_dispatch_key(operator, key)


def storage_id(tensor: torch.Tensor | torch.UntypedStorage) -> int:
    """A number that identifies a storage while it exists. Tensors that share memory have the same number."""
    storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else tensor
    return storage._cdata
