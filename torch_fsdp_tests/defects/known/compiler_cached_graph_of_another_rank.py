"""With a warm cache, ``torch.compile`` over sharded DTensors loads the graph of another rank of the machine and raises.

``DTensor._stable_hash_for_caching`` gives AOTAutograd's cache the global shape and the placements, but neither the
shape of the local shard nor, before 2.15, its device. So all ranks of a machine have the same key in the cache that
they share by default. The first run is right, because each rank compiles its own graph. In a later run a rank can find
the graph of another rank. It raises in ``assert_size_stride`` if its own local shard has another shape. Before 2.15 the
graph may also be one for another rank's device. Since then accelerators of one machine have different keys, and only
ranks that share a device, such as the CPU, are affected. The reproduction compares the keys, without compiling.
"""

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.COMPILER,
    consequence=Consequence.ERROR,
    exposure=Exposure.COMMON,
    where="torch.distributed.tensor.DTensor._stable_hash_for_caching",
    features="fsdp2, compile",
    workaround="Give each rank a folder of its own in ``TORCHINDUCTOR_CACHE_DIR``.",
    error="expected size ... stride ... at dim=0",
    upstream=("https://github.com/pytorch/pytorch/issues/188390",),
    fails_with=("AssertionError",),
)


def reproduce(rank, world_size, device):
    model = nn.Linear(2, world_size + 1, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
    weight = model.weight.detach()
    key = getattr(weight, "_stable_hash_for_caching", lambda: f"the shard of rank {rank}")()  # not in older versions
    keys = [("", "")] * world_size
    dist.all_gather_object(keys, (str(weight.to_local().shape), key))
    return len({key for _, key in keys}), len({shape for shape, _ in keys})


FIX = """
The key contains the shape of the local shard and, as in 2.15, its device. Ranks with the same shape and device share
graphs as before.
tried: 2.13, 2.15

--- torch/distributed/tensor/_api.py
@@ DTensor._stable_hash_for_caching [<2.15]
-        cache_data = self._spec._stable_hash() + str(self.requires_grad)
+        # Ranks share a cache, and compile for the device and the shape of their shard
+        local = f"{self._local_tensor.device} {self._local_tensor.shape}"
+        cache_data = self._spec._stable_hash() + str(self.requires_grad) + local
@@ DTensor._stable_hash_for_caching [>=2.15]
-        device = str(self._local_tensor.device)
-        cache_data = self._spec._stable_hash() + str(self.requires_grad) + device
+        # They also compile for the shape of their shard.
+        local = f"{self._local_tensor.device} {self._local_tensor.shape}"
+        cache_data = self._spec._stable_hash() + str(self.requires_grad) + local
"""
