"""What differs between the torch versions that this suite runs on (2.9 and up), and nothing else.

A :class:`Fact` says what newer versions of torch do and older ones do not. It is true or false, and finds out when it
is first asked; no other module compares versions, or asks torch for an attribute for the sake of a version. A test that
needs a fact is decorated with :func:`torch_fsdp_tests.common_distributed.needs`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import unittest
from collections.abc import Callable
from typing import Any

import torch

from torch_fsdp_tests import torch_names

__unittest = True

VERSION: tuple[int, int] = tuple(int(part) for part in torch.__version__.split(".")[:2])  # type: ignore[assignment]

_FSDP2 = "torch.distributed.fsdp._fully_shard."


class FactIsUnknown(unittest.SkipTest):
    """The installed torch does not let itself be asked for a fact, so the tests that depend on it skip."""


class Fact:
    """Something that torch does since version ``since``; ``says`` completes the sentence "needs a torch that ...".

    ``probe`` reads it off the installed torch, so that a nightly build or a patched torch is judged by what it is. A
    fact without one follows from the version. ``bool(fact)`` raises :class:`FactIsUnknown` when the probe fails.
    """

    def __init__(self, since: tuple[int, int], says: str, probe: Callable[[], bool] | None = None) -> None:
        self.since, self.says, self.probe = since, says, probe

    def __bool__(self) -> bool:
        return self._holds

    @functools.cached_property
    def _holds(self) -> bool:
        if self.probe is None:
            return VERSION >= self.since
        try:
            return bool(self.probe())
        except Exception as error:
            raise FactIsUnknown(f"whether torch {torch.__version__} {self.says} cannot be told: {error}") from error

    def lacks(self) -> str | None:
        """Why a test that needs this fact cannot run, in words; None when it can."""
        return None if self else f"needs a torch that {self.says} ({_dotted(self.since)} or newer)"

    def __repr__(self) -> str:
        return f"<since {_dotted(self.since)} torch {self.says}>"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _find(module: str, path: str) -> Any:
    """``path`` inside the module, such as ``Class.method``. Raises :class:`torch_names.NameIsGone`."""
    head, *rest = path.split(".")
    return functools.reduce(getattr, rest, getattr(torch_names.module(module), head))


def _has(module: str, path: str) -> Callable[[], bool]:
    """A probe for the last name of ``path``; what stands before it must be there, or nobody can tell."""
    owner, _, name = path.rpartition(".")
    return lambda: hasattr(_find(module, owner) if owner else importlib.import_module(module), name)


def _takes(module: str, path: str, parameter: str) -> Callable[[], bool]:
    """A probe for a parameter of a function."""
    return lambda: parameter in inspect.signature(_find(module, path)).parameters


def _fsdp2_method(name: str, since: tuple[int, int]) -> Fact:
    return Fact(since, f"has FSDPModule.{name}", _has("torch.distributed.fsdp", f"FSDPModule.{name}"))


# --- FSDP1 and FSDP2 --------------------------------------------------------------------------------------------------

FINDS_TENSORS_IN_DATACLASSES = Fact(
    (2, 13),
    "finds the tensors inside dataclasses",
    _has("torch.distributed.fsdp._common_utils", "collect_grad_tensors"),
)
ASSERTIONS_HAVE_TEXT = Fact((2, 10), "says in an assertion of FSDP or of checkpoints what is wrong")
KEEPS_INPUTS_IN_PLACE = Fact((2, 14), "hands on a container of inputs as it is when nothing in it has to move")

# --- FSDP1 ------------------------------------------------------------------------------------------------------------

KEEPS_HOST_TENSORS_IN_PLACE = Fact((2, 14), "does not copy what is offloaded to the host when it is there already")
TELLS_READERS_OF_WHOLE_COPIES = Fact(
    (2, 15),
    "tells the allocator which stream reads an offloaded flat parameter that is not sharded",
    lambda: (
        "_no_dispatch_record_stream"
        in _find("torch.distributed.fsdp._flat_param", "FlatParamHandle._use_sharded_flat_param").__code__.co_names
    ),
)

# --- FSDP2: wrapping --------------------------------------------------------------------------------------------------

HAS_MESH_PER_PARAMETER = Fact(
    (2, 13),
    "lets shard_placement_fn name a mesh for each parameter",
    _has(_FSDP2 + "_fsdp_common", "ShardPlacementResult"),
)
HAS_DP_MESH_DIMS = Fact(
    (2, 13), "has the argument dp_mesh_dims of fully_shard", _has("torch.distributed.fsdp", "DataParallelMeshDims")
)
KEEPS_SPMD_TYPES = Fact(
    (2, 14),
    "keeps the annotations of the package spmd-types on the parameters of FSDP2",
    _has(_FSDP2 + "_fsdp_param", "FSDPParam._restore_spmd_types"),
)
SHARDS_INTEGER_PARAMETERS = Fact((2, 12), "shards parameters of integers with FSDP2")
WRAPS_CONTAINERS_WITH_FORWARD = Fact((2, 12), "wraps a ModuleList or a ModuleDict that has a forward of its own")
CHECKS_SHARED_PARAMETERS = Fact(
    (2, 13),
    "refuses a parameter that two groups of FSDP2 share",
    _has(_FSDP2 + "_fsdp_state", "FSDPState._validate_no_duplicate_params"),
)
GATHERS_UNEVEN_STRIDED_SHARDS = Fact((2, 10), "keeps the order of rows where FSDP2 and TP unevenly cut one dimension")
KEEPS_PADDED_STORAGE = Fact(
    (2, 11),
    "leaves shards that are padded already in their storage when FSDP2 initializes lazily",
    lambda: "same_local_tensor" in _find(_FSDP2 + "_fsdp_param", "FSDPParam.reset_sharded_param").__code__.co_varnames,
)

# --- FSDP2: forward and backward --------------------------------------------------------------------------------------

RUNS_UNDER_FUNCTORCH = Fact(
    (2, 13),
    "lets FSDP2 run its first forward under a transform of functorch",
    _has(_FSDP2 + "_fsdp_common", "_disable_functorch_if_active"),
)
GROUPS_CAST_EACH_INPUT = Fact(
    (2, 13),
    "casts the inputs and outputs of each module of fully_shard([a, b])",
    _takes(_FSDP2 + "_fsdp_state", "_register_group_forward_hooks", "cast_output_dtype"),
)
CASTS_RECOMPUTED_INPUTS = Fact((2, 12), "casts the inputs of an FSDP2 module that a checkpoint recomputes")
KEEPS_RECOMPUTED_GROUPS = Fact(
    (2, 11), "keeps parameters unsharded for what a checkpoint recomputes", _has(_FSDP2 + "_fsdp_common", "is_bw")
)
CASTS_EACH_PARAMETER = Fact(
    (2, 15),
    "lets a mixed precision policy of FSDP2 name the dtype of each parameter",
    _takes("torch.distributed.fsdp", "MixedPrecisionPolicy", "param_dtype_override_fn"),
)
ENDS_BACKWARD_OF_GROUP_ONCE = Fact((2, 12), "ends the backward of fully_shard([a, b]) once, not once a module")
COMPLETES_PARTIAL_GROUPS = Fact(
    (2, 13),
    "completes a group of modules of which only some ran",
    _has(_FSDP2 + "_fsdp_state", "FSDPState._force_complete_incomplete_states"),
)
SHARES_COMM_CONTEXT = Fact((2, 10), "has share_comm_ctx", _has(_FSDP2 + "_fully_shard", "share_comm_ctx"))
KEEPS_UNSHARDED_STORAGE = _fsdp2_method("set_keep_unsharded_storage", (2, 15))
RESETS_ITERATION = _fsdp2_method("reset_iter_state", (2, 13))
FINALIZES_BACKWARD_ON_CALL = _fsdp2_method("finalize_backward", (2, 15))
RESET_DROPS_ACCUMULATED_GRADIENTS = Fact((2, 15), "drops unreduced gradients in reset_iter_state")

# --- FSDP2: reduction -------------------------------------------------------------------------------------------------

LABELS_REDUCE_SCATTER_WAIT = Fact((2, 12), "labels FSDP2's wait for a reduce-scatter in the profiler's trace")
CONCATENATES_CHUNKS_OF_MIXED_DTYPES = Fact(
    (2, 15),
    "has the operator fsdp::chunk_cat_mixed_dtype",
    lambda: hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype"),
)
KEEPS_REDUCE_SCATTER_INPUTS = _fsdp2_method("set_reduce_scatter_max_input_buffers", (2, 13))
REDUCES_UNUSED_PARAMETERS = _fsdp2_method("set_reduce_scatter_unused_params", (2, 13))
REDUCES_IN_GROUP_OF_ITS_OWN = _fsdp2_method("set_separate_reduce_scatter_group", (2, 13))
ALLOCATES_SYMMETRIC_MEMORY = _fsdp2_method("set_symm_mem_for_comm", (2, 12))
COPIES_GRADIENT_OF_ONE_RANK = Fact((2, 10), "copies a gradient that only one rank has, and does not reduce it")
AVERAGES_OVER_SHARDS = Fact((2, 10), "averages where FSDP2's divide factor is the number of shards, not of all ranks")
REDUCES_IN_PARAMETER_DTYPE = Fact((2, 15), "reduces in the parameters' own dtype where there is no reduce_dtype")
ASKS_PARAMETERS_FOR_GRAD_DTYPE = Fact(
    (2, 15),
    "asks each parameter of FSDP2 for the dtype of its gradient",
    lambda: not _takes(_FSDP2 + "_fsdp_collectives", "foreach_reduce", "orig_dtype")(),
)
TELLS_READERS_OF_GRADIENTS = Fact(
    (2, 15),
    "has the operator fsdp::record_grad_output_stream",
    _has(_FSDP2 + "_fsdp_collectives", "record_grad_output_stream"),
)
KEEPS_INPUT_OF_ALL_REDUCE_HOOK = Fact((2, 15), "keeps what an all-reduce hook was given until the hook is done")
CASTS_GRADIENTS_BY_DTYPE = Fact(
    (2, 15),
    "casts reduced gradients dtype by dtype",
    _has(_FSDP2 + "_fsdp_collectives", "_cast_and_view_sharded_grads"),
)

# --- FSDP2: gathering -------------------------------------------------------------------------------------------------

LETS_GROUPS_COPY_THEIR_WAY = Fact(
    (2, 15),
    "lets a group have functions of its own that copy what was gathered and what is to be reduced",
    _has(_FSDP2 + "_fsdp_collectives", "_default_all_gather_output_fn"),
)
RELEASES_GATHERED_OF_PARTIAL_GROUPS = Fact(
    (2, 15),
    "releases what part of a group gathered also after a backward that is not the last",
    _has(_FSDP2 + "_fsdp_param_group", "FSDPCommContext.release_all_gather_state_on_current_stream"),
)
RELEASES_OUTPUTS_OF_EXTENSIONS = Fact(
    (2, 15),
    "lets an extension say that what was gathered is not needed after its post-hook",
    _has(_FSDP2 + "_fsdp_param", "FSDPParam.free_all_gather_outputs"),
)
COPIES_BYTES_ON_ONE_RANK = Fact((2, 15), "copies the bytes that an extension sends also where a group has one rank")

# --- Distributed state dicts ------------------------------------------------------------------------------------------

_DSD = "torch.distributed.checkpoint.state_dict"
REFUSES_MISSING_OPTIM_STATES = Fact(
    (2, 10),
    "says which optimizer state is missing, and loads without it where strict is False",
    lambda: "strict" in _find(_DSD, "_split_optim_state_dict").__code__.co_names,
)
FLATTENS_NESTED_STATES = Fact(
    (2, 10),
    "flattens states of optimizers that are dicts",
    lambda: (
        "_flatten_state_nested_dict"
        in _find(_DSD, "_flatten_optim_state_dict").__code__.co_cellvars
        + _find(_DSD, "_flatten_optim_state_dict").__code__.co_varnames
    ),
)

# --- replicate on FSDP2 ----------------------------------------------------------------------------------------------

REPLICATES_WITHOUT_SHARDS = Fact(
    (2, 11),
    "lets replicate of FSDP2 have a mesh of one dimension, without shards",
    _has("torch.distributed._composable.replicate_with_fsdp", "ReplicateModule"),
)
REPLICATES_OVER_NAMED_DIMS = Fact(
    (2, 13),
    "has the argument dp_mesh_dims of replicate",
    _takes("torch.distributed._composable.replicate_with_fsdp", "replicate", "dp_mesh_dims"),
)

# --- What FSDP stands on ----------------------------------------------------------------------------------------------

CONCATENATES_MESHES = Fact(
    (2, 10),
    "can put device meshes side by side",
    _has("torch.distributed.device_mesh", "DeviceMesh._concatenate"),
)
FAKE_COLLECTIVES_CAN_RAISE = Fact(
    (2, 10),
    "lets the collectives of a fake process group raise",
    _has("torch._C._distributed_c10d", "FakeProcessGroup.Options.error_on_collective"),
)
LOCKS_FAKE_MODE = Fact(
    (2, 13),
    "has a lock around the fake mode in which DTensor propagates shapes",
    _has("torch.distributed.tensor._sharding_prop", "ShardingPropagator._fake_mode_lock"),
)
INSTALLS_CUDA_DEVICE_GUARD = Fact(
    (2, 10),
    "installs a device guard of CUDA when it enters a fake mode",
    _has("torch._C", "_ensureCUDADeviceGuardSet"),
)
KEEPS_FROZEN_UNDER_TP = Fact(
    (2, 11),
    "keeps what is frozen frozen when tensor parallelism splits it",
    lambda: (
        "requires_grad"
        in _find("torch.distributed.tensor.parallel", "ColwiseParallel._partition_linear_fn").__code__.co_names
    ),
)
GRAPHS_ON_ANY_ACCELERATOR = Fact((2, 13), "has torch.accelerator.Graph", _has("torch.accelerator", "Graph"))

# --- Checkpoints ------------------------------------------------------------------------------------------------------

FORWARDS_FSDP_GROUP = Fact(
    (2, 13),
    "hands FSDP1's own process group on in get_state_dict and set_state_dict",
    _has("torch.distributed.checkpoint.state_dict", "_get_fsdp_process_group"),
)
LOADS_PARAMETERS_WITHOUT_STATE = Fact(
    (2, 11),
    "sets, if not strict, an optimizer's state dict that lacks the state of a parameter",
    lambda: "strict" in _find("torch.distributed.checkpoint.state_dict", "_split_optim_state_dict").__code__.co_names,
)

# --- Pipelines --------------------------------------------------------------------------------------------------------

_PIPELINING = "torch.distributed.pipelining."


def _starts_pipelines_with_float32() -> bool:
    """The receivers of a pipeline's first messages expect float32. A torch without this method has no such messages."""
    start = getattr(_find(_PIPELINING + "stage", "PipelineStage"), "_get_init_p2p_neighbors_ops", None)
    return start is None or "float32" in start.__code__.co_names


