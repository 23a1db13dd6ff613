"""The device under test as a value, which is computed once, when it is first used.

A test never names a device. It uses ``current()`` and asks for capabilities. A new accelerator is a new value here. It
comes from :mod:`torch.accelerator` or from its vendor's package (see :mod:`.vendors`), and no other module changes.

Nothing here initializes a device runtime in this process, because such a process must not fork (see torch's note on
"poison fork"). If an answer needs a running device, :mod:`.accelerator_probe` finds it in a separate process.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_fsdp_tests import extension, world_sizes
from torch_fsdp_tests.device import accelerator_probe, vendors
from torch_fsdp_tests.device.capabilities import CAPABILITIES as CAPABILITIES
from torch_fsdp_tests.device.capabilities import STAGED
from torch_fsdp_tests.settings import BACKEND_VARIABLE, DEVICE_VARIABLE, ConfigurationError
from torch_fsdp_tests.verdict import events, in_one_line

# Backends that move no data between processes, so a test over them proves nothing.
_HOLLOW_BACKENDS = {"fake", "threaded", "undefined"}


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One kind of device, with the backend that connects its ranks.

    ``count`` is the number of visible devices (0 for the CPU, which has room for any number of ranks). ``ranks`` is
    the default world size of a test. ``capabilities`` has the names in ``CAPABILITIES`` that were found. ``type`` is
    torch's device type of the tensors. ``vendor_name`` is the vendor's name for the device, if it differs. ``machine``
    has what reports say about model, driver and libraries, under the names of :data:`.machine.TITLES`. ``sharing`` is
    for tests with more ranks than devices: the same device with a backend over which ranks can share it.
    ``tolerances`` has the relative errors by dtype, such as ``{"float32": 1e-4}``, that a comparison of behavior allows
    between two devices; by default none.

    If ranks find their device in another way, the vendor overrides :meth:`device` and :meth:`bind`.
    """

    type: str
    backend: str
    count: int
    ranks: int
    capabilities: frozenset[str] = frozenset()
    vendor_name: str | None = None
    machine: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    sharing: Accelerator | None = None
    tolerances: Mapping[str, float] = dataclasses.field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in sorted(set(self.capabilities) - CAPABILITIES.keys()):
            raise ConfigurationError(_unknown_capability(name))

    @property
    def name(self) -> str:
        """The name of the device in options and reports."""
        return self.vendor_name or self.type

    @property
    def is_cpu(self) -> bool:
        """Whether the device under test is the CPU."""
        return self.name == "cpu"

    @property
    def backend_with_host(self) -> str:
        """The backend, and also gloo for CPU tensors if the device is not the CPU."""
        alone = self.is_cpu or self.backend == STAGED
        return self.backend if alone else f"cpu:gloo,{self.type}:{self.backend}"

    @property
    def is_shared(self) -> bool:
        """Whether the ranks of a test share devices by default."""
        return 0 < self.count < self.ranks and not _on_several_machines()

    def device(self, rank: int = 0) -> torch.device:
        """The device of a rank, with an index if devices have one. More ranks than devices share the devices."""
        if not self.has("device_index"):
            return torch.device(self.type)
        local = _local_ranks[rank] if rank < len(_local_ranks) else rank
        return torch.device(self.type, local % max(self.count, 1))

    def bind(self, rank: int) -> torch.device:
        """Make the rank's device the current device of this process, and return it."""
        device = self.device(rank)
        if device.index is not None:
            torch.get_device_module(self.type).set_device(device.index)
        return device

    def has(self, capability: str) -> bool:
        """Whether the capability was found. Raises ``KeyError`` for a name that is not in ``CAPABILITIES``."""
        if capability not in CAPABILITIES:
            raise KeyError(_unknown_capability(capability))
        return capability in self.capabilities

    def lacks(self, *capabilities: str) -> str | None:
        """The reason why a test that needs these capabilities cannot run here, or None."""
        missing = [f"{name} ({CAPABILITIES[name]})" for name in capabilities if not self.has(name)]
        it = "it" if len(missing) == 1 else "them"
        return f"needs {', '.join(missing)}; {self.name} with {self.backend} does not have {it}" if missing else None

    def for_ranks(self, world_size: int) -> Accelerator:
        """The description for a test with this many ranks: over another backend, if only that one has room for them."""
        return self if self.sharing is None or world_size <= self.count else self.sharing

    def lacks_room_for(self, world_size: int) -> str | None:
        """The reason why there is no room for this many ranks, or None.

        If something else made the ranks, there is room for as many as it made, on any machines.
        """
        place = extension.place()
        if place.world_size is not None:
            made = f"needs {world_size} ranks, but {place.maker} made {place.world_size}"
            return made if world_size > place.world_size else None
        can_share = self.sharing is not None or (self.count > 0 and self.has("shared_device"))
        if self.is_cpu or world_size <= self.count or can_share:
            return None
        return (
            f"needs {world_size} {self.name} devices, but sees only {self.count}; "
            f"ranks that share a device cannot use {self.backend}"
        )


