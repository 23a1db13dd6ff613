"""What differs between the torch versions that this suite runs on (2.9 and up), and nothing else.

A name here says what the installed torch has or how it calls a thing; no other module compares version numbers.
Where a fact can be read off torch itself it is read, not derived from the version.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.fsdp._common_utils as fsdp_utils

VERSION: tuple[int, int] = tuple(int(part) for part in torch.__version__.split(".")[:2])  # type: ignore[assignment]

# FSDP2 calls its two collectives as attributes of ``torch.distributed``; 2.13 renamed them.
ALL_GATHER_NAME = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER_NAME = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"

# Since 2.13 FSDP looks for tensors in containers itself, and finds those in dataclasses.
FINDS_TENSORS_IN_DATACLASSES = hasattr(fsdp_utils, "collect_grad_tensors")

# Imported before the first rank is forked, so that no rank pays for them. ``fully_shard`` imports torch._dynamo (about
# 200 modules) at its first call; an optimizer imports torch._dynamo's and functorch's parts at its first step.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.device_mesh",
    "torch._dynamo",
)
