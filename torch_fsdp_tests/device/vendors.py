"""What is known about each vendor's devices without importing torch, and where to find the rest.

The dispatcher uses it to assign devices, and the harness uses it to describe the device under test. A vendor's package
adds a :class:`Vendor` to the entry point group ``torch_fsdp_tests.accelerators``, under the name of its device type.
"""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch_fsdp_tests import installation
from torch_fsdp_tests.settings import ConfigurationError
from torch_fsdp_tests.verdict import in_one_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "torch_fsdp_tests.accelerators"


@dataclasses.dataclass(frozen=True)
class Vendor:
    """A vendor's declaration of a device type. Its module must not import torch.

    ``visibility_variables`` are the environment variables that restrict which devices a process sees; the first one is
    set if the caller has set none. ``count_devices``, if given, returns the number of devices if no variable is set.

    ``describe`` names a function as ``package.module:function``. It is imported late, so it may import torch. It takes
    ``backend`` and ``ranks``, each of which may be None, and returns an
    :class:`~torch_fsdp_tests.device.accelerator.Accelerator`. Without it torch itself is asked.

    ``torch_build`` names what torch has to be built for, as in its ``version`` module; None for a device that an
    extension brings. ``driver`` is a file with the version of the driver, which reports show. ``environment`` has
    variables for the processes of test files. They can make torch look for devices without starting their runtime.

    Raises :class:`ConfigurationError` for values of other types.
    """

    device_type: str
    visibility_variables: tuple[str, ...] = ()
    count_devices: Callable[[], int] | None = None
    backend: str | None = None
    describe: str | None = None
    torch_build: str | None = None
    driver: str | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        variables = self.visibility_variables
        listed = isinstance(variables, (tuple, list)) and all(isinstance(name, str) and name for name in variables)
        texts = {name: getattr(self, name) for name in ("device_type", "backend", "describe", "torch_build", "driver")}
        required = {name: "a text" for name, text in texts.items() if not isinstance(text, str | None)}
        if not texts["device_type"]:
            required["device_type"] = "the name of a device type"
        if not isinstance(self.environment, Mapping) or not all(
            isinstance(word, str) for pair in self.environment.items() for word in pair
        ):
            required["environment"] = "a dictionary of texts"
        if not listed:
            required["visibility_variables"] = "a tuple of names, with a comma: ('FOO_VISIBLE_DEVICES',)"
        if self.count_devices is not None and not callable(self.count_devices):
            required["count_devices"] = "a function without arguments"
        if self.describe is not None and not _is_place(self.describe):
            required["describe"] = "'package.module:function'"
        for name, what in required.items():
            raise ConfigurationError(f"{name} of the Vendor is {getattr(self, name)!r}; it must be {what}")

    def devices_there(self) -> int:
        """The number of devices. Raises :class:`ConfigurationError` if the vendor's function fails."""
        if self.count_devices is None:
            return 0
        of = f"count_devices of the vendor of {self.device_type!r}"
        try:
            count = self.count_devices()
        except Exception as error:
            raise ConfigurationError(f"{of} failed: {in_one_line(error)}") from error
        if not isinstance(count, int) or count < 0:
            raise ConfigurationError(f"{of} returned {count!r}; it must return the number of devices")
        return count


def _is_place(text: object) -> bool:
    module, _, function = text.partition(":") if isinstance(text, str) else ("", "", "")
    return bool(module and function)


def _nodes(pattern: str) -> Callable[[], int]:
    """Return a function that counts devices by their nodes in the file system."""
    return lambda: len(glob.glob(pattern))


_DRI, _NVIDIA = _nodes("/dev/dri/renderD*"), _nodes("/dev/nvidia[0-9]*")

# Otherwise torch.cuda.is_available starts the driver, and forks cannot use it. Imports of torch's inductor call it.
_WITHOUT_DRIVER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

BUILT_IN = (
    Vendor(
        "cuda",
        ("CUDA_VISIBLE_DEVICES",),
        _NVIDIA,
        "nccl",
        torch_build="cuda",
        driver="/sys/module/nvidia/version",
        environment=_WITHOUT_DRIVER,
    ),
    # ROCm builds of torch use CUDA's name for their devices.
    Vendor(
        "cuda",
        ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        _DRI,
        "nccl",
        torch_build="hip",
        driver="/sys/module/amdgpu/version",
        environment=_WITHOUT_DRIVER,
    ),
    Vendor("xpu", ("ZE_AFFINITY_MASK",), _DRI, "xccl", torch_build="xpu"),
    Vendor("npu", ("ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES"), _nodes("/dev/davinci[0-9]*"), "hccl"),
    Vendor("hpu", ("HABANA_VISIBLE_MODULES", "HABANA_VISIBLE_DEVICES"), _nodes("/dev/accel/accel[0-9]*"), "hccl"),
    Vendor("musa", ("MUSA_VISIBLE_DEVICES",), _nodes("/dev/mtgpu.[0-9]*"), "mccl"),
    Vendor("mlu", ("MLU_VISIBLE_DEVICES",), _nodes("/dev/cambricon_dev[0-9]*"), "cncl"),
    Vendor("neuron", ("NEURON_RT_VISIBLE_CORES",), backend="neuron"),  # a node of the file system has several cores
)


def of_type(device_type: str) -> list[Vendor]:
    """All declarations of a device type: that of an installed package, and those of this module."""
    ours = [vendor for vendor in BUILT_IN if vendor.device_type == device_type]
    return [*filter(None, [load(device_type)]), *ours]


def installed() -> Mapping[str, EntryPoint]:
    """The entry points of installed packages, by device type."""
    return installation.entry_points(ENTRY_POINTS)


def load(device_type: str) -> Vendor | None:
    """The declaration of a device type by an installed package, or None.

    Raises :class:`ConfigurationError` if the package cannot be imported, or declares something else or another type.
    """
    entry = installed().get(device_type)
    if entry is None:
        return None
    what = f"the entry point {entry.value} for {device_type!r}"
    try:
        vendor = entry.load()
    except ConfigurationError as error:
        raise ConfigurationError(f"{what} is wrong: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"{what} cannot be imported: {in_one_line(error)}") from error
    if not isinstance(vendor, Vendor):
        raise ConfigurationError(f"{what} is a {type(vendor).__name__}; declare a {__name__}.Vendor there")
    if vendor.device_type != device_type:
        raise ConfigurationError(f"{what} declares a Vendor of {vendor.device_type!r}; both must have the same name")
    return vendor


def load_all() -> list[Vendor]:
    """The declarations of all installed packages. Raises like :func:`load`, so that none is passed over silently."""
    return list(filter(None, map(load, installed())))
