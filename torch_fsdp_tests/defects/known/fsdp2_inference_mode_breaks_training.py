"""FSDP2's first forward in inference mode makes the next forward outside of inference mode raise.

The first forward of FSDP2 allocates the unsharded parameters. In inference mode they become inference tensors, and
FSDP2 keeps them. The next forward outside of inference mode copies into them, which torch forbids. Modules that do not
reshard after forward, such as the root by default, are not affected. A plain module and DDP train after such a forward,
as does FSDP2 after an earlier training step.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP2,
    consequence=Consequence.ERROR,
    exposure=Exposure.COMMON,
    where="torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.init_all_gather_outputs",
    features="fsdp2",
    workaround="Use ``torch.no_grad()`` until the model has run once outside of inference mode.",
    error="in foreach_all_gather_copy_out ... Inplace update to inference tensor outside InferenceMode is not allowed",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/113203",
        "https://github.com/pytorch/pytorch/pull/197327",
    ),
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = nn.Linear(2, 2, bias=False, device=device)
    fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)), reshard_after_forward=True)
    x = torch.ones(1, 2, device=device)
    with torch.no_grad() if workaround else torch.inference_mode():
        model(x)
    try:
        model(x).sum().backward()
        actual = model.weight.grad.full_tensor()[0, 0].item()
    except RuntimeError as error:
        actual = f"RuntimeError: {str(error).splitlines()[0]}"
    right = 1.0  # the input, as a plain module's gradient
    return actual, right


FIX = """
FSDP2 creates its tensors outside of inference mode.
tried: 2.13, 2.15

--- torch/distributed/fsdp/_fully_shard/_fsdp_param.py
@@ FSDPParam.init_all_gather_outputs
         if len(self.all_gather_outputs) > 0:
             return  # already initialized
-        self.all_gather_outputs = [
-            torch.empty(torch.Size([numel * world_size]), dtype=dtype, device=device)
-            for numel, dtype in zip(all_gather_input_numels, all_gather_input_dtypes)
-        ]
+        with torch.inference_mode(False):  # later forwards use them again
+            self.all_gather_outputs = [
+                torch.empty(
+                    torch.Size([numel * world_size]), dtype=dtype, device=device
+                )
+                for numel, dtype in zip(
+                    all_gather_input_numels, all_gather_input_dtypes
+                )
+            ]
@@ FSDPParam.init_unsharded_param
             return
+        if torch.is_inference_mode_enabled():
+            # Later forwards use the parameter again
+            with torch.inference_mode(False), torch.no_grad():
+                return self.init_unsharded_param()
         inner_tensor = self._sharded_local_tensor
"""
