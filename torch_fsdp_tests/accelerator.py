"""The device under test as a value, asked for late and once.

No test names a device: it takes ``current()`` and asks for a capability. A new accelerator is a new value here, found
through :mod:`torch.accelerator`, or described by its vendor in a function under the entry point group
``torch_fsdp_tests.accelerators``; no other module changes.

Nothing here initialises a device runtime in the asking process, since a process that has done so must not fork
(torch's own note on "poison fork"). What can be learned only from a running device is learned in a process of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

DEVICE_VARIABLE = "TORCH_FSDP_TESTS_DEVICE"
BACKEND_VARIABLE = "TORCH_FSDP_TESTS_BACKEND"
RANKS_VARIABLE = "TORCH_FSDP_TESTS_RANKS"
_PROBED_VARIABLE = "_TORCH_FSDP_TESTS_PROBED"  # what a probe found, for ranks that are fresh interpreters
ENTRY_POINTS = "torch_fsdp_tests.accelerators"

CPU_RANKS = 4
PROBE_LIMIT = 120  # seconds; the first start of a device runtime on a large machine can take half a minute

# Backends that move no data between processes, and so prove nothing about ranks that are processes.
_HOLLOW_BACKENDS = {"fake", "threaded", "undefined"}

CAPABILITIES: Mapping[str, str] = {
    "device_memory": "memory of its own, apart from the host's",
    "device_index": "devices that are told apart by an index",
    "streams": "streams that run work in order of their own",
    "pinned_memory": "host memory pinned for the device",
    "memory_stats": "statistics of its memory allocator",
    "sleep_kernel": "a kernel that keeps the device busy for a given time",
    "peer_access": "devices that reach each other's memory",
    "graphs": "graphs of recorded work",
    "bf16_collectives": "collectives over bfloat16",
    "fp16_collectives": "collectives over float16",
    "premul_sum": "the reduce op PREMUL_SUM in its collectives",
    "symmetric_memory": "symmetric memory between ranks",
    "fork": "a runtime that starts in a forked process",
    "shared_device": "collectives between ranks that share one device",
}


class ConfigurationError(ValueError):
    """The device, backend or number of ranks that was asked for cannot be had. The message says what to do."""


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One kind of device, with the backend that connects its ranks.

    ``count`` is the number of visible devices (0 for the CPU, which hosts any number of ranks); ``ranks`` the world
    size of a test that states none; ``capabilities`` the names of ``CAPABILITIES`` that were found.
    """

    type: str
    backend: str
    count: int
    ranks: int
    capabilities: frozenset[str] = frozenset()

    @property
    def is_host(self) -> bool:
        """True when the ranks compute on the processor itself."""
        return self.type == "cpu"

    def device(self, rank: int = 0) -> torch.device:
        """The device of a rank: indexed where devices are counted, and shared in turn when ranks outnumber them."""
        if not self.has("device_index"):
            return torch.device(self.type)
        return torch.device(self.type, rank % max(self.count, 1))

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
        return f"needs {', '.join(missing)}; {self.type} with {self.backend} has not" if missing else None

    def lacks_room_for(self, world_size: int) -> str | None:
        """Why this many ranks find no place here, in words; None when they do."""
        if self.is_host or world_size <= self.count or (self.count and self.has("shared_device")):
            return None
        return (
            f"needs {world_size} {self.type} devices, {self.count} visible, "
            f"and ranks that share a device cannot use {self.backend}"
        )


def from_torch(device_type: str, backend: str | None, ranks: int | None) -> Accelerator:
    """Describe a device type that torch itself knows, after asking what it can do.

    Raises :class:`ConfigurationError` when torch has no such device, no device is visible, or the backend is absent.
    """
    backend = _checked_backend(device_type, backend)
    if device_type == "cpu":
        found = frozenset({"bf16_collectives", "fp16_collectives", "fork"})
        return Accelerator("cpu", backend, 0, ranks or CPU_RANKS, found)
    facts = _probe(device_type, backend)
    count = int(facts["count"])
    if count == 0:
        raise ConfigurationError(
            f"the device {device_type!r} was asked for and this torch ({torch.__version__}) sees none: "
            f"check the driver and the variable that restricts visibility, or ask for another with {DEVICE_VARIABLE}"
        )
    return Accelerator(device_type, backend, count, ranks or max(count, 2), frozenset(facts["capabilities"]))


def _checked_backend(device_type: str, backend: str | None) -> str:
    known = dict(dist.Backend.default_device_backend_map)
    if backend is None:
        backend = known.get(device_type)
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


_found: dict[str, str] = {}


def environment() -> Mapping[str, str]:
    """Variables that spare a process started from here the probe that was made here."""
    return dict(_found)


