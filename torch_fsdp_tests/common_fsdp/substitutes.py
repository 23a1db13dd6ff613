"""Contexts that let FSDP1 tests run without an accelerator.

Every rank has the substitutes of :mod:`torch_fsdp_tests.device.substitutes`. One that a test may see is a context here.
"""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.device.substitutes import install, uninstall  # noqa: F401
from torch_fsdp_tests.installed_torch import torch_names

_flat_param = torch_names.module("torch.distributed.fsdp._flat_param")


def to_host_is_a_copy() -> AbstractContextManager[Any]:
    """Moving a whole flat parameter to the CPU copies it, even if it is there already.

    A workaround for ``fsdp1_offloading_on_the_host_frees_parameters``: without the copy, FSDP frees what it has just
    moved (with ``offload_to_cpu`` for a state dict). A test in this context shows what FSDP does with the copy,
    but not that FSDP makes one. For ranks that are processes.
    """
    if accelerator.current().has("device_memory"):
        return contextlib.nullcontext()
    handle = _flat_param.FlatParamHandle
    move = functools.partialmethod(torch_names.attribute(handle, "flat_param_to"), copy=True)
    return mock.patch.object(handle, "flat_param_to", move)