def _unknown_capability(name: str) -> str:
    near = difflib.get_close_matches(name, CAPABILITIES, n=1)
    return f"unknown capability {name!r}; " + (
        f"nearest: {near[0]}" if near else f"the known ones are {', '.join(sorted(CAPABILITIES))}"
    )


def from_torch(device_type: str, backend: str | None, ranks: int | None) -> Accelerator:
    """Describe a device type that torch knows, after a probe of what it can do.

    Raises :class:`ConfigurationError` if torch has no such device, no device is visible, or the backend is missing.
    """
    requested_backend, backend = backend, _checked_backend(device_type, backend)
    if device_type == "cpu":
        # What gloo can do is known, so that no file pays for a probe.
        able = _OF_GLOO if backend == "gloo" else frozenset(_probe("cpu", backend)["capabilities"]) & _OF_THE_CPU
        return Accelerator("cpu", backend, 0, ranks or world_sizes.by_default(0), able)
    facts = _probe(device_type, backend)
    count = int(facts["count"])
    if count == 0:
        raise ConfigurationError(
            f"the device {device_type!r} was requested, but PyTorch ({torch.__version__}) sees none: "
            "check the driver and the variable that restricts visibility, or name another device with --device or "
            f"{DEVICE_VARIABLE}"
        )
    ranks = ranks or world_sizes.by_default(count)
    device = Accelerator(
        device_type, backend, count, ranks, frozenset(facts["capabilities"]), machine=facts.get("machine", {})
    )
    has_room = _on_several_machines() or count >= max(ranks, accelerator_probe.ROOM_ENOUGH)
    has_room = has_room or device.has("shared_device")
    instead = None if has_room or requested_backend is not None else _sharing_backend(device_type, backend)
    if instead is None:
        return device
    facts = _probe(device_type, instead)
    able, machine = frozenset(facts["capabilities"]), facts.get("machine", {})
    sharing = dataclasses.replace(device, backend=instead, capabilities=able, machine=machine)
    # A test with a rank for each device uses the device's own backend.
    return sharing if count < ranks else dataclasses.replace(device, sharing=sharing)


def _on_several_machines() -> bool:
    """Whether the ranks may be spread over several machines, each with devices of its own."""
    return not extension.place().one_host


# The capabilities that the CPU can have. The others need a device apart from it.
_OF_GLOO = frozenset({"asynchronous_collectives", "bf16_collectives", "fp16_collectives", "fork"})
_OF_THE_CPU = _OF_GLOO | {"premul_sum"}


def _sharing_backend(device_type: str, backend: str) -> str | None:
    """Another backend than the device's own over which ranks can share a device, or None."""
    if backend == STAGED:
        return None
    accelerator_probe.register(STAGED)
    return STAGED if "shared_device" in _probe(device_type, STAGED)["capabilities"] else None


def _checked_backend(device_type: str, backend: str | None) -> str:
    accelerator_probe.register(backend)
    known = dict(dist.Backend.default_device_backend_map)
    if backend is None:
        backend = known.get(device_type)
        if backend is None and (vendor := vendors.load(device_type)) is not None:
            backend = vendor.backend
        if backend is None:
            raise ConfigurationError(
                f"no backend is known for the device {device_type!r}: PyTorch ({torch.__version__}) knows "
                f"{', '.join(sorted(known))}; name one with --backend or {BACKEND_VARIABLE}, or install the "
                "vendor's extension"
            )
    if backend in _HOLLOW_BACKENDS:
        raise ConfigurationError(
            f"the backend {backend!r} moves no data between processes, so a test over it proves nothing: "
            f"name another backend with --backend or {BACKEND_VARIABLE}"
        )
    if backend not in dist.Backend.backend_list:
        raise ConfigurationError(
            f"unknown backend {backend!r}: PyTorch offers {', '.join(_usable_backends())}; "
            f"name one of these with --backend or {BACKEND_VARIABLE}"
        )
    if not dist.is_backend_available(backend):
        raise ConfigurationError(
            f"the device {device_type!r} with the backend {backend!r} cannot be tested: PyTorch "
            f"({torch.__version__}) was built without {backend!r}"
        )
    return backend


def _usable_backends() -> list[str]:
    """The backends of the installed PyTorch that move data between processes."""
    known = sorted(set(dist.Backend.backend_list) - _HOLLOW_BACKENDS)
    return [backend for backend in known if dist.is_backend_available(backend)]


_local_ranks: list[int] = []  # each rank's number on its machine, if it may differ from the rank


def place(local_ranks: Sequence[int]) -> None:
    """Set the number of every rank on its machine, if the ranks may be spread over several machines."""
    _local_ranks[:] = local_ranks


_answers: dict[str, dict] = {}  # the answers of this process' probes, by device type and backend


