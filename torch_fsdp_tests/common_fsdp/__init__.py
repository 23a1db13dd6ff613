"""Models, modes, patches and comparisons for tests of FSDP. Tests import from this package, not from its modules.

``DEVICE_TYPE``, ``DISTRIBUTED_BACKEND`` and ``DEVICE_COUNT`` are looked up when they are used, see :mod:`.device`.
"""

from __future__ import annotations

from typing import Any

from . import device
from .cases import FSDPTest, FSDPTestContinuous, FSDPTestMultiThread
from .compiled import compiled_fsdp_test, fully_shard_with_compiled_compute, test_compiled_fsdp
from .device import get_devtype
from .group import DummyProcessGroup
from .layers import MLP, DoubleLinear, MLPStack, NestedLinear, SkipModel, SkipModule
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


def __getattr__(name: str) -> Any:
    return device.__getattr__(name)
