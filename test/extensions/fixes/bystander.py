"""Prints how many functions some calls of FSDP run, with 8 and with 16 units, as JSON. No defect shows in them."""

import json
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

CPU = torch.device("cpu")
FULL = StateDictOptions(full_state_dict=True)


def calls(function):
    """The number of functions that the third of three calls runs. The first ones fill caches."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    for _ in range(2):
        function()
    sys.setprofile(profile)
    function()
    sys.setprofile(None)
    return count


def layers(units):
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(units)))


def sharded(units):
    model = layers(units)
    for module in (*model, model):
        fully_shard(module)
    return model


def flat(units):
    options = {"device_id": CPU, "use_orig_params": True}
    inner = nn.Sequential(*(FullyShardedDataParallel(layer, **options) for layer in layers(units)))
    return FullyShardedDataParallel(inner, **options)


def counts(units):
    x, fsdp2, fsdp1 = torch.ones(2, 4), sharded(units), flat(units)
    state = get_model_state_dict(fsdp2, options=FULL)
    with tempfile.TemporaryDirectory() as folder:
        return {
            f"step of FSDP2, {units}": calls(lambda: fsdp2(x).sum().backward()),
            f"step of FSDP1, {units}": calls(lambda: fsdp1(x).sum().backward()),
            f"full load, {units}": calls(lambda: set_model_state_dict(fsdp2, dict(state), options=FULL)),
            f"save, {units}": calls(lambda: dcp.save(get_model_state_dict(fsdp2), checkpoint_id=folder)),
            f"load, {units}": calls(lambda: dcp.load(get_model_state_dict(fsdp2), checkpoint_id=folder)),
        }


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(json.dumps(counts(8) | counts(16)))
