"""Finds the devices that this run may assign, without torch: from options, the environment and the vendors."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_fsdp_tests.device import vendors
from torch_fsdp_tests.device.vendors import Vendor
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.installed_torch import sources
from torch_fsdp_tests.installed_torch.version_ranges import version_fits
from torch_fsdp_tests.settings import BACKEND_VARIABLE, DEVICE_VARIABLE, RANKS_VARIABLE, ConfigurationError

CPU = "cpu"
MIN_TORCH = ">=2.9"
MAX_DEVICES = 10_000  # in one range of names
_BUILT_INTO_TORCH = ("mps", "mtia")  # device types of torch itself that no vendor here declares
_WHICH_BUILD = "https://pytorch.org/get-started says which build of torch fits a GPU"
_UNAVAILABLE = 42  # exit status if a device is not available
# What a separate process runs to find out whether torch can be imported and the device is available.
_IS_AVAILABLE = f"""
import sys
from torch_fsdp_tests.settings import ConfigurationError
from torch_fsdp_tests.verdict import in_one_line
try:
    from torch_fsdp_tests.device import accelerator
except Exception as error:
    print("torch cannot be imported:", in_one_line(error))
    sys.exit({_UNAVAILABLE})
try:
    accelerator.current()
except ConfigurationError as error:
    print(error)
    sys.exit({_UNAVAILABLE})
"""


@dataclasses.dataclass(frozen=True)
class DeviceSet:
    """The devices of one type that may be assigned, under the names in the vendor's variable."""

    type: str
    names: tuple[str, ...]  # empty on the CPU
    variable: str | None = None  # restricts which devices a job sees; without it a job sees all devices
    backend: str | None = None  # the default backend between ranks; None if only the harness knows
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)  # environment variables of every job

    @property
    def assignable(self) -> int | None:
        """The number of devices that can be assigned, or None on the CPU."""
        return None if self.type == CPU else len(self.names)

    @property
    def is_assigned_whole(self) -> bool:
        """Whether a job gets all devices or none, because nothing restricts which devices it uses."""
        return self.variable is None and bool(self.names)

    @property
    def remark(self) -> str | None:
        """A remark if these devices are assigned in an unusual way."""
        if self.type == CPU or self.variable is not None:
            return None
        unknown = f"no vendor declares a variable that restricts which devices of type {self.type!r} a process sees"
        if self.names:
            return f"{unknown}: each file gets all {len(self.names)} of them, one file at a time"
        return f"{unknown}, and their number is unknown: none are assigned, and files that run in parallel share them"

    def shared(self) -> DeviceSet:
        """The same devices for all files at once: none are assigned, and each file sees all of them."""
        visible = {self.variable: ",".join(self.names)} if self.variable is not None and self.names else {}
        return dataclasses.replace(self, names=(), variable=None, variables={**self.variables, **visible})

    def environment(self, assigned: tuple[int, ...]) -> dict[str, str]:
        """The environment variables with which a job sees only the devices at these positions."""
        if not self.assignable or self.variable is None:
            return dict(self.variables)
        return {**self.variables, self.variable: ",".join(self.names[position] for position in assigned)}


def parse_names(text: str) -> tuple[str, ...]:
    """Parse ``0,1,2``, ``0-7`` or a vendor's own ids, in order. Raises ``ValueError`` for an empty list or a repeated
    name.
    """
    names: list[str] = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        span = re.fullmatch(r"(\d+)-(\d+)", word)
        if span and (max(map(len, span.groups())) > 9 or int(span[2]) - int(span[1]) >= MAX_DEVICES):
            raise ValueError(f"{word[:40]!r} has more than {MAX_DEVICES} devices")
        if span is None and re.fullmatch(r"\d*-\d*", word):
            raise ValueError(f"{word!r} is not a range of devices, such as 0-7")
        if span and int(span[1]) > int(span[2]):
            raise ValueError(f"{word!r} counts backwards")
        names += map(str, range(int(span[1]), int(span[2]) + 1)) if span else [word]
    if not names:
        raise ValueError("no device is named")
    if len(set(names)) != len(names):
        raise ValueError(f"{text!r} names a device twice")
    return tuple(names)


