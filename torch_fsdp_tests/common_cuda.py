"""Upstream's names about CUDA, which are computed when they are used.

``__getattr__`` computes every name: the first two from the device under test, the others from torch if that device is
CUDA. A compute capability starts the CUDA runtime. If a test file uses one at import, its ranks no longer start
quickly.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from torch_fsdp_tests.common_utils.flags import has_devices

_OR_LATER = re.compile(r"SM(\d+)OrLater")
_EXACTLY = re.compile(r"IS_SM(\d+)")


def get_compute_capability() -> tuple[int, int]:
    """The compute capability of the current CUDA device as (major, minor), or (0, 0) if CUDA is not under test."""
    return torch.cuda.get_device_capability() if has_devices("cuda") else (0, 0)


def _capability(digits: str) -> tuple[int, int]:
    return int(digits[:-1]), int(digits[-1])


def __getattr__(name: str) -> Any:
    if name == "TEST_CUDA":
        return has_devices("cuda")
    if name == "TEST_MULTIGPU":
        return has_devices("cuda", at_least=2)
    if name == "CUDA_DEVICE":
        return torch.device("cuda", 0) if has_devices("cuda") else None
    if name == "TEST_CUDNN":
        return has_devices("cuda") and torch.backends.cudnn.is_available()
    if name == "TEST_CUDNN_VERSION":
        return torch.backends.cudnn.version() if __getattr__("TEST_CUDNN") else 0
    if name == "PLATFORM_SUPPORTS_BF16":
        return has_devices("cuda") and torch.cuda.is_bf16_supported()
    if match := _OR_LATER.fullmatch(name):
        return has_devices("cuda") and get_compute_capability() >= _capability(match[1])
    if match := _EXACTLY.fullmatch(name):
        return has_devices("cuda") and get_compute_capability() == _capability(match[1])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
