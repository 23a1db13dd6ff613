"""Tests of other projects that name a device which is not there.

Upstream's ``skip_if_lt_x_gpu`` skips on the CPU, so a body behind it may name the device of its author. Here the CPU
runs it, and torch rejects the device: then the test skips, with torch's words. A test of this suite fails, because it
has to use the device under test.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator

from torch_fsdp_tests import installation
from torch_fsdp_tests.device import accelerator, vendors
from torch_fsdp_tests.verdict import Reason, SkipKind, first_line
from torch_fsdp_tests.verdict.events import Skipped

__unittest = True

_KNOWN = "|".join(sorted({vendor.device_type for vendor in vendors.BUILT_IN} | {"mps", "mtia", "ipu", "xla"}))
# How torch rejects a device that is not there, with its type or backend if the message has it.
_REJECTS = re.compile(
    r"(?:type torch\S+ not available. )?Torch not compiled with (\w+) enabled"
    r"|PyTorch was compiled without (\w+) support"
    r"|torch\.\S+ requires (\w+) support"
    r"|Tried to instantiate dummy base class \w+"
    r"|Cannot get (\w+) generator without ATen"
    r"|No (\w+) (?:GPUs|devices) are available"
    r"|Found no (NVIDIA) driver"
    r"|Cannot access accelerator device when none is available"
    r"|Expected one of cpu, .* device type at start of device string: (\w+)"
    r"|Distributed package doesn't have (\w+) built in"
    rf"|Could not run '\S+' with arguments from the '({_KNOWN})' backend"
    rf"|module 'torch\._C' has no attribute '_({_KNOWN})_\w+'"
    rf"|module 'torch' has no attribute '({_KNOWN})'|No module named 'torch\.({_KNOWN})'"
    rf"|'(?:Tensor|Parameter|Module|\w*Linear)' object has no attribute '({_KNOWN})'",
    re.IGNORECASE,
)


def absence(error: Exception) -> Reason | None:
    """Why a test skips that has raised this, or None if it has not named a device that is not there."""
    found = _REJECTS.match(str(error))
    if found is None:
        return None
    named = next(filter(None, found.groups()), "").lower().replace("nvidia", "cuda")
    device = accelerator.current_or_none()
    if device is not None and not device.is_cpu and named in ("", device.type, device.vendor_name, device.backend):
        return None  # the device under test does not work
    return Reason(f"the test names a device that is not there: {first_line(error)}", SkipKind.DEVICE)


@contextlib.contextmanager
def skips(owner: type | Callable) -> Iterator[None]:
    """In this block, a test skips if it names a device that is not there. ``owner`` is a class or function of its file.

    Raises what the block raises if the file is one of this suite.
    """
    try:
        yield
    except Exception as error:
        file = getattr(sys.modules.get(owner.__module__), "__file__", None)
        reason = None if installation.has(file) else absence(error)
        if reason is None:
            raise
        raise Skipped(reason) from error
