"""Run one reproduction in as many ranks as it needs, with only torch. ``--show`` appends this to the reproduction."""

from __future__ import annotations

import datetime
import os
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LIMIT = 20  # seconds after which a collective gives up


def same(found, right):
    """Whether two results are equal, up to the rounding of numbers."""
    if isinstance(right, torch.Tensor) or isinstance(found, torch.Tensor):
        return torch.is_tensor(found) and torch.is_tensor(right) and torch.allclose(found, right, equal_nan=True)
    if isinstance(found, float) and isinstance(right, (int, float)):
        return torch.allclose(torch.tensor(found), torch.tensor(float(right)), rtol=1e-4, equal_nan=True)
    if isinstance(right, (list, tuple)) and isinstance(found, (list, tuple)):
        return len(found) == len(right) and all(map(same, found, right))
    if isinstance(right, dict) and isinstance(found, dict):
        return found.keys() == right.keys() and all(same(found[key], right[key]) for key in right)
    return found == right


def run_rank(rank, world_size, meeting, reproduce, device_type="cpu", backend="gloo"):
    """Connect this rank with the others, and return the result of ``reproduce``."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    device = torch.device(device_type)
    if device_type != "cpu":
        device = torch.device(device_type, rank % torch.get_device_module(device_type).device_count())
        torch.get_device_module(device_type).set_device(device)
    patience = datetime.timedelta(seconds=LIMIT)
    # A rank that goes on at once, and destroys the group, breaks the connections that a slower rank is making. The
    # reproduction does not depend on this variable.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=world_size, timeout=patience)
    del os.environ["TORCH_DIST_INIT_BARRIER"]
    return reproduce(rank, world_size, device)


def tell(rank, world_size, meeting, reproduce):
    """Print what this rank found."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "cpu" if accelerator is None else accelerator.type
    found, right = run_rank(rank, world_size, meeting, reproduce, kind, dist.get_default_backend_for_device(kind))
    verdict = "absent" if same(found, right) else "PRESENT"
    print(f"rank {rank}: {verdict}\n  found {found}\n  right {right}\n", end="", flush=True)  # in one piece
    os._exit(0)  # some defects leave collectives that never finish


def launch(reproduce, world_size):
    """Under torchrun, run one of its ranks. Otherwise start the ranks."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if int(os.environ["WORLD_SIZE"]) != world_size:
            raise SystemExit(f"start it with {world_size} processes: torchrun --nproc-per-node {world_size}")
        tell(int(os.environ["RANK"]), world_size, "env://", reproduce)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(tell, (world_size, f"file://{folder}/meeting", reproduce), nprocs=world_size)
