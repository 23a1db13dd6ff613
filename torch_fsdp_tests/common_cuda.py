"""Upstream's names about CUDA, which are computed from the device under test when they are used."""

from __future__ import annotations

from typing import Any

from torch_fsdp_tests.common_utils.flags import has_devices

_LEAST_DEVICES = {"TEST_CUDA": 1, "TEST_MULTIGPU": 2}


def __getattr__(name: str) -> Any:
    if name in _LEAST_DEVICES:
        return has_devices("cuda", _LEAST_DEVICES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
