"""What every test file uses: the base class, ``run_tests``, parametrization, flags and decorators.

This package replaces ``torch/testing/_internal/common_utils.py``. Names that depend on the device under test
(``TEST_CUDA`` and the like) and on the seed of the run (``SEED``) are computed when they are used, not at import.
"""

from __future__ import annotations

from torch_fsdp_tests.common_utils import flags as _flags
from torch_fsdp_tests.common_utils import seed as _seed
from torch_fsdp_tests.common_utils.flags import (
    FILE_SCHEMA,
    IS_LINUX,
    IS_MACOS,
    IS_SANDCASTLE,
    IS_WINDOWS,
    MI200_ARCH,
    TEST_WITH_ASAN,
    TEST_WITH_DEV_DBG_ASAN,
    TEST_WITH_ROCM,
    TEST_WITH_SLOW,
    HardwareClassification,
)
from torch_fsdp_tests.common_utils.garbage import check_leaked_tensors
from torch_fsdp_tests.common_utils.main import run_tests
from torch_fsdp_tests.common_utils.network import find_free_port, retry_on_connect_failures
from torch_fsdp_tests.common_utils.parametrization import (
    _TestParametrizer,
    decorateIf,
    instantiate_parametrized_tests,
    parametrize,
    subtest,
)
from torch_fsdp_tests.common_utils.seed import manual_seed, set_rng_seed
from torch_fsdp_tests.common_utils.skips import (
    skip_but_pass_in_sandcastle_if,
    skipIfHpu,
    skipIfRocm,
    skipIfRocmArch,
    skipIfTorchDynamo,
    skipIfXpu,
    slowTest,
    unMarkDynamoStrictTest,
    wrapSwapTensorsTest,
    xfailIf,
)
from torch_fsdp_tests.common_utils.sleep import device_sleep, get_cycles_per_ms, host_time
from torch_fsdp_tests.common_utils.testcase import TestCase
from torch_fsdp_tests.installed_torch import upstream_names

__all__ = [
    "FILE_SCHEMA",
    "IS_LINUX",
    "IS_MACOS",
    "IS_SANDCASTLE",
    "IS_WINDOWS",
    "MI200_ARCH",
    "TEST_CUDA",
    "TEST_HPU",
    "TEST_WITH_ASAN",
    "TEST_WITH_DEV_DBG_ASAN",
    "TEST_WITH_ROCM",
    "TEST_WITH_SLOW",
    "TEST_XPU",
    "HardwareClassification",
    "TestCase",
    "check_leaked_tensors",
    "decorateIf",
    "device_sleep",
    "find_free_port",
    "get_cycles_per_ms",
    "instantiate_parametrized_tests",
    "parametrize",
    "retry_on_connect_failures",
    "run_tests",
    "set_rng_seed",
    "skipIfHpu",
    "skipIfRocm",
    "skipIfRocmArch",
    "skipIfTorchDynamo",
    "skipIfXpu",
    "skip_but_pass_in_sandcastle_if",
    "slowTest",
    "subtest",
    "unMarkDynamoStrictTest",
    "wrapSwapTensorsTest",
    "xfailIf",
]

__getattr__ = upstream_names.complete(
    __name__,
    {"SEED": _seed.seed_of_run, **_flags.ABOUT_DEVICE},
    {"SEED": _seed.SEED_VARIABLE},
)
