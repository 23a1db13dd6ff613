"""``summon_full_params`` with gradients dies or hangs if some ranks have no gradient and the model is not float32.

A rank without a gradient, for example because its shard has only frozen parameters, gives zeros to the all-gather. They
always have the default dtype, while other ranks give their gradients in the dtype of the model. So the ranks send and
expect different numbers of bytes.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Consequence, Defect

DEFECT = Defect(
    family="FSDP1",
    consequence=Consequence.HANG,
    where="torch.distributed.fsdp._flat_param.FlatParamHandle.unshard_grad",
    broken=">=2.9",
    tests=(
        "distributed/fsdp/test_fsdp_unshard_params::TestUnshardParams::test_grads_of_any_dtype_that_some_ranks_have",
    ),
)


def reproduce(rank, world_size, device):
    def checked(gather):
        """Gather only if all ranks send the same dtype. Otherwise this reproduction would not end."""

        def gather_if_alike(output, tensor, group=None, async_op=False):
            dtypes = [None] * world_size
            dist.all_gather_object(dtypes, str(tensor.dtype))
            if len(set(dtypes)) > 1:
                raise TypeError(f"the ranks send {' and '.join(map(str, dtypes))}")
            return gather(output, tensor, group)

        return gather_if_alike

    layer = nn.Linear(2, 1, bias=False, dtype=torch.float64, device=device)
    model = FSDP(layer, use_orig_params=True, device_id=device)
    model(torch.ones(1, 2, dtype=torch.float64, device=device)).sum().backward()
    if rank == 1:
        model.zero_grad()
    for name in ("all_gather_single", "all_gather_into_tensor"):  # 2.13 renamed it
        if hasattr(dist, name):
            setattr(dist, name, checked(getattr(dist, name)))
    right = [[1.0, 0.0]]  # rank 1 has no gradient for its half
    try:
        with FSDP.summon_full_params(model, with_grads=True, writeback=False):
            return layer.weight.grad.tolist(), right
    except TypeError as error:
        return str(error), right
