"""Finds out whether ``torch.compile`` can really compile here. It does so once, when a name of this module is first
used.

An installed compiler is useless to inductor if it cannot build an extension of this Python, so this module lets it
build one. Upstream asks torch for any GPU. Here the device under test decides.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shlex
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torch_fsdp_tests.common_utils.flags import device_under_test, has_devices

COMPILE_LIMIT = 60  # seconds; a cold compiler on a loaded machine takes a few

# Inductor's kernels for the host include Python's header, and OpenMP's.
_SOURCE = "#include <Python.h>\n#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"


@functools.cache
def why_no_host_compiler() -> str | None:
    """The reason why inductor cannot compile for the host, or None if a small extension could be built."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(_SOURCE)
        include = f"-I{sysconfig.get_path('include')}"
        command = [*compiler, include, "-fopenmp", "-shared", "-fPIC", str(source), "-o", str(Path(folder, "probe.so"))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"the C++ compiler does not run: {error}"
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or [
                f"exit status {done.returncode}"
            ]
            return f"the C++ compiler cannot build an extension: {errors[0]}"
    return None


@functools.cache
def why_no_device_compiler() -> str | None:
    """The reason why inductor cannot compile for the device under test, or None if it can."""
    device = device_under_test()
    if device is None or device.is_host:
        return "the device under test is not an accelerator"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from torch.utils._triton import has_triton

    if not has_triton():
        return f"triton does not work with this {device.type}"
    return why_no_host_compiler()  # triton builds the launcher of each kernel with it


def has_device_compiler(device_type: str) -> bool:
    return has_devices(device_type) and why_no_device_compiler() is None


def _gpu_type() -> str:
    # This is upstream's fallback too: test files build device strings from it before they skip.
    device = device_under_test()
    return "cuda" if device is None or device.is_host else device.type


_ANSWERS: dict[str, Callable[[], object]] = {
    "HAS_CPU": lambda: why_no_host_compiler() is None,
    "HAS_TRITON": lambda: why_no_device_compiler() is None,
    "HAS_GPU": lambda: why_no_device_compiler() is None,
    "HAS_GPU_AND_TRITON": lambda: why_no_device_compiler() is None,
    "HAS_CUDA": lambda: has_device_compiler("cuda"),
    "HAS_CUDA_AND_TRITON": lambda: has_device_compiler("cuda"),
    "HAS_XPU": lambda: has_device_compiler("xpu"),
    "HAS_XPU_AND_TRITON": lambda: has_device_compiler("xpu"),
    "HAS_MULTIGPU": lambda: why_no_device_compiler() is None and torch.accelerator.device_count() > 1,
    "GPU_TYPE": _gpu_type,
}


def __getattr__(name: str) -> Any:
    if name in _ANSWERS:
        return _ANSWERS[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
