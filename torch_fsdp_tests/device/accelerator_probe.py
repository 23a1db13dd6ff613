"""Finds out what a device can do by trying it, in a separate process.

A process that may fork later must not start the device's runtime. So :func:`ask` starts this module as a program. It
answers with one line of JSON, and starts itself again for two ranks that share a device::

    python -m torch_fsdp_tests.device.accelerator_probe DEVICE BACKEND
    python -m torch_fsdp_tests.device.accelerator_probe DEVICE BACKEND MEETING_FILE RANK
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from torch_fsdp_tests.device import machine
from torch_fsdp_tests.device.capabilities import STAGED
from torch_fsdp_tests.processes.forkserver import forked
from torch_fsdp_tests.settings import ConfigurationError

PROBE_LIMIT = 240  # seconds; the first start of a device runtime on a large machine can take half a minute
FORK_LIMIT = 60  # seconds for a forked process to compute something on the device
SHARE_LIMIT = 60  # seconds for two processes to exchange tensors of one device
ROOM_ENOUGH = 8  # with this many devices it does not matter whether ranks can share one: no test has more ranks
assert 2 * SHARE_LIMIT >= FORK_LIMIT and FORK_LIMIT + 2 * SHARE_LIMIT < PROBE_LIMIT

# The variable that lets two ranks share a GPU over NCCL. NCCL 2.28.9, which comes with torch 2.11, ignores it.
_SHARE_VARIABLES = {"nccl": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}}


def register(backend: str | None) -> None:
    """Let torch know the backend, if it is this project's own."""
    if backend == STAGED:
        from torch_fsdp_tests.device import staged as staged  # not at import, because few processes need it


def ask(device_type: str, backend: str) -> dict:
    """The result of :func:`describe`, from a fresh interpreter that ends afterwards.

    Raises :class:`ConfigurationError` with the reason if the device cannot be used.
    """
    command = [sys.executable, "-m", __spec__.name, device_type, backend]
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
    """Whether an attempt on the device succeeds. Any failure means that the capability is missing."""
    try:
        return attempt() is not False
    except Exception:
        return False


def describe(device_type: str, backend: str) -> dict:
    """Find out what a device can do by trying it. Runs only in the separate process."""
    register(backend)
    forks = _works(lambda: computes_after_fork(device_type))  # first, while nothing here has touched the device
    try:
        module = torch.get_device_module(device_type)
    except RuntimeError as error:
        raise SystemExit(f"PyTorch ({torch.__version__}) has no device type {device_type!r}") from error
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
        "asynchronous_collectives": lambda: _overlaps(backend),
        "bf16_collectives": lambda: _collective_works(device, backend, torch.bfloat16),
        "fp16_collectives": lambda: _collective_works(device, backend, torch.float16),
        "premul_sum": lambda: _collective_works(device, backend, torch.float32, premul=True),
        "symmetric_memory": lambda: count > 1 and _has_symmetric_memory(device, backend),
    }
    capabilities = [name for name, attempt in attempts.items() if _works(attempt)]
    about = machine.of_device(device_type, backend) if device_type != machine.HOST else {}
    return {"count": count, "capabilities": capabilities, "variables": needed if shares else {}, "machine": about}


def computes_after_fork(device_type: str) -> bool:
    """Whether a process that is forked from this one can use the device.

    The fork computes something on it. This process itself only asks torch for the device type.
    """
    torch.accelerator.current_accelerator()

    def compute() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process, wherever it hangs
        signal.setitimer(signal.ITIMER_REAL, FORK_LIMIT)
        os._exit(not _works(lambda: torch.ones(2, device=device_type).sum().item() == 2.0))

    return os.waitpid(forked(compute), 0)[1] == 0


def _shares_a_device(device_type: str, backend: str, variables: Mapping[str, str]) -> bool:
    """Whether two processes can exchange tensors of the first device with all collectives that FSDP calls."""
    with tempfile.TemporaryDirectory(prefix="torch_fsdp_tests-") as folder:
        command = [sys.executable, "-m", __spec__.name, device_type, backend, f"{folder}/meeting"]
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
    """One of the two processes of :func:`_shares_a_device`. Raises if a result is wrong or missing."""
    register(backend)
    device = torch.device(device_type, 0)
    torch.get_device_module(device_type).set_device(device)
    timeout = datetime.timedelta(seconds=SHARE_LIMIT / 2)
    dist.init_process_group(
        backend, store=dist.FileStore(meeting, 2), rank=rank, world_size=2, timeout=timeout, device_id=device
    )
    own = torch.arange(2.0, device=device) + 10 * rank
    gathered, scattered = torch.empty(4, device=device), torch.empty(1, device=device)
    dist.all_gather_into_tensor(gathered, own)
    dist.reduce_scatter_tensor(scattered, own)
    dist.all_reduce(own)
    dist.broadcast(own, 0)
    received = (gathered.tolist(), scattered.tolist(), own.tolist())
    if received != ([0.0, 1.0, 10.0, 11.0], [10.0 + 2 * rank], [10.0, 12.0]):
        raise RuntimeError(f"two ranks on one device exchanged {received}")
    dist.destroy_process_group()


def _has_symmetric_memory(device: torch.device, backend: str) -> bool:
    """Whether a group of one rank can allocate symmetric memory and set it up."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    _connect(backend)
    tensor = symmetric_memory.empty(4, device=device)
    return symmetric_memory.rendezvous(tensor, dist.distributed_c10d._get_default_group()) is not None


def _overlaps(backend: str) -> bool:
    """Whether collectives leave the CPU free to give the device more work."""
    return backend != STAGED


def _connect(backend: str) -> None:
    """Make a process group with only this process, once."""
    if not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _collective_works(device: torch.device, backend: str, dtype: torch.dtype, premul: bool = False) -> bool:
    _connect(backend)
    tensor = torch.ones(2, dtype=dtype, device=device)
    op = dist._make_nccl_premul_sum(0.5) if premul else dist.ReduceOp.SUM
    dist.all_reduce(tensor, op=op)
    return bool((tensor.float() == (0.5 if premul else 1.0)).all().item())  # some dtypes have no comparison


if __name__ == "__main__":
    if len(sys.argv) > 3:
        _exchange(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        print(json.dumps(describe(*sys.argv[1:3])), flush=True)
    os._exit(0)  # skip the clean-up of runtime and backend, because gloo of torch 2.9 may abort in it
