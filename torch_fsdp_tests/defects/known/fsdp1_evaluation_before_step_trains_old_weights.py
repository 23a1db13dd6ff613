"""An evaluation between backward and ``optimizer.step`` makes the next training step use the old weights.

FULL_SHARD leaves the root's gathered parameters in place after forward, SHARD_GRAD_OP those of every instance, and
only a backward frees them. After an evaluation under ``no_grad`` none comes, so the next forward finds the parameters
gathered and uses them as they are, although the optimizer has moved the shards. Flat and original parameters are
alike, and no write in place is needed.
"""

import copy

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Consequence, Defect

DEFECT = Defect(
    family="FSDP1",
    consequence=Consequence.WRONG_IN_SILENCE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle.needs_unshard",
    broken=">=2.9",
    tests=(
        "distributed/fsdp/test_fsdp_use_orig_params::TestFSDPUseOrigParamsWriteback"
        "::test_update_in_place_between_forwards",
    ),
)


def losses(model, device):
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.linspace(-1, 1, 12, device=device).view(3, 4)
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        yield loss.item()
        with torch.no_grad():
            model(x)  # the evaluation
        optim.step()
        optim.zero_grad()


def reproduce(rank, world_size, device):
    torch.manual_seed(0)
    plain = nn.Linear(4, 4).to(device)
    model = FSDP(copy.deepcopy(plain), device_id=device)
    return list(losses(model, device)), list(losses(plain, device))
