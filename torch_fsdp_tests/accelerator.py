"""The device under test as a value, asked for late and once.

No test names a device: it takes ``current()`` and asks for a capability. A new accelerator is a new value here, found
through :mod:`torch.accelerator`, or described by its vendor's package (see :mod:`.vendors`); no other module changes.

Nothing here initialises a device runtime in the asking process, since a process that has done so must not fork
(torch's own note on "poison fork"). What can be learned only from a running device, :mod:`.accelerator_probe` learns in
a process of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pkgutil
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from torch_fsdp_tests import accelerator_probe, events, launcher, settings, vendors
from torch_fsdp_tests.capabilities import CAPABILITIES as CAPABILITIES
from torch_fsdp_tests.vendors import BACKEND_VARIABLE, DEVICE_VARIABLE, ConfigurationError

CPU_RANKS = 4
# Backends that move no data between processes, and so prove nothing about ranks that are processes.
_HOLLOW_BACKENDS = {"fake", "threaded", "undefined"}


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One kind of device, with the backend that connects its ranks.

    ``count`` is the number of visible devices (0 for the CPU, which hosts any number of ranks); ``ranks`` the world
    size of a test that states none; ``capabilities`` the names of ``CAPABILITIES`` that were found. ``type`` is what
    torch calls the devices of the tensors, ``vendor_name`` what the vendor calls its device where that is not the same.

    A vendor whose ranks find their device in a way of its own overrides :meth:`device` and :meth:`bind`.
    """

    type: str
    backend: str
    count: int
    ranks: int
    capabilities: frozenset[str] = frozenset()
    vendor_name: str | None = None

    @property
    def name(self) -> str:
        """What the device is asked for and reported by."""
        return self.vendor_name or self.type

    @property
    def is_host(self) -> bool:
        """True when the device under test is the processor itself."""
        return self.name == "cpu"

    @property
    def few_ranks(self) -> int:
        """The world size of a test to which more than two ranks add nothing: 2 on the host, where each costs time."""
        return 2 if self.is_host else self.ranks

    @property
    def is_shared(self) -> bool:
        """Whether a test with ``ranks`` ranks has several on a device."""
        return 0 < self.count < self.ranks

    def device(self, rank: int = 0) -> torch.device:
        """The device of a rank: indexed where devices are counted, and shared in turn when ranks outnumber them."""
        if not self.has("device_index"):
            return torch.device(self.type)
        local = _local_ranks[rank] if rank < len(_local_ranks) else rank
        return torch.device(self.type, local % max(self.count, 1))

    def bind(self, rank: int) -> torch.device:
        """Make the rank's device the current one of this process and return it."""
        device = self.device(rank)
        if device.index is not None:
            torch.get_device_module(self.type).set_device(device.index)
        return device

    def has(self, capability: str) -> bool:
        """Whether the capability was found. Raises ``KeyError`` for a name that is not in ``CAPABILITIES``."""
        if capability not in CAPABILITIES:
            raise KeyError(f"unknown capability {capability!r}; the known ones are {', '.join(sorted(CAPABILITIES))}")
        return capability in self.capabilities

    def lacks(self, *capabilities: str) -> str | None:
        """Why a test that needs these capabilities cannot run here, in words; None when it can."""
        missing = [f"{name} ({CAPABILITIES[name]})" for name in capabilities if not self.has(name)]
        it = "it" if len(missing) == 1 else "them"
        return f"needs {', '.join(missing)}; {self.name} with {self.backend} does not have {it}" if missing else None

    def lacks_room_for(self, world_size: int) -> str | None:
        """Why this many ranks find no place here, in words; None when they do.

        Where a launcher made the ranks there are as many as it made, on whatever machines.
        """
        launch = launcher.found()
        if launch is not None:
            made = f"wants {world_size} ranks, the launcher made {launch.world_size}"
            return made if world_size > launch.world_size else None
        if self.is_host or world_size <= self.count or (self.count and self.has("shared_device")):
            return None
        return (
            f"needs {world_size} {self.name} devices, {self.count} visible, "
            f"and ranks that share a device cannot use {self.backend}"
        )


def from_torch(device_type: str, backend: str | None, ranks: int | None) -> Accelerator:
    """Describe a device type that torch itself knows, after asking what it can do.

    Raises :class:`ConfigurationError` when torch has no such device, no device is visible, or the backend is absent.
    """
    asked, backend = backend, _checked_backend(device_type, backend)
    if device_type == "cpu" and backend == "gloo":  # known, so that no file pays for a probe
        found = frozenset({"bf16_collectives", "fp16_collectives", "fork"})
        return Accelerator("cpu", backend, 0, ranks or CPU_RANKS, found)
    facts = _probe(device_type, backend)
    if device_type == "cpu":
        return Accelerator("cpu", backend, 0, ranks or CPU_RANKS, frozenset(facts["capabilities"]) & _OF_THE_HOST)
    count = int(facts["count"])
    if count == 0:
        raise ConfigurationError(
            f"the device {device_type!r} was asked for and this torch ({torch.__version__}) sees none: "
            f"check the driver and the variable that restricts visibility, or ask for another with {DEVICE_VARIABLE}"
        )
    ranks = ranks or max(count, 2)
    if count < ranks and asked is None and "shared_device" not in facts["capabilities"]:
        instead = _sharing_backend(device_type, backend)
        if instead is not None:
            backend, facts = instead, _probe(device_type, instead)
    return Accelerator(device_type, backend, count, ranks, frozenset(facts["capabilities"]))


