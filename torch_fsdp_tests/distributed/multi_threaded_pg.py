"""Upstream's name for the process group whose ranks are threads, :mod:`torch_fsdp_tests.ranks.threaded_pg`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from torch_fsdp_tests.installed_torch import upstream_names
from torch_fsdp_tests.ranks.threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)


def ret_work(ret: Any) -> dist.Work:
    """The handle of a collective that is done, with its result, for a method that a vendor replaces."""
    future: Future = Future()
    future.set_result(ret)
    return torch._C._distributed_c10d._create_work_from_future(future)


__all__ = [
    "ProcessLocalGroup",
    "_install_threaded_pg",
    "_uninstall_threaded_pg",
    "ret_work",
]

__getattr__ = upstream_names.complete(__name__)