def find(device: str | None, names: tuple[str, ...] | None, environment: Mapping[str, str]) -> DeviceSet:
    """The devices to assign for ``--device`` and ``--devices``, such as ``xpu`` and ``0-3``. Each may be None.

    Raises :class:`ConfigurationError` for an unknown type, and for named devices that cannot be assigned one by one.
    """
    device = device or environment.get(DEVICE_VARIABLE)
    if device:
        _check_known(device, environment)
    # Without a name: the first candidate with visible devices, which the installed torch most likely picks.
    likely = (vendor for vendor in _candidates(environment) if _visible(vendor, environment))
    vendor = _vendor(device) if device else next(likely, None)
    if vendor is None or vendor.device_type == CPU:
        return DeviceSet(CPU, (), backend="gloo")
    if names is not None and not vendor.visibility_variables:
        raise ConfigurationError(
            f"--devices: no vendor declares a variable that restricts which devices of type {vendor.device_type!r} a "
            "process sees, so a file gets all of them or none; leave the option out"
        )
    variable = _variable(vendor, environment) or next(iter(vendor.visibility_variables), None)
    others = {name: value for name, value in vendor.environment.items() if name not in environment}
    return DeviceSet(vendor.device_type, names or _visible(vendor, environment), variable, vendor.backend, others)


def _check_known(device: str, environment: Mapping[str, str]) -> None:
    """Raise if this cannot be a device type. An extension that ``import torch`` loads may define any other name."""
    ours = (vendor.device_type for vendor in vendors.BUILT_IN)
    known = sorted({CPU, *_BUILT_INTO_TORCH, *ours, *vendors.installed()})
    if device in known:
        return
    bare = device.partition(":")[0].lower()
    if bare in known:
        raise ConfigurationError(f"{device!r} is not a device type; use {bare!r} (--devices says which ones to assign)")
    if not loads_extensions(environment):
        raise ConfigurationError(
            f"the device type {device!r} is unknown; torch and the installed vendors' packages know {', '.join(known)}"
        )


def check(device_set: DeviceSet, device: str | None, backend: str | None, ranks: int | None) -> None:
    """Raise :class:`ConfigurationError` if a run with these settings would fail.

    Where only torch or an extension can tell, a separate process imports it, which takes seconds.
    """
    declared = vendors.load(device_set.type)
    if declared is not None and not device_set.names:
        _check_present(declared)
    if torch_version() is None:
        return
    ours = [vendor.torch_build for vendor in vendors.BUILT_IN if vendor.device_type == device_set.type]
    builds = [] if declared is not None or device is None else list(filter(None, ours))
    if builds and not any(map(is_built_for, builds)):
        raise ConfigurationError(
            f"the installed torch ({torch_version()}) was not built for the device type {device_set.type!r}: install a "
            "build that was, or name another device with --device"
        )
    usual = backend in (None, "gloo", device_set.backend)
    there = device is None or device_set.type == CPU or is_there(device_set)
    described = declared is not None and declared.describe is not None
    if described or not (usual and there) or loads_extensions(os.environ):
        _ask_torch(device, backend, ranks)


def under_test(device_set: DeviceSet, run: RunTests, ranks: int) -> dict[str, Any]:
    """The facts that are certain before a file reports them. Only a file knows what an accelerator can do."""
    if device_set.type == CPU and (run.execution.device is not None or not loads_extensions(os.environ)):
        return {
            "torch": torch_version(),
            "device": CPU,
            "backend": run.execution.backend or device_set.backend,
            "ranks": ranks,
        }
    return {"torch": torch_version(), "device": run.execution.device}


def is_there(device_set: DeviceSet) -> bool:
    """Whether the devices certainly exist, without importing torch: it was built for them, and their nodes exist.

    A variable that names devices proves nothing, and torch may lack the extension of a device that a package declares.
    """
    if device_set.type in vendors.installed():
        return False
    ours = [vendor for vendor in vendors.BUILT_IN if vendor.device_type == device_set.type]
    return any(is_built_for(vendor.torch_build) and vendor.devices_there() for vendor in ours if vendor.torch_build)


def _check_present(vendor: Vendor) -> None:
    """Raise if a vendor that can count its devices finds none, or if a variable leaves none."""
    if _visible(vendor, os.environ):
        return
    if (name := _variable(vendor, os.environ)) is not None:
        raise ConfigurationError(
            f"{name} is {os.environ[name]!r}, which leaves no {vendor.device_type!r} device: set it to the devices "
            "that the tests may use, or unset it"
        )
    if vendor.count_devices is not None:
        raise ConfigurationError(
            f"there is no {vendor.device_type!r} device: count_devices of its vendor returned 0; check the driver"
        )


