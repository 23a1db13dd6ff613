"""Flags with upstream's names: the platform, the build under test, and the device under test.

A flag that depends on the environment or the interpreter is a constant. A flag that depends on the device under test,
such as ``TEST_CUDA``, is computed by ``about_device`` when it is used. The package's ``__getattr__`` calls this
function. It uses :func:`torch_fsdp_tests.device.accelerator.current`, and starts no device runtime.
"""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Callable

import torch

from torch_fsdp_tests import settings
from torch_fsdp_tests.device import accelerator

FILE_SCHEMA = "file:///" if sys.platform == "win32" else "file://"

IS_LINUX = sys.platform == "linux"
IS_WINDOWS = sys.platform == "win32"
IS_MACOS = sys.platform == "darwin"

IS_SANDCASTLE = settings.is_on("SANDCASTLE", os.environ)  # a CI of Meta
TEST_WITH_ASAN = settings.is_on("PYTORCH_TEST_WITH_ASAN", os.environ)
TEST_WITH_DEV_DBG_ASAN = settings.is_on("PYTORCH_TEST_WITH_DEV_DBG_ASAN", os.environ)
TEST_WITH_ROCM = settings.is_on("PYTORCH_TEST_WITH_ROCM", os.environ)
TEST_WITH_SLOW = settings.is_on(settings.SLOW_VARIABLE, os.environ)

# ROCm architecture names, for skipIfRocmArch and its kin.
MI200_ARCH = ("gfx90a",)


class HardwareClassification(enum.Enum):
    """What a test class sets as ``hw_classification``, for a selection that upstream's runner has. Nothing reads it."""

    GENERIC = "generic"
    ACCELERATOR = "accelerator"
    CPU = "cpu"
    CUDA = "cuda"
    MPS = "mps"
    XPU = "xpu"


def device_type_under_test() -> str:
    """The device type in generated names, even if the requested device or its backend is not available."""
    device = accelerator.current_or_none()  # called at import, where an exception would hide every test of a file
    return device.type if device is not None else os.environ.get(accelerator.DEVICE_VARIABLE) or "cpu"


def privateuse1_name() -> str:
    """The name that an extension has given to torch's spare device type, or the default name."""
    return torch._C._get_privateuse1_backend_name()


def has_devices(device_type: str, at_least: int = 1) -> bool:
    """Whether the device under test has this type, and at least this many devices are visible."""
    device = accelerator.current_or_none()
    return device is not None and device.type == device_type and device.count >= at_least


ABOUT_DEVICE: dict[str, Callable[[], object]] = {
    "TEST_CUDA": lambda: has_devices("cuda"),
    "TEST_HPU": lambda: has_devices("hpu"),
    "TEST_XPU": lambda: has_devices("xpu"),
}
