"""Delays on the device, for tests of which operation waits for which."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch.distributed as dist

from torch_fsdp_tests.common_utils import device_sleep, get_cycles_per_ms
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.installed_torch import torch_facts, torch_names

_fsdp1_runtime = torch_names.module("torch.distributed.fsdp._runtime_utils")


def delay_device(milliseconds: float) -> None:
    """Keep the device's current stream busy for a time. Does nothing on a device without a sleep kernel: if the calling
    thread waited instead, the device would finish earlier and not later, so the delay would prove nothing.
    """
    device = accelerator.current()
    if milliseconds > 0 and device.has("sleep_kernel"):
        device_sleep(device.type, int(milliseconds * get_cycles_per_ms(device.type)))


def _delaying(owner: Any, name: str, milliseconds: float) -> AbstractContextManager[object]:
    """Inside the context, ``owner.name`` first delays the device. Not for ranks in threads, which share the patch."""
    if milliseconds <= 0:
        return contextlib.nullcontext()
    function = getattr(owner, name)

    @functools.wraps(function)
    def late(*args: Any, **kwargs: Any) -> Any:
        delay_device(milliseconds)
        return function(*args, **kwargs)

    return mock.patch.object(owner, name, late)


def _delayed_reduce_scatter(milliseconds: float) -> AbstractContextManager[object]:
    """Inside the context, the gradients' reduce-scatters are delayed."""
    return _delaying(dist, torch_facts.reduce_scatter_name(), milliseconds)


def _delayed_reshard(milliseconds: float) -> AbstractContextManager[object]:
    """Inside the context, FSDP1 frees unsharded parameters late. Its runtime looks the function up at each call."""
    return _delaying(_fsdp1_runtime, "_reshard", milliseconds)