PIPELINES_START_OVER_GLOO = Fact(
    (2, 10), "starts a pipeline with messages as long as their receivers expect", _starts_pipelines_with_float32
)
STAGES_NEED_NO_MESSAGES_TO_THEMSELVES = Fact(
    (2, 13),
    "starts a pipeline without messages of a rank to itself",
    _has(_PIPELINING + "schedules", "PipelineScheduleMulti._initialize_pp_stages"),
)
PIPELINES_TRAIN_AFTER_EVALUATION = Fact(
    (2, 13),
    "prepares the stages of a pipeline anew when training follows evaluation",
    _has(_PIPELINING + "schedules", "PipelineScheduleMulti._initialize_pp_stages"),
)
REDUCES_GRADIENTS_BY_ACTION = Fact(
    (2, 10),
    "has the action REDUCE_GRAD of a pipeline's schedule",
    _has(_PIPELINING + "schedules", "_ComputationType.REDUCE_GRAD"),
)
WAITS_FOR_GRADIENTS_BY_ACTION = Fact(
    (2, 15),
    "has the action WAIT_REDUCE_GRAD of a pipeline's schedule",
    _has(_PIPELINING + "schedules", "_ComputationType.WAIT_REDUCE_GRAD"),
)


def all_gather_name() -> str:
    """What FSDP calls its all-gather in ``torch.distributed``, which 2.13 renamed."""
    return _first_in_dist("all_gather_single", "all_gather_into_tensor")


def reduce_scatter_name() -> str:
    """What FSDP calls its reduce-scatter in ``torch.distributed``, which 2.13 renamed."""
    return _first_in_dist("reduce_scatter_single", "reduce_scatter_tensor")


def _first_in_dist(*names: str) -> str:
    found = [name for name in names if _has("torch.distributed", name)()]
    if not found:
        raise torch_names.NameIsGone(f"torch.distributed has none of {', '.join(names)}: mend torch_facts.py")
    return found[0]


# Imported before the first rank is forked, so that no rank pays for them. ``fully_shard`` imports torch._dynamo (about
# 200 modules) at its first call; an optimizer imports torch._dynamo's and functorch's parts at its first step.
PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.device_mesh",
    "torch._dynamo",
)


def facts() -> dict[str, Fact]:
    """All facts by their names."""
    return {name: value for name, value in globals().items() if isinstance(value, Fact)}
