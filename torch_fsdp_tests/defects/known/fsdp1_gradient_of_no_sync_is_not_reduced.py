"""A gradient from ``no_sync()`` is not reduced if its FSDP1 instance has no part in the next backward.

``no_sync`` promises that its gradients are synchronized in the first iteration after it. But a gradient is only reduced
by the hook that runs after the instance's own gradient. If the instance was not used, or was frozen meanwhile, its
gradient stays that of this rank. Under NO_SHARD the ranks then take different steps, and nothing raises. With the other
strategies FSDP1 finds at the end of backward that a gradient was computed but not sharded, and raises.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.SILENTLY_WRONG,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._runtime_utils._finalize_params",
    features="fsdp1, accumulation, strategies",
    workaround="Let each instance take part in the backward that synchronizes: ``(loss + 0 * "
    "output_of_the_instance.sum()).backward()``.",
    error="All sharded parameters that received a gradient in the post-backward should use `_saved_grad_shard`",
)


class Branches(nn.Module):
    def __init__(self, wrap, device):
        super().__init__()
        self.a, self.b = (wrap(nn.Linear(1, 2, bias=False, device=device)) for _ in range(2))

    def forward(self, x, name):
        return getattr(self, name)(x)


def reproduce(rank, world_size, device, workaround=False):
    def wrap(module):
        return FSDP(module, sharding_strategy=ShardingStrategy.NO_SHARD, device_id=device)

    x = torch.full((1, 1), rank + 1.0, device=device)
    model = wrap(Branches(wrap, device))
    with model.no_sync():
        model(x, "a").sum().backward()
    loss = model(x, "b").sum()
    if workaround:
        loss = loss + 0 * model(x, "a").sum()
    loss.backward()
    return next(model.module.a.parameters()).grad[0].item(), 1.5  # the ranks' gradients are 1 and 2


FIX = """
A flag records whether a gradient was reduced, because its size does not show this. The end of a backward that
synchronizes reduces what is left as usual: in the post-backward stream, with a cast to ``reduce_dtype``.
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/_runtime_utils.py
@@ _post_backward_hook
         _post_backward_reshard(state, handle)
+        flat_param._is_unreduced = not state._sync_gradients
         if not state._sync_gradients:
             if handle._use_orig_params:
                 handle._use_unsharded_grad_views()
             return
-
-        # Wait for all ops in the current stream (e.g. gradient computation) to
-        # finish before reduce-scattering the gradient
-        if not torch.distributed._functional_collectives.is_torchdynamo_compiling():
-            state._post_backward_stream.wait_stream(
-                state._device_handle.current_stream()
-            )
-
-        with state._device_handle.stream(state._post_backward_stream):
-            autograd_computed_grad = flat_param.grad.data
-            if (
-                not _low_precision_hook_enabled(state)
-                and flat_param.grad.dtype != handle._reduce_dtype
-                # If we are forcing full precision but communicating grads
-                # (i.e. model.eval() + full precision in eval was configured), don't downcast gradient.
-                and not handle._force_full_precision
-            ):
-                flat_param.grad.data = flat_param.grad.to(handle._reduce_dtype)
-            if handle.uses_sharded_strategy:
-                _reduce_grad(state, handle)
-            else:
-                _reduce_grad_no_shard(state, handle)
-            # Since the unsharded gradient is produced in the computation
-            # stream and consumed in the post-backward stream, inform the
-            # caching allocator (before it goes out of scope)
-            _no_dispatch_record_stream(
-                autograd_computed_grad, state._post_backward_stream
-            )
+        _cast_and_reduce_grad(state, handle)
+
+
+def _cast_and_reduce_grad(state, handle):
+    flat_param = handle.flat_param
+    # Wait for all ops in the current stream (e.g. gradient computation) to
+    # finish before reduce-scattering the gradient
+    if not torch.distributed._functional_collectives.is_torchdynamo_compiling():
+        state._post_backward_stream.wait_stream(state._device_handle.current_stream())
+
+    with state._device_handle.stream(state._post_backward_stream):
+        autograd_computed_grad = flat_param.grad.data
+        if (
+            not _low_precision_hook_enabled(state)
+            and flat_param.grad.dtype != handle._reduce_dtype
+            # If we are forcing full precision but communicating grads
+            # (i.e. model.eval() + full precision in eval was configured), don't downcast gradient.
+            and not handle._force_full_precision
+        ):
+            flat_param.grad.data = flat_param.grad.to(handle._reduce_dtype)
+        if handle.uses_sharded_strategy:
+            _reduce_grad(state, handle)
+        else:
+            _reduce_grad_no_shard(state, handle)
+        # Since the unsharded gradient is produced in the computation
+        # stream and consumed in the post-backward stream, inform the
+        # caching allocator (before it goes out of scope)
+        _no_dispatch_record_stream(autograd_computed_grad, state._post_backward_stream)
+
+
+def _reduce_grad_of_no_sync(state):
+    handle = state._handle
+    if not handle or not state._sync_gradients or not handle.flat_param.requires_grad:
+        return
+    flat_param = handle.flat_param
+    if not getattr(flat_param, "_is_unreduced", False):
+        return
+    flat_param._is_unreduced = False
+    if flat_param.grad is None:  # cleared since
+        flat_param._post_backward_called = False
+        return
+    state.training_state = TrainingState.FORWARD_BACKWARD
+    handle._training_state = HandleTrainingState.BACKWARD_POST
+    _cast_and_reduce_grad(state, handle)
@@ _post_backward_final_callback
     root_state = state
+    for fsdp_state in state._all_fsdp_states:
+        _reduce_grad_of_no_sync(fsdp_state)
"""