@functools.cache
def _probe(device_type: str, backend: str) -> dict:
    """Ask a device what it can do, in a process that ends afterwards.

    A fresh interpreter, since the asking process may fork later and must not have started the device's runtime.
    """
    told = json.loads(os.environ.get(_PROBED_VARIABLE, "{}"))
    if told.get("probe") == [device_type, backend]:
        return told["facts"]
    command = [sys.executable, "-m", f"{__package__}.accelerator", device_type, backend]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_LIMIT, env=environment)
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(f"the device {device_type!r} did not answer within {PROBE_LIMIT} s") from error
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ConfigurationError(f"the device {device_type!r} cannot be used: {reason}")
    facts = json.loads(done.stdout.splitlines()[-1])
    _found.update({_PROBED_VARIABLE: json.dumps({"probe": [device_type, backend], "facts": facts})})
    return facts


def _works(attempt: Callable[[], object]) -> bool:
    """Whether an attempt on the device succeeds; any failure means that the capability is absent."""
    try:
        return attempt() is not False
    except Exception:
        return False


def _describe(device_type: str, backend: str) -> dict:
    """What a device can do, found by doing it. Runs in the probing process only."""
    try:
        module = torch.get_device_module(device_type)
    except RuntimeError as error:
        raise SystemExit(f"this torch ({torch.__version__}) has no device type {device_type!r}") from error
    count = module.device_count()
    if count == 0:
        return {"count": 0, "capabilities": []}
    device = torch.device(device_type, 0)
    attempts: dict[str, Callable[[], object]] = {
        "device_memory": lambda: torch.ones(1).to(device).data_ptr() != 0,
        "device_index": lambda: module.set_device(0),
        "streams": lambda: module.Stream().synchronize(),
        "pinned_memory": lambda: torch.ones(1).pin_memory().is_pinned(),
        "memory_stats": lambda: module.memory_allocated() >= 0 and module.reset_peak_memory_stats() is None,
        "sleep_kernel": lambda: module._sleep(1),
        "peer_access": lambda: count > 1 and module.can_device_access_peer(0, 1),
        "graphs": lambda: callable(module.graph),
        "symmetric_memory": lambda: count > 1 and device_type == "cuda",
        "fork": lambda: device_type in ("cuda", "xpu"),
        "shared_device": lambda: backend == "gloo" or _nccl_shares_devices(backend),
        "bf16_collectives": lambda: _collective_works(device, backend, torch.bfloat16),
        "fp16_collectives": lambda: _collective_works(device, backend, torch.float16),
        "premul_sum": lambda: _collective_works(device, backend, torch.float32, premul=True),
    }
    return {"count": count, "capabilities": [name for name, attempt in attempts.items() if _works(attempt)]}


def _nccl_shares_devices(backend: str) -> bool:
    return backend == "nccl" and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def _collective_works(device: torch.device, backend: str, dtype: torch.dtype, premul: bool = False) -> bool:
    if not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(2, dtype=dtype, device=device)
    op = dist._make_nccl_premul_sum(0.5) if premul else dist.ReduceOp.SUM
    dist.all_reduce(tensor, op=op)
    return bool((tensor == (0.5 if premul else 1.0)).all().item())


def _from_vendors() -> Mapping[str, importlib.metadata.EntryPoint]:
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def _asked_ranks() -> int | None:
    text = os.environ.get(RANKS_VARIABLE)
    if text is None:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise ConfigurationError(f"{RANKS_VARIABLE} is {text!r}: give the number of ranks, 1 or more")
    return int(text)


@functools.cache
def _resolve(asked_type: str | None, backend: str | None, ranks: int | None) -> Accelerator:
    vendors = _from_vendors()
    if asked_type is None:
        found = torch.accelerator.current_accelerator()
        asked_type = "cpu" if found is None or not _visible(found.type, backend, vendors) else found.type
    if asked_type in vendors:
        describe = vendors[asked_type].load()
        return describe(backend=backend, ranks=ranks)
    try:
        torch.device(asked_type)
    except RuntimeError as error:
        offered = sorted({"cpu", *vendors, *dist.Backend.default_device_backend_map})
        raise ConfigurationError(
            f"unknown device {asked_type!r} in {DEVICE_VARIABLE}: this torch and the installed extensions offer "
            f"{', '.join(offered)}"
        ) from error
    return from_torch(asked_type, backend, ranks)


def _visible(device_type: str, backend: str | None, vendors: Mapping[str, object]) -> bool:
    """Whether the accelerator that torch was built for is there; a vendor answers for its own."""
    return device_type in vendors or int(_probe(device_type, _checked_backend(device_type, backend))["count"]) > 0


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


if __name__ == "__main__":
    print(json.dumps(_describe(*sys.argv[1:3])))
