"""What is known about each vendor's devices without importing torch, and where to find the rest.

The dispatcher uses it to lend devices, and the harness uses it to describe the device under test. A vendor's package
adds a :class:`Vendor` to the entry point group ``torch_fsdp_tests.accelerators``, under the name of its device type.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "torch_fsdp_tests.accelerators"

DEVICE_VARIABLE = "TORCH_FSDP_TESTS_DEVICE"
BACKEND_VARIABLE = "TORCH_FSDP_TESTS_BACKEND"
RANKS_VARIABLE = "TORCH_FSDP_TESTS_RANKS"


class ConfigurationError(ValueError):
    """The requested device, backend or number of ranks is not available. The message says what to do."""


@dataclasses.dataclass(frozen=True)
class Vendor:
    """A vendor's declaration of a device type. Its module must not import torch.

    ``visibility_variables`` are the environment variables that restrict which devices a process sees; the first one is
    set if the caller has set none. ``count_devices`` returns the number of devices if no variable is set.

    ``describe`` names a function as ``package.module:function``. It is imported late, so it may import torch. It takes
    ``backend`` and ``ranks``, each of which may be None, and returns an
    :class:`~torch_fsdp_tests.accelerator.Accelerator`. Without it torch itself is asked.

    ``torch_build`` names what torch has to be built for, as in its ``version`` module; None for a device that an
    extension brings.
    """

    device_type: str
    visibility_variables: tuple[str, ...] = ()
    count_devices: Callable[[], int] = lambda: 0
    backend: str | None = None
    describe: str | None = None
    torch_build: str | None = None


def _nodes(pattern: str) -> Callable[[], int]:
    """Return a function that counts devices by their nodes in the file system."""
    return lambda: len(glob.glob(pattern))


_DRI, _NVIDIA = _nodes("/dev/dri/renderD*"), _nodes("/dev/nvidia[0-9]*")

BUILT_IN = (
    Vendor("cuda", ("CUDA_VISIBLE_DEVICES",), _NVIDIA, "nccl", torch_build="cuda"),
    # ROCm builds of torch use CUDA's name for their devices.
    Vendor(
        "cuda", ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), _DRI, "nccl", torch_build="hip"
    ),
    Vendor("xpu", ("ZE_AFFINITY_MASK",), _DRI, "xccl", torch_build="xpu"),
    Vendor("npu", ("ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES"), _nodes("/dev/davinci[0-9]*"), "hccl"),
    Vendor("hpu", ("HABANA_VISIBLE_MODULES", "HABANA_VISIBLE_DEVICES"), _nodes("/dev/accel/accel[0-9]*"), "hccl"),
    Vendor("musa", ("MUSA_VISIBLE_DEVICES",), _nodes("/dev/mtgpu.[0-9]*"), "mccl"),
    Vendor("mlu", ("MLU_VISIBLE_DEVICES",), _nodes("/dev/cambricon_dev[0-9]*"), "cncl"),
)


def installed() -> Mapping[str, EntryPoint]:
    """The entry points of installed packages, by device type."""
    if not any(map(_is_for_us, sys.path)):
        return {}
    import importlib.metadata  # imported late, because it takes longer than a whole plan, and is rarely needed

    return {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def _is_for_us(folder: str) -> bool:
    """Whether a folder of packages has one with an entry point of this group."""
    files = glob.glob(os.path.join(glob.escape(folder), "*-info", "entry_points.txt"))
    return any(f"[{ENTRY_POINTS}]" in Path(file).read_text(encoding="utf-8", errors="replace") for file in files)


def load(device_type: str) -> Vendor | None:
    """The declaration of a device type by an installed package, or None.

    Raises :class:`ConfigurationError` if the package cannot be imported or declares something else.
    """
    entry = installed().get(device_type)
    if entry is None:
        return None
    try:
        vendor = entry.load()
    except Exception as error:
        raise ConfigurationError(f"the entry point {entry.value} for {device_type!r} failed: {error}") from error
    if not isinstance(vendor, Vendor):
        raise ConfigurationError(
            f"the entry point {entry.value} for {device_type!r} is a {type(vendor).__name__}; "
            f"declare a {__name__}.Vendor there"
        )
    return vendor
