"""FSDP1 zeroes a single gradient set to None on a stream that the next reduction does not wait for.

The user may set the gradient of one parameter to None and keep those of others. Before the next all-gather,
``_writeback_orig_params`` zeroes that part of the flat gradient on the pre-unshard stream. It returns False, because it
has written no parameter, so ``_unshard`` makes no stream wait. The stream of the reduction adds the new gradient to the
same memory, and the optimizer reads it. The old gradient may survive, or the new one be lost. With offloaded
parameters, and for inner instances with a ``param_dtype``, a copy on the pre-unshard stream makes the others wait.

The reproduction checks the order that FSDP1 requests, so it needs no accelerator.
"""

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.HARDWARE,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle._writeback_orig_params",
    features="fsdp1, use_orig_params",
    races=("_writeback_tensor)",),
    workaround="Do not set single gradients to None: zero them, or drop all gradients of the model at once.",
)


def reproduce(rank, world_size, device, workaround=False):
    model = FSDP(nn.Linear(2, 2, device=device), device_id=device, use_orig_params=True)
    model(next(model.parameters()).new_ones(1, 2)).sum().backward()
    gradient = model._handle.flat_param.grad
    if workaround:
        model.weight.grad.zero_()
    else:
        model.weight.grad = None
    before = gradient.count_nonzero().item()
    others_wait = model._handle.pre_unshard()  # on the pre-unshard stream
    is_written = gradient.count_nonzero().item() < before
    return "written unordered" if is_written and not others_wait else "ordered", "ordered"
