"""Models, modes, patches and comparisons for tests of FSDP. Tests import from this package, not from its modules.

``DEVICE_TYPE`` (without an index), ``DISTRIBUTED_BACKEND`` and ``DEVICE_COUNT`` (the default world size of a test) are
those of the device under test, and are looked up when they are used. A test file that assigns one chooses its device by
it. Upstream computes them at import, and its count for the CPU is 1. Here the CPU counts as 4, and a device that ranks
share counts as the number of these ranks.
"""

from __future__ import annotations

from torch_fsdp_tests import settings
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.installed_torch import upstream_names

from .cases import FSDPTest, FSDPTestContinuous, FSDPTestMultiThread
from .compiled import compiled_fsdp_test, fully_shard_with_compiled_compute, test_compiled_fsdp
from .device import get_devtype
from .group import DummyProcessGroup
from .layers import MLP, DoubleLinear, MLPStack, NestedLinear, SkipModel, SkipModule
from .modes import CUDAInitMode as _CUDAInitMode
from .modes import DEVICEInitMode, FSDPInitMode, FSDPTestModel, FullyShardMode
from .nested import (
    AlwaysWrapNestedWrappedModule,
    DummyDDP,
    MixtureOfExperts,
    ModuleWithDelay,
    NestedWrappedModule,
    NestedWrappedModuleWithDelay,
    NonUniformReqGradNWM,
)
from .parity import check_sharded_parity
from .patches import (
    debug_level,
    patch_all_gather,
    patch_all_reduce,
    patch_foreach_all_gather,
    patch_foreach_reduce,
    patch_post_backward,
    patch_reduce_scatter,
    patch_register_post_backward_hook_backward,
    patch_reshard,
    patch_unshard,
    reduce_scatter_with_assert,
)
from .states import (
    _assert_module_states,
    _broadcast_state_dict,
    _get_state_dict,
    _maybe_wrap_fsdp,
    _move_to_device,
    _zero_model,
    get_full_params,
    subtest_name,
)
from .training import FSDPTestMixin
from .transformer import TransformerWithSharedParams

__getattr__ = upstream_names.complete(
    __name__,
    {
        "DEVICE_TYPE": lambda: accelerator.current().type,
        "DISTRIBUTED_BACKEND": lambda: accelerator.current().backend,
        "DEVICE_COUNT": lambda: accelerator.current().ranks,
        "CUDAInitMode": upstream_names.renamed(_CUDAInitMode, "CUDAInitMode", "DEVICEInitMode"),
    },
    {
        "DEVICE_TYPE": settings.DEVICE_VARIABLE,
        "DISTRIBUTED_BACKEND": settings.BACKEND_VARIABLE,
        "DEVICE_COUNT": settings.RANKS_VARIABLE,
    },
)