def _ask_torch(device: str | None, backend: str | None, ranks: int | None) -> None:
    """Raise :class:`ConfigurationError` with the harness' message if this device and backend are not available, or if
    torch and its extensions cannot be imported.
    """
    import subprocess

    requested = {
        DEVICE_VARIABLE: device,
        BACKEND_VARIABLE: backend,
        RANKS_VARIABLE: None if ranks is None else str(ranks),
    }
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment = {**os.environ, "PYTHONPATH": path} | {name: value for name, value in requested.items() if value}
    done = subprocess.run([sys.executable, "-c", _IS_AVAILABLE], env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode == _UNAVAILABLE:
        raise ConfigurationError(done.stdout.strip().rpartition("\n")[2])  # extensions may also print


def loads_extensions(environment: Mapping[str, str]) -> bool:
    """Whether ``import torch`` will import a vendor's extension, which may define a device type."""
    import importlib.metadata

    is_on = environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"
    return is_on and bool(importlib.metadata.entry_points(group="torch.backends"))


def _variable(vendor: Vendor, environment: Mapping[str, str]) -> str | None:
    """The vendor's variable that the caller has set, or None."""
    return next((name for name in vendor.visibility_variables if name in environment), None)


def _visible(vendor: Vendor, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The devices in the caller's variable; without a variable, all devices.

    Like the vendors' own rule, the list ends at the first negative index.
    """
    variable = _variable(vendor, environment)
    if variable is None:
        return tuple(map(str, range(vendor.devices_there())))
    words = [name for word in environment[variable].split(",") for name in _expanded(word.strip())]
    visible = itertools.takewhile(lambda w: w and w[0] != "-" and w.lower() not in ("all", "none", "void"), words)
    return tuple(dict.fromkeys(visible))


def _expanded(word: str) -> Sequence[str]:
    """The names in a word of a variable: some vendors' variables may have ranges."""
    return parse_names(word) if re.fullmatch(r"\d{1,4}-\d{1,4}", word) else [word]


def _vendor(device_type: str) -> Vendor:
    """The vendor of a device type. A declaration by an installed package has priority."""
    ours = [vendor for vendor in vendors.BUILT_IN if vendor.device_type == device_type]
    built = (vendor for vendor in ours if is_built_for(vendor.torch_build or ""))
    return vendors.load(device_type) or next(built, None) or next(iter(ours), Vendor(device_type))


def _candidates(environment: Mapping[str, str]) -> Iterator[Vendor]:
    declared = vendors.load_all()  # also if none is picked, because a package that cannot be imported is an error
    if declared and loads_extensions(environment):
        yield from declared
    for vendor in vendors.BUILT_IN:
        if is_built_for(vendor.torch_build) if vendor.torch_build else _variable(vendor, environment):
            yield vendor


def torch_folder() -> Path | None:
    """The folder of the installed torch, found without importing it, or None."""
    return sources.folder()


def is_built_for(name: str) -> bool:
    """Whether the installed torch was built for ``cuda``, ``hip`` or ``xpu``."""
    return bool(sources.versions().get(name))


def torch_version() -> str | None:
    """The version of the installed torch, found without importing it, or None."""
    return sources.versions().get("__version__")


def missing_packages() -> str | None:
    """A sentence with what is missing (packages, or a newer torch) and the command that installs it, or None."""
    import importlib.util

    lacking = [name for name in ("torch", "numpy", "expecttest") if importlib.util.find_spec(name) is None]
    if not lacking:
        version = torch_version() or ""
        if not version[:1].isdigit() or version_fits(version, MIN_TORCH):  # a vendor may number its versions otherwise
            return None
        command = f"{sys.executable} -m pip install --upgrade torch"
        return f"torch {version} is installed, but the tests need torch {MIN_TORCH}: {command}; {_WHICH_BUILD}"
    *others, last = lacking
    named = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    which = f"; {_WHICH_BUILD}" if "torch" in lacking else ""
    command = f"{sys.executable} -m pip install {' '.join(lacking)}"
    return f"{named} not installed for this Python: {command}{which}"


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
