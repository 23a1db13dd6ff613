"""Run one reproduction in as many ranks as it needs, with only torch. ``--show`` appends this to the reproduction."""

from __future__ import annotations

import datetime
import os
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LIMIT = 20  # seconds after which a collective times out


def same(actual, expected):
    """Whether two results are equal, up to the rounding of numbers."""
    if isinstance(expected, torch.Tensor) or isinstance(actual, torch.Tensor):
        both = torch.is_tensor(actual) and torch.is_tensor(expected)
        return both and torch.allclose(actual, expected, equal_nan=True)
    if isinstance(actual, float) and isinstance(expected, (int, float)):
        return torch.allclose(torch.tensor(actual), torch.tensor(float(expected)), rtol=1e-4, equal_nan=True)
    if isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)):
        return len(actual) == len(expected) and all(map(same, actual, expected))
    if isinstance(expected, dict) and isinstance(actual, dict):
        return actual.keys() == expected.keys() and all(same(actual[key], expected[key]) for key in expected)
    return actual == expected


def run_rank(rank, world_size, init_method, reproduce, device_type="cpu", backend="gloo"):
    """Connect this rank with the others, and return the result of ``reproduce``."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    device = torch.device(device_type)
    if device_type != "cpu":
        device = torch.device(device_type, rank % torch.get_device_module(device_type).device_count())
        torch.get_device_module(device_type).set_device(device)
    timeout = datetime.timedelta(seconds=LIMIT)
    # A rank that goes on at once, and destroys the group, breaks the connections that a slower rank is making. The
    # reproduction does not depend on this variable.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)
    del os.environ["TORCH_DIST_INIT_BARRIER"]
    return reproduce(rank, world_size, device)


def print_result(rank, world_size, init_method, reproduce):
    """Print the result of this rank."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "cpu" if accelerator is None else accelerator.type
    backend = dist.get_default_backend_for_device(kind)
    actual, expected = run_rank(rank, world_size, init_method, reproduce, kind, backend)
    verdict = "absent" if same(actual, expected) else "PRESENT"
    print(f"rank {rank}: {verdict}\n  actual {actual}\n  expected {expected}\n", end="", flush=True)  # in one piece
    os._exit(0)  # some defects leave collectives that never finish


def launch(reproduce, world_size):
    """Under torchrun, run one of its ranks. Otherwise start the ranks."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if int(os.environ["WORLD_SIZE"]) != world_size:
            raise SystemExit(f"start it with {world_size} processes: torchrun --nproc-per-node {world_size}")
        print_result(int(os.environ["RANK"]), world_size, "env://", reproduce)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(print_result, (world_size, f"file://{folder}/rendezvous", reproduce), nprocs=world_size)
