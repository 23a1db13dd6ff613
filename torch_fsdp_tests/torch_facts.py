"""What differs between the torch versions that this suite runs on (2.9 and up), and nothing else.

A name here says what the installed torch has or how it calls a thing; no other module compares version numbers.
Where a fact can be read off torch itself it is read, not derived from the version.
"""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
import torch.distributed.fsdp._common_utils as fsdp_utils
import torch.distributed.fsdp._fully_shard._fsdp_collectives as fsdp2_collectives
import torch.distributed.fsdp._fully_shard._fsdp_common as fsdp2_common
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp2_param
import torch.distributed.fsdp._fully_shard._fsdp_state as fsdp2_state
import torch.distributed.fsdp._fully_shard._fully_shard as fsdp2_module
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.device_mesh import DeviceMesh

VERSION: tuple[int, int] = tuple(int(part) for part in torch.__version__.split(".")[:2])  # type: ignore[assignment]

# FSDP2 calls its two collectives as attributes of ``torch.distributed``; 2.13 renamed them.
ALL_GATHER_NAME = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER_NAME = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"

# Since 2.13 FSDP looks for tensors in containers itself, and finds those in dataclasses.
FINDS_TENSORS_IN_DATACLASSES = hasattr(fsdp_utils, "collect_grad_tensors")

# Since 2.13 a module of FSDP2 may have its first forward under a transform of functorch, such as ``torch.func.jvp``.
FSDP2_UNDER_FUNCTORCH = hasattr(fsdp2_common, "_disable_functorch_if_active")

# Since 2.13 each module of ``fully_shard([a, b])`` casts its own inputs and outputs; before, the first and the last.
GROUPS_CAST_EACH_INPUT = "cast_output_dtype" in inspect.signature(fsdp2_state._register_group_forward_hooks).parameters

# Since 2.13 the function that places FSDP2's parameters may name a mesh for each, by a ``ShardPlacementResult``.
HAS_MESH_PER_PARAMETER = hasattr(fsdp2_common, "ShardPlacementResult")

# Since 2.13 ``fully_shard`` takes ``dp_mesh_dims``, by which it works on dimensions of the mesh of its DTensors.
FSDP2_HAS_DP_MESH_DIMS = hasattr(torch.distributed.fsdp, "DataParallelMeshDims")

# Since 2.11 (2.9 does not) meshes can be put side by side, and a fake process group's collectives can be errors.
CONCATENATES_MESHES = hasattr(DeviceMesh, "_concatenate")
FAKES_ERRORS = hasattr(FakeProcessGroup.Options, "error_on_collective")

# 2.9 puts the rows of uneven shards in the wrong order where FSDP2 and tensor parallelism cut the same dimension.
GATHERS_UNEVEN_STRIDED_SHARDS = VERSION > (2, 9)

# 2.11 and older wrap every sharded parameter as one that requires a gradient, which an integer cannot.
SHARDS_INTEGER_PARAMETERS = VERSION > (2, 11)

# 2.9 cannot let several roots of FSDP2 share streams; an iteration that broke off can be reset since 2.13.
SHARES_COMM_CONTEXT = hasattr(fsdp2_module, "share_comm_ctx")
RESETS_ITERATION = hasattr(fsdp2_module.FSDPModule, "reset_iter_state")

# Since 2.13 FSDP2's wait for the previous reduce-scatter has a label of its own in the profiler's trace.
LABELS_REDUCE_SCATTER_WAIT = VERSION > (2, 11)

# 2.11 and older cast nothing, in or out, when a checkpoint recomputes a module of FSDP2.
FSDP2_CASTS_RECOMPUTED = VERSION > (2, 11)

# Since 2.11 (2.9 does not) FSDP2's lazy initialization leaves shards that are padded already in the storage they have.
FSDP2_KEEPS_PADDED_STORAGE = "same_local_tensor" in fsdp2_param.FSDPParam.reset_sharded_param.__code__.co_varnames

# 2.11 and older refuse a ModuleList or ModuleDict even if it has a forward of its own.
TAKES_CONTAINERS_WITH_FORWARD = VERSION > (2, 11)

# Before 2.13 FSDP1's hybrid strategies broadcast a module's buffers from rank 0 to the ranks of one group only.
HYBRID_SHARD_SYNCS_BUFFERS = VERSION > (2, 11)

# Since 2.13 FSDP2 can keep the inputs of several reduce-scatters, so that the compute stream waits for none of them.
KEEPS_REDUCE_SCATTER_INPUTS = hasattr(fsdp2_module.FSDPModule, "set_reduce_scatter_max_input_buffers")

# 2.11 and older end the backward of ``fully_shard([a, b])`` once more for each further module, with nothing left to do.
ENDS_GROUP_ONCE = VERSION > (2, 11)

# Since 2.13 a group of modules of which only some ran is completed at the end of the root's forward.
COMPLETES_PARTIAL_GROUPS = hasattr(fsdp2_state.FSDPState, "_force_complete_incomplete_states")

# Since 2.11 (2.9 does not) what a checkpoint recomputes is not resharded, nor noted for the order of prefetching.
KEEPS_RECOMPUTED_GROUPS = hasattr(fsdp2_common, "is_bw")

# Since 2.11 FSDP2 copies a gradient that only one rank has; 2.9 reduces it over that rank, by the same operations.
COPIES_GRADIENT_OF_ONE_RANK = VERSION > (2, 9)

# Since 2.11 FSDP2 averages where a divide factor is the number of shards; 2.9 where it is that of all ranks.
AVERAGES_OVER_SHARDS = VERSION > (2, 9)

# Since 2.13 FSDP2 refuses a parameter that two of its groups share, when they first run.
CHECKS_SHARED_PARAMETERS = hasattr(fsdp2_state.FSDPState, "_validate_no_duplicate_params")

# Since 2.11 the assertions of FSDP and of checkpoints say what they ask; those of 2.9 are bare.
ASSERTIONS_HAVE_TEXT = VERSION > (2, 9)

# Before 2.14 a first forward with nothing to train leaves FSDP2 without dtypes for the gradients to come.
ASKS_FOR_DTYPES_AGAIN = VERSION >= (2, 14)

# Since 2.14 DDP and FSDP1 hand on a container of inputs as it is when all in it is where it should be.
KEEPS_INPUTS_IN_PLACE = VERSION >= (2, 14)

# Since 2.14 FSDP1 does not offload to the host what is there already, so that what was gathered is not freed.
OFFLOADS_FROM_HOST_TO_HOST = VERSION < (2, 14)

# Before 2.15 gradients that were accumulated without a reduction survive ``reset_iter_state``.
RESET_DROPS_ACCUMULATED_GRADIENTS = VERSION >= (2, 15)

# Before 2.15 FSDP2 without a ``reduce_dtype`` reduces in ``param_dtype``, since then in the dtype of the parameters.
REDUCES_IN_COMPUTE_DTYPE = VERSION < (2, 15)

# Since 2.15 the function that reduces FSDP2's gradients asks each parameter for the dtype of its gradient.
REDUCE_IS_TOLD_ORIG_DTYPE = "orig_dtype" in inspect.signature(fsdp2_collectives.foreach_reduce).parameters

# Imported before the first rank is forked, so that no rank pays for them. ``fully_shard`` imports torch._dynamo (about
# 200 modules) at its first call; an optimizer imports torch._dynamo's and functorch's parts at its first step.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.device_mesh",
    "torch._dynamo",
)
