"""Upstream's names about CUDA. Those that count devices are computed from the device under test when they are used."""

from __future__ import annotations

import functools

from torch_fsdp_tests.common_utils.flags import has_devices
from torch_fsdp_tests.installed_torch import upstream_names

__all__ = [
    "TEST_CUDA",
    "TEST_MULTIGPU",
]

__getattr__ = upstream_names.complete(
    __name__,
    {"TEST_CUDA": functools.partial(has_devices, "cuda"), "TEST_MULTIGPU": functools.partial(has_devices, "cuda", 2)},
)