# What a probe of the processor can tell; the other capabilities are those of a device apart from it.
_OF_THE_HOST = frozenset({"bf16_collectives", "fp16_collectives", "premul_sum", "fork"})


def _sharing_backend(device_type: str, backend: str) -> str | None:
    """Another backend than the device's own, over which its ranks can share a device; None where there is none."""
    for other in ("gloo",):
        if other != backend and dist.is_backend_available(other):
            if "shared_device" in _probe(device_type, other)["capabilities"]:
                return other
    return None


def _checked_backend(device_type: str, backend: str | None) -> str:
    known = dict(dist.Backend.default_device_backend_map)
    if backend is None:
        backend = known.get(device_type)
        if backend is None and (vendor := vendors.load(device_type)) is not None:
            backend = vendor.backend
        if backend is None:
            raise ConfigurationError(
                f"no backend is known for the device {device_type!r}: this torch ({torch.__version__}) knows "
                f"{', '.join(sorted(known))}; name one with {BACKEND_VARIABLE}, or install the vendor's extension"
            )
    if backend in _HOLLOW_BACKENDS:
        raise ConfigurationError(
            f"the backend {backend!r} moves no data between processes, so a test over it proves nothing: "
            f"name another with {BACKEND_VARIABLE}"
        )
    if backend not in dist.Backend.backend_list:
        raise ConfigurationError(
            f"unknown backend {backend!r}: this torch knows {', '.join(sorted(set(dist.Backend.backend_list)))}; "
            f"name one of these with {BACKEND_VARIABLE}"
        )
    if not dist.is_backend_available(backend):
        raise ConfigurationError(
            f"the device {device_type!r} with the backend {backend!r} cannot be tested: this torch "
            f"({torch.__version__}) was built without {backend!r}"
        )
    return backend


_local_ranks: list[int] = []  # of each rank on its own machine, where a launcher made them


def place(local_ranks: Sequence[int]) -> None:
    """Tell which rank is the how-manieth of its machine, for a process whose ranks a launcher spread over several."""
    _local_ranks[:] = local_ranks


_answers: dict[str, dict] = {}  # of the probes made here, by device type and backend


def environment() -> Mapping[str, str]:
    """Variables for processes started from here: the answers of the probes made here, and what sharing devices needs.

    Asked for when ranks are started, which is after :func:`current` has been asked.
    """
    found = {events.PROBED_VARIABLE: json.dumps(_answers)} if _answers else {}
    for answer in _answers.values():
        found |= answer.get("variables", {})
    return found


@functools.cache
def _probe(device_type: str, backend: str) -> dict:
    """Ask a device what it can do, in a process that ends afterwards.

    A fresh interpreter, since the asking process may fork later and must not have started the device's runtime. It
    takes many seconds on some, so the answer is recorded, and the dispatcher hands it to the files that come later.
    """
    what = f"{device_type} {backend}"
    told = json.loads(os.environ.get(events.PROBED_VARIABLE, "{}"))
    _answers[what] = told[what] if what in told else accelerator_probe.ask(device_type, backend)
    events.record(probed=dict(_answers))
    return _answers[what]


def _asked_ranks() -> int | None:
    asked = settings.ranks(os.environ)
    if asked is None:
        try:
            launch = launcher.found()
        except launcher.LaunchError as error:
            raise ConfigurationError(str(error)) from error
        return None if launch is None else launch.world_size
    return asked


@functools.cache
def _resolve(asked_type: str | None, backend: str | None, ranks: int | None) -> Accelerator:
    if asked_type is None:
        found = torch.accelerator.current_accelerator()
        asked_type = "cpu" if found is None or not _visible(found.type, backend) else found.type
    vendor = vendors.load(asked_type)
    if vendor is not None and vendor.describe is not None:
        return pkgutil.resolve_name(vendor.describe)(backend=backend, ranks=ranks)
    try:
        torch.device(asked_type)
    except RuntimeError as error:
        offered = sorted({"cpu", *vendors.installed(), *dist.Backend.default_device_backend_map})
        raise ConfigurationError(
            f"unknown device {asked_type!r} in {DEVICE_VARIABLE}: this torch and the installed extensions offer "
            f"{', '.join(offered)}"
        ) from error
    return from_torch(asked_type, backend, ranks)


def _visible(device_type: str, backend: str | None) -> bool:
    """Whether the accelerator that torch was built for is there; a vendor that describes its own answers for it."""
    vendor = vendors.load(device_type)
    if vendor is not None and vendor.describe is not None:
        return True
    return int(_probe(device_type, _checked_backend(device_type, backend))["count"]) > 0


def current() -> Accelerator:
    """The device under test.

    Chosen by ``TORCH_FSDP_TESTS_DEVICE``, ``_BACKEND`` and ``_RANKS``; by default torch's accelerator where one is
    visible, else the CPU. Raises :class:`ConfigurationError` with one sentence when the wish cannot be met.
    """
    ranks = _asked_ranks()
    return _resolve(os.environ.get(DEVICE_VARIABLE) or None, os.environ.get(BACKEND_VARIABLE) or None, ranks)


def initialised() -> bool:
    """Whether the runtime of an accelerator runs in this process already, so that its forks would break."""
    found = torch.accelerator.current_accelerator()
    if found is None:
        return False
    module = torch.get_device_module(found.type)
    return bool(getattr(module, "is_initialized", lambda: False)())