def environment() -> Mapping[str, str]:
    """Variables for processes that this process starts: the answers of its probes, and what sharing devices needs.

    This is called when ranks start, after the first call of :func:`current`.
    """
    variables = {events.PROBED_VARIABLE: json.dumps(_answers)} if _answers else {}
    for answer in _answers.values():
        variables |= answer.get("variables", {})
    return variables


@functools.cache
def _probe(device_type: str, backend: str) -> dict:
    """Find out what a device can do, in a separate process.

    That process is a fresh interpreter, because this process may fork later and must not start the device's runtime. On
    some devices the probe takes many seconds, so the answer is recorded, and the dispatcher passes it to later files.
    """
    what = f"{device_type} {backend}"
    known = json.loads(os.environ.get(events.PROBED_VARIABLE, "{}"))
    _answers[what] = known[what] if what in known else accelerator_probe.ask(device_type, backend)
    events.record(probed=dict(_answers))
    return _answers[what]


@functools.cache
def _resolve(asked_type: str | None, backend: str | None, ranks: int | None) -> Accelerator:
    if asked_type is None:
        vendors.load_all()  # a package that cannot be imported is an error, and no reason to test the CPU
        current = torch.accelerator.current_accelerator()
        asked_type = "cpu" if current is None or not _visible(current.type, backend) else current.type
    vendor = vendors.load(asked_type)
    if vendor is not None and vendor.describe is not None:
        return _described(vendor, backend, ranks)
    try:
        torch.device(asked_type)
    except RuntimeError as error:
        raise ConfigurationError(_unknown_device(asked_type)) from error
    return from_torch(asked_type, backend, ranks)


def _described(vendor: vendors.Vendor, backend: str | None, ranks: int | None) -> Accelerator:
    """The description by the vendor's own function. Raises :class:`ConfigurationError` if it fails."""
    what = f"the function {vendor.describe} that describes the device {vendor.device_type!r}"
    try:
        describe = pkgutil.resolve_name(vendor.describe or "")
    except Exception as error:
        remedy = "write it, or leave `describe` out of the Vendor, so that torch is asked"
        raise ConfigurationError(f"{what} cannot be imported: {in_one_line(error)}; {remedy}") from error
    try:
        device = describe(backend=backend, ranks=ranks)
    except ConfigurationError as error:
        raise ConfigurationError(f"{what} reports: {error}") from error
    except Exception as error:
        raise ConfigurationError(f"{what} failed: {in_one_line(error)}") from error
    if not isinstance(device, Accelerator):
        raise ConfigurationError(f"{what} returned a {type(device).__name__}; it must return an {Accelerator.__name__}")
    return device


def _unknown_device(name: str) -> str:
    """A sentence about a device type that torch does not know. It offers what this build of torch has."""
    unknown = f"unknown device {name!r}: torch {torch.__version__} does not know it"
    if name in vendors.installed():
        return f"{unknown}; install the extension of torch that adds it, or set `describe` in its Vendor"
    if any(vendor.device_type == name for vendor in vendors.BUILT_IN):
        return f"{unknown}; install the extension of torch that adds it, or name another device with --device"
    current = torch.accelerator.current_accelerator()
    known = sorted({"cpu", *vendors.installed(), *([] if current is None else [current.type])})
    return f"unknown device {name!r}: torch {torch.__version__} and the installed vendors know {', '.join(known)}"


def _visible(device_type: str, backend: str | None) -> bool:
    """Whether the accelerator that torch was built for is visible. If its vendor describes it, the vendor decides."""
    vendor = vendors.load(device_type)
    if vendor is not None and vendor.describe is not None:
        return True
    return int(_probe(device_type, _checked_backend(device_type, backend))["count"]) > 0


_expected_ranks = 0  # of the test that runs


def expect(ranks: int) -> None:
    """Set the number of ranks of the test that runs in this process: :func:`current` then has room for them."""
    global _expected_ranks
    _expected_ranks = ranks


def current() -> Accelerator:
    """The device under test, as a test with the number of ranks of :func:`expect` uses it.

    ``TORCH_FSDP_TESTS_DEVICE``, ``_BACKEND`` and ``_RANKS`` select it. The default is torch's accelerator if one is
    visible, else the CPU. Raises :class:`ConfigurationError` with one sentence if the device is not available.
    """
    asked_type, backend = (os.environ.get(name) or None for name in (DEVICE_VARIABLE, BACKEND_VARIABLE))
    device = _resolve(asked_type, backend, world_sizes.asked())
    return device.for_ranks(_expected_ranks)


def current_or_none() -> Accelerator | None:
    """Like :func:`current`, but None if the requested device is not available. The first test then reports why."""
    try:
        return current()
    except ConfigurationError:
        return None


def initialized() -> bool:
    """Whether an accelerator's runtime is running in this process, so that its forks would not work."""
    current = torch.accelerator.current_accelerator()
    if current is None:
        return False
    module = torch.get_device_module(current.type)
    return bool(getattr(module, "is_initialized", lambda: False)())
