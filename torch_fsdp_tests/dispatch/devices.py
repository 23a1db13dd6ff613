"""Which devices this run may lend, found without torch: from options, the caller's environment and device nodes.

What is known of each vendor is data (``data/devices.json``): the environment variables that restrict visibility, the
first of which is set for a job, the device nodes to count when no variable says anything, and the backend that torch
or the vendor's extension takes by default.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

DEVICE_VARIABLE = "TORCH_FSDP_TESTS_DEVICE"
HOST = "cpu"
DATA = Path(__file__).parent / "data"


@dataclasses.dataclass(frozen=True)
class DeviceSet:
    """The devices of one type that may be lent, by the names that the vendor's variable takes."""

    type: str
    names: tuple[str, ...]  # empty on the host
    variable: str | None = None  # restricts what a job sees
    backend: str | None = None  # between ranks, unless another is asked for; None where only the harness can know

    @property
    def lendable(self) -> int | None:
        """How many there are to lend; None on the CPU, where nothing is."""
        return None if self.type == HOST else len(self.names)

    def environment(self, lent: tuple[int, ...]) -> dict[str, str]:
        """What makes a job see only the devices at these positions."""
        if not self.lendable or self.variable is None:
            return {}
        return {self.variable: ",".join(self.names[position] for position in lent)}


def parse_names(text: str) -> tuple[str, ...]:
    """``0,1,2``, ``0-7`` or vendor's own ids, in order. Raises ``ValueError`` for an empty list or a repeated name."""
    names: list[str] = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        span = re.fullmatch(r"(\d+)-(\d+)", word)
        if span and int(span[1]) > int(span[2]):
            raise ValueError(f"{word!r} counts backwards")
        names += map(str, range(int(span[1]), int(span[2]) + 1)) if span else [word]
    if not names:
        raise ValueError("no device is named")
    if len(set(names)) != len(names):
        raise ValueError(f"{text!r} names a device twice")
    return tuple(names)


def find(device: str | None, names: tuple[str, ...] | None, environment: Mapping[str, str]) -> DeviceSet:
    """The devices to lend for a wish such as ``--device xpu`` and ``--devices 0-3``, either of which may be None."""
    vendors = json.loads((DATA / "devices.json").read_text())
    device = device or environment.get(DEVICE_VARIABLE)
    kind = device or _device_of_installed_torch(environment, vendors)
    if kind == HOST:
        return DeviceSet(HOST, (), backend="gloo")
    vendor_key = "hip" if kind == "cuda" and _torch_versions().get("hip") else kind
    vendor = vendors.get(vendor_key, {"variables": [], "nodes": ""})
    # Nothing but a device type is hidden in the vendor's key: ROCm builds of torch call their devices by CUDA's name.
    shown = "cuda" if kind == "hip" else kind
    variable = next((name for name in vendor["variables"] if environment.get(name)), None)
    if names is None and variable is not None:
        names = _visible(environment[variable])
    if names is None:
        names = tuple(str(index) for index in range(len(glob.glob(vendor["nodes"])) if vendor["nodes"] else 0))
    return DeviceSet(shown, names, variable or next(iter(vendor["variables"]), None), vendor.get("backend"))


def loads_extensions(environment: Mapping[str, str]) -> bool:
    """Whether ``import torch`` will import a vendor's extension, which may bring a device of its own."""
    import importlib.metadata

    asked = environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"
    return asked and bool(importlib.metadata.entry_points(group="torch.backends"))


def _visible(text: str) -> tuple[str, ...]:
    """What a vendor's variable shows: a list that ends, as theirs does, at the first negative index."""
    names: list[str] = []
    for word in (word.strip() for word in text.split(",")):
        if word.startswith("-") or not word or word.lower() in ("all", "none", "void"):
            break
        names.append(word)
    return tuple(dict.fromkeys(names))


def _device_of_installed_torch(environment: Mapping[str, str], vendors: Mapping[str, Mapping]) -> str:
    """The type that the installed torch most likely picks, from its build and from what the machine shows."""
    built_for = [name for name, version in _torch_versions().items() if version]
    for name, vendor in vendors.items():
        named = any(variable in environment for variable in vendor["variables"])
        extension = name not in ("cuda", "hip", "xpu") and named
        if not extension and name not in built_for:
            continue
        shown = next((_visible(environment[v]) for v in vendor["variables"] if v in environment), None)
        if shown or (shown is None and glob.glob(vendor["nodes"])):
            return "cuda" if name == "hip" else name
    return HOST


@functools.cache
def _torch_versions() -> dict[str, str]:
    """Torch's version and what it was built for, read from its version file, since importing it takes seconds."""
    import importlib.util

    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return {}
    try:
        text = Path(next(iter(spec.submodule_search_locations)), "version.py").read_text()
    except OSError:
        return {}
    return dict(re.findall(r"^(__version__|cuda|hip|xpu)\b[^=\n]*=\s*['\"]([^'\"]*)['\"]", text, re.MULTILINE))


def torch_version() -> str | None:
    """The version that the installed torch gives itself, without importing it; None where there is none."""
    return _torch_versions().get("__version__")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
