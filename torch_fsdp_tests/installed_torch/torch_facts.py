"""Differences between the versions of torch that this suite supports (2.9 and later).

A :class:`Fact` says what newer versions of torch do and older ones do not. It is true or false, and is computed when it
is first used. No other module compares versions, or checks for an attribute of torch because of a version. A test that
needs a fact is decorated with :func:`torch_fsdp_tests.common_distributed.needs`.

A fix in PyTorch is an entry of the registry of defects, so that its test also runs on older versions. If a test can
only run where a defect is fixed, its fact names the defect.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from torch_fsdp_tests import settings
from torch_fsdp_tests.installed_torch import read_once as read_once  # before torch, whose environment it records
from torch_fsdp_tests.installed_torch import torch_names
from torch_fsdp_tests.installed_torch.version_ranges import dotted
from torch_fsdp_tests.verdict import Reason, SkipKind, events

if importlib.util.find_spec("torch"):
    import torch

    INSTALLED: str = torch.__version__
else:
    INSTALLED = "0.0"  # the facts can be listed without torch

__unittest = True

VERSION: tuple[int, int] = tuple(int(part) for part in INSTALLED.split(".")[:2])  # type: ignore[assignment]

_FSDP2 = "torch.distributed.fsdp._fully_shard."


def is_release(version: str) -> bool:
    """Whether ``2.13.0+cpu`` names a release, and not a nightly build, a candidate, or a build of some commit."""
    return re.fullmatch(r"\d+(\.\d+)*(\.post\d+)?(\+(?!.*git)[\w.]+)?", version) is not None


IS_RELEASE = is_release(INSTALLED)


class TorchDiffers(Exception):
    """The installed PyTorch differs from the release of its version. No known defect explains this."""


class Fact:
    """A behavior since version ``since``. ``says`` completes "needs a version of PyTorch that ...".

    ``probe`` inspects the installed torch. It decides for a nightly build or a build of some commit, and a test skips
    when it fails (see :func:`torch_names.name_is_gone`). For a release the version decides, because a probe would take
    a regression for an older version. If the probe disagrees there, that is reported at the end of the run, and
    with ``--strict-defects`` ``bool(fact)`` raises :class:`TorchDiffers`. Without a probe the version decides.

    ``fixes`` names the defects of the registry that ``since`` fixed. A fact without them is about a feature,
    or about a part of torch that is not FSDP.
    """

    def __init__(
        self, since: tuple[int, int], says: str, probe: Callable[[], bool] | None = None, fixes: tuple[str, ...] = ()
    ) -> None:
        self.since, self.says, self.probe, self.fixes = since, says, probe, fixes

    def __bool__(self) -> bool:
        if self.differs and settings.is_on(settings.STRICT_DEFECTS_VARIABLE, os.environ):
            raise TorchDiffers(f"{self.differs}. If the release itself is like this, correct torch_facts.py")
        return VERSION >= self.since if IS_RELEASE else self.seen

    @property
    def is_new(self) -> bool:
        """Whether it is something to use. Otherwise it is a changed behavior."""
        return self.says.partition(" ")[0] in ("has", "can", "lets", "accepts", "wraps")

    @functools.cached_property
    def seen(self) -> bool:
        """What the probe finds, or what follows from the version. Raises ``NameIsGone`` if the probe fails."""
        if self.probe is None:
            return VERSION >= self.since
        try:
            return bool(self.probe())
        except Exception as error:
            words = f"cannot tell whether torch {INSTALLED} {self.says}: {error}"
            raise torch_names.name_is_gone(words, SkipKind.FACT) from error

    @functools.cached_property
    def differs(self) -> str:
        """How the installed torch differs from the release of its version; empty if it does not. It is reported."""
        if not IS_RELEASE:
            return ""
        try:
            if self.seen == (VERSION >= self.since):
                return ""
            since = f"as torch does since {dotted(self.since)}"
            return _reported(f": it {self.says}, {since}" if self.seen else f", which {self.says}")
        except torch_names.NameIsGone as error:
            return _reported(f": {error}")

    def lacks(self) -> str | None:
        """The reason why a test that needs this fact cannot run, or None if it can."""
        words = f"needs a version of PyTorch that {self.says} ({dotted(self.since)} or newer)"
        return None if self else Reason(words, SkipKind.TORCH)

    def __repr__(self) -> str:
        return f"<since {dotted(self.since)} torch {self.says}>"


unlike_release: list[str] = []  # how the installed torch differs from its release, as far as this process has seen


def _reported(how: str) -> str:
    difference = f"the installed PyTorch differs from release {INSTALLED.partition('+')[0]}{how}"
    unlike_release.append(difference)
    events.record(unlike_release=unlike_release)
    print(difference, file=sys.stderr)  # a rank records no events, and its output is shown if the test fails
    return difference


def _find(module: str, path: str) -> Any:
    """``path`` inside the module, such as ``Class.method``. Raises :class:`torch_names.NameIsGone`."""
    head, *rest = path.split(".")
    return functools.reduce(getattr, rest, getattr(torch_names.module(module), head))


def _owner(module: str, path: str) -> Any:
    """What has the last name of ``path``. The names before it must exist, or this raises."""
    owner = path.rpartition(".")[0]
    return _find(module, owner) if owner else importlib.import_module(module)


def _has(module: str, path: str) -> Callable[[], bool]:
    """A probe for the last name of ``path``."""
    return lambda: hasattr(_owner(module, path), path.rpartition(".")[2])


def _uses(module: str, path: str, name: str, if_gone: bool = False) -> Callable[[], bool]:
    """A probe for a name that a function uses. It is ``if_gone`` without the function."""

    def probe() -> bool:
        function = getattr(_owner(module, path), path.rpartition(".")[2], None)
        return if_gone if function is None else name in function.__code__.co_names

    return probe


def _takes(module: str, path: str, parameter: str) -> Callable[[], bool]:
    """A probe for a parameter of a function."""
    return lambda: parameter in inspect.signature(_find(module, path)).parameters


def _fsdp2_method(name: str, since: tuple[int, int]) -> Fact:
    return Fact(since, f"has FSDPModule.{name}", _has("torch.distributed.fsdp", f"FSDPModule.{name}"))


# --- FSDP1 and FSDP2 --------------------------------------------------------------------------------------------------

FINDS_TENSORS_IN_DATACLASSES = Fact(
    (2, 12),
    "finds tensors inside dataclasses",
    _has("torch.distributed.fsdp._common_utils", "collect_grad_tensors"),
    fixes=("fsdp2_outputs_in_dataclasses_raise",),
)
ASSERTIONS_HAVE_MESSAGES = Fact((2, 10), "explains what is wrong when an assertion of FSDP or of checkpoints fails")

# --- FSDP2: wrapping --------------------------------------------------------------------------------------------------

HAS_MESH_PER_PARAMETER = Fact(
    (2, 12),
    "lets shard_placement_fn name a mesh for each parameter",
    _has(_FSDP2 + "_fsdp_common", "ShardPlacementResult"),
)
HAS_DP_MESH_DIMS = Fact(
    (2, 12), "has the argument dp_mesh_dims of fully_shard", _has("torch.distributed.fsdp", "DataParallelMeshDims")
)
KEEPS_SPMD_TYPES = Fact(
    (2, 14),
    "lets parameters of FSDP2 keep the annotations of the package spmd-types",
    _has(_FSDP2 + "_fsdp_param", "FSDPParam._restore_spmd_types"),
)
SHARDS_INTEGER_PARAMETERS = Fact(
    (2, 12), "shards integer parameters with FSDP2", fixes=("fsdp2_integer_parameters_are_refused",)
)
WRAPS_CONTAINERS_WITH_FORWARD = Fact((2, 12), "wraps a ModuleList or a ModuleDict that has its own forward")
GATHERS_UNEVEN_STRIDED_SHARDS = Fact(
    (2, 10),
    "keeps the order of rows when FSDP2 and TP shard one dimension unevenly",
    fixes=("dtensor_uneven_rows_with_tp_are_reordered",),
)
KEEPS_PADDED_STORAGE = Fact(
    (2, 10),
    "does not copy shards that are padded already when FSDP2 initializes lazily",
    lambda: "same_local_tensor" in _find(_FSDP2 + "_fsdp_param", "FSDPParam.reset_sharded_param").__code__.co_varnames,
    fixes=("fsdp2_early_state_dict_goes_stale",),
)

# --- FSDP2: forward and backward --------------------------------------------------------------------------------------

RUNS_UNDER_FUNCTORCH = Fact(
    (2, 13),
    "lets FSDP2 run its first forward under a functorch transform",
    _has(_FSDP2 + "_fsdp_common", "_disable_functorch_if_active"),
    fixes=("fsdp2_first_forward_in_jvp_raises",),
)
KEEPS_GROUPS_UNSHARDED_FOR_RECOMPUTATION = Fact(
    (2, 10),
    "keeps parameters unsharded during recomputation",
    _has(_FSDP2 + "_fsdp_common", "is_bw"),
)
CASTS_INPUTS_OF_EACH_MODULE = Fact((2, 13), "casts the inputs of each module of fully_shard([a, b])")
CASTS_EACH_PARAMETER = Fact(
    (2, 15),
    "lets FSDP2's mixed precision policy set the dtype of each parameter",
    _takes("torch.distributed.fsdp", "MixedPrecisionPolicy", "param_dtype_override_fn"),
)
RUNS_POST_BACKWARD_ONCE_PER_GROUP = Fact(
    (2, 12), "runs the post-backward of fully_shard([a, b]) once, not once per module"
)
COMPLETES_PARTIAL_GROUPS = Fact(
    (2, 13),
    "completes a group of modules when only some of them ran",
    _has(_FSDP2 + "_fsdp_state", "FSDPState._force_complete_incomplete_states"),
    fixes=("fsdp2_partial_group_loses_gradients", "fsdp2_partial_group_stays_gathered"),
)
CAN_SHARE_COMM_CONTEXT = Fact((2, 10), "has share_comm_ctx", _has(_FSDP2 + "_fully_shard", "share_comm_ctx"))
CAN_KEEP_UNSHARDED_STORAGE = _fsdp2_method("set_keep_unsharded_storage", (2, 15))
HAS_RESET_ITER_STATE = _fsdp2_method("reset_iter_state", (2, 13))
HAS_FINALIZE_BACKWARD = _fsdp2_method("finalize_backward", (2, 15))
RESET_DROPS_ACCUMULATED_GRADIENTS = Fact(
    (2, 15),
    "drops unreduced gradients in reset_iter_state",
    fixes=("fsdp2_reset_keeps_unreduced_gradients",),
)

# --- FSDP2: reduction -------------------------------------------------------------------------------------------------

LABELS_REDUCE_SCATTER_WAIT = Fact((2, 12), "labels FSDP2's wait for a reduce-scatter in the profiler's trace")
HAS_MIXED_DTYPE_CHUNK_CAT = Fact(
    (2, 15), "has the operator fsdp::chunk_cat_mixed_dtype", lambda: hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype")
)
LIMITS_REDUCE_SCATTER_INPUT_BUFFERS = _fsdp2_method("set_reduce_scatter_max_input_buffers", (2, 13))
HAS_REDUCE_SCATTER_OF_UNUSED_PARAMETERS = _fsdp2_method("set_reduce_scatter_unused_params", (2, 13))
HAS_SEPARATE_REDUCE_SCATTER_GROUP = _fsdp2_method("set_separate_reduce_scatter_group", (2, 13))
HAS_SYMMETRIC_MEMORY_FOR_COMMUNICATION = _fsdp2_method("set_symm_mem_for_comm", (2, 12))
SKIPS_REDUCTION_OVER_ONE_RANK = Fact((2, 10), "copies a gradient instead of reducing it over a single rank")
AVERAGES_OVER_SHARDS = Fact((2, 10), "averages when FSDP2's divide factor is the number of shards and not of all ranks")
REDUCES_IN_PARAMETER_DTYPE = Fact((2, 15), "reduces in the parameters' dtype when no reduce_dtype is set")
HAS_GRAD_DTYPE = Fact((2, 10), "has Tensor.grad_dtype", _has("torch", "Tensor.grad_dtype"))
ASKS_PARAMETERS_FOR_GRAD_DTYPE = Fact(
    (2, 15),
    "uses the grad_dtype of each FSDP2 parameter",
    lambda: not _takes(_FSDP2 + "_fsdp_collectives", "foreach_reduce", "orig_dtype")(),
    fixes=("fsdp2_grad_dtype_is_lost",),
)
RECORDS_STREAM_OF_OUTPUT_GRADIENTS = Fact(
    (2, 15),
    "has the operator fsdp::record_grad_output_stream",
    _has(_FSDP2 + "_fsdp_collectives", "record_grad_output_stream"),
)
CASTS_GRADIENTS_BY_DTYPE = Fact(
    (2, 15),
    "casts reduced gradients separately for each dtype",
    _has(_FSDP2 + "_fsdp_collectives", "_cast_and_view_sharded_grads"),
)

# --- FSDP2: unsharding ------------------------------------------------------------------------------------------------

HAS_COPY_FUNCTIONS_PER_GROUP = Fact(
    (2, 15),
    "lets each group set its own copy-in and copy-out functions",
    _has(_FSDP2 + "_fsdp_collectives", "_default_all_gather_output_fn"),
)
EXTENSIONS_CAN_FREE_ALL_GATHER = Fact(
    (2, 15),
    "lets an extension free the all-gather outputs after its post-hook",
    _has(_FSDP2 + "_fsdp_param", "FSDPParam.free_all_gather_outputs"),
)

# --- Distributed state dicts ------------------------------------------------------------------------------------------

_DSD = "torch.distributed.checkpoint.state_dict"
FLATTENS_NESTED_STATES = Fact(
    (2, 10),
    "flattens optimizer states that are dicts",
    lambda: (
        "_flatten_state_nested_dict"
        in _find(_DSD, "_flatten_optim_state_dict").__code__.co_cellvars
        + _find(_DSD, "_flatten_optim_state_dict").__code__.co_varnames
    ),
)

# --- replicate on FSDP2 ----------------------------------------------------------------------------------------------

REPLICATES_WITHOUT_SHARDS = Fact(
    (2, 11),
    "accepts a one-dimensional mesh without a name for FSDP2's replicate",
    _has("torch.distributed._composable.replicate_with_fsdp", "_validate_mesh"),
)
REPLICATES_OVER_NAMED_DIMS = Fact(
    (2, 12),
    "has the argument dp_mesh_dims of replicate",
    _takes("torch.distributed._composable.replicate_with_fsdp", "replicate", "dp_mesh_dims"),
)

# --- What FSDP depends on ---------------------------------------------------------------------------------------------

FAKE_COLLECTIVES_CAN_RAISE = Fact(
    (2, 10),
    "lets the collectives of a fake process group raise",
    _has("torch._C._distributed_c10d", "FakeProcessGroup.Options.error_on_collective"),
)
HAS_DERIVED_SHARDING_RULES = Fact(
    (2, 11),
    "has DTensor rules for operators that consist of others, such as mse_loss",
    # Torch 2.11 does not import the module before it is used.
    lambda: importlib.util.find_spec("torch.distributed.tensor._decompositions") is not None,
)
LOCKS_FAKE_MODE = Fact(
    (2, 12),
    "locks the fake mode in which DTensor propagates shapes",
    _has("torch.distributed.tensor._sharding_prop", "ShardingPropagator._fake_mode_lock"),
)
INSTALLS_CUDA_DEVICE_GUARD = Fact(
    (2, 10), "installs a CUDA device guard when it enters a fake mode", _has("torch._C", "_ensureCUDADeviceGuardSet")
)
TP_KEEPS_REQUIRES_GRAD = Fact(
    (2, 11),
    "keeps requires_grad when tensor parallelism shards a parameter",
    lambda: (
        "requires_grad"
        in _find("torch.distributed.tensor.parallel", "ColwiseParallel._partition_linear_fn").__code__.co_names
    ),
)
# Seen in 2.13, and not in 2.9. The versions between were not tried.
COMPILES_INSIDE_OF_SELECTIVE_CHECKPOINTS = Fact((2, 13), "compiles a layer that runs in a selective checkpoint")
RUNS_HOOKS_OUTSIDE_OF_COMPILED_BACKWARDS = Fact((2, 13), "runs the hooks of FSDP2 outside of a compiled backward")
COMPILES_STEPS_ON_UNEVEN_SHARDS = Fact((2, 13), "compiles the step of an optimizer for uneven shards of FSDP2")
UNSHARDED_SPECS_HAVE_COMPUTE_DTYPE = Fact((2, 13), "gives unsharded DTensors of FSDP2 a spec with the compute dtype")
UNSHARDS_WITHOUT_PARAMETERS = Fact((2, 13), "lets FSDP1's _unshard run on an instance without parameters")
KEEPS_PARTIAL = Fact((2, 13), "can redistribute a partial DTensor to the same placement")
TAKES_GRADIENT_PLACEMENTS_OF_LOCAL_TENSORS = Fact((2, 13), "lets DTensor.from_local take grad_placements")
KEEPS_PLACEMENTS_OF_UNEVEN_COLUMNS = Fact((2, 13), "keeps the placements of a gradient of unevenly sharded columns")
REPLICAS_KEEP_REQUIRES_GRAD = Fact((2, 13), "keeps requires_grad when distribute_module replicates a parameter")
COMPUTES_AS_PLAIN_TENSORS = Fact((2, 13), "computes with DTensors as with plain tensors, but for known cases")
CONCATENATES_MESHES = Fact(
    (2, 10), "can concatenate DeviceMeshes", _has("torch.distributed.device_mesh", "DeviceMesh._concatenate")
)
UNFLATTENS_MESHES = Fact((2, 13), "can unflatten a dimension of a DeviceMesh")
NORMALIZES_STRIDED_DIMS = Fact((2, 13), "can redistribute to a strided shard of a negative dimension")
VIEWS_SHARDED_DIMS_AS_ONE = Fact((2, 13), "can view several sharded dimensions of a DTensor as one")
# Seen in 2.11, and not in 2.10.
WRITES_INDEX_ON_EVERY_RANK = Fact((2, 11), "writes the index of files that all ranks have consolidated")
HAS_KEYS_FOR_CACHED_GRAPHS = Fact(
    (2, 12),
    "has keys of DTensors for cached graphs",
    _has("torch.distributed.tensor", "DTensor._stable_hash_for_caching"),
)
HAS_ACCELERATOR_GRAPHS = Fact((2, 12), "has torch.accelerator.Graph", _has("torch.accelerator", "Graph"))

# --- Checkpoints ------------------------------------------------------------------------------------------------------

STATE_DICTS_USE_FSDP1_GROUP = Fact(
    (2, 13),
    "uses FSDP1's process group in get_state_dict and set_state_dict",
    _has("torch.distributed.checkpoint.state_dict", "_get_fsdp_process_group"),
    fixes=("dsd_state_dict_of_a_group_needs_all_ranks",),
)

# --- Pipelines --------------------------------------------------------------------------------------------------------

_PIPELINING = "torch.distributed.pipelining."

PIPELINE_START_MESSAGES_MATCH = Fact(
    (2, 10),
    "starts a pipeline with messages of the size that the receivers expect",
    _uses(_PIPELINING + "stage", "PipelineStage._get_init_p2p_neighbors_ops", "float32", if_gone=True),
)
PIPELINES_SEND_NOTHING_TO_THEMSELVES = Fact(
    (2, 12),
    "starts a pipeline without messages from a rank to itself",
    _has(_PIPELINING + "schedules", "PipelineScheduleMulti._initialize_pp_stages"),
)
PIPELINES_TRAIN_AFTER_EVAL = Fact(
    (2, 12),
    "prepares pipeline stages again when training follows a forward in eval mode",
    _has(_PIPELINING + "schedules", "PipelineScheduleMulti._initialize_pp_stages"),
)
REDUCES_GRADIENTS_BY_ACTION = Fact(
    (2, 10), "has the pipeline action REDUCE_GRAD", _has(_PIPELINING + "schedules", "_ComputationType.REDUCE_GRAD")
)
CAN_LEAVE_OUT_PIPELINE_OUTPUTS = Fact(
    (2, 10),
    "can leave out the outputs of a pipeline's step",
    _takes(_PIPELINING + "schedules", "PipelineScheduleSingle.step", "return_outputs"),
)
SPLITS_CONTAINERS = Fact(
    (2, 10),
    "splits containers, and masks of flex attention, into the microbatches of a pipeline",
    _has(_PIPELINING + "microbatch", "_split_block_mask"),
)
RETAINS_GRADIENTS_OF_CHUNKS = Fact(
    (2, 12),
    "retains the gradients of a pipeline's microbatches if the batch is a leaf",
    _uses(_PIPELINING + "microbatch", "_split_tensor", "retain_grad"),
)
KNOWS_SHAPES_OF_DTENSOR_CHUNKS = Fact(
    (2, 13),
    "knows the shapes of the microbatches of an unevenly sharded DTensor",
    _uses(_PIPELINING + "microbatch", "_split_tensor", "divmod"),
)
WAITS_FOR_GRADIENTS_BY_ACTION = Fact(
    (2, 15),
    "has the pipeline action WAIT_REDUCE_GRAD",
    _has(_PIPELINING + "schedules", "_ComputationType.WAIT_REDUCE_GRAD"),
)


def all_gather_name() -> str:
    """The name of the all-gather in ``torch.distributed`` that FSDP calls; 2.13 renamed it."""
    return _first_in_dist("all_gather_single", "all_gather_into_tensor")


def reduce_scatter_name() -> str:
    """The name of the reduce-scatter in ``torch.distributed`` that FSDP calls; 2.13 renamed it."""
    return _first_in_dist("reduce_scatter_single", "reduce_scatter_tensor")


def _first_in_dist(*names: str) -> str:
    present = [name for name in names if _has("torch.distributed", name)()]
    if not present:
        raise torch_names.name_is_gone(f"torch.distributed has none of {', '.join(names)}: update torch_facts.py")
    return present[0]


# Imported before the first rank is forked, so that no rank has to. The first call of ``fully_shard`` would import
# torch._dynamo (about 200 modules), and the first step of an optimizer parts of torch._dynamo and functorch.
PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.device_mesh",
    "torch._dynamo",
)

# Torch imports these when it needs them first: for a profiler's range, a step of an optimizer, ``torch.save``, a
# checkpoint, ``replicate``. Some versions lack some of them.
IMPORTED_LATE = (
    "torch.profiler._cupti_monitor",
    "torch._subclasses.schema_check_mode",
    "torch.utils.serialization.config",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.distributed._composable.replicate_with_fsdp",
)


def facts() -> dict[str, Fact]:
    """All facts by their names."""
    return {name: value for name, value in globals().items() if isinstance(value, Fact)}
