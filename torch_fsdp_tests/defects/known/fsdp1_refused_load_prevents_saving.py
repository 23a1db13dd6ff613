"""After ``load_state_dict`` raises in a nested FSDP1 instance, every ``state_dict()`` and load raises.

Hooks before loading unshard the parameters of each instance, and hooks after loading reshard them. An exception in a
nested instance skips the hooks after loading of all instances around it. Their parameters stay unsharded, and every
later ``state_dict`` and ``load_state_dict`` raises because of that. An exception while saving does the same.
"""

import contextlib

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.STATE_LEFT_CHANGED,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._state_dict_utils._enter_unshard_params_ctx",
    features="fsdp1, state_dict",
    workaround="After a load that raised, make and wrap the model anew.",
    error="Entering the ``_unshard_fsdp_state_params`` context but _unshard_params_ctx[module] is not None",
)


def reproduce(rank, world_size, device):
    layers = nn.Linear(2, 2), nn.Linear(2, 2)
    model = FSDP(nn.Sequential(FSDP(layers[0], device_id=device), layers[1]), device_id=device)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state_dict = model.state_dict()
        with contextlib.suppress(Exception):  # a plain tensor in place of a sharded one
            model.load_state_dict({**state_dict, "0.weight": torch.ones(2, 2, device=device)})
        try:
            actual = ", ".join(model.state_dict())
        except AssertionError as error:
            actual = f"{type(error).__name__}: {error}"
    return actual, "0.weight, 0.bias, 1.weight, 1.bias"


FIX = """
If loading or saving raises, the unsharding that its pre-hooks have begun is undone, the inner instances first.
tried: 2.9, 2.13, 2.15

--- torch/distributed/fsdp/fully_sharded_data_parallel.py
@@ FullyShardedDataParallel
+    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
+        with self._undone_after_an_exception():
+            return super().load_state_dict(*args, **kwargs)
+
+    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
+        with self._undone_after_an_exception():
+            return super().state_dict(*args, **kwargs)
+
+    @contextlib.contextmanager
+    def _undone_after_an_exception(self) -> Generator:
+        from torch.distributed.fsdp._state_dict_utils import _exit_unshard_params_ctx
+
+        try:
+            yield
+        except BaseException:
+            for state in reversed(traversal_utils._get_fsdp_states(self)):
+                for module in list(state._unshard_params_ctx):
+                    _exit_unshard_params_ctx(module, state)
+            raise
+
     def __getattr__(self, name: str) -> Any:
"""
