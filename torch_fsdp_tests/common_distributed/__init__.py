"""Test cases with ranks, decorators and subtests. Replaces ``torch/testing/_internal/common_distributed.py``."""

from __future__ import annotations

import torch.distributed as c10d

from torch_fsdp_tests import settings
from torch_fsdp_tests.common_distributed import environment
from torch_fsdp_tests.common_distributed.case import TIMEOUT_DEFAULT, TIMEOUT_OVERRIDE, RankTestCase, get_timeout
from torch_fsdp_tests.common_distributed.continuous import DeviceContinuousTest, MultiProcContinuousTest
from torch_fsdp_tests.common_distributed.dynamo import DynamoDistributedSingleProcTestCase, _dynamo_dist_per_rank_init
from torch_fsdp_tests.common_distributed.environment import (
    cleanup_temp_dir,
    core_dumps_disabled,
    initialize_temp_directories,
    with_dist_debug_levels,
)
from torch_fsdp_tests.common_distributed.modules import SaveForwardInputsModel, SaveForwardInputsModule
from torch_fsdp_tests.common_distributed.multi_process import (
    DistributedTestBase,
    DynamoDistributedMultiProcTestCase,
    MultiProcessTestCase,
    logger,
)
from torch_fsdp_tests.common_distributed.multi_threaded import MultiThreadedTestCase, spawn_threads_and_init_comms
from torch_fsdp_tests.common_distributed.requirements import (
    TEST_SKIPS,
    TestSkip,
    at_least_x_gpu,
    at_most,
    get_required_world_size,
    needs,
    ranks_of,
    requires,
    requires_accelerator_dist_backend,
    requires_capability,
    requires_gloo,
    requires_nccl,
    requires_nccl_version,
    requires_world_size,
    skip_if_lt_x_gpu,
    skip_if_rocm_arch_multiprocess,
    skip_if_rocm_multiprocess,
    sm_is_or_higher_than,
)
from torch_fsdp_tests.common_distributed.subtests import run_subtests
from torch_fsdp_tests.common_distributed.vendor_requirements import (
    import_transformers_or_skip,
    nccl_skip_if_lt_x_gpu,
    require_n_gpus_for_nccl_backend,
    requires_cuda_p2p_access,
    requires_mpi,
    requires_multicast_support,
    requires_nccl_shrink,
    requires_ucc,
    requires_xccl,
    skip_if_no_gpu,
    skip_if_odd_worldsize,
    skip_if_rocm_ver_atleast_multiprocess,
    skip_if_rocm_ver_lessthan_multiprocess,
    skip_if_small_worldsize,
    skip_if_win32,
)
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.installed_torch import upstream_names


def _has_accelerator() -> bool:
    device = accelerator.current_or_none()  # files ask at import, where an exception would hide all their tests
    return device is not None and not device.is_cpu


__getattr__ = upstream_names.complete(
    __name__,
    {
        "HAS_ACCELERATOR": _has_accelerator,
        "DEFAULT_WORLD_SIZE": lambda: accelerator.current().ranks,
        "tmp_dir": environment.directory,
        "MultiProcContinousTest": upstream_names.renamed(
            MultiProcContinuousTest, "MultiProcContinousTest", "MultiProcContinuousTest"
        ),
    },
    {"DEFAULT_WORLD_SIZE": settings.RANKS_VARIABLE},
)
