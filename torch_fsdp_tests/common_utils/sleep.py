"""Keeps a device busy for a known time, so that a test can see what overlaps."""

from __future__ import annotations

import functools
import statistics
import time

import torch

from torch_fsdp_tests.device import accelerator

_HOST_CYCLES_PER_MS = 1e6  # the CPU substitute counts in nanoseconds
_MEASURED_CYCLES = 1_000_000
_MEASUREMENTS = 10
_OUTLIERS = 2  # measurements to drop at each end; the first calls on a device are slow


def _device_type(device: torch.device | str | int | None) -> str:
    return accelerator.current().type if device is None else torch.device(device).type


def _has_kernel(device_type: str) -> bool:
    under_test = accelerator.current()
    if device_type == under_test.type:
        return under_test.has("sleep_kernel")
    return hasattr(torch.get_device_module(device_type), "_sleep")


def device_sleep(device: torch.device | str | int | None, cycles: int) -> None:
    """Keep the device's current stream busy for ``cycles`` of its clock, while the calling thread continues.

    If the device has no sleep kernel (capability ``sleep_kernel``), the calling thread waits instead, and a cycle is
    one nanosecond. The rank's work is delayed by the same time, but nothing overlaps with it. Differs from upstream's:
    on the CPU, upstream counts in a loop, and the speed depends on the interpreter.
    """
    kind = _device_type(device)
    if _has_kernel(kind):
        torch.get_device_module(kind)._sleep(cycles)
    else:
        time.sleep(cycles / _HOST_CYCLES_PER_MS / 1e3)


def host_time() -> float:
    """Seconds on the CPU's clock, to measure how long the CPU waits for the device under test.

    On a simulated device, :func:`device_sleep` takes no time. Its module has ``_waited()`` then, which returns the
    nanoseconds for which the CPU would have waited, and this clock contains them.
    """
    waited = getattr(torch.get_device_module(accelerator.current().type), "_waited", None)
    return time.perf_counter() + (waited() / 1e9 if waited else 0)


def get_cycles_per_ms(device: torch.device | str | int | None = None) -> float:
    """Cycles of :func:`device_sleep` in a millisecond of this device, by default the one under test. Measured once."""
    return _cycles_per_ms(_device_type(device))


@functools.cache
def _cycles_per_ms(kind: str) -> float:
    if not _has_kernel(kind):
        return _HOST_CYCLES_PER_MS
    module = torch.get_device_module(kind)

    def measure() -> float:
        start, end = (module.Event(enable_timing=True) for _ in range(2))
        start.record()
        module._sleep(_MEASURED_CYCLES)
        end.record()
        end.synchronize()
        return _MEASURED_CYCLES / start.elapsed_time(end)

    rates = sorted(measure() for _ in range(_MEASUREMENTS))
    return statistics.mean(rates[_OUTLIERS:-_OUTLIERS])
