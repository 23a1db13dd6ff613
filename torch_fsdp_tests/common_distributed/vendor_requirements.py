"""Decorators of upstream that say what a test needs, for files of vendors. No test of this project uses them.

As those of :mod:`.requirements`, they are checked late and in the parent, and ask for the device under test.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_fsdp_tests.common_distributed.requirements import (
    Requirement,
    requires,
    requires_capability,
    requires_nccl_version,
    skip_if_lt_x_gpu,
)
from torch_fsdp_tests.common_utils.flags import TEST_WITH_ROCM
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.verdict import Reason, SkipKind

__unittest = True

Decorator = Callable[[Any], Any]


def _built_with(backend: str) -> Decorator:
    """Skip if torch was built without this backend, whichever backend is under test."""

    def reason() -> str | None:
        is_there = dist.is_backend_available(backend)
        return None if is_there else Reason(f"torch was built without the backend {backend}", SkipKind.TORCH)

    return requires(reason)


def requires_xccl() -> Decorator:
    """Skip if torch was built without XCCL."""
    return _built_with("xccl")


def requires_ucc() -> Decorator:
    """Skip if torch was built without UCC."""
    return _built_with("ucc")


def requires_mpi() -> Decorator:
    """Skip if torch was built without MPI."""
    return _built_with("mpi")


def requires_nccl_shrink() -> Decorator:
    """Skip if the backend under test is an NCCL that cannot shrink a communicator."""
    return requires_nccl_version((2, 27), "ncclCommShrink")


def requires_multicast_support() -> Decorator:
    """Skip unless one write of a device of the type under test can reach the memory of several (CUDA's multicast)."""

    def reason() -> str | None:
        device = accelerator.current()
        if device.type != "cuda":
            return f"needs multicast, which PyTorch offers for CUDA and not for {device.name}"
        has = torch._C._distributed_c10d._SymmetricMemory.has_multicast_support
        return None if has(torch._C._autograd.DeviceType.CUDA, 0) else "needs devices with multicast"

    return requires(reason)


def requires_cuda_p2p_access() -> Decorator:
    """Skip unless the devices under test can access each other's memory."""
    return requires_capability("peer_access")


def skip_if_no_gpu(func: Any) -> Any:
    """Skip unless each rank has an accelerator of its own. The number of ranks is that of ``WORLD_SIZE``."""

    def reason() -> str | None:
        device, ranks = accelerator.current(), _world_size() or 1
        return None if not device.is_cpu and device.count >= ranks else f"needs {ranks} accelerators"

    return requires(reason)(func)


def nccl_skip_if_lt_x_gpu(backend: str, x: int) -> Decorator:
    """For ``backend="nccl"``, skip unless there is room for ``x`` ranks. For another backend this does nothing."""
    return skip_if_lt_x_gpu(x) if backend == "nccl" else lambda func: func


def require_n_gpus_for_nccl_backend(n: int, backend: str) -> Decorator:
    """The same as :func:`nccl_skip_if_lt_x_gpu`, with the parameters in the other order."""
    return nccl_skip_if_lt_x_gpu(backend, n)


def _world_size() -> int | None:
    """The world size as upstream's tests of c10d set it, or that of the group that exists, or None."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return dist.get_world_size() if dist.is_initialized() else None


def _skip_for_world_size(is_wrong: Callable[[int], object], words: str) -> Decorator:
    def reason() -> str | None:
        ranks = _world_size()
        is_met = ranks is None or os.environ.get("BACKEND") == "mpi" or not is_wrong(ranks)
        return None if is_met else f"{words}, and not {ranks}"

    return requires(reason)


skip_if_small_worldsize = _skip_for_world_size(lambda ranks: ranks < 8, "needs 8 or more ranks")
skip_if_odd_worldsize = _skip_for_world_size(lambda ranks: ranks % 2, "needs an even number of ranks")


def skip_if_win32() -> Decorator:
    """Skip on Windows."""
    return requires(lambda: "not for Windows" if sys.platform == "win32" else None)


def import_transformers_or_skip() -> Decorator:
    """Skip if the package transformers is not installed."""

    def reason() -> str | None:
        is_there = importlib.util.find_spec("transformers") is not None
        return None if is_there else Reason("needs the package transformers", SkipKind.OTHER)

    return requires(reason)


def _rocm_version() -> tuple[int, ...]:
    text = str(getattr(torch.version, "rocm", None) or torch.version.hip).partition("-")[0]
    return tuple(int(number) for number in text.split("."))


def _for_rocm(is_wrong: Callable[[tuple[int, ...]], bool], words: str) -> Requirement:
    return lambda: words if TEST_WITH_ROCM and is_wrong(_rocm_version()) else None


def skip_if_rocm_ver_lessthan_multiprocess(version: Sequence[int] | None = None) -> Decorator:
    """In a run for ROCm, skip if it is older than ``version``, such as ``(7, 0)``; without a version, always."""
    old = _for_rocm(lambda found: version is None or found < tuple(version), f"needs ROCm {version} or newer")
    return requires(old)


def skip_if_rocm_ver_atleast_multiprocess(version: Sequence[int] | None = None) -> Decorator:
    """In a run for ROCm, skip if it is ``version`` or newer; without a version, never."""
    new = _for_rocm(lambda found: version is not None and found >= tuple(version), f"not for ROCm {version} or newer")
    return requires(new)
