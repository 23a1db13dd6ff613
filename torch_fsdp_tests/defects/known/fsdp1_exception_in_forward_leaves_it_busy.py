"""After an exception in forward or backward, FSDP1's ``no_sync()`` raises until the end of the next backward.

Each FSDP1 instance records whether a forward or a backward runs. After an exception it keeps this state until the end
of the next backward. ``no_sync()`` checks the state, so accumulation cannot begin again with the failed microbatch.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.STATE_LEFT_CHANGED,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel.no_sync",
    features="fsdp1",
    workaround="After the exception run a forward and a backward outside ``no_sync()``, and clear the gradients.",
    arguable="FSDP1 does not document that training can go on after an exception, but without accumulation it can.",
    error="expected to be in states [<TrainingState.IDLE: 1>] but current state is TrainingState.FORWARD_BACKWARD",
    fails_with=("ValueError",),
)


def reproduce(rank, world_size, device, workaround=False):
    model = FSDP(nn.Linear(2, 1, device=device), device_id=device)
    try:
        model(torch.ones(1, 3, device=device))  # has the wrong shape
    except RuntimeError:
        pass
    if workaround:
        model(torch.ones(1, 2, device=device)).sum().backward()
        model.zero_grad()
    try:
        with model.no_sync():
            actual = "entered"
    except ValueError as error:
        actual = f"{type(error).__name__}: {error}"
    return actual, "entered"


FIX = '''
``no_sync()`` may begin unless a forward of this instance or a backward runs, which the state does not show after an
exception.
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/fully_sharded_data_parallel.py
@@ FullyShardedDataParallel.forward
+    _forwards = 0  # that run
+
     def forward(self, *args: Any, **kwargs: Any) -> Any:
         """Run the forward pass for the wrapped module, inserting FSDP-specific pre- and post-forward sharding logic."""
+        self._forwards += 1
+        try:
+            return self._run_forward(*args, **kwargs)
+        finally:
+            self._forwards -= 1
+
+    def _run_forward(self, *args: Any, **kwargs: Any) -> Any:
         handle = self._handle
@@ FullyShardedDataParallel.no_sync
-        self._assert_state(TrainingState.IDLE)
+        allowed_states = [TrainingState.IDLE]
+        if not self._forwards and torch._C._current_graph_task_id() == -1:
+            allowed_states.append(TrainingState.FORWARD_BACKWARD)  # left by an exception
+        self._assert_state(allowed_states)
'''  # noqa: E501
