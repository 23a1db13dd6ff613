#!/usr/bin/env python3
"""Try defects on a busy device that only mocks show on the CPU. Prints a line for each defect.

"shown" means that the device has computed a wrong result. "not shown" proves nothing.
"""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from torch_fsdp_tests.common_utils.sleep import device_sleep, get_cycles_per_ms
from torch_fsdp_tests.device import accelerator

SIZE = 512
BUSY = 300  # milliseconds


def busy(device: torch.device) -> None:
    """Keep the current stream busy."""
    device_sleep(device, int(BUSY * get_cycles_per_ms(device)))


def linear(device: torch.device | None = None) -> nn.Linear:
    return nn.Linear(SIZE, SIZE, bias=False, device=device)


def staging(device: torch.device) -> tuple[float, float]:
    """dcp_staging_does_not_wait_for_the_step: a checkpoint is staged while the device still computes the step."""
    model = fully_shard(linear(device), mesh=init_device_mesh(device.type, (1,)))
    (weight,) = model.parameters()
    with torch.no_grad():
        weight.to_local().fill_(1)
        torch.accelerator.synchronize()
        busy(device)
        weight.to_local().fill_(2)
    stager = DefaultStager(StagingOptions(use_shared_memory=False))
    staged = stager.stage(get_model_state_dict(model))
    state = staged.result() if hasattr(staged, "result") else staged
    torch.accelerator.synchronize()
    stager.close()
    return state["weight"].to_local().mean().item(), 2.0


def offload(device: torch.device) -> tuple[float, float]:
    """fsdp2_offloaded_parameters_change_while_copied: the CPU changes parameters that a forward still uses."""
    model = fully_shard(linear(), mesh=init_device_mesh(device.type, (1,)), offload_policy=CPUOffloadPolicy())
    (weight,) = model.parameters()
    inputs = torch.full((1, SIZE), 1 / SIZE, device=device)
    with torch.no_grad():
        weight.to_local().fill_(1)
        model(inputs)
        model.reshard()
        torch.accelerator.synchronize()
        busy(device)
        output = model(inputs)
        weight.to_local().fill_(2)
        return output.mean().item(), 1.0


def tried(script: Callable[[torch.device], tuple[float, float]], device: torch.device) -> str:
    id = (script.__doc__ or "").partition(":")[0]
    try:
        found, right = script(device)
    except Exception:
        return f"{id}: could not be tried\n{traceback.format_exc()}"
    return f"{id}: {'shown' if found != right else 'not shown'}; found {found}, and {right} is right"


def main() -> None:
    under_test = accelerator.current()
    device = under_test.device(0)
    dist.init_process_group(under_test.backend, rank=0, world_size=1, store=dist.HashStore())
    torch.accelerator.set_device_index(0)
    for script in (staging, offload):
        print(tried(script, device), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
