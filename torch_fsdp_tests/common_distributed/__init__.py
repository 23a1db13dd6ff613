"""Test cases with ranks, decorators and subtests. Replaces ``torch/testing/_internal/common_distributed.py``."""

from __future__ import annotations

import torch.distributed as c10d

from torch_fsdp_tests.common_distributed.case import TIMEOUT_DEFAULT, TIMEOUT_OVERRIDE, RankTestCase, get_timeout
from torch_fsdp_tests.common_distributed.continuous import DeviceContinuousTest, MultiProcContinuousTest
from torch_fsdp_tests.common_distributed.environment import (
    cleanup_temp_dir,
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
from torch_fsdp_tests.common_distributed.multi_threaded import MultiThreadedTestCase
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
