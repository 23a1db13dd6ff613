"""With ``set_modules_to_forward_prefetch``, a forward uses stale parameters that an earlier forward prefetched.

An encoder that prefetches the decoder is an example. A forward of the encoder alone under ``no_grad``, as for
embeddings, all-gathers the decoder's parameters and leaves them unused. After a backward FSDP2 drops such an
all-gather. After a forward without gradients, or under a transform of ``torch.func``, it stays, and the decoder's next
forward uses it, also in training. An optimizer step or a load in between has no effect on that forward. ``reshard()``
does not drop the all-gather either.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.reshard",
    features="fsdp2, communication",
    workaround="After the forward that leaves out a module, call ``module.unshard()`` and then ``module.reshard()``.",
)


def reproduce(rank, world_size, device, workaround=False):
    encoder, decoder = (nn.Linear(2, 2, bias=False, device=device) for _ in range(2))
    model = nn.Sequential(encoder, decoder)
    mesh = init_device_mesh(device.type, (world_size,))
    for module in (encoder, decoder, model):
        for param in module.parameters():
            nn.init.ones_(param)
        fully_shard(module, mesh=mesh)
    encoder.set_modules_to_forward_prefetch([decoder])
    optim = torch.optim.SGD(model.parameters(), lr=0.25)
    x = torch.ones(1, 2, device=device)
    model(x).sum().backward()
    with torch.no_grad():
        encoder(x)
    if workaround:
        decoder.unshard()
        decoder.reshard()
    optim.step()  # halves all weights
    return model(x).tolist(), [[1.0, 1.0]]


FIX = """
If no backward follows, the root would have to wait for unused all-gathers and drop their results.
"""
