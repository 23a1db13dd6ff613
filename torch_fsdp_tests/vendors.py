"""What is known of each vendor's devices without importing torch, and where to find the rest.

The dispatcher lends devices by it, and the harness asks it for the device under test. A vendor's package adds a
:class:`Vendor` under the entry point group ``torch_fsdp_tests.accelerators``, named as its device type.
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
    """The device, backend or number of ranks that was asked for cannot be had. The message says what to do."""


@dataclasses.dataclass(frozen=True)
class Vendor:
    """One kind of device, as its vendor declares it. The module that holds it must not import torch.

    ``visibility_variables`` are the environment variables that restrict which devices a process sees; the first one is
    set where the caller has set none. ``count_devices`` says how many there are when no variable tells.

    ``describe`` names a function as ``package.module:function``. It is imported late, so it may import torch; it takes
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
    """Counts devices by their nodes in the file system."""
    return lambda: len(glob.glob(pattern))


_DRI, _NVIDIA = _nodes("/dev/dri/renderD*"), _nodes("/dev/nvidia[0-9]*")

BUILT_IN = (
    Vendor("cuda", ("CUDA_VISIBLE_DEVICES",), _NVIDIA, "nccl", torch_build="cuda"),
    # ROCm builds of torch call their devices by CUDA's name.
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
    import importlib.metadata  # not at import: it takes longer than a whole plan may, and hardly anyone needs it

    return {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def _is_for_us(folder: str) -> bool:
    """Whether a folder of packages has one with an entry point for us."""
    files = glob.glob(os.path.join(glob.escape(folder), "*-info", "entry_points.txt"))
    return any(f"[{ENTRY_POINTS}]" in Path(file).read_text(encoding="utf-8", errors="replace") for file in files)


def load(device_type: str) -> Vendor | None:
    """What an installed package declares of a device type; None where none does.

    Raises :class:`ConfigurationError` when the package cannot be imported or declares something else.
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
