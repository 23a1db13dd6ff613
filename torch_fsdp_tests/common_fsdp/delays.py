"""Delays on the device, for tests of which operation waits for which."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from torch_fsdp_tests.common_utils import device_sleep, get_cycles_per_ms
from torch_fsdp_tests.device import accelerator


def delay_device(milliseconds: float) -> None:
    """Keep the device's current stream busy for a time. Does nothing on a device without a sleep kernel: if the calling
    thread waited instead, the device would finish earlier and not later, so the delay would prove nothing.
    """
    device = accelerator.current()
    if milliseconds > 0 and device.has("sleep_kernel"):
        device_sleep(device.type, int(milliseconds * get_cycles_per_ms(device.type)))


def delayed_inside(owner: Any, name: str, milliseconds: float) -> AbstractContextManager[object]:
    """Inside the context, the device is kept busy before each call of ``owner.name``. Only for ranks that are
    processes, because threads would share the patch.
    """
    if milliseconds <= 0:
        return contextlib.nullcontext()
    function = getattr(owner, name)

    @functools.wraps(function)
    def late(*args: Any, **kwargs: Any) -> Any:
        delay_device(milliseconds)
        return function(*args, **kwargs)

    return mock.patch.object(owner, name, late)
