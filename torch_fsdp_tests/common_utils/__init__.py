"""What every test file uses: the base class, ``run_tests``, parametrization, flags and decorators.

This package replaces ``torch/testing/_internal/common_utils.py``. Names that depend on the device under test
(``TEST_CUDA`` and the like) and on the seed of the run (``SEED``) are computed when they are used, and not when this
package is imported.
"""

from __future__ import annotations

from typing import Any

from torch_fsdp_tests.common_utils import flags as _flags
from torch_fsdp_tests.common_utils import seed as _seed
from torch_fsdp_tests.common_utils.flags import (
    FILE_SCHEMA,
    IS_ARM64,
    IS_CI,
    IS_FBCODE,
    IS_FREE_THREADED,
    IS_LINUX,
    IS_MACOS,
    IS_PPC,
    IS_REMOTE_GPU,
    IS_S390X,
    IS_SANDCASTLE,
    IS_WINDOWS,
    IS_X86,
    MI200_ARCH,
    MI300_ARCH,
    MI350_ARCH,
    NAVI3_ARCH,
    NAVI4_ARCH,
    NAVI_ARCH,
    TEST_NUMPY,
    TEST_SCIPY,
    TEST_TRANSFORMERS,
    TEST_WITH_AOT_EAGER,
    TEST_WITH_ASAN,
    TEST_WITH_CROSSREF,
    TEST_WITH_DEV_DBG_ASAN,
    TEST_WITH_ROCM,
    TEST_WITH_SLOW,
    TEST_WITH_TORCHDYNAMO,
    TEST_WITH_TORCHINDUCTOR,
    TEST_WITH_TSAN,
    TEST_WITH_UBSAN,
)
from torch_fsdp_tests.common_utils.main import (
    run_tests,
)
from torch_fsdp_tests.common_utils.network import (
    ADDRESS_IN_USE,
    CONNECT_TIMEOUT,
    find_free_port,
    retry_on_connect_failures,
)
from torch_fsdp_tests.common_utils.parametrization import (
    _TestParametrizer,
    compose_parametrize_fns,
    decorateIf,
    dtype_name,
    instantiate_parametrized_tests,
    parametrize,
    reparametrize,
    subtest,
)
from torch_fsdp_tests.common_utils.seed import (
    freeze_rng_state,
    manual_seed,
    set_rng_seed,
)
from torch_fsdp_tests.common_utils.skips import (
    DeterministicGuard,
    SwapTensorsGuard,
    getRocmVersion,
    isRocmArchAnyOf,
    lazy_skip_if,
    runOnRocm,
    runOnRocmArch,
    serialTest,
    set_cwd,
    set_default_dtype,
    skip_but_pass_in_sandcastle,
    skip_but_pass_in_sandcastle_if,
    skipIfCrossRef,
    skipIfFreeThreaded,
    skipIfHpu,
    skipIfMPS,
    skipIfRocm,
    skipIfRocmArch,
    skipIfRocmVersionLessThan,
    skipIfTorchDynamo,
    skipIfTorchInductor,
    skipIfWindows,
    skipIfXpu,
    slowTest,
    slowTestIf,
    swap,
    wrapSwapTensorsTest,
    xfailIf,
)
from torch_fsdp_tests.common_utils.sleep import (
    device_sleep,
    get_cycles_per_ms,
)
from torch_fsdp_tests.common_utils.state import (
    SavedState,
    saved_state,
)
from torch_fsdp_tests.common_utils.tensors import (
    check_leaked_tensors,
    disable_gc,
)
from torch_fsdp_tests.common_utils.testcase import (
    TestCase,
    TestCaseBase,
)

__all__ = [
    "ADDRESS_IN_USE",
    "CONNECT_TIMEOUT",
    "FILE_SCHEMA",
    "IS_ARM64",
    "IS_CI",
    "IS_FBCODE",
    "IS_FREE_THREADED",
    "IS_LINUX",
    "IS_MACOS",
    "IS_PPC",
    "IS_REMOTE_GPU",
    "IS_S390X",
    "IS_SANDCASTLE",
    "IS_WINDOWS",
    "IS_X86",
    "MI200_ARCH",
    "MI300_ARCH",
    "MI350_ARCH",
    "NAVI3_ARCH",
    "NAVI4_ARCH",
    "NAVI_ARCH",
    "TEST_NUMPY",
    "TEST_SCIPY",
    "TEST_TRANSFORMERS",
    "TEST_WITH_AOT_EAGER",
    "TEST_WITH_ASAN",
    "TEST_WITH_CROSSREF",
    "TEST_WITH_DEV_DBG_ASAN",
    "TEST_WITH_ROCM",
    "TEST_WITH_SLOW",
    "TEST_WITH_TORCHDYNAMO",
    "TEST_WITH_TORCHINDUCTOR",
    "TEST_WITH_TSAN",
    "TEST_WITH_UBSAN",
    "DeterministicGuard",
    "SavedState",
    "SwapTensorsGuard",
    "TestCase",
    "TestCaseBase",
    "_TestParametrizer",
    "check_leaked_tensors",
    "compose_parametrize_fns",
    "decorateIf",
    "device_sleep",
    "disable_gc",
    "dtype_name",
    "find_free_port",
    "freeze_rng_state",
    "getRocmVersion",
    "get_cycles_per_ms",
    "instantiate_parametrized_tests",
    "isRocmArchAnyOf",
    "lazy_skip_if",
    "manual_seed",
    "parametrize",
    "reparametrize",
    "retry_on_connect_failures",
    "runOnRocm",
    "runOnRocmArch",
    "run_tests",
    "saved_state",
    "serialTest",
    "set_cwd",
    "set_default_dtype",
    "set_rng_seed",
    "skipIfCrossRef",
    "skipIfFreeThreaded",
    "skipIfHpu",
    "skipIfMPS",
    "skipIfRocm",
    "skipIfRocmArch",
    "skipIfRocmVersionLessThan",
    "skipIfTorchDynamo",
    "skipIfTorchInductor",
    "skipIfWindows",
    "skipIfXpu",
    "skip_but_pass_in_sandcastle",
    "skip_but_pass_in_sandcastle_if",
    "slowTest",
    "slowTestIf",
    "subtest",
    "swap",
    "wrapSwapTensorsTest",
    "xfailIf",
]


def __getattr__(name: str) -> Any:
    if name == "SEED":
        return _seed.seed_of_run()
    if name in _flags.ABOUT_DEVICE:
        return _flags.ABOUT_DEVICE[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
