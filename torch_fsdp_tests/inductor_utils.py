"""Finds out whether ``torch.compile`` can really compile here, once, when a name of this module is first used.

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
from pathlib import Path

from torch_fsdp_tests.common_utils.flags import TEST_WITH_SLOW, has_devices
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.installed_torch import upstream_names
from torch_fsdp_tests.verdict import Reason, SkipKind

COMPILE_LIMIT = 60  # seconds; a cold compiler on a loaded machine takes a few

# Inductor's kernels for the CPU include Python's header, and OpenMP's.
_SOURCE = "#include <Python.h>\n#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"


@functools.cache
def why_no_host_compiler() -> str | None:
    """The reason why inductor cannot compile for the CPU, or None if a small extension could be built."""
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
            errors = (line for line in done.stderr.splitlines() if "error" in line)
            return f"the C++ compiler cannot build an extension: {next(errors, f'exit status {done.returncode}')}"
    return None


@functools.cache
def why_no_device_compiler() -> str | None:
    """The reason why inductor cannot compile for the device under test, or None if it can."""
    device = accelerator.current_or_none()
    if device is None or device.is_cpu:
        return "the device under test is not an accelerator"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from torch.utils._triton import has_triton

    if not has_triton():
        return f"triton does not work with this {device.type}"
    return why_no_host_compiler()  # triton builds the launcher of each kernel with it


def why_no_inductor() -> str | None:
    """The reason why a test cannot compile with inductor for the device under test, or None."""
    if not accelerator.current().is_cpu:
        return why_no_device_compiler()
    if not TEST_WITH_SLOW:
        words = "a C++ compiler takes half a minute or more; PYTORCH_TEST_WITH_SLOW=1 runs it"
        return Reason(words, SkipKind.SLOW)
    return why_no_host_compiler()


def _compiles_for(device_type: str) -> bool:
    return has_devices(device_type) and why_no_device_compiler() is None


__all__ = [
    "HAS_CUDA",
    "HAS_GPU",
    "HAS_XPU_AND_TRITON",
]

__getattr__ = upstream_names.complete(
    __name__,
    {
        "HAS_GPU": lambda: why_no_device_compiler() is None,
        "HAS_CUDA": lambda: _compiles_for("cuda"),
        "HAS_XPU_AND_TRITON": lambda: _compiles_for("xpu"),
    },
)
