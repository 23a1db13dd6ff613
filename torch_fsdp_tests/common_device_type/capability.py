"""Upstream's names for what a test needs of its device (since PyTorch 2.15), checked late and in the parent."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from torch_fsdp_tests.common_distributed.requirements import requires
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.installed_torch import upstream_names


class _Category(type):
    """A class whose attributes are names of capabilities: ``Capability.dtype.fp8`` is ``"dtype.fp8"``."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class Capability:
    """Names of capabilities by category. Upstream adds names with each version, so a category accepts any."""

    class dtype(metaclass=_Category):
        """Data types, such as ``fp8`` and ``bf16``."""

    class attention(metaclass=_Category):
        """Kernels of attention: ``flash_attention`` and ``mem_efficient_attention``."""

    class distributed(metaclass=_Category):
        """What a run over several ranks needs: ``backend``, ``fsdp`` and ``dtensor``."""

    class lib(metaclass=_Category):
        """Python packages, such as ``safetensors``."""


# What the device under test has because this suite runs on it.
_ALWAYS = {"distributed.backend", "distributed.fsdp", "distributed.dtensor"}
# Where upstream's own tables of devices look: a constant of a module of its harness, or the answer.
_BY_DEVICE: dict[str, dict[str, str | bool]] = {
    "cpu": {
        "dtype.fp8": True,
        "dtype.bf16": True,
        "attention.flash_attention": True,
        "attention.mem_efficient_attention": False,
    },
    "cuda": {
        "dtype.fp8": "common_cuda.PLATFORM_SUPPORTS_FP8",
        "dtype.bf16": "common_cuda.SM80OrLater",
        "attention.flash_attention": "common_cuda.PLATFORM_SUPPORTS_FLASH_ATTENTION",
        "attention.mem_efficient_attention": "common_cuda.PLATFORM_SUPPORTS_MEM_EFF_ATTENTION",
    },
    "xpu": {
        "dtype.fp8": True,
        "dtype.bf16": True,
        "attention.flash_attention": "common_xpu.PLATFORM_SUPPORTS_FLASH_ATTENTION_XPU",
        "attention.mem_efficient_attention": True,
    },
}


def _lacks(name: str) -> str | None:
    """The reason why a test that needs this capability cannot run, or None."""
    category, _, what = name.partition(".")
    if name in _ALWAYS or (category == "lib" and importlib.util.find_spec(what) is not None):
        return None
    device = accelerator.current()
    has = _BY_DEVICE.get(device.type, {}).get(name)
    if isinstance(has, str):
        module, _, constant = has.partition(".")
        has = bool(upstream_names.lookup(f"{upstream_names.PACKAGE}.{module}", constant))
    known = " as far as is known" if has is None else ""
    return None if has else f"needs {name}, which {device.name} does not have{known}"


def requires_capabilities(*caps: str) -> Callable[[Any], Any]:
    """Skip unless the device under test has all these capabilities, such as ``Capability.dtype.fp8``.

    Differs from upstream's: it needs no table in the test class, and a capability that no table knows is missing and
    not an error.
    """
    return requires(*(functools.partial(_lacks, name) for name in caps))
