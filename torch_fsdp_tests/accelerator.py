"""The device under test as a value, asked for late and once.

No test names a device: it takes ``current()`` and asks for a capability. A new accelerator is a new value here, found
through :mod:`torch.accelerator`, or described by its vendor in a function under the entry point group
``torch_fsdp_tests.accelerators``; no other module changes.

Nothing here initialises a device runtime in the asking process, since a process that has done so must not fork
(torch's own note on "poison fork"). What can be learned only from a running device is learned in a process of its own.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from torch_fsdp_tests import events, launcher

DEVICE_VARIABLE = "TORCH_FSDP_TESTS_DEVICE"
BACKEND_VARIABLE = "TORCH_FSDP_TESTS_BACKEND"
RANKS_VARIABLE = "TORCH_FSDP_TESTS_RANKS"
ENTRY_POINTS = "torch_fsdp_tests.accelerators"

CPU_RANKS = 4
PROBE_LIMIT = 240  # seconds; the first start of a device runtime on a large machine can take half a minute
FORK_LIMIT = 60  # seconds for a forked process to compute something on the device
SHARE_LIMIT = 60  # seconds for two processes to exchange tensors of one device
ROOM_ENOUGH = 4  # devices from which on it does not matter whether ranks can share one: most tests want no more
assert 2 * SHARE_LIMIT >= FORK_LIMIT and FORK_LIMIT + 2 * SHARE_LIMIT < PROBE_LIMIT

# What two ranks that share a GPU need from NCCL, which knows it since 2.27 or so; an older one pays it no attention.
_SHARE_VARIABLES = {"nccl": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}}

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
        return f"needs {', '.join(missing)}; {self.name} with {self.backend} has not" if missing else None

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
    _answers[what] = told[what] if what in told else _ask_in_a_process(device_type, backend)
    events.record(probed=dict(_answers))
    return _answers[what]


def _ask_in_a_process(device_type: str, backend: str) -> dict:
    command = [sys.executable, "-m", f"{__package__}.accelerator", device_type, backend]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_LIMIT, env=environment)
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(f"the device {device_type!r} did not answer within {PROBE_LIMIT} s") from error
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ConfigurationError(f"the device {device_type!r} cannot be used: {reason}")
    return json.loads(done.stdout.splitlines()[-1])


def _works(attempt: Callable[[], object]) -> bool:
    """Whether an attempt on the device succeeds; any failure means that the capability is absent."""
    try:
        return attempt() is not False
    except Exception:
        return False


def _describe(device_type: str, backend: str) -> dict:
    """What a device can do, found by doing it. Runs in the probing process only."""
    forks = _works(lambda: _computes_after_fork(device_type))  # first, while nothing here has touched the device
    try:
        module = torch.get_device_module(device_type)
    except RuntimeError as error:
        raise SystemExit(f"this torch ({torch.__version__}) has no device type {device_type!r}") from error
    count = module.device_count()
    if count == 0:
        return {"count": 0, "capabilities": []}
    device = torch.device(device_type) if device_type == "cpu" else torch.device(device_type, 0)
    needed = _SHARE_VARIABLES.get(backend, {})
    few = device_type != "cpu" and count < ROOM_ENOUGH
    shares = few and _works(lambda: _shares_a_device(device_type, backend, needed))
    attempts: dict[str, Callable[[], object]] = {
        "device_memory": lambda: torch.ones(1).to(device).data_ptr() != 0,
        "device_index": lambda: module.set_device(0),
        "streams": lambda: module.Stream().synchronize(),
        "pinned_memory": lambda: torch.ones(1).pin_memory().is_pinned(),
        "memory_stats": lambda: module.memory_allocated() >= 0 and module.reset_peak_memory_stats() is None,
        "sleep_kernel": lambda: module._sleep(1),
        "peer_access": lambda: count > 1 and module.can_device_access_peer(0, 1),
        "graphs": lambda: callable(module.graph),
        "fork": lambda: forks,
        "shared_device": lambda: shares,
        "bf16_collectives": lambda: _collective_works(device, backend, torch.bfloat16),
        "fp16_collectives": lambda: _collective_works(device, backend, torch.float16),
        "premul_sum": lambda: _collective_works(device, backend, torch.float32, premul=True),
        "symmetric_memory": lambda: count > 1 and _has_symmetric_memory(device, backend),
    }
    found = [name for name, attempt in attempts.items() if _works(attempt)]
    return {"count": count, "capabilities": found, "variables": needed if shares else {}}


def _computes_after_fork(device_type: str) -> bool:
    """Whether a forked process can use the device, where its parent has asked for no more than its type.

    That is what a test process has done when it forks the server of its ranks.
    """
    torch.accelerator.current_accelerator()
    child = os.fork()
    if child == 0:
        right = _works(lambda: torch.ones(2, device=device_type).sum().item() == 2.0)
        os._exit(0 if right else 1)
    return _exit_status(child, FORK_LIMIT) == 0


def _exit_status(child: int, limit: float) -> int | None:
    """That of a child process of ours, which is killed at the limit; None then."""
    give_up = time.monotonic() + limit
    while time.monotonic() < give_up:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)  # the wait for a child has no limit of its own before pidfds
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _shares_a_device(device_type: str, backend: str, variables: Mapping[str, str]) -> bool:
    """Whether two processes can exchange tensors of the first device by all that FSDP calls."""
    with tempfile.TemporaryDirectory(prefix="torch_fsdp_tests-") as folder:
        command = [sys.executable, "-m", f"{__package__}.accelerator", device_type, backend, f"{folder}/meeting"]
        ranks = [
            subprocess.Popen([*command, str(rank)], env=os.environ | variables, stdout=subprocess.DEVNULL)
            for rank in range(2)
        ]
        try:
            give_up = time.monotonic() + SHARE_LIMIT
            return all(rank.wait(max(give_up - time.monotonic(), 0)) == 0 for rank in ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def _exchange(device_type: str, backend: str, meeting: str, rank: int) -> None:
    """One of the two processes of :func:`_shares_a_device`. Raises when a result is wrong or cannot be had."""
    device = torch.device(device_type, 0)
    torch.get_device_module(device_type).set_device(device)
    timeout = datetime.timedelta(seconds=SHARE_LIMIT / 2)
    dist.init_process_group(
        backend, store=dist.FileStore(meeting, 2), rank=rank, world_size=2, timeout=timeout, device_id=device
    )
    mine = torch.arange(2.0, device=device) + 10 * rank
    gathered, scattered = torch.empty(4, device=device), torch.empty(1, device=device)
    dist.all_gather_into_tensor(gathered, mine)
    dist.reduce_scatter_tensor(scattered, mine)
    dist.all_reduce(mine)
    dist.broadcast(mine, 0)
    found = (gathered.tolist(), scattered.tolist(), mine.tolist())
    if found != ([0.0, 1.0, 10.0, 11.0], [10.0 + 2 * rank], [10.0, 12.0]):
        raise RuntimeError(f"two ranks on one device exchanged {found}")
    dist.destroy_process_group()


def _has_symmetric_memory(device: torch.device, backend: str) -> bool:
    """Whether a buffer of symmetric memory can be had and found by its group, here of one rank."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    _connect(backend)
    tensor = symmetric_memory.empty(4, device=device)
    return symmetric_memory.rendezvous(tensor, dist.distributed_c10d._get_default_group()) is not None


def _connect(backend: str) -> None:
    """Make a process group of this process alone, once."""
    if not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _collective_works(device: torch.device, backend: str, dtype: torch.dtype, premul: bool = False) -> bool:
    _connect(backend)
    tensor = torch.ones(2, dtype=dtype, device=device)
    op = dist._make_nccl_premul_sum(0.5) if premul else dist.ReduceOp.SUM
    dist.all_reduce(tensor, op=op)
    return bool((tensor == (0.5 if premul else 1.0)).all().item())


def _from_vendors() -> Mapping[str, importlib.metadata.EntryPoint]:
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def _asked_ranks() -> int | None:
    text = os.environ.get(RANKS_VARIABLE)
    if not text:
        try:
            launch = launcher.found()
        except launcher.LaunchError as error:
            raise ConfigurationError(str(error)) from error
        return None if launch is None else launch.world_size
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
    if len(sys.argv) > 3:
        _exchange(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        print(json.dumps(_describe(*sys.argv[1:3])), flush=True)
    os._exit(0)  # how a runtime and a backend leave is not the question, and gloo of torch 2.9 may abort
